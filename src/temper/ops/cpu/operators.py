"""The native kernels as CPU implementations of the `temper::` operators."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from temper.ops import schema
from temper.ops.cpu import build
from temper.ops.plan import MIXER_KINDS, SiteSpec

# torch dtype -> C++ element type.
ELEMENT_TYPES = {torch.float32: "float", torch.bfloat16: "temper::BFloat16", torch.float64: "double"}
# The kernel projects by itself up to this size of in_map; above, a matrix product is faster.
PROJECT_IN_KERNEL_BYTES = 1_500_000


def operator(name: str, tensors: Sequence[Tensor | None]) -> Callable[..., Any]:
    """An operator for these tensors, called directly unless a tracer, mode or profiler must see it."""
    if schema.must_dispatch("cpu", tensors):
        dispatched: Callable[..., Any] = getattr(torch.ops.temper, name)
        return dispatched
    return _IMPLS[name]


class _Plan(ctypes.Structure):
    """`Plan` of native/plan.h, field by field."""

    _fields_ = (
        ("streams", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("rows", ctypes.c_int64 * 3),
        ("logits", ctypes.c_int64),
        ("direct", ctypes.c_int64 * 3),
        ("clamp", ctypes.c_int64),
        ("mixer", ctypes.c_int64),
        ("iters", ctypes.c_int64),
        ("last_columns", ctypes.c_int64),
        ("num_factors", ctypes.c_int64),
        ("factors", ctypes.POINTER(ctypes.c_int64)),
        ("tables", ctypes.POINTER(ctypes.c_uint8)),
        ("norm_eps", ctypes.c_double),
        ("pre_eps", ctypes.c_double),
        ("tol", ctypes.c_double),
        ("eps", ctypes.c_double),
    )


def _prepare(ints: Sequence[int], floats: Sequence[float]) -> tuple[SiteSpec, _Plan, Any]:
    """The spec, the structure that the kernels read, and a pointer to it."""
    return _prepared(tuple(ints), tuple(floats))


@lru_cache(maxsize=1024)
def _prepared(ints: tuple[int, ...], floats: tuple[float, ...]) -> tuple[SiteSpec, _Plan, Any]:
    spec = SiteSpec.from_packed(ints, floats)
    assert spec.mixer is not None
    mixer, factors = spec.mixer, spec.mixer.factors
    tables = _tables(factors)
    plan = _Plan(
        streams=spec.num_streams,
        dim=spec.dim,
        rows=(ctypes.c_int64 * 3)(*spec.rows),
        logits=spec.num_logits,
        direct=(ctypes.c_int64 * 3)(*spec.direct),
        clamp=spec.norm_clamp,
        mixer=MIXER_KINDS.index(mixer.kind),
        iters=mixer.iters,
        last_columns=mixer.last_columns,
        num_factors=len(factors),
        factors=(ctypes.c_int64 * max(1, len(factors)))(*factors),
        tables=(ctypes.c_uint8 * max(1, len(tables)))(*tables),
        norm_eps=spec.norm_eps,
        pre_eps=spec.pre_eps,
        tol=mixer.tol,
        eps=mixer.eps,
    )
    return spec, plan, ctypes.byref(plan)


def _tables(factors: tuple[int, ...]) -> bytes:
    """Every permutation of every factor, in the order of the logits."""
    return b"".join(bytes(permutation) for size in factors for permutation in itertools.permutations(range(size)))


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    library = build.library(ELEMENT_TYPES[dtype])
    if library is None:
        raise RuntimeError("the native kernels cannot be built here: `temper.list_backends()` says why")
    kernel = getattr(library, name)
    kernel.restype = None
    pointers, flags = _ARGUMENTS[name.removesuffix("_other")]
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_int] * flags, *[ctypes.c_void_p] * pointers]
    return kernel


# The number of pointer arguments of a kernel, and of integers before them: threads, and whether to project.
_ARGUMENTS = {
    "begin": (8, 2),
    "begin_backward": (15, 2),
    "finish": (4, 1),
    "finish_backward": (6, 1),
    "finish_begin": (11, 1),
    "finish_begin_backward": (19, 1),
    "mixer": (4, 1),
    "fold": (4, 0),
    "fold_backward": (5, 0),
}


def _launch(
    name: str,
    dtype: torch.dtype,
    numbers: tuple[Any, ...],
    inputs: tuple[Tensor | None, ...],
    outputs: tuple[Tensor | None, ...],
) -> None:
    """Calls a kernel with contiguous inputs, which are kept alive during the call."""
    # Comprehensions: a call of `append` for every tensor would be a sixth of a site's Python calls.
    held = [None if tensor is None else tensor.contiguous() for tensor in inputs]
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in (*held, *outputs)]
    _kernel(name, dtype)(*numbers, *pointers)


def _run_fold(tensors: list[Tensor], generators: list[int], sizes: list[int], half: bool) -> tuple[Tensor, ...]:
    results = schema.SHAPES["fold"](tensors, generators, sizes, half)
    in_map, out, bias = results
    _launch_fold("fold", generators, tensors, half, (in_map.data_ptr(), out.data_ptr(), bias.data_ptr()))
    return results


def _run_fold_backward(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: list[Tensor], generators: list[int], half: bool
) -> list[Tensor]:
    results = schema.SHAPES["fold_backward"](d_in, d_out, d_bias, tensors, generators, half)
    d_in, d_out, d_bias = d_in.contiguous(), d_out.contiguous(), d_bias.contiguous()
    pointers = (d_in.data_ptr(), d_out.data_ptr(), d_bias.data_ptr(), _pointers(results)[0])
    _launch_fold("fold_backward", generators, tensors, half, pointers)
    return results


def _launch_fold(
    name: str, generators: Sequence[int], tensors: Sequence[Tensor], half: bool, pointers: tuple[Any, ...]
) -> None:
    kernel = _kernel(name, torch.bfloat16 if half else tensors[0].dtype)
    given, held = _pointers(tensors)
    kernel(_generators(tuple(generators)), torch.get_num_threads(), given, *pointers)
    del held


def _pointers(tensors: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
    """An array of pointers to the contiguous tensors, and the objects that must outlive it."""
    held = list(map(Tensor.contiguous, tensors))
    array = (ctypes.c_void_p * len(held))(*map(Tensor.data_ptr, held))
    return array, held


@lru_cache(maxsize=1024)
def _generators(numbers: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _projects(spec: SiteSpec, dtype: torch.dtype) -> bool:
    # A matrix product would need a float32 copy of half-precision streams.
    return dtype == torch.bfloat16 or 4 * spec.num_rows * spec.num_streams * spec.dim <= PROJECT_IN_KERNEL_BYTES


def _run_begin(
    streams: Tensor, in_map: Tensor, out: Tensor, bias: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, ...]:
    spec, _, pointer = _prepare(ints, floats)
    results = schema.SHAPES["begin"](streams, in_map, out, bias, ints, floats)
    projects = _projects(spec, streams.dtype)
    if not projects:
        torch.mm(streams.flatten(1), in_map.flatten(1).T, out=results[2])
    numbers = (pointer, streams.shape[0], torch.get_num_threads(), int(projects))
    _launch("begin", streams.dtype, numbers, (streams, in_map, out, bias), results)
    return results


def _run_begin_backward(
    grad: Tensor | None,
    d_x: Tensor | None,
    d_weights: Tensor | None,
    streams: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    weights: Tensor,
    z: Tensor,
    norms: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    spec, _, pointer = _prepare(ints, floats)
    projects = _projects(spec, streams.dtype)
    inputs = (grad, d_x, d_weights, streams, in_map, out, bias, weights, z, norms)
    results = schema.SHAPES["begin_backward"](*inputs, ints, floats)
    d_streams, d_in, d_out, d_bias = results
    d_z = None if projects else torch.empty_like(z)
    numbers = (pointer, streams.shape[0], torch.get_num_threads(), int(projects))
    _launch("begin_backward", streams.dtype, numbers, inputs, (d_streams, d_in, d_z, d_out, d_bias))
    if d_z is not None:
        d_streams.flatten(1).addmm_(d_z, in_map.flatten(1))
        torch.mm(d_z.T, streams.flatten(1), out=d_in.flatten(1))
    return results


def _run_finish(streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    result = streams.new_empty(streams.shape)
    _write_next(result, streams, y, weights, ints, floats)
    return result


def _run_finish_in_place(streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]) -> None:
    if streams.is_contiguous():
        _write_next(streams, streams, y, weights, ints, floats)
    else:
        streams.copy_(_run_finish(streams, y, weights, ints, floats))


def _write_next(
    target: Tensor, streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]
) -> None:
    name = "finish" if y.dtype == streams.dtype else "finish_other"
    numbers = (_prepare(ints, floats)[2], streams.shape[0], torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (streams, y, weights), (target,))


def _run_finish_backward(
    grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, ints: list[int], floats: list[float]
) -> tuple[Tensor, Tensor]:
    results: tuple[Tensor, Tensor] = schema.SHAPES["finish_backward"](grad, streams, y, weights, ints, floats)
    name = "finish_backward" if y.dtype == streams.dtype else "finish_backward_other"
    numbers = (_prepare(ints, floats)[2], streams.shape[0], torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (grad, streams, y, weights), results)
    return results


def _run_finish_begin(
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    following = streams.new_empty(streams.shape)
    return following, *_chain(following, streams, y, weights, in_map, out, bias, ints, floats)


def _run_finish_begin_in_place(streams: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    if streams.is_contiguous():
        return _chain(streams, streams, *rest)
    following, *begun = _run_finish_begin(streams, *rest)
    streams.copy_(following)
    return tuple(begun)


def _chain(
    following: Tensor,
    streams: Tensor,
    y: Tensor,
    weights: Tensor,
    in_map: Tensor,
    out: Tensor,
    bias: Tensor,
    ints: list[int],
    floats: list[float],
) -> tuple[Tensor, ...]:
    """Writes the next streams, and returns the next site's input and routing."""
    spec, _, pointer = _prepare(ints, floats)
    if not _projects(spec, streams.dtype):
        # A matrix product runs between the two kernels.
        _write_next(following, streams, y, weights, ints, floats)
        return _run_begin(following, in_map, out, bias, ints, floats)
    begun: tuple[Tensor, ...] = schema.SHAPES["begin"](streams, in_map, out, bias, ints, floats)
    name = "finish_begin" if y.dtype == streams.dtype else "finish_begin_other"
    numbers = (pointer, streams.shape[0], torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (streams, y, weights, in_map, out, bias), (following, *begun))
    return begun


def _run_finish_begin_backward(
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
    spec, _, pointer = _prepare(ints, floats)
    later = (grad, d_x, d_next_weights, following, in_map, out, bias, next_weights, z, norms)
    earlier = (streams, y, weights)
    if not _projects(spec, streams.dtype):
        gradient = _run_begin_backward(*later, ints, floats)
        return *gradient, *_run_finish_backward(gradient[0], *earlier, ints, floats)
    results: tuple[Tensor, ...] = schema.SHAPES["finish_begin_backward"](*later, *earlier, ints, floats)
    name = "finish_begin_backward" if y.dtype == streams.dtype else "finish_begin_backward_other"
    numbers = (pointer, streams.shape[0], torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (*later, *earlier), results)
    return results


def _run_mix(logits: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    res: Tensor = schema.SHAPES["mix"](logits, ints, floats)
    _launch_mixer(ints, floats, (logits, None, None), res)
    return res


def _run_mix_backward(logits: Tensor, res: Tensor, grad: Tensor, ints: list[int], floats: list[float]) -> Tensor:
    d_logits = logits.new_empty(logits.shape)
    _launch_mixer(ints, floats, (logits, res, grad), d_logits)
    return d_logits


def _launch_mixer(
    ints: list[int], floats: list[float], inputs: tuple[Tensor, Tensor | None, Tensor | None], target: Tensor
) -> None:
    logits = inputs[0]
    numbers = (_prepare(ints, floats)[2], logits.shape[0], torch.get_num_threads())
    _launch("mixer", logits.dtype, numbers, inputs, (target,))


_IMPLS: dict[str, Callable[..., Any]] = {
    "fold": _run_fold,
    "fold_backward": _run_fold_backward,
    "begin": _run_begin,
    "begin_backward": _run_begin_backward,
    "finish": _run_finish,
    "finish_": _run_finish_in_place,
    "finish_backward": _run_finish_backward,
    "finish_begin": _run_finish_begin,
    "finish_begin_": _run_finish_begin_in_place,
    "finish_begin_backward": _run_finish_begin_backward,
    "mix": _run_mix,
    "mix_backward": _run_mix_backward,
}
schema.register("CPU", _IMPLS)
