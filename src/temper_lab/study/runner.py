"""The runner: starts the runs of a study as processes, monitors them and stops them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from temper_lab import plugins
from temper_lab.console import StopSignal
from temper_lab.io import open_new
from temper_lab.study.cost import flops_of
from temper_lab.study.grid import Cell, run_folder
from temper_lab.study.spec import Study
from temper_lab.train import run_dir
from temper_lab.train.run_dir import RunFolder

# The recent steps that the speed of a run is computed from, validations included.
RECENT = 40


class Tail:
    """Reads the lines added to a file since the last call, or all lines if the file was replaced.

    Args:
        numbers: the names that a line must have; other lines are skipped.
    """

    def __init__(self, path: Path, numbers: Collection[str]) -> None:
        self.path, self.numbers = path, numbers
        self._inode, self._place = 0, 0

    def read(self) -> list[dict[str, Any]]:
        try:
            with open(self.path, "rb") as file:
                inode = self.path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._place = inode, 0
                file.seek(self._place)
                text = file.read()
        except OSError:
            return []
        # The last line may be incomplete.
        whole = text[: text.rfind(b"\n") + 1]
        self._place += len(whole)
        try:
            lines = [line for line in map(json.loads, whole.splitlines()) if isinstance(line, dict)]
            return [line for line in lines if all(_is_number(line.get(name)) for name in self.numbers)]
        except (ValueError, RecursionError):
            # The file was replaced meanwhile, so the next call reads it from the beginning.
            self._inode = 0
            return []


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


class Progress:
    """The step, the loss and the speed of a run.

    Args:
        since: the time from which steps count for the speed.
    """

    def __init__(self, folder: RunFolder, steps: int, since: float) -> None:
        self.steps, self.step = steps, 0
        self.loss: float | None = None
        self.bpb: float | None = None
        self._since = since
        self._metrics = Tail(folder.metrics, ("step", "loss"))
        self._timing = Tail(folder.path / "timing.jsonl", ("time",))
        self._times: deque[float] = deque(maxlen=RECENT)

    def refresh(self) -> None:
        for line in self._metrics.read():
            self.step, self.loss = line["step"], line["loss"]
            self.bpb = line["val_bpb"] if _is_number(line.get("val_bpb")) else self.bpb
        self._times.extend(line["time"] for line in self._timing.read() if line["time"] >= self._since)

    @property
    def seconds_per_step(self) -> float | None:
        if len(self._times) < 2:
            return None
        return (self._times[-1] - self._times[0]) / (len(self._times) - 1)

    @property
    def left(self) -> float | None:
        """Seconds."""
        rate = self.seconds_per_step
        return None if rate is None else rate * (self.steps - self.step)


def state(folder: RunFolder) -> tuple[str, str | None]:
    """The status of a run that no process is training, and the reason if it failed."""
    if not folder.is_run:
        return "waiting", None
    content = folder.read()
    status, error = content.get("status"), content.get("error")
    # A run that was killed could not change its status.
    if status == "running":
        return "killed", None
    return str(status), first_line(error) if status == "failed" else None


def steps_done(folder: RunFolder) -> int:
    rows = run_dir.read_log(folder.metrics)
    return rows[-1]["step"] if rows else 0


def first_line(text: str | None) -> str | None:
    return next((line.strip() for line in (text or "").splitlines() if line.strip()), None)


def last_line(path: Path) -> str | None:
    """The last line that a run printed, which is its error."""
    try:
        with open(path, "rb") as file:
            # Only the end is read, however much was printed.
            file.seek(max(0, path.stat().st_size - (1 << 16)))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return None
    found = next((line.strip() for line in reversed(lines) if line.strip()), None)
    return found and found.removeprefix("error: ")


# Seconds between two polls.
PAUSE = 0.2


@dataclass
class Entry:
    """The displayed state of a run.

    Args:
        flops: the approximate FLOPs of a step, for estimates before the first one.
        is_known: its numbers are another study's, and it has no folder here.
    """

    cell: Cell
    steps: int
    status: str
    reason: str | None = None
    progress: Progress | None = None
    flops: float = 0.0
    is_known: bool = False

    @property
    def step(self) -> int:
        return self.progress.step if self.progress else 0


class Runner:
    """Trains the unfinished runs of a study.

    Args:
        jobs: the number of runs at a time.
        threads: the threads of each run.
        launch: the words before `-m`; by default this interpreter.
        known: keys of runs that are not trained here, because their numbers are known.
        on_change: called when a run has started or ended.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        *,
        jobs: int,
        threads: int,
        launch: Sequence[str] = (),
        known: Collection[str] = (),
        on_change: Callable[[Entry], None] = lambda entry: None,
    ) -> None:
        self.study, self.folder, self.jobs = study, folder, jobs
        self._launch, self._threads = list(launch) or [sys.executable], threads
        self._on_change = on_change
        self._known = known
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.entries = {cell.key: self._entry(cell) for cell in study.cells}
        self._waiting = [cell for cell in study.queue if self.entries[cell.key].status not in ("finished", "skipped")]

    def _entry(self, cell: Cell) -> Entry:
        run, recipe = run_folder(self.folder, cell), self.study.settings_of(cell)
        steps = recipe.train.steps
        if reason := self.study.refusal(cell):
            return Entry(cell, steps, "skipped", reason)
        status, reason = state(run)
        if cell.key in self._known and status != "finished":
            return Entry(cell, steps, "finished", is_known=True)
        progress = Progress(run, steps, time.time())
        progress.refresh()
        flops = flops_of(self.study, cell, recipe.model.vocab_size) * recipe.train.batch_tokens
        return Entry(cell, steps, status, reason, progress, flops)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> list[Entry]:
        return [self.entries[key] for key in self._children]

    def run(self, on_look: Callable[[], None] = lambda: None) -> int:
        """Trains until everything has ended or a signal asks to stop; returns the signal, else 0.

        Args:
            on_look: called a few times a second.
        """
        wish = StopSignal()
        try:
            while self._children or (self._waiting and not wish.number):
                self._reap()
                if wish.number:
                    self._ask_to_stop()
                else:
                    self._start()
                for entry in self.running:
                    if entry.progress is not None:
                        entry.progress.refresh()
                on_look()
                time.sleep(PAUSE)
        except KeyboardInterrupt:
            # A second Ctrl-C does not wait for checkpoints.
            for child in self._children.values():
                os.killpg(child.pid, signal.SIGKILL)
        finally:
            self._ask_to_stop()
            for child in self._children.values():
                child.wait()
            self._reap()
            wish.forget()
        return wish.number

    def _start(self) -> None:
        for cell in list(self._waiting):
            if len(self._children) >= self.jobs:
                return
            run = run_folder(self.folder, cell)
            entry = self.entries[cell.key]
            # A run of a killed study is still saving its checkpoint, or was started by hand.
            if run.is_claimed():
                entry.status = "elsewhere"
                continue
            self._waiting.remove(cell)
            if state(run)[0] == "finished":
                self._end(entry, 0)
                continue
            entry.status, entry.reason = "running", None
            entry.progress = Progress(run, entry.steps, time.time())
            self._children[cell.key] = self._spawn(cell.key)
            self._on_change(entry)

    def _spawn(self, key: str) -> subprocess.Popen[bytes]:
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        words = ["-m", "temper_lab.study.worker", str(self.folder), key, str(self._threads), *plugins.named()]
        with open_new(logs / f"{key}.txt") as log:
            # Started in its own session: Ctrl-C goes to the study, which closes the pipe.
            return subprocess.Popen(
                [*self._launch, *words],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _ask_to_stop(self) -> None:
        for child in self._children.values():
            assert child.stdin is not None
            child.stdin.close()

    def _reap(self) -> None:
        for key, child in list(self._children.items()):
            code = child.poll()
            if code is not None:
                assert child.stdin is not None
                child.stdin.close()
                del self._children[key]
                self._end(self.entries[key], code)

    def _end(self, entry: Entry, code: int) -> None:
        run = run_folder(self.folder, entry.cell)
        entry.status, entry.reason = state(run)
        if entry.status == "killed" or (code < 0 and entry.status == "waiting"):
            words = f" by {signal.Signals(-code).name}" if code < 0 else ""
            entry.status, entry.reason = "killed", f"killed{words} at step {steps_done(run)}"
        elif entry.status == "waiting":
            # The process ended before it wrote anything to its folder.
            log = self.folder / "logs" / f"{entry.cell.key}.txt"
            entry.status, entry.reason = "failed", last_line(log) or f"exit code {code}"
        if entry.progress is not None:
            entry.progress.refresh()
        self._on_change(entry)
