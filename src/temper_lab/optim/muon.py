"""Muon: momentum with orthogonalized updates, for the matrices inside the blocks."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from temper.registry import check_int

# One step maps every singular value s to a s + b s^3 + c s^5, which is steep at 0 and stays near 1.
A, B, C = 3.4445, -4.7750, 2.0315
# How many steps may run on the Gram matrix alone: its small eigenvalues, squares of small singular values, lose
# a digit of precision in each.
GRAM_STEPS = 3
# The most numbers that are orthogonalized at once; the matrices of a large model take several batches.
MAX_BATCH = 1 << 28
# The size from which mirroring a quarter of a symmetric product is cheaper than computing it.
SYMMETRIC_FROM = 128

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Workspace:
    """Scratch tensors that are reused from step to step; fresh pages would cost a quarter of a step."""

    def __init__(self) -> None:
        self._flat: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, role: str, shape: Iterable[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """An uninitialized tensor, valid until the same role is taken again."""
        shape = tuple(shape)
        size, key = math.prod(shape), (role, dtype, device)
        if key not in self._flat or self._flat[key].numel() < size:
            self._flat[key] = torch.empty(size, dtype=dtype, device=device)
        return self._flat[key][:size].view(shape)


def orthogonalize(batch_BMN: Tensor, *, steps: int = 5, eps: float = 1e-7, space: Workspace | None = None) -> Tensor:
    """Approximates U V^T for every matrix U S V^T of a batch, by Newton-Schulz steps in the batch's dtype.

    The batch is used as scratch, and the answer may live in `space`.
    """
    space = space or Workspace()
    num, rows, cols = batch_BMN.shape
    take = partial(space.take, dtype=batch_BMN.dtype, device=batch_BMN.device)
    other = take("other", batch_BMN.shape)
    # Transposed views put the Gram matrix on the short side; a matmul handles transposed memory as well.
    x, y = (batch_BMN.mT, other.mT) if rows > cols else (batch_BMN, other)
    short, long = x.shape[-2:]

    def square(role: str) -> Tensor:
        return take(role, (num, short, short))

    def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
        """left @ right where it is symmetric: three quarters are computed, the last one is mirrored."""
        if short < SYMMETRIC_FROM:
            return torch.bmm(left, right, out=out)
        middle = short // 2
        # Separate buffers: a batched matmul into a strided view processes the batch one by one.
        top = take("top", (num, middle, short))
        corner = take("corner", (num, short - middle, short - middle))
        torch.bmm(left[:, :middle], right, out=top)
        torch.bmm(left[:, middle:], right[:, :, middle:], out=corner)
        out[:, :middle], out[:, middle:, middle:] = top, corner
        out[:, middle:, :middle] = top[:, :, middle:].mT
        return out

    # A singular value is at most the Frobenius norm; the steps converge from anywhere in (0, 1].
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x.div_(norm.clamp_(min=eps))
    # 4 products of short^3 replace 2 of short^2 long, but only full precision survives them.
    if long >= 2 * short and x.dtype != torch.bfloat16:
        return _on_gram(x, y, steps, square, product, batch_BMN)
    gram, poly, half = square("gram"), square("poly"), square("half")
    for _ in range(steps):
        product(x, x.mT, gram)
        if x.dtype == torch.bfloat16:
            # In half precision the 3.4 on the diagonal would swamp the polynomial.
            torch.baddbmm(gram, gram, gram, beta=B, alpha=C, out=poly)
            torch.baddbmm(x, poly, x, beta=A, out=y)
        else:
            torch.bmm(_polynomial(gram, half, poly, product), x, out=y)
        x, y = y, x
    return x.mT if rows > cols else x


def _polynomial(gram: Tensor, scratch: Tensor, out: Tensor, product: Product) -> Tensor:
    """a + b G + c G^2 as a + G (b + c G), with plain products: a fused addition would copy first."""
    torch.mul(gram, C, out=scratch).diagonal(dim1=-2, dim2=-1).add_(B)
    product(gram, scratch, out).diagonal(dim1=-2, dim2=-1).add_(A)
    return out


def _on_gram(
    x: Tensor, y: Tensor, steps: int, square: Callable[[str], Tensor], product: Product, batch_BMN: Tensor
) -> Tensor:
    """The same steps on G = X X^T: X' = P X with P = a + b G + c G^2, so G' = P G P, and X is touched at the end.

    All that is multiplied on the way is a polynomial of one G: it commutes, and every product is symmetric.
    """
    gram, poly, half, total, spare = (square(role) for role in ("gram", "poly", "half", "total", "spare"))
    for start in range(0, steps, GRAM_STEPS):
        last = min(steps - start, GRAM_STEPS) - 1
        product(x, x.mT, gram)
        for index in range(last + 1):
            factor = poly if index else total
            _polynomial(gram, half, factor, product)
            if index < last:
                product(gram, factor, half)
                product(half, factor, gram)
            if index:
                product(factor, total, spare)
                total, spare = spare, total
        torch.bmm(total, x, out=y)
        x, y = y, x
    return x if x.shape == batch_BMN.shape else x.mT


def orthogonalize_flops(rows: int, cols: int, *, steps: int = 5, dtype: torch.dtype = torch.float32) -> float:
    """Floating point operations of `orthogonalize` for one matrix; of a symmetric product, three quarters."""
    short, long = sorted((rows, cols))
    square, wide = 2 * short**3, 2 * short**2 * long
    saved = 0.75 if short >= SYMMETRIC_FROM else 1.0
    if dtype == torch.bfloat16:
        return steps * (saved * wide + square + wide)
    if long < 2 * short:
        return steps * (saved * (wide + square) + wide)
    # On the Gram matrix: a polynomial in every step, its product with those before, and the next Gram matrix.
    runs = [min(steps - start, GRAM_STEPS) for start in range(0, steps, GRAM_STEPS)]
    return sum(saved * (wide + (run + 3 * (run - 1)) * square) + wide for run in runs)


class Muon(torch.optim.Optimizer):
    """W <- W - lr sqrt(max(1, rows/cols)) orthogonal(momentum), for two-dimensional weights of hidden layers.

    Float32 on CPU and bfloat16 on CUDA; matrices of equal shape share one batched matmul. Sharded parameters
    (FSDP2) are gathered, and every rank keeps its shard of the same result.

    Args:
        momentum: the decay of the running mean, with Nesterov's look-ahead.
        eps: the smallest norm to divide an update by.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.02,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        ns_steps: int = 5,
        weight_decay: float = 0.0,
        eps: float = 1e-7,
    ) -> None:
        for name, value in (("lr", lr), ("weight_decay", weight_decay), ("eps", eps)):
            if not value >= 0:
                raise ValueError(f"{name} is {value!r}; expected a number >= 0")
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum is {momentum!r}; expected a number in [0, 1)")
        check_int("ns_steps", ns_steps, 1)
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_steps": ns_steps,
            "weight_decay": weight_decay,
            "eps": eps,
        }
        self._space = Workspace()
        super().__init__(params, defaults)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._space = Workspace()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.ndim != 2:
                raise ValueError(f"Muon is for matrices, got a parameter of shape {tuple(parameter.shape)}")
            if not parameter.is_floating_point():
                raise ValueError(f"Muon is for real numbers, got a parameter of dtype {parameter.dtype}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            buckets: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    buckets[tuple(parameter.shape), parameter.dtype, parameter.device].append(parameter)
            for bucket in buckets.values():
                count = max(1, MAX_BATCH // bucket[0].numel())
                for start in range(0, len(bucket), count):
                    self._step_bucket(bucket[start : start + count], group)
        return loss

    def _step_bucket(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        momentum = group["momentum"]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        grads = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
        means = [local(self.state[parameter]["momentum"]) for parameter in parameters]
        torch._foreach_lerp_(means, grads, 1 - momentum)

        first = parameters[0]
        dtype = torch.bfloat16 if first.is_cuda else torch.promote_types(first.dtype, torch.float32)
        updates = self._space.take("updates", (len(parameters), *first.shape), dtype, first.device)
        for update, parameter, grad, mean in zip(updates, parameters, grads, means, strict=True):
            ahead = grad.lerp(mean, momentum) if group["nesterov"] else mean
            update.copy_(_gathered(ahead, parameter))
        updates = orthogonalize(updates, steps=group["ns_steps"], eps=group["eps"], space=self._space)

        rows, cols = first.shape
        scaled_lr = group["lr"] * math.sqrt(max(1, rows / cols))
        for parameter, update in zip(parameters, updates, strict=True):
            shard = local(parameter)
            if group["weight_decay"]:
                shard.mul_(1 - group["lr"] * group["weight_decay"])
            shard.add_(shard_like(update, parameter), alpha=-scaled_lr)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, for elementwise operations."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _gathered(shard: Tensor, like: Tensor) -> Tensor:
    if not isinstance(like, DTensor):
        return shard
    # Shards may be uneven, so the full shape cannot be computed from this one's.
    whole = DTensor.from_local(shard, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())
    return whole.full_tensor()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a tensor that every rank has whole, or that is sharded as `like` is already."""
    if not isinstance(like, DTensor) or isinstance(tensor, DTensor):
        return local(tensor)
    # There is nothing to send: each rank cuts out its own part.
    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))
