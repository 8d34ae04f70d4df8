"""Compiles the native kernels once, into a cache keyed by source, flags, compiler and CPU, and loads them."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent / "native"
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-Wno-psabi", "-fPIC", "-shared")
# Tried in this order: not every compiler has OpenMP or knows the machine it runs on.
EXTRAS = (("-march=native", "-fopenmp"), ("-march=native",), ())
TIMEOUT = 300.0
# Functions that a library must export.
FUNCTIONS = ("begin", "begin_backward", "mixer", "fold", "fold_backward", "finish", "finish_backward")


class UnavailableError(Exception):
    """The error when there are no native kernels on this machine."""


@cache
def library(stored: str) -> ctypes.CDLL | None:
    """The kernels for streams stored as `stored` (a C++ type), or None after one warning that says why."""
    try:
        return _load(stored)
    except UnavailableError as reason:
        _warn(str(reason))
        return None


# Whether the user was warned; once for all dtypes is enough.
_warned = False


def _warn(reason: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        text = f"temper has no native CPU kernels here and takes the slower `fused` path: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)


def can_load(stored: str) -> bool:
    """Whether `library` returns kernels; a constant for tracers."""
    return library(stored) is not None


# The effect of torch.compiler.assume_constant_result, without importing the compiler.
can_load._dynamo_marked_constant = True  # type: ignore[attr-defined]


def why_not() -> str | None:
    """The reason why the kernels cannot be built, as far as can be told without building; None if there is none."""
    try:
        _compiler()
        cache_folder()
    except UnavailableError as reason:
        return str(reason)
    return None


def cache_folder() -> Path:
    """The cache of compiled kernels: $TEMPER_CACHE, `temper` in the user's cache, or a private temporary folder."""
    if chosen := os.environ.get("TEMPER_CACHE"):
        candidates = [Path(chosen)]
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        home = Path(base) if base else Path(os.path.expanduser("~")) / ".cache"
        candidates = [home / "temper", Path(tempfile.gettempdir()) / f"temper-{_user()}"]
    problems = []
    for folder in candidates:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_private(folder)
            with tempfile.TemporaryFile(dir=folder):
                return folder
        except OSError as error:
            problems.append(f"{folder}: {error.strerror or error}")
    tried = "; ".join(problems)
    raise UnavailableError(f"no folder to keep them in ({tried}); set TEMPER_CACHE to one that can be written")


def _check_private(path: Path) -> None:
    """Checks the folder that code is loaded from: no other user may write to it or replace it."""
    status = path.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise PermissionError(1, "is a link, which could lead anywhere")
    if not hasattr(os, "getuid"):
        return
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(1, "belongs to, or can be written by, somebody else")
    above = path.absolute().parent.stat()
    if above.st_mode & stat.S_IWOTH and not above.st_mode & stat.S_ISVTX:
        raise PermissionError(1, "can be replaced by somebody else: anybody can write to the folder that it is in")


def _user() -> str:
    return str(os.getuid()) if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")


def _compiler() -> str:
    names = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "c++", "clang++"]
    for name in names:
        if found := shutil.which(name):
            return found
    raise UnavailableError(f"no C++ compiler found (looked for {', '.join(names)}); install g++, or set CXX")


def _load(stored: str) -> ctypes.CDLL:
    compiler, folder = _compiler(), cache_folder()
    identity = _identity(compiler)
    failure = ""
    for extra in EXTRAS:
        flags = (*FLAGS, *extra, f"-DSTORED={stored}")
        stem = f"kernels-{_digest(identity, flags)}"
        try:
            if path := _find(folder, stem):
                return _open(path)
        except OSError:
            # Damaged: rebuild it.
            pass
        try:
            return _open(_compile(compiler, flags, folder, stem))
        except (UnavailableError, OSError, subprocess.SubprocessError) as error:
            failure = str(error)
    raise UnavailableError(f"{compiler} could not build them: {failure}")


def _find(folder: Path, stem: str) -> Path | None:
    """The cached library, if only the user can write it and its bytes match the hash in its name."""
    for path in folder.glob(f"{stem}-*.so"):
        try:
            _check_private(path)
        except OSError:
            continue
        # Loading a truncated library could crash the process.
        if path.stem == f"{stem}-{_hash(path)}":
            return path
    return None


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:32]


def _open(path: Path) -> ctypes.CDLL:
    """Loads a library; removes it if it lacks our functions."""
    try:
        library = ctypes.CDLL(str(path))
        if missing := [name for name in FUNCTIONS if not hasattr(library, name)]:
            raise OSError(f"what it built has no function {missing[0]}")
    except OSError:
        path.unlink(missing_ok=True)
        raise
    return library


def _compile(compiler: str, flags: tuple[str, ...], folder: Path, stem: str) -> Path:
    """Builds beside the target and renames, so that concurrent builds do not collide."""
    if sys.stderr.isatty():
        print("temper: compiling CPU kernels, once (about 5 s) ...", file=sys.stderr)
    handle, name = tempfile.mkstemp(suffix=".so", dir=folder)
    os.close(handle)
    try:
        command = [compiler, *flags, str(SOURCES / "kernels.cpp"), "-o", name]
        # A compiler may print anything.
        done = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", timeout=TIMEOUT, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            raise UnavailableError(lines[0].strip() if lines else f"exit code {done.returncode}")
        # The linker creates the file with default permissions.
        os.chmod(name, 0o700)
        path = folder / f"{stem}-{_hash(Path(name))}.so"
        os.replace(name, path)
        return path
    finally:
        Path(name).unlink(missing_ok=True)


@cache
def _identity(compiler: str) -> str:
    """Everything except the flags that determines the compiler's output."""
    digest = hashlib.sha256()
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.read_bytes())
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, timeout=TIMEOUT, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise UnavailableError(f"{compiler} does not run: {error}") from error
    digest.update(version)
    digest.update(_cpu().encode())
    return digest.hexdigest()


def _digest(identity: str, flags: tuple[str, ...]) -> str:
    return hashlib.sha256(" ".join((identity, *flags)).encode()).hexdigest()[:24]


def _cpu() -> str:
    """The CPU features behind -march=native: machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
