"""Python in processes of its own, which never outlive their test."""

import os
import signal
import subprocess
import sys
from pathlib import Path


def start(*words: str, **environment: str) -> subprocess.Popen:
    """`python WORDS...` on one thread."""
    # What a process that has to be stopped was doing is worth knowing.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **environment}
    return subprocess.Popen([sys.executable, *words], stderr=subprocess.PIPE, text=True, env=env)


def error_of(process: subprocess.Popen, seconds: float = 240) -> str:
    """What a process has written to stderr when it ends; if it does not, it is stopped and the test fails."""
    try:
        return process.communicate(timeout=seconds)[1]
    except subprocess.TimeoutExpired:
        # torchrun puts its workers into sessions of their own, and ends when they do.
        workers = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in workers or [process.pid]:
            os.kill(int(pid), signal.SIGABRT)
        error = process.communicate()[1]
        raise AssertionError(f"still running after {seconds} s:\n{error}") from None


def succeed(processes: list[subprocess.Popen], seconds: float = 240) -> None:
    """Waits for processes that belong together, and fails the test unless all of them end well."""
    try:
        for process in processes:
            error = error_of(process, seconds)
            assert process.returncode == 0, error
    finally:
        for process in processes:
            process.kill()
            process.communicate()
