"""The runs of a study as processes, some at a time: started, watched, and told to stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from temper_lab.compare.counts import flops_of
from temper_lab.compare.progress import Progress, last_line, state, steps_done
from temper_lab.compare.study import Cell, Study, run_folder
from temper_lab.interrupt import StopWish

# Seconds between two looks.
PAUSE = 0.2


@dataclass
class Entry:
    """A run as people see it.

    Args:
        flops: of a step, about; how long a step takes is not known before the first one.
    """

    cell: Cell
    steps: int
    status: str
    reason: str | None = None
    progress: Progress | None = None
    flops: float = 0.0

    @property
    def step(self) -> int:
        return self.progress.step if self.progress else 0


class Runner:
    """Trains what is not finished yet.

    Args:
        jobs: how many at a time.
        threads: of each.
        launch: the words before `-m`; this interpreter if there are none.
        on_change: called when a run has started or ended.
        on_look: called a few times a second.
    """

    def __init__(
        self,
        study: Study,
        folder: Path,
        *,
        jobs: int,
        threads: int,
        launch: Sequence[str] = (),
        on_change: Callable[[Entry], None] = lambda entry: None,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        self.study, self.folder, self.jobs = study, folder, jobs
        self._launch, self._threads = list(launch) or [sys.executable], threads
        self._on_change, self._on_look = on_change, on_look
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.entries = {cell.key: self._entry(cell) for cell in study.cells}
        self._waiting = [cell for cell in study.queue if self.entries[cell.key].status not in ("finished", "skipped")]

    def _entry(self, cell: Cell) -> Entry:
        run, recipe = run_folder(self.folder, cell), self.study.settings_of(cell)
        steps = recipe.train.steps
        if reason := self.study.refusal(cell):
            return Entry(cell, steps, "skipped", reason)
        status, reason = state(run)
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

    def run(self) -> int:
        """Until everything has ended, or somebody wishes to stop; the signal then, else 0."""
        wish = StopWish()
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
                self._on_look()
                time.sleep(PAUSE)
        except KeyboardInterrupt:
            # The second Ctrl-C does not wait for checkpoints.
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
            # A run of a study that was killed is saving its last checkpoint, or somebody trains it by hand.
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
        words = ["-m", "temper_lab.compare.child", str(self.folder), key, str(self._threads)]
        with open(logs / f"{key}.txt", "ab") as log:
            # A session of its own: Ctrl-C is for the study, which closes the pipe.
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
            # Gone before it could say anything in its folder.
            log = self.folder / "logs" / f"{entry.cell.key}.txt"
            entry.status, entry.reason = "failed", last_line(log) or f"exit code {code}"
        if entry.progress is not None:
            entry.progress.refresh()
        self._on_change(entry)
