"""The elementwise pieces of a block, each with a backward that keeps and touches as little as it can.

Letters: B batch, T token, H head, D features. Half precision is computed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from temper.precision import widen

EPS = 1e-6


def rms_norm(x: Tensor) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) over the last axis, without parameters."""
    return _RMSNorm.apply(x)


def rotate_and_norm(x_BTHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary position embedding and then the RMS norm, of queries or keys.

        first' = first cos + second sin,   second' = second cos - first sin

    Args:
        cos: broadcastable to x, both halves alike.
        sin: the same, with the sign of the second half turned.
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
    # Whole heads with a swapped copy: strided halves cost three times as much on a CPU.
    return (x * cos).addcmul_(torch.cat((second, first), dim=-1), sin)


class _RMSNorm(torch.autograd.Function):
    # Only y is kept, which the linear layer behind it keeps anyway.
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
    # Only the result is kept, which attention keeps anyway.
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide = widen(x)
        # A rotation leaves the norm as it is.
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
