"""A study from its settings to its results."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import temper
from temper_lab.compare import core, cost, results, table
from temper_lab.compare.runner import Entry, Runner
from temper_lab.compare.session import Session, is_on_cpu
from temper_lab.compare.study import FILE_NAME, Study, run_folder
from temper_lab.compare.vary import MACHINE
from temper_lab.compare.view import View
from temper_lab.io import recover
from temper_lab.provenance import corpus_of
from temper_lab.recipe import Recipe
from temper_lab.run import RunFolder
from temper_lab.tokenizer import FILE_NAME as TOKENIZER
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import train_tokenizer


def compare(study: Study, folder: Path, session: Session) -> int:
    """Trains what is not finished and writes what was found; 0, 1 if a run failed, 128 + the signal that stopped it."""
    with ExitStack() as stack:
        is_new = not folder.exists()
        if not is_new:
            check_folder(folder)
            stack.enter_context(claimed(folder))
        check_runs(study, folder)
        if session.bundle is not None:
            core.check_bundle(session.bundle, session.max_per_task)
        is_trained = all(_is_settled(study, folder, cell) for cell in study.cells)
        corpus = None if is_trained else corpus_of(study.recipe)
        if is_new:
            folder.mkdir(parents=True)
            stack.enter_context(claimed(folder))
        recover(folder)
        study = study.recorded(folder)
        study.write(folder)
        if corpus is not None:
            make_tokenizer(study, folder, corpus)
            check_runs(study, folder)
            if is_on_cpu(study.recipe):
                compile_kernels()
        return _Comparison(study, folder, session).run()


class _Comparison:
    """A study that is being run in a folder which is ours."""

    def __init__(self, study: Study, folder: Path, session: Session) -> None:
        self.study, self.folder, self.session = study, folder, session
        self.vocab_size = vocab_size(study, folder)
        num_runs = sum(not _is_settled(study, folder, cell) for cell in study.cells)
        jobs, self.threads = session.settled(study.recipe, num_runs)
        self.runner = Runner(
            study,
            folder,
            jobs=jobs,
            threads=self.threads,
            launch=session.launch,
            on_change=self._changed,
            on_look=lambda: self.view.look(),
        )
        self.view = View(self.runner)
        self.cost = self._known_cost()

    def run(self) -> int:
        for entry in self.runner.entries.values():
            if entry.status == "skipped":
                print(f"{entry.cell.key} skipped: {entry.reason}", file=sys.stderr)
        if self.runner.num_waiting:
            each = f" of {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
            print(f"{self.runner.num_waiting} runs to train, {self.runner.jobs} at a time{each}", file=sys.stderr)
        self._write()
        with self.view:
            number = self.runner.run()
        path = self._write()
        if number:
            print(f"stopped: {self.view.summary()}; so far: {path}", file=sys.stderr)
            print(f"continue with: {self._again()}", file=sys.stderr)
            return 128 + number
        if self.session.with_cost and self.cost is None:
            self.cost = cost.measure(self.study, self.vocab_size, self.threads)
            if self.cost is None:
                reason = "it takes too long on this machine"
                if not cost.groups_of(self.study):
                    reason = "every run varies what a step does, and it is measured with the recipe as it is"
                print(f"the cost of a step was not measured: {reason}", file=sys.stderr)
            path = self._write()
        if self.session.bundle is not None:
            done = [entry for entry in self.runner.entries.values() if entry.status == "finished"]
            runs = [run_folder(self.folder, entry.cell).path for entry in done]
            core.evaluate(runs, self.session.bundle, self.session.max_per_task, self.study.recipe.train.device)
            path = self._write()
        return self._close(path)

    def _close(self, path: Path) -> int:
        found = results.read(self.folder) or {}
        table.show(found)
        if self.study.claims:
            from temper_lab.report.outcomes import claim_lines, outcomes
            from temper_lab.report.results import Study as Results

            print("\n".join(claim_lines(outcomes(Results.of(found)))))
        bad = [entry for entry in self.runner.entries.values() if entry.status not in ("finished", "skipped")]
        for entry in bad:
            log = self.folder / "logs" / f"{entry.cell.key}.txt"
            print(f"{entry.cell.key} {entry.status}: {entry.reason or 'no reason given'} (see {log})", file=sys.stderr)
        if bad:
            print(f"try {'it' if len(bad) == 1 else 'them'} again with: {self._again()}", file=sys.stderr)
        print(f"results: {path}")
        return 1 if bad else 0

    def _again(self) -> str:
        return f"temper compare --out {shlex.quote(str(self.folder))}"

    def _changed(self, entry: Entry) -> None:
        self.view.changed(entry)
        if entry.status != "running":
            self._write()

    def _write(self) -> Path:
        entries = self.runner.entries.values()
        found = results.gather(self.study, self.folder, entries, self.vocab_size, self.cost)
        return results.write(self.folder, found)

    def _known_cost(self) -> Any:
        """What an earlier command has measured, if it was of all these methods."""
        found = results.known_cost(self.folder)
        asked = {(str(method), streams) for method, streams in cost.groups_of(self.study)}
        known = {(row["method"], row["streams"]) for row in found["rows"]} if found else set()
        return found if known >= asked else None


def claimed(folder: Path) -> Any:
    """Only one command works on a study."""
    return RunFolder(folder).claimed()


def check_folder(folder: Path) -> None:
    """Raises ValueError for a folder that is something else."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder for the study")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if names and not names & {FILE_NAME, "runs"}:
        raise ValueError(f"{folder} is not empty and holds no study; expected a new folder")


def check_runs(study: Study, folder: Path) -> None:
    """Raises ValueError for a run that is there and is of another recipe, or has another tokenizer."""
    shared = folder / "tokenizer" / TOKENIZER
    fingerprint = Tokenizer.load(shared).fingerprint if shared.is_file() else None
    for cell in study.cells:
        run = run_folder(folder, cell)
        if not run.is_run:
            continue
        before = Recipe.from_dict(run.recipe(), str(run.path))
        if changes := before.changes(study.recipe_of(cell, folder), MACHINE):
            raise ValueError(f"{run.path} is a run of another recipe: {'; '.join(changes)}. Another --out starts anew")
        own = run.path / TOKENIZER
        if fingerprint is not None and own.is_file() and Tokenizer.load(own).fingerprint != fingerprint:
            raise ValueError(f"{run.path} has another tokenizer than {shared}, so its numbers are not to be compared")


def make_tokenizer(study: Study, folder: Path, corpus: Any) -> None:
    """One for all runs: there already, named by the recipe, that of runs which are there, or a new one."""
    target = folder / "tokenizer"
    if (target / TOKENIZER).is_file():
        return
    settings = study.recipe.tokenizer
    owned = (run_folder(folder, cell).path / TOKENIZER for cell in study.cells)
    known = Path(settings.path) if settings.path else next((path for path in owned if path.is_file()), None)
    if known is not None:
        tokenizer = Tokenizer.load(known)
    else:
        print(f"tokenizer: {study.recipe.model.vocab_size:,} tokens from {corpus.name}", file=sys.stderr)
        tokenizer = train_tokenizer(corpus, study.recipe.model.vocab_size, settings.train_chars)
    tokenizer.save(target)


def vocab_size(study: Study, folder: Path) -> int:
    """Of the study's tokenizer; of the recipe until there is one."""
    path = folder / "tokenizer" / TOKENIZER
    return Tokenizer.load(path).vocab_size if path.is_file() else study.recipe.model.vocab_size


def compile_kernels() -> None:
    """Once, before many processes want them: a site of the smallest size runs forward and backward."""
    site = temper.HyperConnection(temper.preset("temper-cp", num_streams=2, dim=8))
    streams = torch.ones(1, 2, 8, requires_grad=True)
    x, state = site.begin(streams)
    site.finish(state, x).sum().backward()


def _is_settled(study: Study, folder: Path, cell: Any) -> bool:
    run = run_folder(folder, cell)
    return study.refusal(cell) is not None or (run.is_run and run.read().get("status") == "finished")
