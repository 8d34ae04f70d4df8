"""Fields of a recipe as axes of a study: which may be varied, with which values, and how runs are named by them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from itertools import product
from typing import Any

from temper.registry import unknown
from temper_lab.recipe import Recipe, check_field, field_types

# Fields with all their values, in the requested order.
Axes = tuple[tuple[str, tuple[Any, ...]], ...]
# Fields with one value each, in the order of the recipe.
Settings = tuple[tuple[str, Any], ...]

# Fields that have an axis of their own, and its option.
OWN = {
    "model.preset": "methods",
    "model.router": "methods, such as temper-cp:rank=8",
    "model.routers": "methods, such as temper-cp:rank=8",
    "model.num_streams": "streams",
    "train.seed": "seeds",
}
# Fields that say where to compute, not what.
MACHINE = ("train.threads", "tokenizer.path")
# Fields that say when a run is measured and sampled, and what is kept of it.
RECORDS = (
    *("train.val_every", "train.save_every", "train.keep_last", "train.keep_best", "train.sample_every"),
    *("train.sample_tokens", "train.prompts", "train.tensorboard"),
)
# Fields that a residual network does not depend on, so that its runs are the same for every value.
ROUTING = ("optim.routing_lr",)
# Fields that change the time of a training step, besides those of the model.
STEP = (
    *("train.batch_tokens", "train.device_batch_size", "train.precision", "train.compile", "train.parallel"),
    *("train.deterministic", "optim.ns_steps"),
)
EXAMPLE = "optim.matrix_lr=0.02,0.05"
# The longest value, in characters, that a folder is named by in full.
LONGEST = 40


def parse(texts: Iterable[str]) -> Axes:
    """Parses axes from a command line: FIELD=VALUE,VALUE."""
    found: dict[str, list[Any]] = {}
    for text in texts:
        name, sign, values = text.partition("=")
        if not sign:
            raise ValueError(f"--vary {text!r} is not FIELD=VALUE,VALUE, such as {EXAMPLE}")
        name = name.strip().replace("-", "_")
        _check(name)
        if name in found:
            raise ValueError(f"--vary has {name} twice; expected all its values at once, such as {EXAMPLE}")
        # Commas inside lists and quotation marks do not separate values.
        words = [word.strip() for word in re.findall(r'((?:\[[^\]]*\]|"[^"]*"|[^,])*),', f"{values},")]
        if "" in words:
            raise ValueError(f"--vary {text!r} has an empty value; expected values between commas, such as {EXAMPLE}")
        found[name] = [_value(name, word) for word in words]
    return read(found)


def read(values: Mapping[str, Any]) -> Axes:
    """Reads axes from a recipe, {"optim.matrix_lr": [0.02, 0.05]}; ValueError for a field that cannot be varied."""
    flat: dict[str, Any] = {}
    for name, entry in values.items():
        # TOML reads `optim.matrix_lr = [...]` as a table in a table.
        flat |= (
            {f"{name}.{key}": inner for key, inner in entry.items()} if isinstance(entry, Mapping) else {name: entry}
        )
    order = list(field_types())
    for name in flat:
        _check(name)
    axes = []
    for name in sorted(flat, key=order.index):
        if not isinstance(flat[name], list) or not flat[name]:
            raise ValueError(f"vary has {name} = {flat[name]!r}; expected a list of values")
        axes.append((name, tuple(dict.fromkeys(check_field(name, value) for value in flat[name]))))
    return tuple(axes)


def combinations(axes: Axes) -> list[Settings]:
    """Every value of a field with every value of the others; one empty combination if nothing is varied."""
    names = [name for name, _ in axes]
    return [tuple(zip(names, values, strict=True)) for values in product(*(values for _, values in axes))]


def differing(settings: Settings, recipe: Recipe) -> Settings:
    """The settings that differ from the recipe's own."""
    return tuple((name, value) for name, value in settings if recipe.field(name) != value)


@cache
def varied(recipe: Recipe, settings: Settings) -> Recipe:
    """A recipe with other settings, or a ValueError that names them."""
    return recipe.with_fields(dict(settings)) if settings else recipe


def value_in(recipe: Mapping[str, Any], settings: Mapping[str, Any], name: str, *, is_residual: bool) -> Any:
    """The value of a field in a run; None for one that the run does not depend on.

    Args:
        recipe: sections of plain values, as files have them.
        settings: the varied fields of the run.
    """
    if is_residual and name in ROUTING:
        return None
    section, _, key = name.partition(".")
    fields = recipe.get(section)
    return settings.get(name, fields.get(key) if isinstance(fields, Mapping) else None)


def of_residual(settings: Settings) -> Settings:
    """The settings on which a residual network depends."""
    return tuple(item for item in settings if item[0] not in ROUTING)


def has_own_step(settings: Settings) -> bool:
    """True if a variation changes the time of a training step."""
    return any(name.startswith("model.") or name in STEP for name, _ in settings)


def ordered(values: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct values, numbers sorted by size and others in their order."""
    each = tuple(dict.fromkeys(values))
    is_number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in each)
    return tuple(sorted(each)) if is_number else each


def show(value: Any) -> str:
    """The text of a value: 0.05, 4, true, float32, 0.8x0.95."""
    if isinstance(value, list | tuple):
        return "x".join(map(show, value))
    if isinstance(value, str):
        return value
    return json.dumps(value).removesuffix(".0")


def show_or_dash(value: Any) -> str:
    """The value of a field for a table; None if the run does not depend on it."""
    return "-" if value is None else show(value)


def short(name: str) -> str:
    """The name of a field without its section."""
    return name.rpartition(".")[2]


def describe(settings: Settings) -> str:
    return ", ".join(f"{name}={show(value)}" for name, value in settings)


def suffix(settings: Settings) -> str:
    """The variation as part of a folder's name: `-matrix_lr0.05-depth4`."""
    return "".join(f"-{short(name)}{_safe(show(value))}" for name, value in settings)


def frozen(settings: Mapping[str, Any]) -> Settings:
    """Hashable settings from those of a JSON file."""

    def fixed(value: Any) -> Any:
        return tuple(map(fixed, value)) if isinstance(value, list) else value

    return tuple((name, fixed(value)) for name, value in settings.items())


def plain(axes: Axes | Settings) -> dict[str, Any]:
    """Converts axes or settings to the form that JSON holds."""
    return {name: json.loads(json.dumps(value)) for name, value in axes}


def _value(name: str, word: str) -> Any:
    """Parses a word as JSON if that gives the field's type, otherwise takes it as text."""
    try:
        value = json.loads(word)
    except ValueError:
        return word
    if _fits(name, value):
        return value
    if isinstance(value, float) and value.is_integer() and _fits(name, int(value)):
        raise ValueError(f"{name} is {word}; expected a whole number, such as {int(value)}")
    return word


def _fits(name: str, value: Any) -> bool:
    try:
        check_field(name, value)
    except ValueError:
        return False
    return True


def _check(name: str) -> None:
    if name not in field_types():
        raise unknown("field of a recipe", name, [known for known in field_types() if _refusal(known) is None])
    if reason := _refusal(name):
        raise ValueError(f"{name} cannot be varied: {reason}")


def _refusal(name: str) -> str | None:
    """The reason why a field cannot be an axis."""
    if name in OWN:
        axis = OWN[name]
        return f"every run has its own already; use --{axis} (`{axis.partition(',')[0]}` in a recipe)"
    if name in (*MACHINE, "train.device"):
        option = name.replace("_", "-")
        return f"it says where a study runs, not what it trains; use --{option} for all runs"
    if name in RECORDS:
        option = name.replace("_", "-")
        return f"it changes what is recorded of a run, not what the run trains; use --{option} for all runs"
    section = name.partition(".")[0]
    if section in ("data", "tokenizer") or name == "model.vocab_size":
        what = "tokenizer" if section != "data" else "data"
        return f"all runs of a study share the {what}; for another value begin a study in another --out"
    return None


def _safe(text: str) -> str:
    """Text that is safe in a folder's name; changed text gets a fingerprint to stay unique."""
    safe = re.sub(r"[^\w.+-]", "_", text)[:LONGEST]
    return safe if safe == text else f"{safe}-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
