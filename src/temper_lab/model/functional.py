"""Forward and backward of norm, rotation, MLP and the loss in chunks, which save little for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.registry import unknown
from temper.streams import no_autocast, widen

EPS = 1e-6


def rms_norm(x: Tensor) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) over the last axis, without parameters."""
    return _RMSNorm.apply(x)


def rotate_and_norm(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary position embedding and then the RMS norm, of queries or keys.

        first' = first cos + second sin,   second' = second cos - first sin

    Args:
        cos: broadcastable to x, with equal halves.
        sin: the same, with the sign of the second half flipped.
    """
    return _RotateAndNorm.apply(x_BTHD, cos, sin)


def squared_relu_mlp(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """W_down max(W_up x, 0)^2: (..., D) -> (..., D)."""
    return _SquaredReLUMLP.apply(x, up, down)


def _rstd(x: Tensor) -> Tensor:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(EPS).rsqrt_()


def _norm_backward(grad: Tensor, y: Tensor, rstd: Tensor) -> Tensor:
    grad, y = widen(grad), widen(y)
    slope = (grad * y).mean(-1, keepdim=True)
    return torch.addcmul(grad, y, slope, value=-1).mul_(rstd)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    # Works on whole heads and a swapped copy: strided halves take three times as long on a CPU.
    return (x * cos).addcmul_(torch.cat((second, first), dim=-1), sin)


class _RMSNorm(torch.autograd.Function):
    # Only y is saved, which the following linear layer saves anyway.
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        wide = widen(x)
        rstd = _rstd(wide)
        y = (wide * rstd).to(x.dtype)
        ctx.save_for_backward(y, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        y, rstd = ctx.saved_tensors
        return _norm_backward(grad, y, rstd).to(y.dtype)


class _RotateAndNorm(torch.autograd.Function):
    # Only the result is saved, which attention saves anyway.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = widen(x)
        # A rotation does not change the norm.
        rstd = _rstd(wide)
        y = _rotate(wide, cos.to(wide.dtype), sin.to(wide.dtype)).mul_(rstd).to(x.dtype)
        ctx.save_for_backward(y, rstd, cos, sin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        y, rstd, cos, sin = ctx.saved_tensors
        grad = _norm_backward(grad, y, rstd)
        return _rotate(grad, cos.to(grad.dtype), sin.to(grad.dtype).neg()).to(y.dtype), None, None


class _SquaredReLUMLP(torch.autograd.Function):
    # Of the wide layer only r = max(W_up x, 0) is kept, made in place; its square, which a linear layer would
    # keep as well, is one multiplication away. The slope 2 r is zero where the ReLU's is.
    @staticmethod
    def forward(ctx: Any, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        r = F.linear(x, up).relu_()
        # Autocast may have chosen a smaller dtype than that of x.
        ctx.save_for_backward(x.to(r.dtype), r, up, down)
        ctx.dtype = x.dtype
        return F.linear(r * r, down)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, r, up, down = ctx.saved_tensors
        shape = x.shape
        x, r, grad = x.flatten(0, -2), r.flatten(0, -2), grad.flatten(0, -2)
        grad_down = grad.T @ (r * r)
        # The 2 costs nothing on the weight and is exact there.
        grad_r = (grad @ (2 * down).to(r.dtype)).mul_(r)
        grad_x = (grad_r @ up.to(r.dtype)).view(shape)
        return grad_x.to(ctx.dtype), (grad_r.T @ x).to(up.dtype), grad_down.to(down.dtype)


CAP = 15.0
REDUCTIONS = ("mean", "sum", "none")


def chunk_size(device: torch.device) -> int:
    """The tokens of a chunk: their logits should fit a CPU's cache, or fill a GPU."""
    return 4096 if device.type == "cuda" else 512


def cap_logits(z: Tensor) -> Tensor:
    """15 tanh(z / 15), in float32."""
    return widen(z).div(CAP).tanh().mul(CAP)


def chunked_cross_entropy(
    x: Tensor, weight_VD: Tensor, targets: Tensor, *, reduction: str = "mean", chunk: int | None = None
) -> Tensor:
    """Cross entropy of 15 tanh(W x / 15) against the targets, in nats.

    For "mean" and "sum" the gradients are computed in the forward pass, while the logits of a chunk are at hand;
    for "none" the backward pass recomputes the logits.

    Args:
        x: (..., D).
        targets: ids, (...).
        reduction: "mean", "sum" or "none", which gives a loss for every token.
        chunk: the tokens of a chunk.
    """
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    if targets.shape != x.shape[:-1]:
        raise ValueError(f"targets have shape {tuple(targets.shape)}; expected {tuple(x.shape[:-1])}")
    chunk = chunk or chunk_size(x.device)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        x = x.to(torch.get_autocast_dtype(device))
    arguments = (x.flatten(0, -2), weight_VD, targets.flatten(), chunk)
    if reduction == "none":
        return _TokenLosses.apply(*arguments).view(targets.shape)
    total = _SummedLoss.apply(*arguments, torch.is_grad_enabled())
    return total / targets.numel() if reduction == "mean" else total


def _shares(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The loss of every token of a chunk, softmax(logits), and s with logits = 15 (2 s - 1)."""
    # tanh(z / 15) = 2 sigmoid(2 z / 15) - 1; a shift of all logits is nothing to a softmax, and a
    # sigmoid takes half the time of a tanh.
    s_nV = widen((x * (2 / CAP)) @ weight.T).sigmoid_()
    p_nV = torch.softmax(s_nV * (2 * CAP), dim=-1)
    loss_n = p_nV.gather(-1, targets[:, None]).squeeze(-1).log_().neg_()
    return loss_n, p_nV, s_nV


def _slopes(p_nV: Tensor, s_nV: Tensor, targets: Tensor, dtype: torch.dtype) -> Tensor:
    """d loss / d (2 z / 15) / (2 * 15), in the memory of p."""
    p_nV.scatter_add_(-1, targets[:, None], p_nV.new_full((1, 1), -1).expand(len(targets), 1))
    return torch.ops.aten.sigmoid_backward.grad_input(p_nV, s_nV, grad_input=p_nV).to(dtype)


# Converts those slopes to d loss / d z: d (2 z / 15) / d z times the factor 2 * 15 that was left out.
_SLOPE = 4.0


class _SummedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, with_grad: bool) -> Tensor:
        need_x, need_weight = (with_grad and need for need in ctx.needs_input_grad[:2])
        total = torch.zeros((), dtype=widen(x[:0]).dtype, device=x.device)
        grad_x = torch.empty_like(x) if need_x else None
        # A sum over chunks, so never in half precision.
        grad_weight = widen(torch.zeros_like(weight)) if need_weight else None
        with no_autocast(x):
            cast = weight.to(x.dtype)
            for start in range(0, len(x), chunk):
                part, part_targets = x[start : start + chunk], targets[start : start + chunk]
                loss_n, p_nV, s_nV = _shares(part, cast, part_targets)
                total += loss_n.sum()
                if not (need_x or need_weight):
                    continue
                slope_nV = _slopes(p_nV, s_nV, part_targets, x.dtype)
                if grad_x is not None:
                    torch.mm(slope_nV, cast, out=grad_x[start : start + chunk])
                if grad_weight is not None:
                    _add_product(grad_weight, slope_nV, part)
        ctx.save_for_backward(*(grad for grad in (grad_x, grad_weight) if grad is not None))
        ctx.needed, ctx.dtype = (need_x, need_weight), weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        grad_x = saved.pop(0) * (grad * _SLOPE) if ctx.needed[0] else None
        grad_weight = saved.pop(0).mul(grad * _SLOPE).to(ctx.dtype) if ctx.needed[1] else None
        return grad_x, grad_weight, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        ctx.save_for_backward(x, weight, targets)
        ctx.chunk = chunk
        with no_autocast(x):
            cast = weight.to(x.dtype)
            parts = zip(x.split(chunk), targets.split(chunk), strict=True)
            return torch.cat([_shares(part, cast, part_targets)[0] for part, part_targets in parts])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_n: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, targets = ctx.saved_tensors
        cast = weight.to(x.dtype)
        grad_x, grad_weight = torch.empty_like(x), widen(torch.zeros_like(weight))
        for start in range(0, len(x), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            _, p_nV, s_nV = _shares(x[rows], cast, targets[rows])
            slope_nV = _slopes(p_nV, s_nV, targets[rows], p_nV.dtype)
            slope_nV = slope_nV.mul_(grad_n[rows, None] * _SLOPE).to(x.dtype)
            torch.mm(slope_nV, cast, out=grad_x[rows])
            _add_product(grad_weight, slope_nV, x[rows])
        return grad_x, grad_weight.to(weight.dtype), None, None


def _add_product(total_VD: Tensor, slope_nV: Tensor, x_nD: Tensor) -> None:
    if slope_nV.dtype == total_VD.dtype:
        total_VD.addmm_(slope_nV.T, x_nD)
    else:
        total_VD += slope_nV.T @ x_nD
