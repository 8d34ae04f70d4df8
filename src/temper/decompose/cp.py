"""CP: alternating least squares, and the same under a moment.

A state is one factor (mode, Q) per mode, streams and features first. Letters as in steps.py, Q terms.

The best rank-Q approximation need not exist: terms may grow without limit while they cancel. A step therefore
minimises the error plus a small multiple of the terms' own squares: the cost of rounding them to the stored dtype, at
least RIDGE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from temper.decompose.descent import PLAIN, WEIGHTED, Effort, State, best
from temper.decompose.moment import Moment, Problem, solve
from temper.decompose.steps import INNER, feature_step, holding, stream_step

RIDGE = 1e-12


def cp(weight: Tensor, rank: int, effort: Effort, *, first: State) -> State:
    """The best factors found by alternating least squares.

    Args:
        first: the start that is always tried; others are the singular vectors and random factors.
    """
    small, bases = _squeezed(weight)
    grown = 1 + _ridge(effort) * torch.eye(rank, dtype=weight.dtype)

    def sweep(state: State) -> State:
        factors = list(state)
        for mode, factor in enumerate(state):
            others = factors[:mode] + factors[mode + 1 :]
            gram = _gram(others) * grown
            slope = small.movedim(mode, 0).flatten(1) @ columns(others, rank) - factor @ gram
            factors[mode] = factor + solve(gram, slope.T).T
        return balanced(tuple(factors))

    def starts() -> Iterator[State]:
        yield tuple(basis.T @ factor for basis, factor in zip(bases, first, strict=True))
        random = effort.random()
        drawn = [torch.randn(mode, rank, generator=random, dtype=weight.dtype) for mode in small.shape]
        for mode, basis in enumerate(drawn):
            vectors = torch.linalg.svd(small.movedim(mode, 0).flatten(1), full_matrices=False).U[:, :rank]
            basis[:, : vectors.shape[1]] = vectors
        yield tuple(drawn)
        for _ in range(effort.restarts):
            yield tuple(torch.randn(mode, rank, generator=random, dtype=weight.dtype) for mode in small.shape)

    found = best(
        starts(),
        sweep,
        lambda state: (small - dense(state)).square().sum().item(),
        effort,
        exact=1e-28 * weight.square().sum().item(),
        defaults=replace(PLAIN, trial=30),
        extrapolate=True,
    )
    return tuple(basis @ factor for basis, factor in zip(bases, found, strict=True))


def weighted_cp(weight: Tensor, rank: int, moment: Moment, effort: Effort, *, first: State) -> State:
    """The best factors found in the measure of a moment; not worse than the plain ones."""
    problem = Problem(moment, weight.flatten(2))
    ridge = _ridge(effort)
    grown = 1 + ridge * torch.eye(rank, dtype=weight.dtype)

    def around(part: Problem, state: State) -> State:
        """The best stream factor, then the best factor of every output."""
        stream, feature, *outs = state
        rows_RO, mixed_QR = _split(outs)
        stream = stream_step(part, rows_RO, stream, mixed_QR[:, None] * feature.T[:, :, None])
        ins_NDQ = stream[:, None] * feature
        flat = ins_NDQ.flatten(0, 1)
        gram_in = flat.T @ part.moment.apply(ins_NDQ).flatten(0, 1)
        wanted_QO = flat.T @ part.seen.flatten(0, 1)
        for mode, factor in enumerate(outs):
            others = outs[:mode] + outs[mode + 1 :]
            gram = gram_in * _gram(others)
            left_over = (wanted_QO - gram_in @ columns(outs).T).view(rank, *weight.shape[2:]).movedim(mode + 1, 1)
            slope = torch.einsum("qop,pq->oq", left_over.reshape(rank, len(factor), -1), columns(others, rank))
            outs[mode] = factor + solve(gram * grown, (slope - factor * (gram.diagonal() * ridge)).T).T
        return (stream, feature, *outs)

    def sweep(state: State) -> State:
        stream, feature, *outs = state
        if rank < weight.shape[1]:
            basis, few = torch.linalg.qr(feature)
            inner = holding(problem, basis, stream[:, None] * few, columns(outs).T)
            for _ in range(INNER):
                stream, few, *outs = around(inner, (stream, few, *outs))
        else:
            stream, feature, *outs = around(problem, state)
        rows_RO, mixed_QR = _split(outs)
        spread_QQR = torch.diag_embed(mixed_QR.T).movedim(0, -1)
        return balanced((stream, feature_step(problem, rows_RO, stream, spread_QQR, feature), *outs))

    def error(state: State) -> float:
        return problem.error(state[0][:, None] * state[1], columns(state[2:]).T)

    white, (stream_root, stream_back), (feature_root, feature_back) = problem.white()
    plain = cp(weight, rank, effort, first=first)
    seen = (stream_root @ plain[0], feature_root @ plain[1], *plain[2:])
    stream, feature, *outs = cp(white.view(weight.shape), rank, effort, first=seen)
    starts = [plain, balanced((stream_back @ stream, feature_back @ feature, *outs))]
    random = effort.random()
    for _ in range(effort.restarts):
        stream, feature, *outs = (torch.randn(factor.shape, generator=random).double() for factor in plain)
        starts.append(balanced((stream_back @ stream, feature_back @ feature, *outs)))
    return best(
        starts,
        sweep,
        error,
        effort,
        exact=1e-28 * moment.square(weight),
        defaults=WEIGHTED,
        extrapolate=True,
    )


def dense(factors: Sequence[Tensor]) -> Tensor:
    """The tensor that the factors represent."""
    flat = columns(factors[:2]) @ columns(factors[2:]).T
    return flat.view(*(factor.shape[0] for factor in factors))


def columns(factors: Sequence[Tensor], rank: int = 1) -> Tensor:
    """Column by column outer product, flattened: (A, Q), (B, Q), .. -> (A * B.., Q); a row of ones for none."""
    product = torch.ones(1, rank, dtype=torch.float64)
    for factor in factors:
        product = (product[:, None] * factor).flatten(0, 1)
    return product


def _gram(factors: Sequence[Tensor]) -> Tensor:
    """columns(..)^T columns(..), without making them."""
    product = torch.ones((), dtype=torch.float64)
    for factor in factors:
        product = product * (factor.T @ factor)
    return product


def _ridge(effort: Effort) -> float:
    return max(RIDGE, effort.rounding**2)


def balanced(factors: State) -> State:
    """The same terms, each with equal norms in every mode."""
    norms = torch.stack([factor.norm(dim=0) for factor in factors])
    each = norms.log().mean(0).exp()
    scale = torch.where(norms > 0, each / norms, torch.zeros_like(norms))
    return tuple(factor * s for factor, s in zip(factors, scale, strict=True))


def _split(outs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Orthonormal rows (R, O), and (Q, R) so that the outputs are their product."""
    basis, rest = torch.linalg.qr(columns(outs))
    return basis.T, rest.T


def _squeezed(weight: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The same tensor in bases of its own column spaces, so that a long mode costs little."""
    small, bases = weight, []
    for mode in range(weight.ndim):
        vectors, scales, _ = torch.linalg.svd(weight.movedim(mode, 0).flatten(1), full_matrices=False)
        basis = vectors[:, : max(1, int((scales > 1e-14 * scales[0]).sum()))]
        small = torch.tensordot(small, basis, dims=([mode], [0])).movedim(-1, mode)
        bases.append(basis)
    return small, bases
