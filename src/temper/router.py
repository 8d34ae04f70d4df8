"""From streams to routing: norm, generators, gates and mixer, always in float32 or better."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Self

import torch
from torch import Tensor, nn

from temper.config import HEADS, Choice, RouterConfig, option_defaults
from temper.gates import Gates, with_vector_gates
from temper.generators import Generator
from temper.norm import GAINS, StreamNorm
from temper.ops import autograd, backend, naive
from temper.ops.plan import Fold, Plan
from temper.precision import no_autocast, widen
from temper.routing import Routing

# The children of a site that routing is made of.
ROUTING = ("norm", "mixer", *HEADS)


class Head(nn.Module):
    """The logits of pre, res or post: gate * squash(Z) + bias.

    Args:
        initial_bias: makes the bias that the head starts with.
    """

    def __init__(self, generator: Generator, initial_bias: Callable[[], Tensor]) -> None:
        super().__init__()
        self._initial_bias = initial_bias
        self.generator = generator
        # Not a scalar: FSDP cannot shard those.
        self.gate = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(generator.out_modes))

    def reset_parameters(self) -> None:
        """Gate and bias as they start; the generator has initial values of its own."""
        with torch.no_grad():
            self.gate.fill_(0.01)
            _assign(self.bias, self._initial_bias())

    def stored(self) -> tuple[Tensor, ...]:
        """Every tensor, as the native kernels want them."""
        return *self.generator.stored(), self.gate, self.bias

    def forward(self, bottleneck: Tensor, out_map: Tensor, gates: Gates) -> Tensor:
        dynamic = gates.squash(torch.tensordot(bottleneck, out_map, dims=1))
        return self.gate.to(dynamic.dtype) * dynamic + self.bias.to(dynamic.dtype)


class StateDictError(ValueError, RuntimeError):
    """A state dict that does not belong to this module; torch's own callers expect a RuntimeError."""


class Router(nn.Module):
    """What a site decides from its streams: `route` gives pre, res and post for every token.

    Args:
        config: from `temper.preset`.
        layer_index: which site of the network this is; it starts on stream `layer_index mod N`.
    """

    def __init__(self, config: RouterConfig, *, layer_index: int = 0) -> None:
        super().__init__()
        if not isinstance(config, RouterConfig):
            raise TypeError(f"expected a RouterConfig (from temper.preset), got {type(config).__name__}")
        if isinstance(layer_index, bool) or not isinstance(layer_index, int) or layer_index < 0:
            raise ValueError(f"layer_index is {layer_index!r}; expected a whole number >= 0")
        self.config = config
        self.layer_index = layer_index
        # Whether `model.bfloat16()`, `.half()` and `.to(dtype)` leave the parameters of routing in float32.
        self.keep_float32 = True
        self.gates = Gates.named(config.gates)(config.pre_eps)
        # What the fast implementations are told of this site; None if they do not know its form.
        self.plan: Plan | None = None
        if config.is_residual:
            return
        self.mixer = config.build_mixer()
        self.norm = StreamNorm(
            config.num_streams,
            config.dim,
            gain=config.gain,
            norm=config.norm,
            eps=config.norm_eps,
            clamp=config.norm_clamp,
        )
        # Nothing that refers back to this module: it would live on until the next garbage collection.
        ends = (self.gates, config.num_streams, layer_index % config.num_streams)
        starts: list[Callable[[], Tensor]]
        starts = [partial(_initial_bias, *ends, 0), self.mixer.initial_bias, partial(_initial_bias, *ends, 1)]
        heads = (Head(config.build_generator(head), start) for head, start in zip(HEADS, starts, strict=True))
        self.pre, self.res, self.post = heads
        self.plan = self._make_plan()
        for head in (self.pre, self.res, self.post):
            head.reset_parameters()

    def _make_plan(self) -> Plan | None:
        config = self.config
        if not self.gates.fast or config.norm != "flat":
            return None
        rows = []
        for head in HEADS:
            generator, in_modes, out_modes, options = config.generator(head)
            rows.append(generator.bottleneck(in_modes, out_modes, **options))
        pre, res, post = (head.generator.direct for head in (self.pre, self.res, self.post))
        return Plan(
            num_streams=config.num_streams,
            dim=config.dim,
            rows=(rows[0], rows[1], rows[2]),
            direct=(pre, res, post),
            logits=math.prod(self.mixer.logit_shape),
            norm_eps=config.norm_eps,
            norm_clamp=config.norm_clamp,
            pre_eps=config.pre_eps,
            native=self.mixer.native(),
            form=self._make_form(),
        )

    def _make_form(self) -> tuple[int, ...] | None:
        config = self.config
        numbers = [config.num_streams, config.dim, GAINS.index(config.gain)]
        for head in (self.pre, self.res, self.post):
            form = head.generator.native()
            # Who stores tensors in a known form but makes other maps of them is not known.
            if form is None or _owner(head.generator, "native") is not _owner(head.generator, "maps"):
                return None
            numbers += form.numbers(head.generator.out_modes)
        return tuple(numbers)

    def reset_parameters(self) -> None:
        """Sets every parameter to its initial value, drawn in the same order as in building.

        Sharded parameters (DTensors) get the shards of what one process would draw, if all processes have the same
        random state.
        """
        if self.config.is_residual:
            return
        if any(hasattr(parameter, "placements") for parameter in self.parameters()):
            with torch.no_grad():
                self._copy_from(Router(self.config, layer_index=self.layer_index))
            return
        self.norm.reset_parameters()
        for head in (self.pre, self.res, self.post):
            head.generator.reset_parameters()
        for head in (self.pre, self.res, self.post):
            head.reset_parameters()

    def _copy_from(self, other: Router) -> None:
        mine, theirs = self.state_dict(), other.state_dict()
        for name, value in theirs.items():
            _assign(mine[name], value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """Moves and casts as for any module, with two exceptions.

        Routing is not narrowed below float32 (see `keep_float32`), and what comes from the meta device gets its initial
        values: no trainer that does not know this module can leave it with whatever was in memory.
        """
        parts = [child for name, child in self.named_children() if name in ROUTING]
        was_meta = any(tensor.is_meta for part in parts for tensor in part.parameters())
        others = {name: child for name, child in self._modules.items() if name not in ROUTING}
        for part in parts:
            part._apply(partial(_move, fn) if self.keep_float32 else fn)
        routing, self._modules = self._modules, others
        try:
            super()._apply(fn, recurse)
        finally:
            self._modules = routing
        if was_meta and not any(tensor.is_meta for part in parts for tensor in part.parameters()):
            self._start_anew()
        return self

    def _start_anew(self) -> None:
        """Initial values that depend on the seed, without taking random numbers from anybody else."""
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed((torch.initial_seed() + 1_000_003 * (self.layer_index + 1)) % 2**63)
            with torch.device("cpu"), torch.no_grad():
                self._copy_from(Router(self.config, layer_index=self.layer_index))
        finally:
            generator.set_state(before)

    def set_generators(self, **generators: Generator) -> None:
        """Puts other generators into the heads named (`res=generator`); all else of the site stays the object it is."""
        changes: dict[str, Any] = {}
        for head, generator in generators.items():
            if head not in HEADS or self.config.is_residual:
                raise ValueError(f"{self.extra_repr()} has no generator {head!r}")
            modes = (generator.in_modes, generator.out_modes)
            if modes != self.config.modes(head):
                raise ValueError(f"a generator for {modes} cannot be {head}'s; expected {self.config.modes(head)}")
            options = {name: getattr(generator, name) for name in option_defaults(type(generator))}
            changes[head] = Choice(generator.name, **options)
        self.config = dataclasses.replace(self.config, **changes)
        for head, generator in generators.items():
            getattr(self, head).generator = generator.train(self.training)
        self.plan = self._make_plan()

    def route(self, streams: Tensor) -> Routing:
        """pre, res and post of every token, in the dtype of the streams.

        Shape:
            streams: (..., N, D) -> pre (..., N), res (..., M, N), post (..., M).
        """
        self.check_streams(streams)
        routing = self.route_wide(streams)
        return Routing(*(part.to(streams.dtype) for part in routing))

    def route_wide(self, streams: Tensor) -> Routing:
        """The same before it is rounded to the dtype of the streams: float32, or float64 for float64."""
        if self.config.is_residual:
            return _plain_routing(widen(streams))
        if self.plan is not None:
            return routing_of(self.run(streams)[1])
        streams = widen(streams)
        dtype = streams.dtype
        with no_autocast(streams):
            heads = (self.pre, self.res, self.post)
            in_maps, out_maps = zip(*(head.generator.maps(dtype) for head in heads), strict=True)
            in_map = torch.cat(in_maps)
            gain = self.norm.gain()
            if gain is not None:
                in_map = in_map * gain.to(dtype)
            # One pass over the streams serves all three generators.
            bottleneck = naive.project(streams, in_map, self.norm.rstd(streams))
            parts = bottleneck.split([part.shape[0] for part in in_maps], dim=-1)
            pre, res, post = (
                head(part, out_map, self.gates) for head, part, out_map in zip(heads, parts, out_maps, strict=True)
            )
            return Routing(self.gates.pre(pre), self.mixer(res), self.gates.post(post))

    def run(self, streams: Tensor, group: int = 0) -> tuple[Tensor, autograd.Link]:
        """x, and the routing as the operations have it: what `begin` does at a site that has a plan."""
        assert self.plan is not None
        implementation = backend.choose(streams, self.plan, self.mixer)
        with no_autocast(streams):
            weights = self._weights_for(implementation, streams.dtype)
        return autograd.begin(streams, weights, self.plan, self.mixer, implementation, group)

    def _weights_for(self, implementation: ModuleType, dtype: torch.dtype) -> Fold | autograd.Stored:
        """All weights for streams of a dtype: folded, unless the implementation can do that itself."""
        assert self.plan is not None
        wide = torch.promote_types(dtype, torch.float32)
        if self.plan.form is not None and hasattr(implementation, "fold"):
            owners = (self.norm, self.pre, self.res, self.post)
            stored = autograd.Stored(tensor for owner in owners for tensor in owner.stored())
            if all(tensor.dtype == wide for tensor in stored):
                return stored
        return self.fold(wide)

    def fold(self, dtype: torch.dtype) -> Fold:
        """The generators, the gain and the gates folded together, at the same cost for any number of tokens."""
        in_maps, outs, biases = [], [], []
        for head in (self.pre, self.res, self.post):
            in_map, out_map = head.generator.maps(dtype)
            gate = head.gate.to(dtype)
            if head.generator.direct:
                in_map = in_map * gate
            else:
                outs.append((out_map * gate).flatten())
            in_maps.append(in_map)
            biases.append(head.bias.to(dtype).flatten())
        in_map = torch.cat(in_maps)
        gain = self.norm.gain()
        if gain is not None:
            in_map = in_map * gain.to(dtype)
        return Fold(in_map, torch.cat(outs) if outs else in_map.new_empty(0), torch.cat(biases))

    def check_streams(self, streams: Tensor) -> None:
        """Raises for what cannot be the streams of this site."""
        if not isinstance(streams, Tensor):
            raise TypeError(f"streams must be a tensor (..., N, D), got {type(streams).__name__}")
        num_streams, dim = self.config.num_streams, self.config.dim
        # A residual site routes nothing, so any number of streams will do.
        any_number = self.config.mixer is None
        if streams.ndim < 2 or streams.shape[-1] != dim or not (any_number or streams.shape[-2] == num_streams):
            raise ValueError(
                f"streams have shape {tuple(streams.shape)}; expected (..., {num_streams}, {dim}): "
                f"num_streams={num_streams} and dim={dim}. temper.expand_streams makes them from (..., {dim})."
            )
        if not streams.is_floating_point():
            raise TypeError(f"streams have dtype {streams.dtype}; expected a floating-point dtype")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """As for any module, but all or nothing, and only what is finite."""
        # torch copies what fits and complains afterwards; here nothing is written unless all of it fits.
        self._check_state_dict(state_dict, "", strict)
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        # Inside a larger model, where torch itself collects what is missing.
        self._check_state_dict(state_dict, prefix, strict=False)
        # In place: torch hands the same mapping on to the heads.
        state_dict.update(with_vector_gates({key: state_dict[key] for key in state_dict if key.startswith(prefix)}))
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _check_state_dict(self, state_dict: Mapping[str, Any], prefix: str, strict: bool) -> None:
        state_dict = with_vector_gates(state_dict)
        routing = ROUTING
        mine = {key: value for key, value in self.state_dict().items() if key.split(".")[0] in routing}
        given = {
            key.removeprefix(prefix): value
            for key, value in state_dict.items()
            if key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in routing
        }
        problems = []
        if strict:
            problems += [f"missing {key}" for key in mine if key not in given]
            problems += [f"unexpected {key}" for key in given if key not in mine]
        for key in mine.keys() & given.keys():
            if given[key].shape != mine[key].shape:
                problems.append(f"{key} is {tuple(given[key].shape)}, expected {tuple(mine[key].shape)}")
            elif not given[key].is_meta and not torch.isfinite(given[key]).all():
                problems.append(f"{key} has values that are not finite")
        if problems:
            shown = "; ".join(sorted(problems)[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
            raise StateDictError(
                f"this state dict does not fit {prefix or 'this site'} ({self.extra_repr()}): {shown}. "
                "Nothing was loaded."
            )

    def extra_repr(self) -> str:
        config = self.config
        if config.mixer is None:
            return f"residual, dim={config.dim}"
        generators = "/".join(getattr(config, head).name for head in HEADS)
        return (
            f"num_streams={config.num_streams}, dim={config.dim}, generators={generators}, "
            f"mixer={config.mixer.name}, layer_index={self.layer_index}"
        )


def _initial_bias(gates: Gates, num_streams: int, index: int, which: int) -> Tensor:
    """Of pre (0) or post (1)."""
    return gates.initial_bias(num_streams, index)[which]


def _move(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """What `fn` makes of a tensor, but never in less than float32 unless it was so before."""
    moved = fn(tensor)
    wide = torch.promote_types(moved.dtype, torch.float32) if moved.is_floating_point() else moved.dtype
    return moved if moved.dtype in (wide, tensor.dtype) else tensor.to(moved.device, wide)


def _assign(target: Tensor, value: Tensor) -> None:
    """Copies a whole tensor into another, or its shard into a DTensor."""
    if hasattr(target, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = value.to(target.device, target.dtype)
        # Every process has the whole, so each cuts out its own part.
        mesh, placements = target.device_mesh, target.placements  # type: ignore[attr-defined]
        value = distribute_tensor(value, mesh, placements, src_data_rank=None)
    target.detach().copy_(value)


def _owner(thing: object, name: str) -> type:
    """The class that an attribute comes from."""
    return next(cls for cls in type(thing).__mro__ if name in vars(cls))


def routing_of(link: autograd.Link) -> Routing:
    """The routing of every token, with the leading dimensions of the streams."""
    return link.plan.split(link.weights.view(*link.streams.shape[:-2], link.plan.num_weights))


def _plain_routing(streams: Tensor) -> Routing:
    """The routing of x + f(x): read the first stream, keep every stream, write to every stream."""
    *lead, num_streams, _ = streams.shape
    eye = torch.eye(num_streams, dtype=streams.dtype, device=streams.device)
    return Routing(eye[0].expand(*lead, -1), eye.expand(*lead, -1, -1), torch.ones_like(eye[0]).expand(*lead, -1))
