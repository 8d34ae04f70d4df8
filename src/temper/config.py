"""The configuration of a router, every method by name, and what a site costs."""

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
from temper.registry import Registered, check_int, unknown, without_memory

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
        norm_eps: added to the mean square; with `norm_clamp`, its lower limit; with `norm_outside`, added to the root
            of the mean square (Megatron-Core's guard).
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
    norm_outside: bool = False

    def __post_init__(self) -> None:
        for name in ("num_streams", "dim"):
            check_int(name, getattr(self, name), 1)
        for name in ("norm_eps", "pre_eps"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ValueError(f"{name} is {value!r}; expected a finite number >= 0")
        for name in ("norm_clamp", "norm_outside"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected True or False")
        if self.norm_clamp and self.norm_outside:
            raise ValueError("norm_clamp and norm_outside are two places for norm_eps; expected at most one of them")
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
            with without_memory():
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


PRESETS: dict[str, dict[str, Any]] = {
    "residual": {"generator": None, "mixer": None},
    "hc": {
        "generator": "per-stream",
        "mixer": "unconstrained",
        "gates": "tanh",
        "norm": "per-stream",
        "gain": "feature",
    },
    "mhc": {"generator": "dense", "mixer": "sinkhorn"},
    "mhc-identity": {"generator": "dense", "mixer": "identity"},
    "mhc-lite": {"generator": "dense", "mixer": "birkhoff"},
    "kromhc": {"generator": "dense", "mixer": "kronecker"},
    "temper-cp": {"generator": "cp", "mixer": "sinkhorn"},
    "temper-tucker": {"generator": "tucker", "mixer": "sinkhorn"},
    "temper-tt": {"generator": "tt", "mixer": "sinkhorn"},
    "temper-tucker-frozen": {"generator": Choice("tucker", freeze_core=True), "mixer": "sinkhorn"},
    "temper-tucker-res": {"generator": "dense", "res": "tucker", "mixer": "sinkhorn"},
    "temper-cp-krom": {"generator": "cp", "mixer": "kronecker"},
    "temper-tucker-krom": {"generator": "tucker", "mixer": "kronecker"},
    "temper-slim": {"generator": "cp", "mixer": "kronecker", "gain": "none"},
}
"""The fields of `RouterConfig` that each method sets, by the name of the method."""


def preset(name: str, *, num_streams: int, dim: int, **overrides: Any) -> RouterConfig:
    """The configuration of a method, with optional overrides.

    Args:
        name: one of `temper.PRESETS`.
        num_streams: N. A residual network has one stream, whatever N is asked for.
        dim: the width of each stream.
        overrides: fields of `RouterConfig` (`mixer="kronecker"`, `gain="none"`,
            `res=Choice("cp", rank=8)`), `generator=` for all three heads at once, or an option of a
            generator or mixer (`rank=8`, `init_std=0.02`, `freeze_core=True`, `iters=50`), which goes
            to every part that has it.
    """
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    known = [field.name for field in fields(RouterConfig)]
    values = {**PRESETS[name], **{key: value for key, value in overrides.items() if key in [*known, "generator"]}}
    options = {key: value for key, value in overrides.items() if key not in values}
    if "generator" in overrides:
        # All three heads at once, overriding the preset's choice for any of them.
        values = {key: value for key, value in values.items() if key not in HEADS or key in overrides}
    generator = values.pop("generator")
    parts = {head: values.pop(head, generator) for head in HEADS} | {"mixer": values.pop("mixer")}
    if all(part is None for part in parts.values()):
        if options:
            raise unknown(f"option of the preset {name}", next(iter(options)), known)
        # Validated as given, then set to one: the streams of a residual network would only be copies.
        RouterConfig(num_streams=num_streams, dim=dim, **values)
        return RouterConfig(num_streams=1, dim=dim, **values)
    if parts["mixer"] is not None and not takes_logits(parts["mixer"], num_streams):
        # Without logits, a generator that was not requested by name is dropped.
        parts["res"] = overrides.get("res")
    choices: dict[str, Any] = {key: Choice.of(part) for key, part in parts.items() if part is not None}
    for option, value in options.items():
        takers = {key for key, choice in choices.items() if option in option_defaults(_component(key, choice))}
        if not takers:
            every = {o for key, choice in choices.items() for o in option_defaults(_component(key, choice))}
            raise unknown(f"option of the preset {name}", option, [*known, "generator", *every])
        choices |= {key: choices[key].using(**{option: value}) for key in takers}
    return RouterConfig(num_streams=num_streams, dim=dim, **choices, **values)


def _component(part: str, choice: Choice) -> type[Generator] | type[Mixer]:
    return Mixer.named(choice.name) if part == "mixer" else Generator.named(choice.name)


@dataclass(frozen=True)
class Cost:
    """The cost of one site for one forward pass.

    Args:
        parameters: trainable, what the site adds to the model.
        frozen_parameters: saved but not trained.
        flops: of the forward pass, a multiply and add counted as two; a training step takes
            about three times as many.
        activation_bytes: saved for the backward pass (by the "cpu" and "fused" backends; "naive" saves more):
            the streams, the branch output and the routing of every token, and once for all of them the folded
            weights, of which "cpu" saves half. The branch itself comes on top.
    """

    parameters: int
    frozen_parameters: int
    flops: int
    activation_bytes: int

    def __mul__(self, sites: int) -> Cost:
        """The cost of several such sites."""
        return Cost(*(sites * value for value in vars(self).values()))

    __rmul__ = __mul__


def cost(config: RouterConfig, tokens: int, *, dtype: torch.dtype = torch.float32) -> Cost:
    """Parameters, FLOPs and activation memory of one site.

    Args:
        tokens: the number of tokens in one forward pass.
        dtype: of the streams; routing is float32 at least.
    """
    check_int("tokens", tokens)
    trained = count_parameters(config)
    frozen = count_parameters(config, include_frozen=True) - trained
    num_streams, dim = config.num_streams, config.dim
    if config.is_residual:
        # One add per entry; addition saves nothing.
        return Cost(trained, frozen, tokens * dim, 0)
    assert config.mixer is not None
    mixer, options = Mixer.named(config.mixer.name), config.mixer.options
    fold, rows, out_entries, logits = 0, 0, 0, 0
    for head in config.heads:
        generator, in_modes, out_modes, generator_options = config.generator(head)
        bottleneck = generator.bottleneck(in_modes, out_modes, **generator_options)
        fold += generator.fold_flops(in_modes, out_modes, **generator_options)
        rows += bottleneck
        if generator.direct:
            # The gate scales the map itself.
            fold += bottleneck * math.prod(in_modes)
        else:
            out_entries += bottleneck * math.prod(out_modes)
        logits += math.prod(out_modes)
    width = num_streams * dim
    if config.gain != "none":
        fold += rows * width
    # Per token: squares and their sum, the bottleneck, the logits with gate and bias, the gates (four for a
    # sigmoid), the mixer; then reading, mixing, and scaling and adding what is written.
    routing = 2 * width + (2 * width + 1) * rows + 2 * out_entries + 2 * logits + 8 * num_streams
    routing += mixer.flops(num_streams, **options)
    streams = 2 * width + 2 * num_streams * width + 2 * width
    size = torch.promote_types(dtype, torch.float32).itemsize
    if Gates.named(config.gates).fast and config.norm == "flat":
        # Saved per token: streams and y as they are stored; the routing, the bottleneck and the norm in full precision.
        saved = (width + dim) * dtype.itemsize + (num_streams**2 + 2 * num_streams + rows + 2) * size
    else:
        # Autograd saves: streams, y, norm, the bottleneck twice (before and after the norm), the logits'
        # dynamic part, pre, post, res and what the mixer saves.
        saved = width + dim + 2 + 2 * rows + logits + 4 * num_streams + num_streams**2
        saved += mixer.saved(num_streams, **options)
        if config.norm == "per-stream":
            # Only one scale per token leaves the sum; with one per stream the normed streams are saved as well.
            saved += width
        saved *= size
    # Saved once: the maps, before and after the gain.
    maps = rows * width * (1 if config.gain == "none" else 2) + out_entries
    return Cost(trained, frozen, fold + tokens * (routing + streams), maps * size + tokens * saved)
