"""`results.json`: everything that a study found, as dataclasses that alone write and read it.

`python -m temper_lab.study.results` prints the JSON schema of the file, which docs/results.schema.json holds.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from temper.registry import check_int
from temper_lab.data import DataFingerprint
from temper_lab.io import atomic_write, brief, dumps, read_json
from temper_lab.study import vary as varying
from temper_lab.study.claims import Claim, read_claims
from temper_lab.study.vary import Settings

FORMAT = "temper-results-1"
FILE_NAME = "results.json"
RESIDUAL = "residual"
# Larger numbers are rejected, because their squares are infinite.
LARGEST, LARGEST_COUNT = 1e100, 1 << 63

# The statuses of runs that have not ended.
Status = Literal["finished", "failed", "skipped", "interrupted", "killed", "waiting"]
STATUSES: tuple[str, ...] = get_args(Status)
# Pairs of a step and a finite value.
Curve = tuple[tuple[int, float], ...]
Values = tuple[float | None, ...]
Table = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class Parameters:
    """Trainable parameters in all, those of the routing, and stored ones that are not trained."""

    total: int | None = None
    added: int | None = None
    frozen: int | None = None


@dataclass(frozen=True)
class Columns:
    """Measurements along the steps of a run, each as long as `step`; null where a number is not finite."""

    step: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (each.name for each in fields(self)):
            if len(getattr(self, name)) != len(self.step):
                raise ValueError(f"the curve of {name} has another number of steps than of values")

    def curve(self, name: str) -> Curve:
        """The finite values of a column with their steps."""
        pairs = zip(self.step, getattr(self, name), strict=True)
        return tuple((step, value) for step, value in pairs if value is not None)


@dataclass(frozen=True)
class Training(Columns):
    """The training loss at every step, or means over the steps since the one before."""

    loss: Values = ()

    def blocks(self, count: int) -> Training:
        """A curve of at most `count` points: the rounded mean of each block of steps, at the last step of the block."""
        size = -(-len(self.step) // count)
        if size < 2:
            return self
        curve = self.curve("loss")
        parts = [curve[start : start + size] for start in range(0, len(curve), size)]
        means = (round(math.fsum(loss for _, loss in part) / len(part), 5) for part in parts)
        return Training(tuple(part[-1][0] for part in parts), tuple(means))


@dataclass(frozen=True)
class Validation(Columns):
    """The validations of a run."""

    bpb: Values = ()
    loss: Values = ()


@dataclass(frozen=True)
class Routing(Columns):
    """Measures of mixing at the validations of a model with several streams."""

    res_off_diagonal: Values = ()
    composite_gain: Values = ()
    composite_backward_gain: Values = ()
    stream_similarity: Values = ()

    def __post_init__(self) -> None:
        # A file of an earlier version lacks what was not measured then.
        for name in (each.name for each in fields(self) if not getattr(self, each.name)):
            object.__setattr__(self, name, (None,) * len(self.step))
        super().__post_init__()


ROUTING = tuple(each.name for each in fields(Routing) if each.name != "step")


@dataclass(frozen=True)
class Final:
    """The numbers at the end: the training loss is the mean over the last tenth of the steps."""

    train_loss: float | None = None
    val_loss: float | None = None
    bpb: float | None = None


@dataclass(frozen=True)
class CoreScores:
    """CORE of a run, null unless all its tasks were asked, and every task with its accuracy."""

    CORE: float | None = None
    max_per_task: int | None = None
    tasks: Table = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """The speed of a run, at whatever time and beside whatever else it ran."""

    step_seconds: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class Source:
    """The study that trained a run which this one took over."""

    study: str | None = None
    commit: str | None = None
    versions: Table = field(default_factory=dict)
    machine: Table = field(default_factory=dict)
    tokenizer: str | None = None


@dataclass(frozen=True)
class Run:
    """One run of the grid.

    Args:
        method: as people write it, `temper-cp:rank=8`; `label` is the same for names of files.
        streams: the true N, which is 1 for a residual network.
        vary: the fields in which its recipe differs from that of the study.
        reason: the reason why it failed or was skipped.
        steps: the steps of the whole run, of which `step` are done.
        source: null for a run that this study trained itself.
    """

    key: str
    preset: str
    label: str
    streams: int
    seed: int
    status: Status
    method: str = ""
    options: Table = field(default_factory=dict)
    vary: Table = field(default_factory=dict)
    reason: str | None = None
    parameters: Parameters = Parameters()
    flops_per_token: int | None = None
    step: int | None = None
    steps: int | None = None
    tokens: int | None = None
    train: Training = Training()
    val: Validation = Validation()
    final: Final | None = None
    routing: Routing | None = None
    core: CoreScores | None = None
    timing: Timing | None = None
    source: Source | None = None

    def __post_init__(self) -> None:
        if not self.method:
            object.__setattr__(self, "method", self.label)
        if any(isinstance(value, Mapping) for value in self.vary.values()):
            raise ValueError(f"vary is {brief(dict(self.vary))}; expected fields with their values")

    @property
    def is_residual(self) -> bool:
        return self.preset == RESIDUAL

    @property
    def is_finished(self) -> bool:
        return self.status == "finished"

    @property
    def bpb(self) -> float | None:
        return self.final.bpb if self.final else None

    @property
    def train_loss(self) -> float | None:
        return self.final.train_loss if self.final else None

    @property
    def added(self) -> int | None:
        return self.parameters.added

    @cached_property
    def settings(self) -> Settings:
        """The varied fields, in the order of their names."""
        return varying.frozen({name: self.vary[name] for name in sorted(self.vary)})

    def mixing(self, name: str) -> Curve:
        """A column of the routing; empty for a run that has none."""
        return self.routing.curve(name) if self.routing else ()

    @property
    def core_score(self) -> float | None:
        return self.core.CORE if self.core else None

    @cached_property
    def core_tasks(self) -> dict[str, float]:
        """The centered accuracy by task, which may be a number or an entry of a larger result."""
        found = {}
        for label, value in (self.core.tasks if self.core else {}).items():
            centered = number(value.get("centered") if isinstance(value, Mapping) else value)
            if centered is not None:
                found[label] = centered
        return found

    @cached_property
    def core_errors(self) -> dict[str, float]:
        """The standard error of the centered accuracy by task, where accuracy, baseline and items are known."""
        found = {}
        for label, entry in (self.core.tasks if self.core else {}).items():
            values = entry if isinstance(entry, Mapping) else {}
            accuracy, baseline, items = (number(values.get(name)) for name in ("accuracy", "baseline", "items"))
            if accuracy is None or baseline is None or items is None:
                continue
            if 0 <= accuracy <= 1 and 0 <= baseline < 1 and items > 1:
                found[label] = math.sqrt(accuracy * (1 - accuracy) / (items - 1)) / (1 - baseline)
        return found


@dataclass(frozen=True)
class Quartiles:
    """The median of a measurement's rounds and the quartiles below and above it."""

    median: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class CostRow:
    """The time of a training step of one method: in milliseconds, and as a multiple of the residual network's."""

    method: str
    streams: int
    step_ms: Quartiles = Quartiles()
    ratio: Quartiles = Quartiles()


@dataclass(frozen=True)
class Cost:
    """The time of a training step of all methods, taking turns in one process."""

    setting: Table = field(default_factory=dict)
    rows: tuple[CostRow, ...] = ()


@dataclass(frozen=True)
class Results:
    """The content of a results.json.

    Args:
        study: the name of the recipe.
        command: the commands that made and extended this study.
        commit: the commit of the source tree, with "+changes" if files differ from it.
        tokenizer: its fingerprint.
        data: those that all runs were trained on.
        recipe: the recipe that all runs share.
        vary: the varied fields, each with all values that runs have.
        runs: in the order of the grid.
    """

    runs: tuple[Run, ...]
    study: str = "study"
    command: str | None = None
    commit: str | None = None
    versions: Table = field(default_factory=dict)
    machine: Table = field(default_factory=dict)
    tokenizer: str | None = None
    data: DataFingerprint | None = None
    recipe: Table = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    methods: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    seeds: tuple[int, ...] = ()
    vary: Table = field(default_factory=dict)
    cost: Cost | None = None

    def __post_init__(self) -> None:
        keys = [run.key for run in self.runs]
        if twice := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"the results have several runs with the key {', '.join(twice)}")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Results:
        """Reads the content of a file of this version or an older one; a ValueError says what was expected."""
        if values.get("format") != FORMAT:
            raise ValueError(f"the results have format {brief(values.get('format'))}, expected {FORMAT!r}")
        entries = values.get("runs")
        if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
            raise ValueError("the results have no list of runs")
        runs = []
        for place, entry in enumerate(entries):
            try:
                runs.append(_read(Run, entry))
            except ValueError as error:
                key = entry.get("key", "without a key")
                name = key if isinstance(key, str) else brief(key)
                raise ValueError(f"run {place} ({name}) in the results: {error}") from error
        try:
            claims = read_claims(values.get("claims") or [])
        except ValueError as error:
            raise ValueError(f"the claims in the results: {error}") from error
        rest = {name: value for name, value in values.items() if name not in ("runs", "claims")}
        try:
            return _read(cls, rest, runs=tuple(runs), claims=claims)
        except ValueError as error:
            raise ValueError(f"the results: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        return {"format": FORMAT, **_plain(self)}

    @classmethod
    def read(cls, path: Path) -> Results:
        """The results of a study, given its folder or the file itself."""
        file = path / FILE_NAME if path.is_dir() else path
        if not path.exists():
            raise ValueError(
                f"there is no {path}; expected the folder of a study (`temper compare --out {path}` makes one)"
            )
        if not file.is_file():
            raise ValueError(f"there is no {FILE_NAME} in {path}; `temper compare --out {path}` writes it")
        content = read_json(file, allow_nan=True)
        try:
            return cls.from_dict(content)
        except ValueError as error:
            raise ValueError(f"{file} is not a study: {error}") from error

    def small(self, points: int = 100) -> Results:
        """The results for a file that is committed: training losses are means over at most so many blocks of steps."""
        return replace(self, runs=tuple(replace(run, train=run.train.blocks(points)) for run in self.runs))

    def write(self, folder: Path, name: str = FILE_NAME) -> Path:
        """Writes the file as a whole."""
        path = folder / name
        atomic_write(path, dumps(FILE_NAME, self.to_dict()))
        return path


def number(value: Any) -> float | None:
    """A finite number, or None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST < value < LARGEST:
        return None
    return float(value)


def _read(kind: type[T], values: Mapping[str, Any], **known: Any) -> T:
    """A dataclass from a table: null is the default, and unknown entries are left out, as newer files may have more.

    Args:
        known: fields that are read already.
    """
    found, types = dict(known), get_type_hints(kind)
    own = [each for each in fields(cast("Any", kind)) if each.name not in known]
    lacking = [
        each.name
        for each in own
        if each.default is MISSING and each.default_factory is MISSING and values.get(each.name) is None
    ]
    if lacking:
        raise ValueError(f"a {_words(kind)} lacks {', '.join(lacking)}")
    for name in (each.name for each in own if values.get(each.name) is not None):
        found[name] = _value(types[name], values[name], name)
    return kind(**found)


def _value(kind: Any, value: Any, name: str) -> Any:
    """A JSON value as the type of a field."""
    if get_origin(kind) is UnionType:
        (inner,) = (each for each in get_args(kind) if each is not NoneType)
        # Missing numbers are legitimate results.
        if inner in (int, float) and number(value) is None:
            return None
        return _value(inner, value, name)
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        if not isinstance(value, list):
            raise ValueError(f"{name} is {brief(value)}; expected a list")
        return tuple(_value(inner, each, name) for each in value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} is {brief(value)}; expected one of {', '.join(get_args(kind))}")
        return value
    if is_dataclass(kind) or kind == Table:
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} is {brief(value)}; expected a table")
        return value if kind == Table else _read(cast("type[Any]", kind), value)
    return _plain_value(kind, value, name)


def _plain_value(kind: type, value: Any, name: str) -> Any:
    if kind is str:
        if not isinstance(value, str):
            raise ValueError(f"{name} is {brief(value)}; expected a text")
        return value
    if kind is float:
        return number(value)
    return check_int(name, value, 0, LARGEST_COUNT - 1, "a whole number")


def _plain(value: Any) -> Any:
    """A value as plain JSON."""
    if isinstance(value, Claim):
        return value.to_dict()
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    # Lists of numbers, most of a file, need no conversion.
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(each) for each in value]
    return value


def schema() -> dict[str, Any]:
    """The JSON schema of the file (draft 2020-12), made from the dataclasses."""
    parts: dict[str, Any] = {}
    main = _schema_of(Results, parts)
    main["properties"] = {"format": {"const": FORMAT}, **main["properties"]}
    main["required"] = ["format", *main["required"]]
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": FILE_NAME}
    return {**head, **main, "$defs": dict(sorted(parts.items()))}


def _schema_of(kind: type, parts: dict[str, Any]) -> dict[str, Any]:
    """A dataclass as an object; `parts` gets those that are inside it."""
    own = fields(cast("Any", kind))
    types = get_type_hints(kind)
    required = [each.name for each in own if each.default is MISSING and each.default_factory is MISSING]
    text = _docstring(kind)
    about = {each.name: text[each.name] for each in own if each.name in text}
    properties = {
        each.name: {
            **_schema(types[each.name], parts, is_optional=each.name not in required),
            **({"description": about[each.name]} if each.name in about else {}),
        }
        for each in own
    }
    found = {"description": text[""], "type": "object", "properties": properties}
    return {**found, "required": required} if required else found


def _schema(kind: Any, parts: dict[str, Any], *, is_optional: bool) -> dict[str, Any]:
    if get_origin(kind) is UnionType:
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
        is_optional = True
    if get_origin(kind) is tuple:
        inner = get_args(kind)[0]
        found: dict[str, Any] = {"type": "array", "items": _schema(inner, parts, is_optional=False)}
    elif get_origin(kind) is Literal:
        found = {"type": "string", "enum": [*get_args(kind)]}
    elif is_dataclass(kind):
        name = cast("type", kind).__name__
        if name not in parts:
            parts[name] = {}
            parts[name] = Claim.schema() if kind is Claim else _schema_of(cast("type", kind), parts)
        found = {"$ref": f"#/$defs/{name}"}
        return {"anyOf": [found, {"type": "null"}]} if is_optional else found
    elif kind == Table:
        found = {"type": "object"}
    else:
        found = {"type": {str: "string", int: "integer", float: "number"}[kind]}
        found |= {"minimum": 0} if kind is int else {}
    return {**found, "type": [found["type"], "null"]} if is_optional and "enum" not in found else found


def _docstring(kind: type) -> dict[str, str]:
    """The first line of a docstring, under "", and what its `Args` say of each field."""
    head, _, args = (kind.__doc__ or "").partition("Args:\n")
    found = {"": " ".join(head.split("\n\n")[0].split())}
    for names, text in re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", args, re.MULTILINE):
        found[names] = " ".join(text.split())
    return found


def _words(kind: type) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", kind.__name__).lower()


if __name__ == "__main__":
    print(dumps("the schema", schema()), end="")
