"""Files and folders of the lab: written atomically, and read within limits, by one set of functions.

Everything is first written to a workspace beside its final place, `.NAME.tmp-<128 random bits>/`:

    lock      marks the workspace as ours, and is locked as long as its writer lives
    new       what is being written; after an exchange of names, what was replaced
    old/NAME  what is being replaced, where names cannot be exchanged

so that an abandoned workspace can be told from one in use, and from folders that are not ours. Readers change nothing:
they see the old folder or the new one, and read again if it was replaced meanwhile.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import reprlib
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import filelock
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

T = TypeVar("T")
SHARED = "shared"
LOCK, NEW, OLD, GONE = "lock", "new", "old", "gone"
MARK = b"a workspace of temper; without a process that holds this lock it can be removed\n"
WORKSPACE = re.compile(r"\..+\.tmp-[0-9a-f]{32}", re.DOTALL)
UNCHANGED = "Nothing was changed."
# A reader starts again when the folder was replaced under it, at most this many times in a row.
ATTEMPTS = 200
# Limits for files that a person may have edited: far more than ours ever have, far less than would fill memory.
MAX_BYTES, MAX_YAML_BYTES, MAX_DEPTH, MAX_INT = 256 << 20, 1 << 20, 64, 1 << 64


@contextmanager
def atomic_dir(final: Path, is_ours: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """Gives a folder to write into, which gets its final name in one step once it is on disk; an error removes it.

    Args:
        is_ours: called with a folder that is in the way and not empty, which is replaced only if this returns true.
            Without it, only an empty folder is replaced.
    """
    final = final.absolute()
    with _failing(final), _workspace(final) as work:
        (work / NEW).mkdir()
        yield work / NEW
        for path in (work / NEW).rglob("*"):
            fsync(path)
        fsync(work / NEW)
        _put(work, final, is_ours)
        fsync(final.parent)


def _put(work: Path, final: Path, is_ours: Callable[[Path], object] | None) -> None:
    try:
        # Nothing, or an empty folder, is in the way.
        os.rename(work / NEW, final)
        return
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EACCES) or not final.exists():
            raise
    if final.is_dir() and not final.is_symlink() and any(final.iterdir()) and not (is_ours and is_ours(final)):
        raise ValueError(f"{final} exists and is not empty, so it is not replaced; expected a new folder")
    if not final.is_dir():
        raise ValueError(f"{final} is a file, so it is not replaced; expected a folder")
    if _exchange(work / NEW, final):
        return
    # Without an atomic exchange the name is missing for a moment: readers wait, and `recover` repairs a crash.
    (work / OLD).mkdir()
    os.rename(final, work / OLD / final.name)
    try:
        os.rename(work / NEW, final)
    except BaseException:
        os.rename(work / OLD / final.name, final)
        raise


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file atomically; a link of that name is replaced, not followed."""
    path = path.absolute()
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path) as part:
        part.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Gives a path with the same suffix to write a file to, which gets its final name when it is complete."""
    path = path.absolute()
    with _failing(path), _nameable(path), _workspace(path) as work:
        part = work / f"{NEW}{path.suffix}"
        yield part
        fsync(part)
        os.replace(part, path)
        fsync(path.parent)


@contextmanager
def _nameable(path: Path) -> Iterator[None]:
    """Raises OSError for a name that no file could get, or that would be taken from a device (/dev/null) or a pipe."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        # Links like /dev/stdout lead to one.
        mode = os.stat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise OSError(errno.EINVAL, "it is a device or a pipe, which is not replaced; expected the name of a file")
    yield


@contextmanager
def atomic_files(*paths: Path) -> Iterator[list[Path]]:
    """Gives a path for each file, as `atomic_file` does; they get their names when all of them are complete."""
    with ExitStack() as stack:
        yield [stack.enter_context(atomic_file(path)) for path in paths]


@contextmanager
def _failing(final: Path) -> Iterator[None]:
    """Turns any failure to write into an OSError that names the target."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # Of several files, the one that failed has been named.
        if isinstance(error, OSError) and (error.strerror or "").endswith(UNCHANGED):
            raise
        raise OSError(_errno(error), f"could not write {final}: {_reason(error)}. {UNCHANGED}") from error


@contextmanager
def _workspace(final: Path) -> Iterator[Path]:
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(final.parent)
    # File names are limited to 255 bytes.
    name = os.fsdecode(os.fsencode(final.name)[:200])
    work = final.parent / f".{name}.tmp-{uuid.uuid4().hex}"
    # Other users cannot create anything in it.
    work.mkdir(mode=0o700)
    with _locked(work / LOCK) as lock:
        try:
            if lock is not None:
                (work / LOCK).write_bytes(MARK)
            yield work
        finally:
            # If it cannot be removed now, the next writer removes it.
            with suppress(OSError):
                _clear(work)


def _clear(work: Path) -> None:
    """Removes a workspace; the lock, which identifies it, is removed last."""
    if not work.exists():
        return
    for path in work.iterdir():
        if path.name == LOCK:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    (work / LOCK).unlink(missing_ok=True)
    work.rmdir()


def recover(folder: Path) -> None:
    """Cleans up after killed writers: restores what was being replaced, and removes their workspaces."""
    for work in workspaces(folder):
        with suppress(OSError), _locked(work / LOCK, is_new=False) as lock:
            # Another process may have recovered it meanwhile.
            if lock is None or not _is_workspace(work):
                continue
            for path in (work / OLD).iterdir() if (work / OLD).is_dir() else ():
                if not os.path.lexists(folder / path.name):
                    os.rename(path, folder / path.name)
            _clear(work)
    # The writer was killed at the very start or at the very end.
    for path in _named_as_workspaces(folder):
        with suppress(OSError):
            path.rmdir()


def workspaces(folder: Path) -> list[Path]:
    """The workspaces in a folder, in use or not."""
    return [path for path in _named_as_workspaces(folder) if _is_workspace(path)]


def _named_as_workspaces(folder: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return []
    return [folder / name for name in names if name.startswith(".") and WORKSPACE.fullmatch(name)]


def _is_workspace(path: Path) -> bool:
    try:
        if not path.is_dir() or path.is_symlink() or (path / LOCK).is_symlink():
            return False
        mark = (path / LOCK).read_bytes()
        # A writer killed before the mark was complete leaves nothing else.
        return mark == MARK or (MARK.startswith(mark) and os.listdir(path) == [LOCK])
    except OSError:
        return False


def remove_dir(folder: Path) -> None:
    """Removes a folder, renaming it first so that an interrupted removal leaves nothing that looks complete."""
    folder = folder.absolute()
    with _workspace(folder) as work:
        os.rename(folder, work / GONE)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Tries to lock a file, and gives whether it could. The lock ends with the process. Links are refused."""
    with _locked(path) as lock:
        yield lock is not None


@contextmanager
def _locked(path: Path, *, is_new: bool = True) -> Iterator[filelock.BaseFileLock | None]:
    if not is_new and not path.exists():
        yield None
        return
    lock = filelock.FileLock(path, timeout=0, thread_local=False)
    try:
        lock.acquire()
    except filelock.Timeout:
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()


def is_locked(path: Path) -> bool:
    """True if a process holds a lock. Nothing is created or changed, and a read-only file will do."""
    try:
        import fcntl
    except ModuleNotFoundError:
        with suppress(OSError), _locked(path, is_new=False) as lock:
            return lock is None and path.exists()
        return False
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # There is no file to lock.
        return False
    finally:
        os.close(handle)
    return False


def read_dir(folder: Path, read: Callable[[Path], T]) -> T:
    """Calls a function on a folder, which sees the old or the new one if it is replaced meanwhile, never a mixture.

    Args:
        read: called with the path to read from, again if the folder was replaced before it returned.
    """
    for attempt in range(ATTEMPTS):
        found = _whereabouts(folder, is_last=attempt > ATTEMPTS // 2)
        with _held(found) as is_same:
            try:
                value = read(found)
            except (ValueError, OSError):
                if is_same():
                    raise
            else:
                if is_same():
                    return value
        time.sleep(min(0.02, 0.001 * attempt))
    raise ValueError(f"{folder} was replaced {ATTEMPTS} times while it was read; try again when its writer has ended")


def _whereabouts(folder: Path, *, is_last: bool) -> Path:
    """The path to read a folder from: its own, or where a killed writer without atomic exchange left it."""
    aside = _aside(folder) if is_last and not folder.exists() else None
    return aside or folder


def _aside(folder: Path) -> Path | None:
    """The path of a folder that is being replaced without an atomic exchange."""
    folder = folder.absolute()
    places = (work / OLD / folder.name for work in workspaces(folder.parent))
    return next((place for place in places if place.is_dir()), None)


@contextmanager
def _held(folder: Path) -> Iterator[Callable[[], bool]]:
    """Holds a folder open, so that its inode is not reused, and gives a test whether its path still leads to it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        # It is unchanged unless a writer is about to restore it.
        yield lambda: not folder.exists() and _aside(folder) is None
        return
    except OSError:
        # Some systems cannot open folders.
        yield lambda: True
        return
    try:
        yield lambda: _is_same(handle, folder)
    finally:
        os.close(handle)


def _is_same(handle: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(folder))
    except OSError:
        return False


@cache
def _renameat2() -> Callable[[bytes, bytes], int] | None:
    """The system call that exchanges two names, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux" and hasattr(libc, "renameat2"):
        at_cwd, exchange = -100, 2
        return lambda one, other: libc.renameat2(at_cwd, one, at_cwd, other, ctypes.c_uint(exchange))
    if sys.platform == "darwin" and hasattr(libc, "renamex_np"):
        return lambda one, other: libc.renamex_np(one, other, ctypes.c_uint(2))
    return None


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two names in one step; False where the system or the file system cannot."""
    call = _renameat2() if os.name == "posix" else None
    if call is None:
        return False
    if call(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(number, os.strerror(number), str(other))


def fsync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path, mode: str = "ab") -> BinaryIO:
    """Opens a file for writing and refuses a symbolic link, which could lead anywhere."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))  # type: ignore[return-value]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file in the given dtypes; identical tensors are stored once."""
    unique: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise ValueError(f"expected tensors by name, got {name!r}: {type(tensor).__name__}")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values to save")
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and key in first:
            shared[name] = first[key]
            continue
        first[key] = name
        storage = tensor.untyped_storage().data_ptr()
        tensor = tensor.detach().cpu().contiguous()
        # Different views of one storage are stored separately.
        unique[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    # A single entry: safetensors writes several in random order, and equal tensors have to give equal bytes.
    save_file(unique, path, metadata={SHARED: json.dumps(shared)} if shared else {"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads the tensors of a safetensors file, or raises a FileError that says what is wrong."""
    with open_tensors(path) as file:
        # Copied, so that the file may be replaced or removed while they are in use.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
        shared = parse_json((file.metadata() or {}).get(SHARED, "{}"), path)
        return tensors | {name: tensors[source] for name, source in shared.items()}


@contextmanager
def open_tensors(path: Path) -> Iterator[Any]:
    """Opens a safetensors file to read from; whatever is wrong with it is a FileError."""
    _check_file(path)
    try:
        with _named_in_utf8(path) as name, safe_open(name, framework="pt", device="cpu") as file:
            yield file
    # An unknown dtype raises KeyError or AttributeError, and wrong sizes raise RuntimeError.
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, RuntimeError, FileError) as error:
        raise FileError(f"{path} is not a complete safetensors file: {_line(error)}") from error


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[Path]:
    """A path that is valid UTF-8, if necessary a link: safetensors writes other names but cannot read them."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "link").symlink_to(path.absolute())
            yield Path(folder) / "link"
    else:
        yield path


def write_json(path: Path, value: Any) -> None:
    path.write_text(dumps(path.name, value), encoding="utf-8")


def dumps(what: str, value: Any) -> str:
    """Serializes a value as JSON, or raises ValueError: NaN and tensors are not JSON."""
    try:
        return json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error


class FileError(ValueError):
    """A file cannot be used. The message names it, and says what is wrong and what was expected."""


def read_text(path: Path, max_bytes: int = MAX_BYTES, *, errors: str = "strict") -> str:
    """Reads a UTF-8 file of limited length, or raises FileError."""
    _check_file(path)
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > max_bytes:
        raise FileError(f"{path} has more than {max_bytes:,} bytes, which no such file has")
    try:
        return data.decode("utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is not UTF-8 text (at byte {error.start})") from error


def parse_json(text: str, where: object, *, allow_nan: bool = False) -> Any:
    """Parses JSON from an untrusted source, or raises FileError.

    Args:
        where: the place that messages name.
        allow_nan: accept NaN and infinities, which files of other programs may have.
    """
    return _parsed(json.loads, text, where, "JSON", allow_nan=allow_nan)


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """Reads the JSON object in a file, or raises a FileError that says what is wrong."""
    value = parse_json(read_text(path, max_bytes), path, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise FileError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """Parses TOML, or raises FileError."""
    import tomllib

    # Infinite numbers are left to the checks of each option.
    return _parsed(tomllib.loads, text, where, "TOML", allow_nan=True)


def read_yaml(path: Path) -> Any:
    """Reads a YAML file of plain values, or raises FileError. Aliases are refused: a few can expand to gigabytes."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("it has an alias (*), which is not read here")
            return super().compose_node(parent, index)

    def load(text: str) -> Any:
        try:
            return yaml.load(text, Loader)
        # Invalid dates raise ValueError, and unhashable keys TypeError.
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError(error) from error

    return _parsed(load, read_text(path, MAX_YAML_BYTES), path, "YAML", allow_nan=True)


def _parsed(parse: Callable[[str], Any], text: str, where: object, kind: str, *, allow_nan: bool = False) -> Any:
    try:
        value = parse(text)
    except RecursionError as error:
        raise FileError(f"{where} is nested too deeply; expected at most {MAX_DEPTH} levels") from error
    except ValueError as error:
        raise FileError(f"{where} is not {kind}: {_line(error)[:300]}") from error
    if problem := _excess(value, allow_nan=allow_nan):
        raise FileError(f"{where} {problem}")
    return value


def _excess(value: Any, *, allow_nan: bool) -> str | None:
    """Describes what exceeds the limits: deep nesting, overlong integers, or numbers that are not finite."""
    level = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            kind = type(part)
            if kind is dict:
                below += part.values()
            elif kind is list:
                below += part
            elif kind is float:
                if not allow_nan and part - part != 0:
                    return f"has the number {part}; expected finite numbers"
            elif kind is int and not -MAX_INT < part < MAX_INT:
                return f"has a whole number of {part.bit_length()} bits; expected at most 64"
        if not below:
            return None
        level = below
    return f"is nested too deeply; expected at most {MAX_DEPTH} levels"


def entry(content: Any, key: str, kind: type[T], where: object) -> T:
    """The entry of a JSON object, or a FileError if it is missing or of another type."""
    if not isinstance(content, Mapping):
        raise FileError(f"{where} holds {brief(content)} where an object with {key!r} was expected")
    if key not in content:
        raise FileError(f"{where} has no {key!r}")
    value: Any = content[key]
    accepted: Any = int | float if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise FileError(f"{where}: {key!r} is {brief(value)}; expected {_KINDS.get(kind, kind.__name__)}")
    result: T = value
    return result


_KINDS: dict[Any, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def brief(value: object) -> str:
    """The text of a value for a message, shortened."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    shortener.maxlevel = 3
    return shortener.repr(value)


def _check_file(path: Path) -> None:
    # Reading a pipe or a device could block.
    if not path.is_file():
        raise FileError(f"{path} is not a file" if path.exists() else f"{path} is missing")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Raises ValueError for a NaN or an infinity in any tensor."""
    if bad := [name for name, tensor in tensors.items() if not torch.isfinite(tensor).all()]:
        raise ValueError(f"{where}: {len(bad)} tensors have values that are not finite ({', '.join(bad[:3])})")


def _errno(error: BaseException) -> int:
    if isinstance(error, OSError) and error.errno:
        return error.errno
    # safetensors raises its own error, with the error number in the message.
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 5


def _reason(error: BaseException) -> str:
    return os.strerror(_errno(error)) if not isinstance(error, OSError) else (error.strerror or str(error))
