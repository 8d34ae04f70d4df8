"""The measure of a weighted problem: tr(E^T S E), S the second moment of the inputs.

Letters: N streams, D features, A stream rank, B feature columns, R bottleneck, O outputs (flattened).
"""

from __future__ import annotations

import torch
from torch import Tensor

# How much of the mean diagonal is added to a linear system. As a system is solved for a step and not
# for a value, this only makes steps shorter where S sees nothing; the measure itself stays what it is.
NUDGE = 1e-10


class Moment:
    """S = E[vec(Hhat) vec(Hhat)^T] as a tensor (N, D, N, D)."""

    def __init__(self, tensor_NDND: Tensor) -> None:
        self.tensor = tensor_NDND
        self.modes = (tensor_NDND.shape[0], tensor_NDND.shape[1])

    @property
    def matrix(self) -> Tensor:
        return self.tensor.flatten(2).flatten(0, 1)

    def apply(self, x: Tensor) -> Tensor:
        """S x for x (N, D, ...)."""
        return (self.matrix @ x.flatten(0, 1).flatten(1)).view(x.shape)

    def square(self, x: Tensor) -> float:
        """tr(x^T S x); clamped, because rounding can make it negative."""
        return max(0.0, torch.sum(x * self.apply(x)).item())

    def streams(self, factor_NA: Tensor) -> Tensor:
        """(A x I)^T S (A x I) as (A, D, A, D)."""
        num_streams, dim = self.modes
        rank = factor_NA.shape[1]
        left_ADND = (factor_NA.T @ self.tensor.reshape(num_streams, -1)).view(rank * dim, num_streams, dim)
        return (factor_NA.T @ left_ADND).view(rank, dim, rank, dim)

    def features(self, factor_DB: Tensor) -> Tensor:
        """(I x C)^T S (I x C) as (N, B, N, B)."""
        num_streams, dim = self.modes
        rank = factor_DB.shape[1]
        right_NDNB = (self.tensor.reshape(-1, dim) @ factor_DB).view(num_streams, dim, num_streams * rank)
        return (factor_DB.T @ right_NDNB).view(num_streams, rank, num_streams, rank)

    def roots(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """For streams and features: Y^(1/2) and its inverse, where Y x Z (partial traces) is the S that separates."""
        by_stream = self.tensor.diagonal(dim1=1, dim2=3).sum(-1)
        by_feature = self.tensor.diagonal(dim1=0, dim2=2).sum(-1)
        return _roots(by_stream), _roots(by_feature / by_feature.diagonal().sum())


class Problem:
    """A weight (N, D, O) to come close to in the measure of a moment."""

    def __init__(self, moment: Moment, weight_NDO: Tensor) -> None:
        self.moment, self.weight = moment, weight_NDO
        self.seen = moment.apply(weight_NDO)

    def white(self) -> tuple[Tensor, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """W (N, D, O) in the measure of the S that separates, and that measure's roots and inverses for N and for D."""
        streams, features = self.moment.roots()
        return torch.einsum("nm,dc,mco->ndo", streams[0], features[0], self.weight), streams, features

    def slope(self, ins_NDR: Tensor, out_RO: Tensor) -> Tensor:
        """S (W - What), half the negative gradient, for What = ins out: S meets R columns and not O."""
        return self.seen - self.moment.apply(ins_NDR) @ out_RO

    def error(self, ins_NDR: Tensor, out_RO: Tensor) -> float:
        """tr((W - What)^T S (W - What)); as one side is a plain difference, it keeps its digits when both are close."""
        return max(0.0, torch.sum((self.weight - ins_NDR @ out_RO) * self.slope(ins_NDR, out_RO)).item())


def _roots(matrix: Tensor) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(matrix)
    # Limits how far rarely seen directions are stretched.
    root = values.clamp(min=1e-8 * values[-1].item()).sqrt()
    return vectors * root @ vectors.T, vectors / root @ vectors.T


def factor(matrix: Tensor) -> Tensor:
    """The Cholesky factor of a symmetric semidefinite matrix, with a growing ridge until it exists."""
    nudge = NUDGE * max(matrix.diagonal().mean().item(), torch.finfo(matrix.dtype).tiny)
    for _ in range(12):
        nudged = matrix.clone()
        nudged.diagonal().add_(nudge)
        lower, failed = torch.linalg.cholesky_ex(nudged)
        if not failed:
            return lower
        nudge *= 10
    raise ValueError("the moment is not positive semidefinite: expected E[x x^T] of real inputs x")


def solve(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix^-1 right for a symmetric semidefinite matrix and a vector or matrix."""
    columns = right if right.ndim == 2 else right[:, None]
    return torch.cholesky_solve(columns, factor(matrix)).view(right.shape)
