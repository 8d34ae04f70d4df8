"""Files and folders of the lab: written whole or not at all, and read with limits, by one set of functions.

Whatever is written grows in a workspace beside its final place, `.NAME.tmp-<128 random bits>/`:

    lock      says that the workspace is ours, and is locked as long as its writer lives
    new       what is being written; after an exchange of names, what was replaced
    old/NAME  what is being replaced, where names cannot be exchanged

so that a workspace without a living writer can be told from one that is in use, and from the folders of other people.
Readers change nothing: they see the old folder or the new one, and try again if it was replaced while they read.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import re
import reprlib
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
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
# A reader starts again when the folder was replaced under it; so many times in a row is no accident.
ATTEMPTS = 200
# Of files that a person could have edited: far more than ours ever have, far less than what would fill the memory.
MAX_BYTES, MAX_YAML_BYTES, MAX_DEPTH, MAX_INT = 256 << 20, 1 << 20, 64, 1 << 64


@contextmanager
def atomic_dir(final: Path, is_ours: Callable[[Path], object] | None = None) -> Iterator[Path]:
    """A folder to write into, which takes its final name in one step when all of it is on disk; or vanishes.

    Args:
        is_ours: called with a folder that is in the way and not empty: true, or it is not replaced. Without it, only
            an empty folder is.
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
        # Onto nothing, or onto an empty folder.
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
    # Without an exchange the name is missing for a moment: readers wait, and `recover` repairs a crash in between.
    (work / OLD).mkdir()
    os.rename(final, work / OLD / final.name)
    try:
        os.rename(work / NEW, final)
    except BaseException:
        os.rename(work / OLD / final.name, final)
        raise


def atomic_write(path: Path, content: str | bytes) -> None:
    """Writes a file that has its name only when all of it is on disk; a link of that name is replaced, not followed."""
    path = path.absolute()
    data = content.encode() if isinstance(content, str) else content
    with atomic_file(path) as part:
        part.write_bytes(data)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """The path of a file to write, with the same suffix, which takes its final name when it is complete."""
    path = path.absolute()
    with _failing(path), _workspace(path) as work:
        part = work / f"{NEW}{path.suffix}"
        yield part
        fsync(part)
        os.replace(part, path)
        fsync(path.parent)


@contextmanager
def _failing(final: Path) -> Iterator[None]:
    """Whatever keeps something from being written, as an OSError that says so."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise OSError(_errno(error), f"could not write {final}: {_reason(error)}. Nothing was changed.") from error


@contextmanager
def _workspace(final: Path) -> Iterator[Path]:
    final.parent.mkdir(parents=True, exist_ok=True)
    recover(final.parent)
    # The limit of a name is 255 bytes.
    name = os.fsdecode(os.fsencode(final.name)[:200])
    work = final.parent / f".{name}.tmp-{uuid.uuid4().hex}"
    # Nobody else can plant anything in there.
    work.mkdir(mode=0o700)
    with _locked(work / LOCK) as lock:
        try:
            if lock is not None:
                (work / LOCK).write_bytes(MARK)
            yield work
        finally:
            # What cannot be removed now is removed by the next writer.
            with suppress(OSError):
                _clear(work)


def _clear(work: Path) -> None:
    """Removes a workspace; the lock, by which it is known, goes last."""
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
    """Ends what killed writers have left in a folder: what was being replaced comes back, their workspaces go."""
    for work in workspaces(folder):
        with suppress(OSError), _locked(work / LOCK, is_new=False) as lock:
            # Another process may have ended it meanwhile.
            if lock is None or not _is_workspace(work):
                continue
            for path in (work / OLD).iterdir() if (work / OLD).is_dir() else ():
                if not os.path.lexists(folder / path.name):
                    os.rename(path, folder / path.name)
            _clear(work)
    # A writer that was killed right at the start, or right at the end.
    for path in _named_as_workspaces(folder):
        with suppress(OSError):
            path.rmdir()


def workspaces(folder: Path) -> list[Path]:
    """The workspaces in a folder, whether somebody works in them or not."""
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
        # Killed before the mark was written, it holds nothing else.
        return mark == MARK or (mark == b"" and os.listdir(path) == [LOCK])
    except OSError:
        return False


def remove_dir(folder: Path) -> None:
    """Removes a folder, which loses its name first: a removal cut short leaves nothing that looks complete."""
    folder = folder.absolute()
    with _workspace(folder) as work:
        os.rename(folder, work / GONE)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Whether a lock file could be locked; the lock ends with the process, however that ends. Links are refused."""
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
    """Whether a process holds a lock; nothing is made or changed, and a file that can only be read will do."""
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
        # Nothing that could be locked.
        return False
    finally:
        os.close(handle)
    return False


def read_dir(folder: Path, read: Callable[[Path], T]) -> T:
    """What a function makes of a folder: of the old one or of the new one if it is replaced meanwhile, never of both.

    Args:
        read: called with the path to read from, and again if the folder was replaced before it was done.
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
    """Where to read a folder: in its place, or where a writer without an exchange of names was killed."""
    aside = _aside(folder) if is_last and not folder.exists() else None
    return aside or folder


def _aside(folder: Path) -> Path | None:
    """Where a folder is that is being replaced without an exchange of names."""
    folder = folder.absolute()
    places = (work / OLD / folder.name for work in workspaces(folder.parent))
    return next((place for place in places if place.is_dir()), None)


@contextmanager
def _held(folder: Path) -> Iterator[Callable[[], bool]]:
    """A question whether the folder is still the one that it was, which stays open so that its inode is its own."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        # It is the same if nobody is about to put it back.
        yield lambda: not folder.exists() and _aside(folder) is None
        return
    except OSError:
        # Systems that do not open folders.
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
    """The system's call that exchanges two names, if it has one."""
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
    """Waits until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def open_new(path: Path, mode: str = "ab") -> BinaryIO:
    """Opens a file to write where a link of that name is refused: it could lead anywhere."""
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NOFOLLOW", 0), 0o666))  # type: ignore[return-value]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A safetensors file in the dtypes given; tensors that are one and the same are stored once."""
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
        # Views of one storage that differ become tensors of their own.
        unique[name] = tensor.clone() if storage in storages else tensor
        storages.add(storage)
    # One entry: safetensors writes several in a random order, and the same tensors are to be the same bytes.
    save_file(unique, path, metadata={SHARED: json.dumps(shared)} if shared else {"format": "pt"})


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or a FileError that says what is wrong with it."""
    _check_file(path)
    try:
        with _named_in_utf8(path) as name, safe_open(name, framework="pt", device="cpu") as file:
            # Copies, so that the file may be replaced or removed while they live.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata() or {}
        shared = parse_json(metadata.get(SHARED, "{}"), path)
        return tensors | {name: tensors[source] for name, source in shared.items()}
    # A dtype that torch does not have is a KeyError or an AttributeError, a lie about sizes a RuntimeError.
    except (SafetensorError, OSError, KeyError, TypeError, AttributeError, RuntimeError, FileError) as error:
        raise FileError(f"{path} is not a complete safetensors file: {_line(error)}") from error


@contextmanager
def _named_in_utf8(path: Path) -> Iterator[Path]:
    """The path, or a link to it: safetensors reads no other names, though it writes them."""
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
    """JSON, or a ValueError: NaN and tensors are not JSON."""
    try:
        return json.dumps(value, indent=1, allow_nan=False) + "\n"
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} cannot be written as JSON: {error}") from error


class FileError(ValueError):
    """A file that cannot be used as it is. The message names it, and says what is wrong and what was expected."""


def read_text(path: Path, max_bytes: int = MAX_BYTES, *, errors: str = "strict") -> str:
    """The text of a file, or a FileError: it has to be a file, of some length at most, in UTF-8."""
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
    """A value from JSON that somebody else may have written, or a FileError.

    Args:
        where: for the message.
        allow_nan: take NaN and infinities, which other people's files may have.
    """
    return _parsed(json.loads, text, where, "JSON", allow_nan=allow_nan)


def read_json(path: Path, *, max_bytes: int = MAX_BYTES, allow_nan: bool = False) -> dict[str, Any]:
    """The JSON object in a file, or a FileError that says what is wrong with it."""
    value = parse_json(read_text(path, max_bytes), path, allow_nan=allow_nan)
    if not isinstance(value, dict):
        raise FileError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def parse_toml(text: str, where: object) -> dict[str, Any]:
    """The tables of a TOML file, or a FileError."""
    import tomllib

    # Whether a number may be infinite is for its option to say.
    return _parsed(tomllib.loads, text, where, "TOML", allow_nan=True)


def read_yaml(path: Path) -> Any:
    """What a YAML file of plain values holds, or a FileError. Aliases are refused: a few of them make gigabytes."""
    import yaml

    class Loader(yaml.SafeLoader):
        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                raise yaml.YAMLError("it has an alias (*), which is not read here")
            return super().compose_node(parent, index)

    def load(text: str) -> Any:
        try:
            return yaml.load(text, Loader)
        # Dates that are none are ValueErrors, keys that cannot be keys TypeErrors.
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
    """What no file of this lab has: deep nesting, numbers of any length, numbers that are none."""
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
    """An entry of a JSON object that has to be there and of a type, or a FileError."""
    if not isinstance(content, Mapping):
        raise FileError(f"{where} holds {brief(content)} where an object with {key!r} was expected")
    if key not in content:
        raise FileError(f"{where} has no {key!r}")
    value = content[key]
    accepted = int | float if kind is float else kind
    if not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        raise FileError(f"{where}: {key!r} is {brief(value)}; expected {_KINDS.get(kind, kind.__name__)}")
    return value


_KINDS: dict[Any, str] = {dict: "an object", list: "a list", str: "a text", int: "a whole number", float: "a number"}


def brief(value: object) -> str:
    """A value for a message, whatever its size."""
    shortener = reprlib.Repr()
    shortener.maxstring = shortener.maxother = 80
    shortener.maxlevel = 3
    return shortener.repr(value)


def _check_file(path: Path) -> None:
    # A pipe or a device would keep its reader waiting.
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
    # safetensors writes in its own language and reports the number in its message.
    found = re.search(r"os error (\d+)", str(error))
    return int(found[1]) if found else 5


def _reason(error: BaseException) -> str:
    return os.strerror(_errno(error)) if not isinstance(error, OSError) else (error.strerror or str(error))
