"""A bundle of tasks: `core.yaml`, `eval_meta_data.csv` and the items in `eval_data/`."""

from __future__ import annotations

import csv
import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

from temper.registry import unknown
from temper_lab.eval.core.kinds import KINDS, Item, Kind
from temper_lab.io import FileError, brief, parse_json, read_text, read_yaml

TASKS_FILE, BASELINES_FILE, ITEMS_FOLDER = "core.yaml", "eval_meta_data.csv", "eval_data"
SHUFFLE_SEED = 1337
MAX_TABLE_BYTES, MAX_LINE_BYTES = 1 << 20, 16 << 20
LABEL_COLUMN, BASELINE_COLUMN = "Eval Task", "Random baseline"


@dataclass(frozen=True)
class Task:
    """A task with its items, in the order in which they are evaluated.

    Args:
        num_shots: examples before every item.
        delimiter: between a question and its answer.
        baseline: the accuracy of guessing, from 0 to 1.
    """

    label: str
    kind_name: str
    num_shots: int
    delimiter: str
    baseline: float
    items: list[Item] = field(repr=False)

    @property
    def kind(self) -> Kind:
        return KINDS[self.kind_name]

    @property
    def fingerprint(self) -> str:
        """A hash of everything that decides the prompts and the answers."""
        content = json.dumps([self.label, self.kind_name, self.num_shots, self.delimiter, self.items], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Bundle:
    """The tasks to evaluate.

    Args:
        absent: labels of `core.yaml` whose items the bundle does not hold.
        baselines: the file that the baselines are from.
    """

    tasks: list[Task]
    absent: list[str]
    baselines: str


def load_bundle(folder: str | Path, *, labels: Sequence[str] | None = None, max_per_task: int | None = None) -> Bundle:
    """Reads and checks a bundle, or raises ValueError.

    Args:
        labels: only these tasks, whose items then have to be there; all that the bundle holds if left out.
        max_per_task: only so many items of each task, after shuffling.
    """
    root = find_root(Path(folder))
    entries = _read_tasks(root / TASKS_FILE)
    for label in labels or ():
        if label not in entries:
            raise unknown("task", label, list(entries))
    wanted = list(entries) if labels is None else [label for label in entries if label in labels]
    baselines = _read_baselines(root / BASELINES_FILE)
    tasks, absent = [], []
    for label in wanted:
        entry = entries[label]
        path = root / ITEMS_FOLDER / entry["dataset_uri"]
        if not path.is_file():
            absent.append(label)
            continue
        if label not in baselines:
            raise ValueError(
                f"{root / BASELINES_FILE}: no row for {label!r}; expected one for every task of {TASKS_FILE}"
            )
        items = _read_items(path, KINDS[entry["icl_task_type"]])
        random.Random(SHUFFLE_SEED).shuffle(items)
        items = items[:max_per_task]
        if len(items) <= entry["num_fewshot"]:
            raise ValueError(
                f"{label}: {len(items)} items; every item comes after {entry['num_fewshot']} others as examples, "
                f"so there have to be at least {entry['num_fewshot'] + 1}"
            )
        settings = (entry["icl_task_type"], entry["num_fewshot"], entry["continuation_delimiter"], baselines[label])
        tasks.append(Task(label, *settings, items))
    if absent and (labels is not None or not tasks):
        missing = ", ".join(str(Path(ITEMS_FOLDER) / entries[label]["dataset_uri"]) for label in absent)
        raise ValueError(f"the bundle {root} does not hold {missing}")
    return Bundle(tasks, absent, str(root / BASELINES_FILE))


def find_root(folder: Path) -> Path:
    """The folder with `core.yaml`: this one, or the only one in it, as archives have it."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}; expected an evaluation bundle, or a zip of one")
    if (folder / TASKS_FILE).is_file():
        return folder
    inner = [path.parent for path in folder.glob(f"*/{TASKS_FILE}")]
    if len(inner) == 1:
        return inner[0]
    raise ValueError(f"{folder}: no {TASKS_FILE} there; expected the folder of an evaluation bundle")


def _read_tasks(path: Path) -> dict[str, dict[str, Any]]:
    """The entries of `core.yaml` by label."""
    content = read_yaml(path)
    entries = content.get("icl_tasks") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"{path}: no list of tasks; expected one under 'icl_tasks'")
    tasks: dict[str, dict[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        try:
            task = _task(entry)
        except ValueError as error:
            raise ValueError(f"{path}: task {number}: {error}") from error
        if task["label"] in tasks:
            raise ValueError(f"{path}: task {number}: {task['label']!r} comes twice")
        tasks[task["label"]] = task
    return tasks


def _task(entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise ValueError(f"{brief(entry)}; expected a mapping")
    entry = {"continuation_delimiter": " ", **entry}
    for key in ("label", "dataset_uri", "icl_task_type", "continuation_delimiter"):
        if not isinstance(entry.get(key), str):
            raise ValueError(f"{key!r} is {brief(entry.get(key))}; expected a text")
    if entry["icl_task_type"] not in KINDS:
        raise unknown("icl_task_type", entry["icl_task_type"], list(KINDS))
    shots = entry.get("num_fewshot")
    # A list in the public bundle, of one number.
    shots = shots[0] if isinstance(shots, list) and len(shots) == 1 else shots
    if isinstance(shots, bool) or not isinstance(shots, int) or shots < 0:
        raise ValueError(f"'num_fewshot' is {brief(entry.get('num_fewshot'))}; expected one whole number >= 0")
    uri = Path(entry["dataset_uri"])
    if uri.is_absolute() or ".." in uri.parts or "\0" in entry["dataset_uri"]:
        raise ValueError(f"'dataset_uri' is {str(uri)!r}; expected a path inside {ITEMS_FOLDER}/")
    return {**entry, "num_fewshot": shots}


def _read_baselines(path: Path) -> dict[str, float]:
    """The accuracies of guessing by label, from percent."""
    if not path.is_file():
        raise ValueError(f"{path} is missing; expected a table with the columns {LABEL_COLUMN!r}, {BASELINE_COLUMN!r}")
    baselines = {}
    try:
        with StringIO(read_text(path, MAX_TABLE_BYTES), newline="") as file:
            reader = csv.DictReader(file, strict=True)
            if lacking := {LABEL_COLUMN, BASELINE_COLUMN} - set(reader.fieldnames or ()):
                raise ValueError(f"no column {sorted(lacking)[0]!r}")
            for line in reader:
                label, value = line[LABEL_COLUMN], line[BASELINE_COLUMN]
                try:
                    percent = float(value)
                except (TypeError, ValueError):
                    percent = -1.0
                if not 0 <= percent < 100:
                    raise ValueError(f"the baseline of {label!r} is {value!r}; expected percent, from 0 to below 100")
                if label in baselines:
                    raise ValueError(f"{label!r} comes twice")
                baselines[label] = percent / 100
    except (csv.Error, ValueError) as error:
        raise ValueError(f"{path} is not a table of baselines: {error}") from error
    return baselines


def _read_items(path: Path, kind: Kind) -> list[Item]:
    items = []
    with open(path, "rb") as file:
        for number in count(1):
            line = file.readline(MAX_LINE_BYTES)
            if not line:
                break
            if len(line) == MAX_LINE_BYTES:
                raise FileError(f"{path}: line {number} has {MAX_LINE_BYTES:,} bytes or more; no item has")
            if not line.strip():
                continue
            try:
                text = line.decode("utf-8")
            except UnicodeDecodeError as error:
                raise FileError(f"{path}: line {number} is not UTF-8 (at byte {error.start})") from error
            item = parse_json(text, f"{path}: line {number}", allow_nan=True)
            trouble = kind.trouble(item) if isinstance(item, dict) else "expected an object"
            if trouble:
                raise ValueError(f"{path}: line {number}: {trouble}")
            items.append(item)
    if not items:
        raise ValueError(f"{path}: no items; expected one JSON object per line")
    return items
