"""Sinkhorn's rounds without autograd: scaling vectors where the range of numbers allows it, logarithms elsewhere.

Letters: N streams, T tokens last, so that every operation is vectorised over tokens. The axis normalised last comes
first: callers transpose if that is the columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# Beyond this spread of logits within a column the scaling vectors could leave the range of the dtype.
MAX_SPREAD = {torch.float32: 40.0, torch.float64: 300.0}


def has_values(tensor: Tensor) -> bool:
    """Whether Python can branch on the values of a tensor: not in a compiled graph, nor on fake or meta tensors."""
    return not torch.compiler.is_compiling() and type(tensor) is Tensor and not tensor.is_meta


def solve(logits_NNT: Tensor, iters: int) -> Tensor:
    """res (N, N, T) after `iters` rounds of columns, then rows."""
    return _by_token(
        logits_NNT, lambda: _solve_by_scaling(logits_NNT, iters), lambda: _rounds(logits_NNT, iters)[-1].exp()
    )


def vjp(logits_NNT: Tensor, grad_NNT: Tensor, iters: int) -> Tensor:
    """The gradient of the logits from that of res.

    In logit space a normalisation subtracts P times the sum of the gradient from the gradient; every P is recomputed.
    """
    return _by_token(
        logits_NNT,
        lambda: _vjp_by_scaling(logits_NNT, grad_NNT, iters),
        lambda: _vjp_by_logs(logits_NNT, grad_NNT, iters),
    )


def _by_token(logits_NNT: Tensor, by_scaling: Callable[[], Tensor], by_logs: Callable[[], Tensor]) -> Tensor:
    """Every token by the faster method that its own logits allow, so that it never depends on its neighbours."""
    # Where values are unavailable, or need a device synchronisation, logarithms serve all tokens.
    if not has_values(logits_NNT) or logits_NNT.device.type != "cpu" or not logits_NNT.numel():
        return by_logs()
    spread_T = (logits_NNT.amax(0) - logits_NNT.amin(0)).amax(0)
    # Not "greater than": NaN goes by logarithms too.
    is_narrow_T = spread_T <= MAX_SPREAD[logits_NNT.dtype]
    if is_narrow_T.all():
        return by_scaling()
    if not is_narrow_T.any():
        return by_logs()
    return torch.where(is_narrow_T, by_scaling(), by_logs())


def _solve_by_scaling(logits_NNT: Tensor, iters: int) -> Tensor:
    kernel, rows, columns = _scale(logits_NNT, iters)
    return kernel * rows[-1] * columns[-1]


def _vjp_by_scaling(logits_NNT: Tensor, grad_NNT: Tensor, iters: int) -> Tensor:
    kernel, rows, columns = _scale(logits_NNT, iters)
    carry = kernel * rows[-1] * columns[-1] * grad_NNT
    for k in range(iters, 0, -1):
        carry.addcmul_(kernel * columns[k], carry.sum(1, keepdim=True) * rows[k], value=-1)
        carry.addcmul_(kernel * rows[k - 1], carry.sum(0) * columns[k], value=-1)
    return carry


def _scale(logits_NNT: Tensor, iters: int) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    # A column's maximum cancels in the first normalisation.
    kernel = (logits_NNT - logits_NNT.amax(0)).exp_()
    # (N, 1, T) and (N, T).
    rows, columns = [torch.ones_like(kernel[:, :1])], [torch.ones_like(kernel[0])]
    for _ in range(iters):
        columns.append((kernel * rows[-1]).sum(0).reciprocal_())
        rows.append((kernel * columns[-1]).sum(1, keepdim=True).reciprocal_())
    return kernel, rows, columns


def _rounds(value: Tensor, iters: int) -> list[Tensor]:
    """log(res) after every normalisation."""
    steps = []
    for _ in range(iters):
        for axis in (0, 1):
            # Not `keepdim`: of a DTensor, torch 2.13 then takes the wrong axis for the sharded one.
            value = value - value.logsumexp(axis).unsqueeze(axis)
            steps.append(value)
    return steps


def _vjp_by_logs(logits_NNT: Tensor, grad_NNT: Tensor, iters: int) -> Tensor:
    steps = _rounds(logits_NNT, iters)
    carry = steps[-1].exp() * grad_NNT
    for k in range(2 * iters - 1, -1, -1):
        carry = carry - steps[k].exp() * carry.sum(k % 2, keepdim=True)
    return carry


def solve_guarded(logits_NNT: Tensor, iters: int, eps: float) -> Tensor:
    """DeepSeek-V4's form: softmax + eps, and eps in every sum that is divided by."""
    return _guarded_rounds(logits_NNT, iters, eps)[0][-1]


def vjp_guarded(logits_NNT: Tensor, grad_NNT: Tensor, iters: int, eps: float) -> Tensor:
    """The gradient of the logits: Q / (sum Q + eps) = P has dQ = (dP - sum dP P) / (sum Q + eps)."""
    values, sums, axes = _guarded_rounds(logits_NNT, iters, eps)
    carry = grad_NNT
    for value, total, axis in zip(reversed(values), reversed(sums), reversed(axes), strict=True):
        carry = (carry - (carry * value).sum(axis, keepdim=True)) / total
    start = logits_NNT.softmax(0)
    return start * (carry - (carry * start).sum(0, keepdim=True))


def _guarded_rounds(value: Tensor, iters: int, eps: float) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """The matrix after every division, what it was divided by, and along which axis."""
    value = value.softmax(0) + eps
    values, sums, axes = [], [], [1, *[0, 1] * (iters - 1)]
    for axis in axes:
        sums.append(value.sum(axis, keepdim=True) + eps)
        value = value / sums[-1]
        values.append(value)
    return values, sums, axes
