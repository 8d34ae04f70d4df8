"""Exact updates of one part of a weighted problem, the others fixed.

Every generator with ranks is What[n, d, o] = sum A[n, a] B[a, d, r] Q[r, o] with orthonormal rows of Q, and
B[a, d, r] = sum_b F[a, b, r] C[d, b]. Letters: N streams, D features, A stream rank, B feature columns,
R bottleneck, O outputs (flattened).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from temper.decompose.descent import State
from temper.decompose.moment import Moment, Problem, factor, solve

# Rounds over streams and outputs between two over the features, which are the expensive ones.
INNER = 3
# Up to this many unknowns a system is solved by elimination; above it, by conjugate gradients.
DIRECT = 1200
GRADIENTS = 25


class Outputs(NamedTuple):
    """The generator's form of Q: its rows (R, O), and an update of the outputs for X (K, O) with a free first mode."""

    rows: Callable[[State], Tensor]
    improve: Callable[[Tensor, State], State]


def basis_of(middle_ADR: Tensor) -> tuple[Tensor, Tensor]:
    """C (D, B) with orthonormal columns and F (A, B, R), so that B[a, d, r] = sum_b F[a, b, r] C[d, b]."""
    basis_DB, rest = torch.linalg.qr(middle_ADR.movedim(1, 0).flatten(1))
    num_a, _, num_r = middle_ADR.shape
    return basis_DB, rest.view(-1, num_a, num_r).movedim(0, 1)


def middle_of(mixed_ABR: Tensor, factor_DB: Tensor) -> Tensor:
    """B (A, D, R) from F and C."""
    return torch.einsum("abr,db->adr", mixed_ABR, factor_DB)


def alternate(problem: Problem, stream_NA: Tensor, middle_ADR: Tensor, outs: State, form: Outputs) -> State:
    """(A, B, outputs..) after one step in the outputs together with B, and one in the streams."""
    target, root = without_features(problem, stream_NA, middle_ADR, form.rows(outs))
    outs = form.improve(root, outs)
    rows_RO = form.rows(outs)
    middle_ADR = (target @ rows_RO.T).view(middle_ADR.shape)
    if stream_NA.shape[1] < stream_NA.shape[0]:
        stream_NA, rest = torch.linalg.qr(stream_step(problem, rows_RO, stream_NA, middle_ADR))
        middle_ADR = torch.tensordot(rest, middle_ADR, dims=1)
    return (stream_NA, middle_ADR, *outs)


def without_features(problem: Problem, stream_NA: Tensor, middle_ADR: Tensor, out_RO: Tensor) -> tuple[Tensor, Tensor]:
    """For a given A the best B for every Q, and the plain problem that remains for Q.

    Gives the target T (A * D, O) and X (K, O): the error is ||X - X Q^T Q||^2 and a constant, and B = T Q^T.
    """
    moment, weight_NDO = problem.moment, problem.weight
    num_streams, dim = moment.modes
    rank = stream_NA.shape[1]
    if rank == num_streams:
        # A is square, so T is W whatever S is.
        target = torch.linalg.solve(stream_NA, weight_NDO.flatten(1)).reshape(num_streams * dim, -1)
        values, vectors = torch.linalg.eigh(weight_NDO.flatten(0, 1).T @ problem.seen.flatten(0, 1))
        return target, values.clamp(min=0).sqrt()[:, None] * vectors.T
    slope_NDO = problem.slope(torch.tensordot(stream_NA, middle_ADR, dims=1), out_RO)
    slope = (stream_NA.T @ slope_NDO.flatten(1)).view(rank * dim, -1)
    lower = factor(moment.streams(stream_NA).reshape(rank * dim, rank * dim))
    target = middle_ADR.reshape(rank * dim, -1) @ out_RO + torch.cholesky_solve(slope, lower)
    return target, torch.linalg.qr(lower.T @ target).R


def holding(problem: Problem, basis_DB: Tensor, held_NBR: Tensor, out_RO: Tensor) -> Problem:
    """The same problem with the features held in a basis: C^T S C for S, and few features.

    Args:
        held_NBR: What in that basis, with the outputs apart.
    """
    inner = Moment(problem.moment.features(basis_DB))
    slope_NDO = problem.slope(torch.einsum("nbr,db->ndr", held_NBR, basis_DB), out_RO)
    pull_NBO = torch.einsum("ndo,db->nbo", slope_NDO, basis_DB)
    step = solve(inner.matrix, pull_NBO.flatten(0, 1)).view(pull_NBO.shape)
    return Problem(inner, held_NBR @ out_RO + step)


def stream_step(problem: Problem, out_RO: Tensor, stream_NA: Tensor, middle_ADR: Tensor) -> Tensor:
    """The best A for given B and Q."""
    moment = problem.moment
    residual_NDR = problem.weight @ out_RO.T - torch.tensordot(stream_NA, middle_ADR, dims=1)
    basis_DB, mixed_ABR = basis_of(middle_ADR)
    pairs = torch.einsum("abr,ecr->aebc", mixed_ABR, mixed_ABR)
    system = torch.einsum("nbmc,aebc->name", moment.features(basis_DB), pairs)
    pull_NA = torch.einsum("ndr,adr->na", moment.apply(residual_NDR), middle_ADR)
    size = stream_NA.numel()
    return stream_NA + solve(system.reshape(size, size), pull_NA.flatten()).view(stream_NA.shape)


def feature_step(problem: Problem, out_RO: Tensor, stream_NA: Tensor, mixed_ABR: Tensor, factor_DB: Tensor) -> Tensor:
    """The best C for given A, F and Q."""
    moment = problem.moment
    residual_NDR = problem.weight @ out_RO.T - torch.einsum("na,abr,db->ndr", stream_NA, mixed_ABR, factor_DB)
    if stream_NA.shape[1] > moment.modes[0]:
        # More columns than streams add nothing.
        mixed_ABR = torch.einsum("na,abr->nbr", stream_NA, mixed_ABR)
        stream_NA = torch.eye(moment.modes[0], dtype=stream_NA.dtype)
    inner_ADAD = moment.streams(stream_NA)
    pull_ADR = torch.tensordot(stream_NA.T, moment.apply(residual_NDR), dims=1)
    pull_DB = torch.einsum("abr,adr->db", mixed_ABR, pull_ADR)
    if factor_DB.numel() <= DIRECT:
        pairs = torch.einsum("abr,ecr->aebc", mixed_ABR, mixed_ABR)
        system = torch.einsum("adef,aebc->dbfc", inner_ADAD, pairs).reshape(factor_DB.numel(), -1)
        return factor_DB + solve(system, pull_DB.flatten()).view(factor_DB.shape)

    rank, dim = inner_ADAD.shape[:2]
    inner = inner_ADAD.reshape(rank * dim, rank * dim)

    def system_of(step_DB: Tensor) -> Tensor:
        moved = inner @ middle_of(mixed_ABR, step_DB).flatten(0, 1)
        return torch.einsum("abr,adr->db", mixed_ABR, moved.view(rank, dim, -1))

    # The system for a separable S: Y x Z from partial traces.
    by_feature = factor(inner_ADAD.diagonal(dim1=0, dim2=2).sum(-1))
    by_stream = inner_ADAD.diagonal(dim1=1, dim2=3).sum(-1) / inner.diagonal().sum()
    by_column = factor(torch.einsum("abr,ae,ecr->bc", mixed_ABR, by_stream, mixed_ABR))

    def precondition(slope: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(slope, by_feature).T, by_column).T

    return factor_DB + _conjugate_gradients(system_of, pull_DB, precondition)


def _conjugate_gradients(
    system: Callable[[Tensor], Tensor], right: Tensor, precondition: Callable[[Tensor], Tensor]
) -> Tensor:
    """A step towards system^-1 right; every iteration lowers the error of the problem it comes from."""
    step, left = torch.zeros_like(right), right
    along = close = precondition(left)
    size = torch.sum(left * close)
    enough = 1e-8 * size
    for _ in range(GRADIENTS):
        if not size > enough:
            break
        moved = system(along)
        curvature = torch.sum(along * moved)
        # Directions that S does not see have no curvature and nothing to gain.
        if not curvature > 0:
            break
        length = size / curvature
        step, left = step + length * along, left - length * moved
        close = precondition(left)
        size, last = torch.sum(left * close), size
        along = close + size / last * along
    return step
