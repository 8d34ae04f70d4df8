"""The operations on streams by native kernels: the same functions as `fused`, as torch operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.ops import build
from temper.ops.fused import Begun
from temper.ops.operators import STORED, operator
from temper.ops.plan import Fold, Plan

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

MAX_STREAMS = 64


def serves(plan: Plan, mixer: Mixer, dtype: torch.dtype) -> bool:
    """Whether the kernels know the mixer and the dtype, and can be built here."""
    known = plan.native is not None and plan.num_streams <= MAX_STREAMS
    return known and dtype in STORED and build.can_load(STORED[dtype])


def fold(tensors: tuple[Tensor, ...], plan: Plan, dtype: torch.dtype) -> Fold:
    """The gain, the generators, the gates and the biases folded together, for streams of this dtype."""
    sizes = [sum(plan.rows), sum(plan.map_sizes), sum(plan.logits_of)]
    return Fold(*operator("fold", *tensors)(tensors, plan.form, sizes, dtype == torch.bfloat16))


def fold_backward(d_fold: Fold, tensors: tuple[Tensor, ...], plan: Plan, dtype: torch.dtype) -> list[Tensor]:
    """The gradients of the tensors."""
    pull = operator("fold_backward", *d_fold, *tensors)
    result: list[Tensor] = pull(*d_fold, tensors, plan.form, dtype == torch.bfloat16)
    return result


def begin(streams_TND: Tensor, fold: Fold, plan: Plan, mixer: Mixer) -> Begun:
    """x, the routing weights and what is kept for the backward."""
    return Begun(*operator("begin", streams_TND, *fold)(streams_TND, *fold, *plan.numbers))


def finish(streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
    """The next streams."""
    tensors = (streams_TND, _branch(y_TD, streams_TND), weights_TK)
    result: Tensor = operator("finish", *tensors)(*tensors, *plan.numbers)
    return result


def finish_(streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, plan: Plan) -> Tensor:
    """The next streams in the place of the streams."""
    # Through the dispatcher, which counts changes.
    torch.ops.temper.finish_(streams_TND, _branch(y_TD, streams_TND), weights_TK, *plan.numbers)
    return streams_TND


def finish_backward(
    grad_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """The gradients of y and of the routing weights."""
    tensors = (grad_TND, streams_TND, _branch(y_TD, streams_TND), weights_TK)
    d_y, d_weights = operator("finish_backward", *tensors)(*tensors, *plan.numbers)
    return d_y.to(y_TD.dtype), d_weights


def begin_backward(
    grad_TND: Tensor | None,
    d_x_TD: Tensor | None,
    d_weights_TK: Tensor | None,
    streams_TND: Tensor,
    fold: Fold,
    weights_TK: Tensor,
    z_TR: Tensor,
    norms_T2: Tensor,
    plan: Plan,
    mixer: Mixer,
) -> tuple[Tensor, Fold]:
    """The gradients of the streams and of the folded weights."""
    tensors = (grad_TND, d_x_TD, d_weights_TK, streams_TND, *fold, weights_TK, z_TR, norms_T2)
    d_streams, *d_fold = operator("begin_backward", *tensors)(*tensors, *plan.numbers)
    return d_streams, Fold(*d_fold)


def mix(logits: Tensor, mixer: Mixer) -> Tensor:
    """res of logits (T, *logit_shape)."""
    result: Tensor = torch.ops.temper.mix(logits, *mixer.plan().numbers)
    return result


def mix_backward(logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
    """The gradient of the logits."""
    result: Tensor = torch.ops.temper.mix_backward(logits, res, grad, *mixer.plan().numbers)
    return result


def _branch(y: Tensor, streams: Tensor) -> Tensor:
    """y in a dtype that the kernels take beside the streams."""
    pairs = (torch.float32, torch.bfloat16)
    return y if y.dtype == streams.dtype or {y.dtype, streams.dtype} == set(pairs) else y.to(streams.dtype)
