"""A command that dies at its k-th call to the file system, in a process of its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

# What changes a folder, as the interpreter announces it before it happens.
EVENTS = {"os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.link", "os.symlink", "os.truncate", "os.chmod", "open"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def run(action: Callable[[], int], root: Path, die_at: int | None = None) -> tuple[int, int]:
    """The exit code of an action and how many calls it made below a folder; 9 if it died at one of them."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, calls, inside = 70, 0, str(root)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)

        def count() -> None:
            nonlocal calls
            calls += 1
            if calls == die_at:
                os._exit(9)

        def hook(event: str, arguments: tuple) -> None:
            if event not in EVENTS or not _place(event, arguments).startswith(inside):
                return
            if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & WRITING):
                return
            count()

        try:
            sys.addaudithook(hook)
            _count_calls_without_events(count)
            code = action()
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 1
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os.write(writer, str(calls).encode())
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        calls = int(file.read() or 0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), calls


def _place(event: str, arguments: tuple) -> str:
    """Where a call does something: names may be relative to a folder that is open, as those that rmtree removes are."""
    path = arguments[0]
    if isinstance(path, int):
        return os.readlink(f"/proc/self/fd/{path}")
    path = os.fsdecode(path)
    folder = {"os.remove": 1, "os.rmdir": 1, "os.mkdir": 2, "os.rename": 2, "os.chmod": 2}.get(event)
    if folder is None or arguments[folder] < 0:
        return os.path.abspath(path)
    return os.path.join(os.readlink(f"/proc/self/fd/{arguments[folder]}"), path)


def _count_calls_without_events(count: Callable[[], None]) -> None:
    """Before each of these, and after an exchange of names as well."""
    from temper_lab import io

    fsync, exchange, write = os.fsync, io._exchange, io.save_file

    def counted_fsync(handle: int) -> None:
        count()
        fsync(handle)

    def counted_exchange(one: Path, other: Path) -> bool:
        count()
        done = exchange(one, other)
        count()
        return done

    def counted_write(tensors: object, path: Path, **options: object) -> None:
        # Half of the file is there.
        write(tensors, path, **options)
        data = Path(path).read_bytes()
        Path(path).write_bytes(data[: len(data) // 2])
        count()
        Path(path).write_bytes(data)

    os.fsync, io._exchange, io.save_file = counted_fsync, counted_exchange, counted_write
