"""The configuration of one hyper-connection: which generators, which mixer, how many streams."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch

from temper.gates import Gates
from temper.generators import Generator
from temper.generators.base import Modes, Shapes, count
from temper.mixers import Mixer
from temper.norm import GAINS, NORMS, gain_shapes
from temper.registry import Registered, unknown

HEADS = ("pre", "res", "post")


@dataclass(frozen=True, init=False)
class Choice:
    """A registered name and its options: `Choice("tucker", rank=(2, 12), freeze_core=True)`."""

    name: str
    items: tuple[tuple[str, Any], ...]

    def __init__(self, name: str, /, **options: Any) -> None:
        # Sorted and without lists, so that equal choices compare and hash equal and survive a round trip through JSON.
        items = ((key, tuple(value) if isinstance(value, list) else value) for key, value in sorted(options.items()))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "items", tuple(items))

    @classmethod
    def of(cls, value: Choice | str | Mapping[str, Any]) -> Choice:
        """Parses a choice: a name, or a mapping with a name and options."""
        if isinstance(value, Choice):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Mapping) and isinstance(value.get("name"), str):
            return cls(value["name"], **{key: option for key, option in value.items() if key != "name"})
        raise TypeError(f"expected a name, a mapping with a 'name', or a Choice, got {value!r}")

    @property
    def options(self) -> dict[str, Any]:
        """The options as a new dictionary."""
        return dict(self.items)

    def using(self, **options: Any) -> Choice:
        """The same choice with some options changed."""
        return Choice(self.name, **{**self.options, **options})

    def __repr__(self) -> str:
        return f"Choice({', '.join([repr(self.name), *(f'{key}={value!r}' for key, value in self.items)])})"


@dataclass(frozen=True)
class RouterConfig:
    """Everything a hyper-connection is built from. `temper.preset` makes one; ranks are stored in full.

    Args:
        num_streams: N.
        dim: D, the width of each stream.
        pre, res, post: the generator of each head, all three None for a plain residual; res alone is None if the mixer
            takes no logits.
        mixer: turns the logits of `res` into a matrix.
        gates: "sigmoid", or "tanh" for HC's own form.
        gain: the norm's gain, "full", "rank-one", "feature" or "none".
        norm: "flat" over all N * D entries, or HC's "per-stream".
        norm_eps: added to the mean square; with `norm_clamp`, its lower limit.
        pre_eps: added to every read weight.
    """

    num_streams: int
    dim: int
    pre: Choice | None = None
    res: Choice | None = None
    post: Choice | None = None
    mixer: Choice | None = None
    gates: str = "sigmoid"
    gain: str = "full"
    norm: str = "flat"
    norm_eps: float = 1e-6
    norm_clamp: bool = False
    pre_eps: float = 0.0

    def __post_init__(self) -> None:
        for name in ("num_streams", "dim"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} is {value!r}; expected a whole number >= 1")
        for name in ("norm_eps", "pre_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; expected a finite number >= 0")
        if not isinstance(self.norm_clamp, bool):
            raise ValueError(f"norm_clamp is {self.norm_clamp!r}; expected True or False")
        Gates.named(self.gates)
        for name, known in (("gain", GAINS), ("norm", NORMS)):
            if getattr(self, name) not in known:
                raise unknown(name, getattr(self, name), known)
        parts = {name: getattr(self, name) for name in (*HEADS, "mixer")}
        if all(part is None for part in parts.values()):
            return
        if parts["mixer"] is not None and not takes_logits(parts["mixer"], self.num_streams):
            if parts["res"] is not None:
                name = Choice.of(parts["mixer"]).name
                raise ValueError(f"res is {parts['res']!r}; the {name} mixer takes no logits, so expected None")
            del parts["res"]
        if missing := [name for name, part in parts.items() if part is None]:
            raise ValueError(f"{', '.join(missing)} missing: give pre, res, post and mixer, or none of them (residual)")
        mixer = _complete(Mixer.named(Choice.of(parts["mixer"]).name), Choice.of(parts["mixer"]))
        object.__setattr__(self, "mixer", mixer)
        for head in self.heads:
            object.__setattr__(self, head, self._resolved(head, Choice.of(parts[head])))
        if Mixer.named(mixer.name).refusal(self.num_streams) is None:
            # Building on the meta device rejects bad options now instead of in the middle of a model.
            with torch.device("meta"):
                self.build_mixer()
                for head in self.heads:
                    self.build_generator(head)

    def _resolved(self, head: str, choice: Choice) -> Choice:
        generator = Generator.named(choice.name)
        choice = _complete(generator, choice)
        in_modes, out_modes = generator.check_modes(*self.modes(head))
        if not generator.ranked:
            return choice
        return choice.using(rank=generator.resolve_rank(in_modes, out_modes, choice.options.get("rank")))

    @property
    def is_residual(self) -> bool:
        """Whether this is the plain residual x + f(x), without parameters."""
        return self.mixer is None or self.num_streams == 1

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads that have a generator: not `res` if the mixer takes no logits, and none for the residual preset."""
        return tuple(head for head in HEADS if getattr(self, head) is not None)

    def modes(self, head: str) -> tuple[Modes, Modes]:
        """The input and output modes of one head's generator."""
        assert self.mixer is not None
        logits = Mixer.named(self.mixer.name).logit_shape_for(self.num_streams)
        return (self.num_streams, self.dim), logits if head == "res" else (self.num_streams,)

    def generator(self, head: str) -> tuple[type[Generator], Modes, Modes, dict[str, Any]]:
        """The class of one head's generator and what it is built with."""
        choice = getattr(self, head)
        return (Generator.named(choice.name), *self.modes(head), choice.options)

    def build_generator(self, head: str) -> Generator:
        """Builds the generator of one head: "pre", "res" or "post"."""
        generator, in_modes, out_modes, options = self.generator(head)
        return generator(in_modes, out_modes, **options)

    def build_mixer(self) -> Mixer:
        """Builds the mixer, or raises a ValueError with the number of parameters its logits would need."""
        assert self.mixer is not None
        mixer = Mixer.named(self.mixer.name)
        if reason := mixer.refusal(self.num_streams):
            per_site = count_parameters(self)
            raise ValueError(
                f"{reason} Here it would take {per_site:,} parameters per site ({24 * per_site:,} in 24 sites)."
            )
        return mixer(self.num_streams, **self.mixer.options)

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold; `from_dict` reads them back."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {
            key: {"name": value.name, **value.options} if isinstance(value, Choice) else value
            for key, value in values.items()
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RouterConfig:
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                raise unknown("router option", key, known)
        return cls(**values)


def _complete(component: type[Registered], choice: Choice) -> Choice:
    """The choice with every default written out: a saved config means the same when a default changes."""
    known = option_defaults(component)
    for key in choice.options:
        if key not in known:
            raise unknown(f"option of the {choice.name} {component.family}", key, known)
    return Choice(choice.name, **{**known, **choice.options})


def takes_logits(mixer: Choice | str | Mapping[str, Any], num_streams: int) -> bool:
    """Whether `res` needs a generator with this mixer."""
    return math.prod(Mixer.named(Choice.of(mixer).name).logit_shape_for(num_streams)) > 0


def option_defaults(component: type[Registered]) -> dict[str, Any]:
    """The options of a generator or mixer, its keyword-only arguments, with their defaults."""
    parameters = inspect.signature(component).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def parameter_shapes(config: RouterConfig) -> tuple[Shapes, Shapes]:
    """State-dict name and shape of every trainable, and of every frozen, tensor of one site."""
    trained: Shapes = {}
    frozen: Shapes = {}
    if config.is_residual:
        return trained, frozen
    for name, shape in gain_shapes(config.gain, config.num_streams, config.dim).items():
        trained[f"norm.{name}"] = shape
    for head in config.heads:
        generator, in_modes, out_modes, options = config.generator(head)
        trained[f"{head}.gate"] = (1,)
        trained[f"{head}.bias"] = out_modes
        for name, shape in generator.shapes(in_modes, out_modes, **options).items():
            trained[f"{head}.generator.{name}"] = shape
        for name, shape in generator.frozen_shapes(in_modes, out_modes, **options).items():
            frozen[f"{head}.generator.{name}"] = shape
    return trained, frozen


def count_parameters(config: RouterConfig, *, include_frozen: bool = False) -> int:
    """The parameters one site adds: generators, biases, three gates and the gain. Allocates nothing."""
    if not isinstance(config, RouterConfig):
        raise TypeError(f"count_parameters wants a RouterConfig (from temper.preset), got {type(config).__name__}")
    trained, frozen = parameter_shapes(config)
    return count(trained) + (count(frozen) if include_frozen else 0)
