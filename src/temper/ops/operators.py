"""The native kernels as torch operators with fake kernels.

The kernels are in `native/`; this file gives them tensors. Operators carry the plan as
numbers, so that graphs that hold them can be saved.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from temper.ops import build
from temper.ops.plan import KINDS, Plan

# How the kernels call what torch calls so.
STORED = {torch.float32: "float", torch.bfloat16: "temper::BFloat16", torch.float64: "double"}
# Up to so many bytes of maps the kernel itself projects; above, a matrix product is faster than its passes.
PROJECTED = 1_500_000
_PLAIN = (Tensor, torch.nn.Parameter)


def _watchers() -> tuple[Callable[[], object], ...]:
    """Who has to see every operator: tracers, modes, functional transforms (levels count from one), the profiler."""
    try:
        return (
            torch.compiler.is_compiling,
            torch._C._is_tracing,
            torch._C._len_torch_dispatch_stack,
            torch._C._functorch.maybe_current_level,
            torch._C._autograd._profiler_enabled,
        )
    except AttributeError:
        # A torch that has other names for them: better slow than unseen.
        return (lambda: True,)


_WATCHERS = _watchers()


def operator(name: str, *tensors: Tensor | None) -> Callable[..., Any]:
    """An operator for these tensors, past torch's dispatcher if nobody would know (docs/LOG.md: what that saves)."""
    # Other kinds of tensor have no memory of their own, or none here.
    if not any(watches() for watches in _WATCHERS) and all(
        tensor is None or (type(tensor) in _PLAIN and tensor.is_cpu) for tensor in tensors
    ):
        return _DOES[name]
    dispatched: Callable[..., Any] = getattr(torch.ops.temper, name)
    return dispatched


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


def _prepare(whole: list[int], real: list[float]) -> tuple[Plan, _Plan, Any]:
    """The plan, the structure that the kernels read, and a pointer to it."""
    return _prepared(tuple(whole), tuple(real))


@lru_cache(maxsize=1024)
def _prepared(whole: tuple[int, ...], real: tuple[float, ...]) -> tuple[Plan, _Plan, Any]:
    plan = Plan.from_numbers(whole, real)
    assert plan.native is not None
    mixer, factors = plan.native, plan.native.factors
    tables = _tables(factors)
    raw = _Plan(
        streams=plan.num_streams,
        dim=plan.dim,
        rows=(ctypes.c_int64 * 3)(*plan.rows),
        logits=plan.logits,
        direct=(ctypes.c_int64 * 3)(*plan.direct),
        clamp=plan.norm_clamp,
        mixer=KINDS.index(mixer.kind),
        iters=mixer.iters,
        last_columns=mixer.last_columns,
        num_factors=len(factors),
        factors=(ctypes.c_int64 * max(1, len(factors)))(*factors),
        tables=(ctypes.c_uint8 * max(1, len(tables)))(*tables),
        norm_eps=plan.norm_eps,
        pre_eps=plan.pre_eps,
        tol=mixer.tol,
        eps=mixer.eps,
    )
    return plan, raw, ctypes.byref(raw)


def _tables(factors: tuple[int, ...]) -> bytes:
    """Every permutation of every factor, in the order of the logits."""
    return b"".join(bytes(permutation) for size in factors for permutation in itertools.permutations(range(size)))


@cache
def _kernel(name: str, dtype: torch.dtype) -> Any:
    library = build.library(STORED[dtype])
    if library is None:
        raise RuntimeError("the native kernels cannot be built here: `temper.backends()` says why")
    kernel = getattr(library, name)
    kernel.restype = None
    pointers, flags = _ARGUMENTS[name.removesuffix("_other")]
    kernel.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_int] * flags, *[ctypes.c_void_p] * pointers]
    return kernel


# How many pointers a kernel takes, and how many small numbers before them: threads, and whether to project.
_ARGUMENTS = {
    "begin": (8, 2),
    "begin_backward": (15, 2),
    "finish": (4, 1),
    "finish_backward": (6, 1),
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
    """Calls a kernel with contiguous inputs, which live at least as long as the call."""
    tensors = [None if tensor is None else tensor.contiguous() for tensor in inputs] + list(outputs)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    _kernel(name, dtype)(*numbers, *pointers)


def _fold(tensors: list[Tensor], form: list[int], sizes: list[int], half: bool) -> tuple[Tensor, ...]:
    results = _empty_fold(tensors, form, sizes, half)
    _launch_fold("fold", form, tensors, half, [tensor.data_ptr() for tensor in results])
    return results


def _empty_fold(tensors: list[Tensor], form: list[int], sizes: list[int], half: bool) -> tuple[Tensor, ...]:
    (num_streams, dim, *_), (rows, maps, biases), like = form, sizes, tensors[0]
    return like.new_empty(rows, num_streams, dim), like.new_empty(maps), like.new_empty(biases)


def _fold_backward(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: list[Tensor], form: list[int], half: bool
) -> list[Tensor]:
    results = _empty_fold_backward(d_in, d_out, d_bias, tensors, form, half)
    given = [part.contiguous() for part in (d_in, d_out, d_bias)]
    pointers = [part.data_ptr() for part in given]
    _launch_fold("fold_backward", form, tensors, half, [*pointers, _pointers(results)])
    return results


def _empty_fold_backward(
    d_in: Tensor, d_out: Tensor, d_bias: Tensor, tensors: list[Tensor], form: list[int], half: bool
) -> list[Tensor]:
    return [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]


def _launch_fold(name: str, form: list[int], tensors: list[Tensor], half: bool, pointers: list[Any]) -> None:
    kernel = _kernel(name, torch.bfloat16 if half else tensors[0].dtype)
    given = [tensor.contiguous() for tensor in tensors]
    kernel(_form(tuple(form)), torch.get_num_threads(), _pointers(given), *pointers)


def _pointers(tensors: list[Tensor]) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@lru_cache(maxsize=1024)
def _form(numbers: tuple[int, ...]) -> Any:
    return (ctypes.c_int64 * len(numbers))(*numbers)


def _projects(plan: Plan, dtype: torch.dtype) -> bool:
    # Matrix products would want a wide copy of half-precision streams.
    return dtype == torch.bfloat16 or 4 * sum(plan.rows) * plan.num_streams * plan.dim <= PROJECTED


def _begin(
    streams: Tensor, in_map: Tensor, out: Tensor, bias: Tensor, whole: list[int], real: list[float]
) -> tuple[Tensor, ...]:
    plan, _, pointer = _prepare(whole, real)
    results = _empty_begin(streams, in_map, out, bias, whole, real)
    z = results[2]
    projects = _projects(plan, streams.dtype)
    if not projects:
        torch.mm(streams.flatten(1), in_map.flatten(1).T, out=z)
    numbers = (pointer, len(streams), torch.get_num_threads(), int(projects))
    _launch("begin", streams.dtype, numbers, (streams, in_map, out, bias), results)
    return results


def _empty_begin(
    streams: Tensor, in_map: Tensor, out: Tensor, bias: Tensor, whole: list[int], real: list[float]
) -> tuple[Tensor, ...]:
    plan = _prepare(whole, real)[0]
    tokens, _, dim = streams.shape
    shapes = (plan.num_weights, sum(plan.rows), 2)
    return streams.new_empty(tokens, dim), *(in_map.new_empty(tokens, size) for size in shapes)


def _finish(streams: Tensor, y: Tensor, weights: Tensor, whole: list[int], real: list[float]) -> Tensor:
    result = streams.new_empty(streams.shape)
    _finish_into(result, streams, y, weights, whole, real)
    return result


def _finish_in_place(streams: Tensor, y: Tensor, weights: Tensor, whole: list[int], real: list[float]) -> None:
    if streams.is_contiguous():
        _finish_into(streams, streams, y, weights, whole, real)
    else:
        streams.copy_(_finish(streams, y, weights, whole, real))


def _finish_into(
    target: Tensor, streams: Tensor, y: Tensor, weights: Tensor, whole: list[int], real: list[float]
) -> None:
    name = "finish" if y.dtype == streams.dtype else "finish_other"
    numbers = (_prepare(whole, real)[2], len(streams), torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (streams, y, weights), (target,))


def _finish_backward(
    grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, whole: list[int], real: list[float]
) -> tuple[Tensor, Tensor]:
    results = _empty_finish_backward(grad, streams, y, weights, whole, real)
    name = "finish_backward" if y.dtype == streams.dtype else "finish_backward_other"
    numbers = (_prepare(whole, real)[2], len(streams), torch.get_num_threads())
    _launch(name, streams.dtype, numbers, (grad, streams, y, weights), results)
    return results


def _empty_finish_backward(
    grad: Tensor, streams: Tensor, y: Tensor, weights: Tensor, whole: list[int], real: list[float]
) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _begin_backward(
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
    whole: list[int],
    real: list[float],
) -> tuple[Tensor, ...]:
    plan, _, pointer = _prepare(whole, real)
    projects = _projects(plan, streams.dtype)
    results = _empty_begin_backward(grad, d_x, d_weights, streams, in_map, out, bias, weights, z, norms, whole, real)
    d_streams, d_in, d_out, d_bias = results
    d_z = None if projects else torch.empty_like(z)
    numbers = (pointer, len(streams), torch.get_num_threads(), int(projects))
    inputs = (grad, d_x, d_weights, streams, in_map, out, bias, weights, z, norms)
    _launch("begin_backward", streams.dtype, numbers, inputs, (d_streams, d_in, d_z, d_out, d_bias))
    if d_z is not None:
        d_streams.flatten(1).addmm_(d_z, in_map.flatten(1))
        torch.mm(d_z.T, streams.flatten(1), out=d_in.flatten(1))
    return results


def _empty_begin_backward(
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
    whole: list[int],
    real: list[float],
) -> tuple[Tensor, ...]:
    return tuple(tensor.new_empty(tensor.shape) for tensor in (streams, in_map, out, bias))


def _mix(logits: Tensor, whole: list[int], real: list[float]) -> Tensor:
    res = _empty_mix(logits, whole, real)
    _run_mixer(whole, real, logits, None, None, res)
    return res


def _empty_mix(logits: Tensor, whole: list[int], real: list[float]) -> Tensor:
    n = _prepare(whole, real)[0].num_streams
    return logits.new_empty(len(logits), n, n)


def _mix_backward(logits: Tensor, res: Tensor, grad: Tensor, whole: list[int], real: list[float]) -> Tensor:
    target = _empty_mix_backward(logits, res, grad, whole, real)
    _run_mixer(whole, real, logits, res, grad, target)
    return target


def _run_mixer(
    whole: list[int], real: list[float], logits: Tensor, res: Tensor | None, grad: Tensor | None, target: Tensor
) -> None:
    numbers = (_prepare(whole, real)[2], len(logits), torch.get_num_threads())
    _launch("mixer", logits.dtype, numbers, (logits, res, grad), (target,))


def _empty_mix_backward(logits: Tensor, res: Tensor, grad: Tensor, whole: list[int], real: list[float]) -> Tensor:
    return logits.new_empty(logits.shape)


_FOLD, _PLAN = "Tensor in_map, Tensor out, Tensor bias", "int[] whole, float[] real"
_OPERATORS = (
    ("fold(Tensor[] tensors, int[] form, int[] sizes, bool half) -> (Tensor, Tensor, Tensor)", _fold, _empty_fold),
    (
        "fold_backward(Tensor d_in, Tensor d_out, Tensor d_bias, Tensor[] tensors, int[] form, bool half) -> Tensor[]",
        _fold_backward,
        _empty_fold_backward,
    ),
    (
        f"begin(Tensor streams, {_FOLD}, int[] whole, float[] real) -> (Tensor, Tensor, Tensor, Tensor)",
        _begin,
        _empty_begin,
    ),
    (
        f"finish(Tensor streams, Tensor y, Tensor weights, {_PLAN}) -> Tensor",
        _finish,
        lambda streams, *_: streams.new_empty(streams.shape),
    ),
    (
        f"finish_(Tensor(a!) streams, Tensor y, Tensor weights, {_PLAN}) -> ()",
        _finish_in_place,
        lambda *_: None,
    ),
    (
        f"finish_backward(Tensor grad, Tensor streams, Tensor y, Tensor weights, {_PLAN}) -> (Tensor, Tensor)",
        _finish_backward,
        _empty_finish_backward,
    ),
    (
        f"begin_backward(Tensor? grad, Tensor? d_x, Tensor? d_weights, Tensor streams, {_FOLD}, Tensor weights, "
        f"Tensor z, Tensor norms, {_PLAN}) -> (Tensor, Tensor, Tensor, Tensor)",
        _begin_backward,
        _empty_begin_backward,
    ),
    (f"mix(Tensor logits, {_PLAN}) -> Tensor", _mix, _empty_mix),
    (
        f"mix_backward(Tensor logits, Tensor res, Tensor grad, {_PLAN}) -> Tensor",
        _mix_backward,
        _empty_mix_backward,
    ),
)
_DOES = {schema.split("(")[0]: function for schema, function, _ in _OPERATORS}
_library = torch.library.Library("temper", "DEF")
for _schema, _function, _fake in _OPERATORS:
    _library.define(_schema)
    _name = _schema.split("(")[0]
    _library.impl(_name, _function, "CPU")
    # The kernel of tensors without memory is the fake kernel of every tracer.
    _library.impl(_name, _fake, "Meta")
