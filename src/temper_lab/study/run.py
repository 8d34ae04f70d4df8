"""A study from its settings to its results."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import temper
from temper_lab.bench.measure import pinned
from temper_lab.console import duration, tell
from temper_lab.data import DataFingerprint
from temper_lab.io import atomic_write, dumps, read_json, recover
from temper_lab.recipe import Recipe
from temper_lab.study import cost, gather, live, vary
from temper_lab.study.cost import counts_of, flops_of
from temper_lab.study.environment import ExecutionOptions, is_on_cpu
from temper_lab.study.gather import (
    CORE_FILE,
    KnownRuns,
    check_tokenizer,
    is_finished,
    read_known,
    read_taken,
    with_data,
    with_records,
)
from temper_lab.study.grid import Cell, run_folder
from temper_lab.study.live import LiveTable
from temper_lab.study.results import FILE_NAME as RESULTS
from temper_lab.study.results import Cost, Results
from temper_lab.study.runner import Entry, Runner
from temper_lab.study.spec import FILE_NAME, Study
from temper_lab.study.vary import MACHINE
from temper_lab.tokenizer import FILE_NAME as TOKENIZER
from temper_lab.tokenizer import Tokenizer
from temper_lab.train import plan
from temper_lab.train.plan import corpus_of
from temper_lab.train.run_dir import RunFolder
from temper_lab.train.trainer import train_tokenizer


def compare(study: Study, folder: Path, execution: ExecutionOptions) -> int:
    """Trains unfinished runs and writes the results; returns 0, 1 if a run failed, or 128 + the stop signal."""
    with ExitStack() as stack:
        is_new = not folder.exists()
        if not is_new:
            check_folder(folder)
            stack.enter_context(claimed(folder))
        check_runs(study, folder)
        if execution.bundle is not None:
            check_bundle(execution.bundle, execution.max_per_task)
        # Unusable files of known runs are refused before anything is written.
        known = read_known(study, execution.known) | read_taken(study, folder)
        study = with_records(study, execution.known)
        is_trained = all(_is_settled(study, folder, cell, known) for cell in study.cells)
        corpus = None if is_trained else corpus_of(study.recipe.data)
        study = with_data(study, folder, execution.known, DataFingerprint.of(corpus) if corpus else None)
        if is_new:
            folder.mkdir(parents=True)
            stack.enter_context(claimed(folder))
        recover(folder)
        study = study.recorded(folder, known)
        study.write(folder)
        if corpus is not None:
            make_tokenizer(study, folder, corpus)
            check_runs(study, folder)
        check_tokenizer(known, fingerprint(folder))
        if corpus is not None and is_on_cpu(study.recipe):
            compile_kernels()
        return _Comparison(study, folder, execution, known).run()


class _Comparison:
    """A study that is being run, in a folder that this process has claimed."""

    def __init__(self, study: Study, folder: Path, execution: ExecutionOptions, known: KnownRuns) -> None:
        self.study, self.folder, self.execution, self.known = study, folder, execution, known
        self.vocab_size, self.tokenizer = vocab_size(study, folder), fingerprint(folder)
        num_runs = sum(not _is_settled(study, folder, cell, known) for cell in study.cells)
        jobs, self.threads = execution.settled(study.recipe, num_runs)
        self.runner = Runner(
            study,
            folder,
            jobs=jobs,
            threads=self.threads,
            launch=execution.launch,
            known=known,
            on_change=self._changed,
        )
        self.view = LiveTable(self.runner)
        self.cost = self._known_cost()

    def run(self) -> int:
        for entry in self.runner.entries.values():
            if entry.status == "skipped":
                tell(f"{entry.cell.key} skipped: {entry.reason}")
        if self.runner.num_waiting:
            each = f" of {self.threads} thread{'s' if self.threads > 1 else ''}" if self.threads else ""
            tell(f"{self.runner.num_waiting} runs to train, {self.runner.jobs} at a time{each}")
        self._write()
        with self.view:
            number = self.runner.run(self.view.look)
        found = self._write()
        if number:
            tell(f"stopped: {self.view.summary()}; so far: {self.folder / RESULTS}")
            tell(f"continue with: {self._again()}")
            return 128 + number
        if self.execution.with_cost and self.cost is None:
            self.cost = cost.measure(self.study, self.vocab_size, self.threads)
            if self.cost is None:
                reason = "it takes too long on this machine"
                if not cost.groups_of(self.study):
                    reason = "every run varies what a step does, and it is measured with the recipe as it is"
                tell(f"the cost of a step was not measured: {reason}")
            found = self._write()
        if self.execution.bundle is not None:
            done = [entry for entry in self.runner.entries.values() if entry.status == "finished"]
            runs = [run_folder(self.folder, entry.cell).path for entry in done if not entry.is_known]
            if len(runs) < len(done):
                tell(f"CORE: {len(done) - len(runs)} runs that were taken over have no model here")
            evaluate_core(runs, self.execution.bundle, self.execution.max_per_task, self.study.recipe.train.device)
            found = self._write()
        return self._close(found)

    def _close(self, found: Results) -> int:
        live.show(found)
        if self.study.claims:
            from temper_lab.report.outcomes import claim_lines, outcomes
            from temper_lab.report.view import StudyView

            print("\n".join(claim_lines(outcomes(StudyView.of(found)))))
        bad = [entry for entry in self.runner.entries.values() if entry.status not in ("finished", "skipped")]
        for entry in bad:
            log = self.folder / "logs" / f"{entry.cell.key}.txt"
            tell(f"{entry.cell.key} {entry.status}: {entry.reason or 'no reason given'} (see {log})")
        if bad:
            tell(f"try {'it' if len(bad) == 1 else 'them'} again with: {self._again()}")
        print(f"results: {self.folder / RESULTS}")
        return 1 if bad else 0

    def _again(self) -> str:
        return f"temper compare --out {shlex.quote(str(self.folder))}"

    def _changed(self, entry: Entry) -> None:
        self.view.changed(entry)
        if entry.status != "running":
            self._write()

    def _write(self) -> Results:
        entries = self.runner.entries.values()
        found = gather.gather(
            self.study, self.folder, entries, self.vocab_size, self.tokenizer, cost=self.cost, known=self.known
        )
        found.write(self.folder)
        return found

    def _known_cost(self) -> Cost | None:
        """The cost that an earlier command has measured, if it was of all these methods."""
        try:
            found = Results.read(self.folder).cost
        except ValueError:
            return None
        asked = {(str(method), streams) for method, streams in cost.groups_of(self.study)}
        known = {(row.method, row.streams) for row in found.rows} if found else set()
        return found if known >= asked else None


def claimed(folder: Path) -> Any:
    """Locks a study, so that only one command works on it."""
    return RunFolder(folder).claimed()


def check_folder(folder: Path) -> None:
    """Raises ValueError for a folder that is not a study."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; expected a folder for the study")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if names and not names & {FILE_NAME, "runs"}:
        raise ValueError(f"{folder} is not empty and holds no study; expected a new folder")


def check_runs(study: Study, folder: Path) -> None:
    """Raises ValueError if an existing run has another recipe or another tokenizer."""
    shared = folder / "tokenizer" / TOKENIZER
    expected = fingerprint(folder)
    for cell in study.cells:
        run = run_folder(folder, cell)
        if not run.is_run:
            continue
        before = Recipe.from_dict(run.recipe(), str(run.path))
        if changes := before.changes(study.recipe_of(cell, folder), MACHINE):
            raise ValueError(f"{run.path} is a run of another recipe: {'; '.join(changes)}. Another --out starts anew")
        own = run.path / TOKENIZER
        if expected is not None and own.is_file() and Tokenizer.load(own).fingerprint != expected:
            raise ValueError(f"{run.path} has another tokenizer than {shared}, so its numbers are not to be compared")


def make_tokenizer(study: Study, folder: Path, corpus: Any) -> None:
    """Provides the tokenizer of all runs: the existing one, the recipe's, that of existing runs, or a new one."""
    target = folder / "tokenizer"
    # The only file there: nobody else would remove what a kill has left beside it.
    recover(target)
    if (target / TOKENIZER).is_file():
        return
    settings = study.recipe.tokenizer
    owned = (run_folder(folder, cell).path / TOKENIZER for cell in study.cells)
    known = Path(settings.path) if settings.path else next((path for path in owned if path.is_file()), None)
    if known is not None:
        tokenizer = Tokenizer.load(known)
    else:
        tell(f"tokenizer: {study.recipe.model.vocab_size:,} tokens from {corpus.name}")
        tokenizer = train_tokenizer(corpus, study.recipe.model.vocab_size, settings.train_chars)
    tokenizer.save(target)


def fingerprint(folder: Path) -> str | None:
    """The fingerprint of the study's tokenizer; None until there is one."""
    path = folder / "tokenizer" / TOKENIZER
    return Tokenizer.load(path).fingerprint if path.is_file() else None


def vocab_size(study: Study, folder: Path) -> int:
    """The vocabulary size of the study's tokenizer, or of the recipe until there is one."""
    path = folder / "tokenizer" / TOKENIZER
    return Tokenizer.load(path).vocab_size if path.is_file() else study.recipe.model.vocab_size


def compile_kernels() -> None:
    """Compiles the kernels once, before many processes need them, by running a tiny site forward and backward."""
    site = temper.HyperConnection(temper.preset("temper-cp", num_streams=2, dim=8))
    streams = torch.ones(1, 2, 8, requires_grad=True)
    x, state = site.begin(streams)
    site.finish(state, x).sum().backward()


def _is_settled(study: Study, folder: Path, cell: Any, known: KnownRuns) -> bool:
    return study.refusal(cell) is not None or is_finished(folder, cell, known)


def forecast(study: Study, folder: Path | None, execution: ExecutionOptions) -> None:
    """Prints the grid with parameters and time."""
    from rich.table import Table

    from temper_lab.console import console

    if folder is not None and folder.exists():
        check_folder(folder)
        check_runs(study, folder)
    plan.check_here(study.recipe)
    size = study.recipe.model.vocab_size if folder is None else vocab_size(study, folder)
    known = read_known(study, execution.known) | ({} if folder is None else read_taken(study, folder))
    runs = [cell for cell in study.cells if not study.refusal(cell) and not is_finished(folder, cell, known)]
    is_here = bool(runs) and not plan.download_command(study.recipe.data)
    with_data(study, folder, execution.known, DataFingerprint.of(corpus_of(study.recipe.data)) if is_here else None)
    jobs, threads = execution.settled(study.recipe, len(runs))
    with pinned(jobs * threads or torch.get_num_threads()):
        share = plan.GPU_SHARE if torch.cuda.is_available() else plan.CPU_SHARE
        here = plan.matmul_flops(study.recipe) * share
    table = Table(box=None)
    table.add_column("method", no_wrap=True)
    fields = [name for name, _ in study.axes]
    for name in ("N", *map(vary.short, fields), "seeds", "added", "parameters", "FLOPs/token", "to train", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    groups: dict[object, list[Cell]] = {}
    for cell in study.cells:
        groups.setdefault(cell.group, []).append(cell)
    total, notes = 0.0, []
    for cells in groups.values():
        first = cells[0]
        counts = counts_of(study, first, size)
        seeds = " ".join(str(cell.seed) for cell in cells)
        values = [vary.show_or_dash(study.value_of(first, name)) for name in fields]
        words = [str(first.method), str(first.num_streams), *values, seeds]
        words += [f"{counts.added:,}", f"{counts.total:,}"]
        if reason := study.refusal(first):
            notes.append(f"{_name(first)} is skipped: {reason}")
            table.add_row(*words, "-", "skipped", "-")
            continue
        flops, train = flops_of(study, first, size), study.settings_of(first).train
        open_runs = [cell for cell in cells if cell in runs]
        seconds = len(open_runs) * flops * train.steps * train.batch_tokens / here
        total += seconds
        table.add_row(*words, f"{flops:,}", f"{len(open_runs)} of {len(cells)}", duration(seconds))
        if counts.frozen:
            notes.append(f"{_name(first)}: {counts.frozen:,} more are stored and not trained")
    console(160).print(table)
    for note in notes:
        print(note)
    trains = [study.settings_of(cell).train for cell in study.cells]
    steps, tokens = _each(train.steps for train in trains), _each(train.batch_tokens for train in trains)
    command = plan.download_command(study.recipe.data)
    missing = f", which is not there yet: {command}" if command else ""
    print(f"{steps} steps x {tokens} tokens each; corpus {study.recipe.data.corpus}{missing}")
    each = f" of {threads} thread{'s' if threads > 1 else ''}" if threads else ""
    print(
        f"{len(runs)} runs to train, {jobs} at a time{each}: about {duration(total)} on this machine (from its matmul "
        "speed)"
    )
    if study.claims:
        print(f"{len(study.claims)} claims to test: {', '.join(claim.name for claim in study.claims)}")
    if not torch.cuda.is_available() and study.recipe.data.num_shards > 1:
        gpus = study.recipe.data.num_shards
        there = total * here / (plan.A100_FLOPS * plan.GPU_SHARE * gpus)
        print(f"about {duration(there)} on {gpus} A100 (estimate: {plan.GPU_SHARE:.0%} of their bfloat16 matmuls)")


def _name(cell: Cell) -> str:
    return f"{cell.method}, N={cell.num_streams}{f', {vary.describe(cell.vary)}' if cell.vary else ''}"


def _each(numbers: Iterable[int]) -> str:
    return " or ".join(f"{number:,}" for number in sorted(set(numbers)))


def check_bundle(bundle: Path, max_per_task: int | None) -> None:
    """Raises ValueError for a bundle that cannot be read, before hours are spent on training."""
    from temper_lab.eval.core.bundle import load_bundle, open_bundle

    with open_bundle(bundle) as folder:
        load_bundle(folder, max_per_task=max_per_task)


def evaluate_core(runs: Sequence[Path], bundle: Path, max_per_task: int | None, device: str) -> None:
    """Evaluates the runs that have not answered these items yet, continuing interrupted evaluations."""
    from temper_lab.console import Bar
    from temper_lab.distributed import precision, process_group
    from temper_lab.eval.core import Partial, evaluate_task, summary
    from temper_lab.eval.core.bundle import load_bundle, open_bundle
    from temper_lab.eval.models import open_model

    with open_bundle(bundle) as folder, process_group(device) as world:
        tasks = load_bundle(folder, max_per_task=max_per_task).tasks
        asked = {task.label: task.fingerprint for task in tasks}
        _, autocast = precision("auto", world.device)
        for run in runs:
            path = run / CORE_FILE
            if path.is_file() and read_json(path).get("asked") == asked:
                continue
            network = open_model(run, device=world.device)
            partial = Partial(path, network.fingerprint())
            results, done = {}, 0
            with Bar(f"CORE {run.name}", sum(len(task.items) for task in tasks)) as bar:
                for task in tasks:
                    before = done

                    def show(count: int, before: int = before, label: str = task.label) -> None:
                        bar.update(before + count, label)

                    results[task.label] = evaluate_task(
                        network, task, world=world, partial=partial, autocast=autocast, progress=show
                    )
                    done += len(task.items)
            found = summary.as_dict(results)
            # Left out, because the answers to every item would be most of results.json.
            tasks_found = {
                label: {name: value for name, value in row.items() if name != "correct"}
                for label, row in found["tasks"].items()
            }
            content = {"CORE": found["core"], "max_per_task": max_per_task, "tasks": tasks_found, "asked": asked}
            atomic_write(path, dumps(CORE_FILE, content))
            partial.forget()
