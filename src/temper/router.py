"""From streams to routing: norm, generators, gates and mixer, always in float32 or better."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from temper.config import HEADS, Choice, RouterConfig, option_defaults
from temper.gates import Gates, with_vector_gates
from temper.generators import Generator
from temper.generators.base import Modes
from temper.norm import GAINS, StreamNorm
from temper.ops import backend
from temper.ops.plan import FoldedWeights, GeneratorSpec, RawWeights, SiteSpec, State
from temper.registry import check_int
from temper.streams import Routing, no_autocast, widen

# The submodules of a site that compute the routing.
ROUTING = ("norm", "mixer", *HEADS)


class Head(nn.Module):
    """The logits of pre, res or post: gate * squash(Z) + bias.

    Args:
        initial_bias: returns the initial bias of the head.
    """

    def __init__(self, generator: Generator, initial_bias: Callable[[], Tensor]) -> None:
        super().__init__()
        self._initial_bias = initial_bias
        self.generator = generator
        # Not a scalar: FSDP cannot shard those.
        self.gate = nn.Parameter(torch.empty(1))
        self.bias = nn.Parameter(torch.empty(generator.out_modes))

    def reset_parameters(self) -> None:
        """Resets gate and bias; the generator has its own reset."""
        with torch.no_grad():
            self.gate.fill_(0.01)
            _assign(self.bias, self._initial_bias())

    def stored(self) -> tuple[Tensor, ...]:
        """Every tensor, in the order in which fold kernels take them."""
        return *self.generator.stored(), self.gate, self.bias


class NoLogits(Generator):
    """The generator of a head without logits: W of shape (N, D, 0)."""

    name = "none"
    direct = True
    weight: Tensor

    def __init__(self, in_modes: Modes) -> None:
        super().__init__(in_modes, (0,))
        # An empty buffer that is not saved; it carries dtype and device.
        self.register_buffer("weight", torch.empty(*in_modes, 0), persistent=False)

    @classmethod
    def check_modes(cls, in_modes: Sequence[int], out_modes: Sequence[int]) -> tuple[Modes, Modes]:
        return tuple(in_modes), tuple(out_modes)

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        return 0

    def reset_parameters(self) -> None:
        pass

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        weight = self.weight.to(dtype=dtype)
        return weight.movedim(-1, 0), weight.new_empty(0, 0)

    def native(self) -> GeneratorSpec:
        return GeneratorSpec("dense")

    def stored(self) -> tuple[Tensor, ...]:
        return (self.weight,)


class NoHead(Head):
    """`res` of a mixer that takes no logits: a head without parameters."""

    def __init__(self, in_modes: Modes) -> None:
        nn.Module.__init__(self)
        self.generator = NoLogits(in_modes)

    @property
    def gate(self) -> Tensor:  # type: ignore[override]
        return self.generator.stored()[0].new_ones(1)

    @property
    def bias(self) -> Tensor:  # type: ignore[override]
        return self.generator.stored()[0].new_empty(0)

    def reset_parameters(self) -> None:
        pass


class StateDictError(ValueError, RuntimeError):
    """A state dict that does not belong to this module; torch's own callers expect a RuntimeError."""


class Router(nn.Module):
    """The routing part of a site: `route` computes pre, res and post of every token from the streams.

    Args:
        config: from `temper.preset`.
        layer_index: which site of the network this is; it starts on stream `layer_index mod N`.
    """

    def __init__(self, config: RouterConfig, *, layer_index: int = 0) -> None:
        super().__init__()
        if not isinstance(config, RouterConfig):
            raise TypeError(f"expected a RouterConfig (from temper.preset), got {type(config).__name__}")
        check_int("layer_index", layer_index)
        self.config = config
        self.layer_index = layer_index
        # Whether `model.bfloat16()`, `.half()` and `.to(dtype)` leave the parameters of routing in float32.
        self.keep_float32 = True
        self.gates = Gates.named(config.gates)(config.pre_eps)
        # The site's spec for backends; None at a residual site.
        self.spec: SiteSpec | None = None
        self._raw_paths: tuple[tuple[tuple[str, ...], str], ...] = ()
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
            outside=config.norm_outside,
        )
        # No reference back to this module: a cycle would keep it alive until the next garbage collection.
        ends = (self.gates, config.num_streams, layer_index % config.num_streams)
        starts: list[Callable[[], Tensor]]
        starts = [partial(_initial_bias, *ends, 0), self.mixer.initial_bias, partial(_initial_bias, *ends, 1)]
        self.pre, self.res, self.post = (
            Head(config.build_generator(head), start) if head in config.heads else NoHead(config.modes(head)[0])
            for head, start in zip(HEADS, starts, strict=True)
        )
        self._describe()
        for head in (self.pre, self.res, self.post):
            head.reset_parameters()

    def _describe(self) -> None:
        """Updates everything derived from the parts of the site; call it again after replacing one."""
        config = self.config
        rows = []
        for name in HEADS:
            if name in config.heads:
                generator, in_modes, out_modes, options = config.generator(name)
                rows.append(generator.bottleneck(in_modes, out_modes, **options))
            else:
                rows.append(0)
        pre, res, post = (head.generator.direct for head in (self.pre, self.res, self.post))
        self.spec = SiteSpec(
            num_streams=config.num_streams,
            dim=config.dim,
            rows=(rows[0], rows[1], rows[2]),
            direct=(pre, res, post),
            num_logits=math.prod(self.mixer.logit_shape),
            norm_eps=config.norm_eps,
            norm_clamp=config.norm_clamp,
            pre_eps=config.pre_eps,
            mixer=self.mixer.native(),
            generators=self._pack_generators(),
            gates=config.gates,
            norm_per_stream=config.norm == "per-stream",
            norm_outside=config.norm_outside,
        )
        self._raw_paths = self._find_raw_paths()

    def _pack_generators(self) -> tuple[int, ...] | None:
        config = self.config
        numbers = [config.num_streams, config.dim, GAINS.index(config.gain)]
        for head in (self.pre, self.res, self.post):
            spec = head.generator.native()
            # A subclass that inherits `native` but overrides `maps` cannot use the kernels.
            if spec is None or _owner(head.generator, "native") is not _owner(head.generator, "maps"):
                return None
            numbers += spec.packed(head.generator.out_modes)
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

        Routing is not narrowed below float32 (see `keep_float32`), and tensors that come from the meta device get their
        initial values, so a trainer unaware of this module cannot leave uninitialized memory in it.
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
        """Draws initial values from the seed without advancing the caller's random state."""
        generator = torch.default_generator
        before = generator.get_state()
        try:
            generator.manual_seed((torch.initial_seed() + 1_000_003 * (self.layer_index + 1)) % 2**63)
            with torch.device("cpu"), torch.no_grad():
                self._copy_from(Router(self.config, layer_index=self.layer_index))
        finally:
            generator.set_state(before)

    def set_generators(self, **generators: Generator) -> None:
        """Replaces the generators of the named heads (`res=generator`); all other parts stay the same objects."""
        changes: dict[str, Any] = {}
        for head, generator in generators.items():
            if head not in self.config.heads or self.config.is_residual:
                raise ValueError(f"{self.extra_repr()} has no generator {head!r}")
            modes = (generator.in_modes, generator.out_modes)
            if modes != self.config.modes(head):
                raise ValueError(f"a generator for {modes} cannot be {head}'s; expected {self.config.modes(head)}")
            options = {name: getattr(generator, name) for name in option_defaults(type(generator))}
            changes[head] = Choice(generator.name, **options)
        self.config = dataclasses.replace(self.config, **changes)
        for head, generator in generators.items():
            getattr(self, head).generator = generator.train(self.training)
        self._describe()

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
        if self.spec is None:
            return _plain_routing(widen(streams))
        routing = self._open(streams)[1].routing
        assert routing is not None
        return routing

    def _open(self, streams: Tensor, group: int = 0) -> tuple[Tensor, State]:
        """x and the backend's state: `begin` for a site that is not residual."""
        spec, mixer = self.spec, self.mixer
        assert spec is not None
        chosen = backend.choose(streams, spec, mixer)
        with no_autocast(streams):
            return chosen.open_site(streams, self._weights_for(chosen, streams.dtype), spec, mixer, group)

    def _weights_for(self, chosen: backend.Backend, dtype: torch.dtype) -> FoldedWeights | RawWeights:
        """The weights for streams of a dtype: folded here unless the backend folds them."""
        assert self.spec is not None
        wide = torch.promote_types(dtype, torch.float32)
        if self.spec.generators is not None and chosen.folding is not None:
            raw = self._raw_weights()
            for tensor in raw.tensors:
                if tensor.dtype != wide:
                    break
            else:
                return raw
        return self.fold(wide)

    def _raw_weights(self) -> RawWeights:
        """The gain, then generator, gate and bias of pre, res and post."""
        # Reads the modules' dictionaries: attribute access on a module is a Python call, three dozen per site.
        tensors: list[Tensor] = []
        for path, key in self._raw_paths:
            module: nn.Module = self
            for name in path:
                module = module._modules[name]  # type: ignore[assignment]
            tensor: Tensor | None = module._parameters.get(key)
            if tensor is None:
                tensor = module._buffers.get(key)
            if tensor is None:
                break
            tensors.append(tensor)
        else:
            if tensors:
                return RawWeights(tuple(tensors))
        # A parameter was replaced by an attribute (a parametrization, a flattened parameter group).
        return RawWeights(self._stored())

    def _stored(self) -> tuple[Tensor, ...]:
        return *self.norm.stored(), *self.pre.stored(), *self.res.stored(), *self.post.stored()

    def _find_raw_paths(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """The path to each raw weight: submodules, and the name in the last of them. Empty if that is uncertain."""
        assert self.spec is not None
        if self.spec.generators is None:
            return ()
        named = itertools.chain(self.named_parameters(remove_duplicate=False), self.named_buffers())
        names = {id(tensor): name for name, tensor in named}
        stored = self._stored()
        if len(set(map(id, stored))) < len(stored) or not all(id(tensor) in names for tensor in stored):
            return ()
        paths = (names[id(tensor)].split(".") for tensor in stored)
        return tuple((tuple(path[:-1]), path[-1]) for path in paths)

    def fold(self, dtype: torch.dtype) -> FoldedWeights:
        """The generators, the gain and the gates folded together, at the same cost for any number of tokens."""
        in_maps, outs, biases, scales = [], [], [], []
        for head in (self.pre, self.res, self.post):
            in_map, out_map = head.generator.maps(dtype)
            gate, bias = head.gate.to(dtype), head.bias.to(dtype).flatten()
            if not self.gates.fast:
                # These gates squash the generator's output before scaling it.
                scales.append(gate.expand(bias.shape))
            elif head.generator.direct:
                in_map = in_map * gate
            else:
                out_map = out_map * gate
            if not head.generator.direct:
                outs.append(out_map.flatten())
            in_maps.append(in_map)
            biases.append(bias)
        in_map = torch.cat(in_maps)
        gain = self.norm.gain()
        if gain is not None:
            in_map = in_map * gain.to(dtype)
        out = torch.cat(outs) if outs else in_map.new_empty(0)
        return FoldedWeights(in_map, out, torch.cat(biases), torch.cat(scales) if scales else None)

    def check_streams(self, streams: Tensor) -> None:
        """Raises an error for a tensor that cannot be the streams of this site."""
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
        """Loads like any module, but all or nothing, and only finite values."""
        # torch copies what fits and reports errors afterwards; here nothing is written unless everything fits.
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
            if isinstance(key, str) and key.startswith(prefix) and key.removeprefix(prefix).split(".")[0] in routing
        }
        problems = []
        if strict:
            problems += [f"missing {key}" for key in mine if key not in given]
            problems += [f"unexpected {key}" for key in given if key not in mine]
        for key in mine.keys() & given.keys():
            if not isinstance(given[key], Tensor) or not given[key].is_floating_point():
                kind = given[key].dtype if isinstance(given[key], Tensor) else type(given[key]).__name__
                problems.append(f"{key} is {kind}, expected a floating-point tensor")
            elif given[key].shape != mine[key].shape:
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
        generators = "/".join(getattr(config, head).name for head in config.heads)
        return (
            f"num_streams={config.num_streams}, dim={config.dim}, generators={generators}, "
            f"mixer={config.mixer.name}, layer_index={self.layer_index}"
        )


def _initial_bias(gates: Gates, num_streams: int, index: int, which: int) -> Tensor:
    """The initial bias of pre (0) or post (1)."""
    return gates.initial_bias(num_streams, index)[which]


def _move(fn: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies `fn` to a tensor without narrowing it below float32."""
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
    """The class that defines an attribute."""
    return next(cls for cls in type(thing).__mro__ if name in vars(cls))


def _plain_routing(streams: Tensor) -> Routing:
    """The routing of x + f(x): read the first stream, keep every stream, write to every stream."""
    *lead, num_streams, _ = streams.shape
    eye = torch.eye(num_streams, dtype=streams.dtype, device=streams.device)
    return Routing(eye[0].expand(*lead, -1), eye.expand(*lead, -1, -1), torch.ones_like(eye[0]).expand(*lead, -1))
