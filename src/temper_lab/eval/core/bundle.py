"""A bundle of CORE: the archive it is downloaded in, and the tasks and items of its files."""

from __future__ import annotations

import csv
import hashlib
import json
import lzma
import random
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import StringIO
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

from temper.registry import check_int, unknown
from temper_lab.data import web
from temper_lab.data.web import DownloadError, Pace, SourceError
from temper_lab.eval.core.tasks import KINDS, Item, Kind
from temper_lab.io import FileError, atomic_dir, brief, parse_json, read_text, read_yaml

# The public bundle has about 160 MB compressed, and is well below these limits.
MAX_BYTES, MAX_PACKED_BYTES, MAX_FILES = 2 << 30, 1 << 30, 10_000


@contextmanager
def open_bundle(bundle: Path) -> Iterator[Path]:
    """Gives the folder of a bundle; a zip is unpacked into a temporary one."""
    if not bundle.is_file():
        yield bundle
        return
    with tempfile.TemporaryDirectory(prefix="temper-core-") as folder:
        unpack(bundle, Path(folder))
        yield Path(folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip. Unsafe names and excessive sizes raise ValueError before anything is written."""
    try:
        with zipfile.ZipFile(archive) as file:
            members = file.infolist()
            _check(members)
            for member in members:
                # Reads at most the size that was checked, and verifies the checksum.
                file.extract(member, folder)
    # Encrypted archives raise RuntimeError, unknown compression NotImplementedError, damaged streams their own errors.
    except (zipfile.BadZipFile, EOFError, RuntimeError, zlib.error, lzma.LZMAError, struct.error) as error:
        raise ValueError(f"{archive} is not a zip that can be unpacked: {error}") from error
    except ValueError as error:
        raise ValueError(f"{archive}: {error}") from error


def _check(members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_FILES:
        raise ValueError(f"{len(members):,} files; an evaluation bundle has at most {MAX_FILES:,}")
    if (total := sum(member.file_size for member in members)) > MAX_BYTES:
        raise ValueError(f"{total:,} bytes when unpacked; an evaluation bundle has at most {MAX_BYTES:,}")
    for member in members:
        # The library would silently write such a file elsewhere.
        path = PurePosixPath(member.orig_filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in str(path):
            raise ValueError(f"{member.orig_filename!r} leads out of the archive; nothing was unpacked")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{member.orig_filename!r} is a link; expected files and folders")


def download_bundle(
    url: str, folder: Path, *, sha256: str | None = None, progress: Callable[[int, int | None], None] | None = None
) -> str:
    """Downloads a zip and unpacks it into a new folder, atomically; gives the SHA-256 of the zip.

    Args:
        sha256: the expected SHA-256.
        progress: called with the bytes received, and the total if it is known.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; expected the name of a folder that the bundle can be unpacked into")
    web.check_address(url)
    folder = folder.absolute()
    with atomic_dir(folder) as work:
        # Downloaded beside the folder, which gets its name when it is complete.
        packed = work.with_name("bundle.zip")
        found = _receive(url, packed, progress, is_checked=sha256 is not None)
        if sha256 is not None and found != sha256.lower():
            raise DownloadError(f"what {url} sent has the SHA-256 {found}, expected {sha256.lower()}")
        unpack(packed, work)
    return found


def _receive(url: str, path: Path, progress: Callable[[int, int | None], None] | None, *, is_checked: bool) -> str:
    digest, done, pace = hashlib.sha256(), 0, Pace()
    try:
        with web.request(url, is_checked=is_checked) as answer, open(path, "xb") as file:
            for chunk in answer.chunks:
                done += len(chunk)
                pace.check(done)
                if max(done, answer.length or 0) > MAX_PACKED_BYTES:
                    raise DownloadError(f"{url}: more than {MAX_PACKED_BYTES:,} bytes; too many for a bundle")
                file.write(chunk)
                digest.update(chunk)
                if progress is not None:
                    progress(done, answer.length)
    except SourceError as error:
        raise DownloadError(f"{url} did not come ({error}). Go online, or take --bundle from elsewhere.") from error
    if answer.length is not None and done != answer.length:
        raise DownloadError(f"{url} ended after {done:,} of {answer.length:,} bytes. Run the same command again.")
    return digest.hexdigest()


TASKS_FILE, BASELINES_FILE, ITEMS_FOLDER = "core.yaml", "eval_meta_data.csv", "eval_data"
SHUFFLE_SEED = 1337
MAX_TABLE_BYTES, MAX_LINE_BYTES = 1 << 20, 16 << 20
LABEL_COLUMN, BASELINE_COLUMN = "Eval Task", "Random baseline"


@dataclass(frozen=True)
class Task:
    """A task with its items, in the order in which they are evaluated.

    Args:
        num_shots: the number of examples before every item.
        delimiter: the text between a question and its answer.
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
        """A hash of everything that determines prompts and answers."""
        content = json.dumps([self.label, self.kind_name, self.num_shots, self.delimiter, self.items], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Bundle:
    """The tasks to evaluate.

    Args:
        absent: labels of `core.yaml` whose items are not in the bundle.
        baselines: the file of the baselines.
    """

    tasks: list[Task]
    absent: list[str]
    baselines: str


def load_bundle(folder: str | Path, *, labels: Sequence[str] | None = None, max_per_task: int | None = None) -> Bundle:
    """Reads and checks a bundle, or raises ValueError.

    Args:
        labels: the tasks to load, whose items must be there; by default all tasks in the bundle.
        max_per_task: the most items to use of each task, after shuffling.
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
    """The folder with `core.yaml`: this one, or its only subfolder, as in archives."""
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
    # The public bundle has a list of one number.
    shots = shots[0] if isinstance(shots, list) and len(shots) == 1 else shots
    check_int("'num_fewshot'", shots, expected="one whole number >= 0")
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
