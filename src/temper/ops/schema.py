"""The `temper::` operators: their schemas, their output shapes, and when torch's dispatcher may be skipped.

A backend that runs kernels on a device registers them here, under the device's dispatch key. Operators carry a site's
spec as integers and floats, so that graphs that hold them can be saved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from temper.ops.plan import SiteSpec


def _empty(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous tensors like these; asking for their shapes in Python would take twice as long."""
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _fold_shapes(tensors: list[Tensor], generators: list[int], sizes: list[int], half: bool) -> tuple[Tensor, ...]:
    (num_streams, dim, *_), (rows, maps, biases), like = generators, sizes, tensors[0]
    return like.new_empty(rows, num_streams, dim), like.new_empty(maps), like.new_empty(biases)


def _fold_backward_shapes(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: list[Tensor], generators: list[int], half: bool
) -> list[Tensor]:
    return _empty(tensors)


def _begin_shapes(
    streams: Tensor, in_map: Tensor, out: Tensor, bias: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, ...]:
    spec = SiteSpec.from_packed(ints, floats)
    tokens, _, dim = streams.shape
    return (
        streams.new_empty(tokens, dim),
        in_map.new_empty(tokens, spec.num_weights),
        in_map.new_empty(tokens, spec.num_rows),
        in_map.new_empty(tokens, 2),
    )


def _begin_backward_shapes(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    *_: Any,
) -> tuple[Tensor, ...]:
    return tuple(_empty((streams, in_map, out, bias)))


def _finish_shape(streams: Tensor, *_: Any) -> Tensor:
    return streams.new_empty(streams.shape)


def _finish_backward_shapes(
    grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _finish_begin_shapes(
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    return streams.new_empty(streams.shape), *_begin_shapes(streams, in_map, out, bias, ints, floats)


def _finish_begin_in_place_shapes(streams: Tensor, y: Tensor, weights: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return _begin_shapes(streams, *rest)


def _finish_begin_backward_shapes(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_next_weights: Tensor | None,
    following: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    next_weights: Tensor,
    z: Tensor,
    norms: Tensor,
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    return tuple(_empty((following, in_map, out, bias, y, weights)))


def _mix_shape(logits: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    n = SiteSpec.from_packed(ints, floats).num_streams
    return logits.new_empty(logits.shape[0], n, n)


def _mix_backward_shape(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape)


_FOLDED, _SPEC = "Tensor in_map, Tensor out, Tensor bias", "int[] ints, float[] floats"
_SCHEMAS: tuple[tuple[str, Callable[..., Any]], ...] = (
    ("fold(Tensor[] tensors, int[] generators, int[] sizes, bool half) -> (Tensor, Tensor, Tensor)", _fold_shapes),
    (
        "fold_backward(Tensor d_in, Tensor d_out, Tensor d_bias, Tensor[] tensors, int[] generators, bool half) "
        "-> Tensor[]",
        _fold_backward_shapes,
    ),
    (f"begin(Tensor streams, {_FOLDED}, {_SPEC}) -> (Tensor, Tensor, Tensor, Tensor)", _begin_shapes),
    (
        f"begin_backward(Tensor? grad, Tensor? d_x, Tensor? d_weights, Tensor streams, {_FOLDED}, Tensor weights, "
        f"Tensor z, Tensor norms, {_SPEC}) -> (Tensor, Tensor, Tensor, Tensor)",
        _begin_backward_shapes,
    ),
    (f"finish(Tensor streams, Tensor y, Tensor weights, {_SPEC}) -> Tensor", _finish_shape),
    (f"finish_(Tensor(a!) streams, Tensor y, Tensor weights, {_SPEC}) -> ()", lambda *_: None),
    (
        f"finish_backward(Tensor grad, Tensor streams, Tensor y, Tensor weights, {_SPEC}) -> (Tensor, Tensor)",
        _finish_backward_shapes,
    ),
    (
        f"finish_begin(Tensor streams, Tensor y, Tensor weights, {_FOLDED}, {_SPEC}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _finish_begin_shapes,
    ),
    (
        f"finish_begin_(Tensor(a!) streams, Tensor y, Tensor weights, {_FOLDED}, {_SPEC}) "
        "-> (Tensor, Tensor, Tensor, Tensor)",
        _finish_begin_in_place_shapes,
    ),
    (
        f"finish_begin_backward(Tensor? grad, Tensor? d_x, Tensor? d_next_weights, Tensor following, {_FOLDED}, "
        f"Tensor next_weights, Tensor z, Tensor norms, Tensor streams, Tensor y, Tensor weights, {_SPEC}) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
        _finish_begin_backward_shapes,
    ),
    (f"mix(Tensor logits, {_SPEC}) -> Tensor", _mix_shape),
    (f"mix_backward(Tensor logits, Tensor res, Tensor grad, {_SPEC}) -> Tensor", _mix_backward_shape),
)

_library = torch.library.Library("temper", "DEF")
SHAPES = {schema.split("(")[0]: shapes for schema, shapes in _SCHEMAS}
for _schema, _ in _SCHEMAS:
    _library.define(_schema)


def register(key: str, impls: Mapping[str, Callable[..., Any]]) -> None:
    """Adds implementations of the operators, by name, under a dispatch key ("CPU", "CUDA", ..)."""
    for name, function in impls.items():
        _library.impl(name, function, key)


# The Meta kernel doubles as the fake kernel for compile and export.
register("Meta", SHAPES)


def _find_watchers() -> tuple[Callable[[], object], ...]:
    """Tracers, modes, functional transforms (levels count from one) and the profiler: they must see every operator."""
    try:
        return (
            torch.compiler.is_compiling,
            torch._C._is_tracing,
            torch._C._len_torch_dispatch_stack,
            torch._C._functorch.maybe_current_level,
            torch._C._autograd._profiler_enabled,
        )
    except AttributeError:
        # This torch version names them differently: always dispatching is slower but correct.
        return (lambda: True,)


_WATCHERS = _find_watchers()
_PLAIN = (Tensor, torch.nn.Parameter)
# `tensor.device.type` takes five times as long, and a site asks some sixty times.
_IS_ON = {"cpu": attrgetter("is_cpu"), "cuda": attrgetter("is_cuda")}


def must_dispatch(device: str, tensors: Sequence[Tensor | None]) -> bool:
    """Whether an operator on these tensors must go through torch's dispatcher (docs/LOG.md: what skipping it saves)."""
    # Plain loops: a generator expression would be a Python call for every item of every call.
    for is_watching in _WATCHERS:
        if is_watching():
            return True
    is_on = _IS_ON[device]
    # `any` of a generator takes half as long again.
    for tensor in tensors:  # noqa: SIM110
        # Subclasses and tensors of other devices have no data pointer here.
        if tensor is not None and (type(tensor) not in _PLAIN or not is_on(tensor)):
            return True
    return False
