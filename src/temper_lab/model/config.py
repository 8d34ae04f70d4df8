"""The configuration of a model: its backbone and its routing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import ne
from typing import Any

import temper
from temper.registry import check_int, is_int, unknown
from temper_lab.io import brief
from temper_lab.method import Method

WIDTH_PER_DEPTH = 64
# Far beyond any model, and low enough that a typing error is refused instead of built for an hour.
LARGEST = {"depth": 1_024, "vocab_size": 1 << 24, "context": 1 << 24, "head_dim": 1 << 16, "num_streams": 1_024}


@dataclass(frozen=True)
class ModelConfig:
    """The backbone and the routing around its branches.

    Args:
        depth: the number of blocks.
        vocab_size: the number of ids, including special tokens.
        context: the longest sequence, in tokens.
        head_dim: the width of every attention head.
        preset: a name of `temper.PRESETS`, or a method such as `mhc:generator=cp:rank=2`: `router` gets its overrides.
        num_streams: N. The residual preset has one stream, whatever N is asked for.
        router: overrides of the preset as `temper.preset` takes them, in the form that JSON and TOML hold.
        routers: further overrides by site, {"3": {"rank": 4}}: site 2l is the attention of block l and 2l + 1 its MLP.
        rope_base: the base of the rotary position embedding.
        checkpoint_blocks: save only the input of a block for the backward pass and recompute the rest:
            less memory, a third more time, the same gradients.
        recompute: save only some of the streams for the backward pass and recompute the others
            (`temper.recompute`): less memory, a little more time, the same gradients.
        width: the width of the residual stream, a multiple of head_dim; 0 for 64 x depth, rounded up to whole heads.
    """

    depth: int
    vocab_size: int
    context: int
    head_dim: int = 128
    preset: str = "residual"
    num_streams: int = 1
    router: Mapping[str, Any] = field(default_factory=dict, hash=False)
    rope_base: float = 10_000.0
    checkpoint_blocks: bool = False
    recompute: bool = False
    routers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    width: int = 0

    def __post_init__(self) -> None:
        for name, largest in LARGEST.items():
            check_int(name, getattr(self, name), 1, largest)
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; expected an even number: positions rotate pairs")
        width = self.width
        if not is_int(width) or width < 0 or width % self.head_dim:
            raise ValueError(
                f"width is {brief(width)}; expected a multiple of head_dim {self.head_dim}, "
                f"or 0 for {WIDTH_PER_DEPTH} x depth rounded up to whole heads"
            )
        base = self.rope_base
        if isinstance(base, bool) or not isinstance(base, int | float) or not 1 < base <= 1e30:
            raise ValueError(f"rope_base is {brief(base)}; expected a number > 1 and <= 1e30")
        for name in ("checkpoint_blocks", "recompute"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {brief(getattr(self, name))}; expected true or false")
        if not isinstance(self.preset, str):
            raise ValueError(f"preset is {brief(self.preset)}; expected a name of temper.PRESETS")
        if not isinstance(self.router, Mapping):
            raise ValueError(f"router is {brief(self.router)}; expected a mapping of overrides for temper.preset")
        object.__setattr__(self, "router", {key: _plain(value) for key, value in self.router.items()})
        if ":" in self.preset:
            self._take_method(Method.parse(self.preset))
        object.__setattr__(self, "routers", self._checked_routers())
        self._check_routing()

    @property
    def dim(self) -> int:
        """D, the width of the residual stream: as set, or else 64 per block, rounded up to whole heads."""
        return self.width or -(-WIDTH_PER_DEPTH * self.depth // self.head_dim) * self.head_dim

    @property
    def num_heads(self) -> int:
        return self.dim // self.head_dim

    @property
    def num_layers(self) -> int:
        return self.depth

    @property
    def num_sites(self) -> int:
        return 2 * self.num_layers

    def routing(self, site: int | None = None) -> temper.RouterConfig:
        """The configuration of one site, or of those without an entry in `routers`; its `num_streams` is the true N."""
        overrides = {**self.router, **self.routers.get(str(site), {})}
        return temper.preset(self.preset, num_streams=self.num_streams, dim=self.dim, **overrides)

    def routings(self) -> list[temper.RouterConfig]:
        """The configurations of all sites in the order in which they run."""
        usual = self.routing()
        return [self.routing(site) if str(site) in self.routers else usual for site in range(self.num_sites)]

    def with_routings(self, routings: Sequence[temper.RouterConfig]) -> ModelConfig:
        """The same backbone with these sites, under the name of the preset that most of them are nearest to."""
        usual = max(routings, key=routings.count)
        size = {"num_streams": usual.num_streams, "dim": self.dim}
        routers = {name: _difference(usual, temper.preset(name, **size)) for name in temper.PRESETS}
        preset = min(routers, key=lambda name: (len(routers[name]), _others(usual, temper.preset(name, **size))))
        own = {str(site): _difference(routing, usual) for site, routing in enumerate(routings) if routing != usual}
        changed = replace(self, preset=preset, num_streams=usual.num_streams, router=routers[preset], routers=own)
        assert changed.routings() == list(routings)
        return changed

    @property
    def method(self) -> str:
        """The routing as people write it, such as `temper-cp:rank=8`."""
        own = f" ({len(self.routers)} sites differ)" if self.routers else ""
        return f"{Method.of(self.preset, self.router)}{own}"

    def _take_method(self, method: Method) -> None:
        """Splits a method into its preset and overrides."""
        for option, value in method.options.items():
            if self.router.get(option, value) != value:
                raise ValueError(
                    f"preset is {self.preset!r} and router has {option} = {brief(self.router[option])}; leave one out"
                )
        object.__setattr__(self, "preset", method.preset)
        object.__setattr__(self, "router", {**self.router, **method.options})

    def _checked_routers(self) -> dict[str, Any]:
        expected = "expected overrides by the number of a site, such as {'3': {'rank': 4}}"
        if not isinstance(self.routers, Mapping):
            raise ValueError(f"routers is {brief(self.routers)}; {expected}")
        for key, overrides in self.routers.items():
            # Only the plain decimal form is a site: "03" and "٣" are not.
            if not (str(key).isdecimal() and str(key) == str(int(key)) and int(key) < self.num_sites):
                raise ValueError(
                    f"routers has a site {brief(key)}; a model of depth {self.depth} has 0 to {self.num_sites - 1}"
                )
            if not isinstance(overrides, Mapping):
                raise ValueError(f"routers[{key!r}] is {brief(overrides)}; {expected}")
        # Keys are strings, as in JSON, and sorted, because the order in which sites were named has no meaning.
        return {str(key): _plain(self.routers[key]) for key in sorted(self.routers, key=int)}

    def _check_routing(self) -> None:
        try:
            usual = self.routing()
        except TypeError as error:
            raise ValueError(f"router is {brief(self.router)}: {error}") from error
        for key, overrides in self.routers.items():
            try:
                routing = self.routing(int(key))
            except (TypeError, ValueError) as error:
                raise ValueError(f"routers[{key!r}] is {brief(overrides)}: {error}") from error
            # A residual site adds to any number of streams.
            if routing.mixer is not None and routing.num_streams != usual.num_streams:
                raise ValueError(
                    f"routers[{key!r}] has {routing.num_streams} streams and the model {usual.num_streams}; "
                    "expected the same at every site"
                )

    def with_(self, **changes: Any) -> ModelConfig:
        """The same model with some fields changed."""
        return replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The configuration as plain values for JSON; `from_dict` reads them back."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        # Defaults are left out, so that configurations saved before these fields existed stay equal.
        return {name: value for name, value in values.items() if value or name not in ("routers", "width")}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        if not isinstance(values, Mapping):
            raise ValueError(f"a model configuration is a mapping, got {type(values).__name__}")
        known = [entry.name for entry in fields(cls)]
        for key in values:
            if key not in known:
                raise unknown("model option", key, known)
        if missing := [key for key in ("depth", "vocab_size", "context") if key not in values]:
            raise ValueError(f"the model configuration lacks {', '.join(missing)}")
        return cls(**values)


def _difference(routing: temper.RouterConfig, base: temper.RouterConfig) -> dict[str, Any]:
    """The overrides that turn one configuration into another of the same size."""
    before = base.to_dict()
    size = ("num_streams", "dim")
    return {key: value for key, value in routing.to_dict().items() if key not in size and value != before[key]}


def _others(routing: temper.RouterConfig, base: temper.RouterConfig) -> int:
    """The number of heads whose generators are of another kind, whatever their rank."""
    names = ([choice and choice.name for choice in (one.pre, one.res, one.post)] for one in (routing, base))
    return sum(map(ne, *names))


def _plain(value: Any) -> Any:
    """The value after a round trip through JSON, so that a loaded configuration equals the saved one."""
    if isinstance(value, temper.Choice):
        value = {"name": value.name, **value.options}
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value
