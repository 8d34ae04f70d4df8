"""CORE of the finished runs, kept in their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from temper_lab.io import atomic_write, dumps, entry, read_json

FILE_NAME = "core.json"


def read_core(run: Path) -> dict[str, Any] | None:
    """CORE and the accuracies of a run that was evaluated, else None."""
    path = run / FILE_NAME
    if not path.is_file():
        return None
    content = read_json(path)
    return {name: content.get(name) for name in ("CORE", "max_per_task")} | {
        "tasks": entry(content, "tasks", dict, path)
    }


def check_bundle(bundle: Path, max_per_task: int | None) -> None:
    """Raises ValueError for a bundle that cannot be read, before hours are spent on what it is for."""
    from temper_lab.eval.core import archive, load_bundle

    with archive.opened(bundle) as folder:
        load_bundle(folder, max_per_task=max_per_task)


def evaluate(runs: Sequence[Path], bundle: Path, max_per_task: int | None, device: str) -> None:
    """Evaluates the runs that have not answered these very items yet; an interrupted evaluation goes on."""
    from temper_lab.distributed import precision, session
    from temper_lab.eval.core import Partial, archive, evaluate_task, load_bundle, report
    from temper_lab.eval.models import open_model
    from temper_lab.progress import Bar

    with archive.opened(bundle) as folder, session(device) as world:
        tasks = load_bundle(folder, max_per_task=max_per_task).tasks
        asked = {task.label: task.fingerprint for task in tasks}
        _, autocast = precision("auto", world.device)
        for run in runs:
            path = run / FILE_NAME
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
            found = report.as_dict(results)
            # The answers to every item would be most of results.json.
            tasks_found = {
                label: {name: value for name, value in row.items() if name != "correct"}
                for label, row in found["tasks"].items()
            }
            content = {"CORE": found["core"], "max_per_task": max_per_task, "tasks": tasks_found, "asked": asked}
            atomic_write(path, dumps(FILE_NAME, content))
            partial.forget()
