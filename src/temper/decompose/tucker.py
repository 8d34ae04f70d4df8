"""Tucker: HOSVD, HOOI, and the same under a moment.

A state is (core, stream factor, feature factor, output factors..). Letters as in steps.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from temper.decompose.descent import PLAIN, WEIGHTED, Effort, State, best
from temper.decompose.moment import Moment, Problem
from temper.decompose.steps import INNER, Outputs, alternate, basis_of, feature_step, holding, middle_of


def useful_ranks(modes: Sequence[int], ranks: Sequence[int]) -> tuple[int, ...]:
    """The ranks that change anything: none exceeds its mode or the product of the others."""
    useful = [min(mode, r) for mode, r in zip(modes, ranks, strict=True)]
    for _ in useful:
        useful = [min(r, math.prod(useful) // r) for r in useful]
    return tuple(useful)


def tucker(weight: Tensor, ranks: Sequence[int], effort: Effort) -> State:
    """The best core and orthonormal factors found: HOSVD, then alternating over modes (HOOI)."""
    ranks = useful_ranks(weight.shape, ranks)

    def sweep(state: State) -> State:
        factors = list(state[1:])
        for mode, r in enumerate(ranks):
            factors[mode] = leading(_project(weight, factors, but=mode), mode, r)
        return (_project(weight, factors), *factors)

    def descend(starts: list[State]) -> State:
        return best(
            starts,
            sweep,
            lambda state: (weight - dense(state)).square().sum().item(),
            effort,
            exact=1e-28 * weight.square().sum().item(),
            defaults=PLAIN,
        )

    factors = [leading(weight, mode, r) for mode, r in enumerate(ranks)]
    # Random bases sometimes lead after a few sweeps but lose in the end, so HOSVD runs to convergence first.
    starts = [descend([(_project(weight, factors), *factors)])]
    random = effort.random()
    for _ in range(effort.restarts):
        drawn = [torch.randn(factor.shape, generator=random).double() for factor in factors]
        bases = [torch.linalg.qr(factor).Q for factor in drawn]
        starts.append((_project(weight, bases), *bases))
    return descend(starts)


def weighted_tucker(weight: Tensor, ranks: Sequence[int], moment: Moment, effort: Effort) -> State:
    """The best Tucker approximation found in the measure of a moment; not worse than the plain one."""
    ranks = useful_ranks(weight.shape, ranks)
    problem = Problem(moment, weight.flatten(2))
    # Whether every B (A, D, R) has so few feature columns, so that they are free.
    free = ranks[1] == min(weight.shape[1], ranks[0] * math.prod(ranks[2:]))

    form = Outputs(_rows, lambda root, outs: _improve(root.view(-1, *weight.shape[2:]), outs))

    def sweep(state: State) -> State:
        core, stream, feature, *outs = state
        mixed = core.flatten(2)
        if free:
            stream, middle, *outs = alternate(problem, stream, middle_of(mixed, feature), tuple(outs), form)
            feature, mixed = basis_of(middle)
            return (mixed.reshape(ranks), stream, feature, *outs)
        inner = holding(problem, feature, torch.tensordot(stream, mixed, dims=1), _rows(tuple(outs)))
        for _ in range(INNER):
            stream, mixed, *outs = alternate(inner, stream, mixed, tuple(outs), form)
        feature, rest = torch.linalg.qr(feature_step(problem, _rows(tuple(outs)), stream, mixed, feature))
        return (torch.einsum("abr,cb->acr", mixed, rest).reshape(ranks), stream, feature, *outs)

    def error(state: State) -> float:
        core, stream, feature, *outs = state
        return problem.error(torch.tensordot(stream, middle_of(core.flatten(2), feature), dims=1), _rows(tuple(outs)))

    white, (_, stream_back), (_, feature_back) = problem.white()
    plain = tucker(weight, ranks, effort)
    core, stream, feature, *outs = tucker(white.view(weight.shape), ranks, effort)
    starts = [plain, _orthonormal((core, stream_back @ stream, feature_back @ feature, *outs))]
    random = effort.random()
    for _ in range(effort.restarts):
        stream, feature, *outs = (torch.randn(factor.shape, generator=random).double() for factor in plain[1:])
        # The first sweep finds the core, so none is needed.
        starts.append(_orthonormal((0 * core, stream_back @ stream, feature_back @ feature, *outs)))
    return best(starts, sweep, error, effort, exact=1e-28 * moment.square(weight), defaults=WEIGHTED)


def dense(state: State) -> Tensor:
    """The tensor that core and factors represent."""
    core, *factors = state
    for factor in factors:
        core = torch.tensordot(core, factor, dims=([0], [1]))
    return core


def leading(weight: Tensor, mode: int, rank: int) -> Tensor:
    """The leading left singular vectors of an unfolding (mode, rank)."""
    return torch.linalg.svd(weight.movedim(mode, 0).flatten(1), full_matrices=False).U[:, :rank]


def _project(weight: Tensor, factors: Sequence[Tensor], but: int | None = None) -> Tensor:
    for mode, factor in enumerate(factors):
        if mode != but:
            weight = torch.tensordot(weight, factor, dims=([mode], [0])).movedim(-1, mode)
    return weight


def _improve(root: Tensor, outs: State) -> State:
    """One round of HOOI over the outputs of X (K, O..), whose first mode is free."""
    factors = [torch.eye(root.shape[0], dtype=root.dtype), *outs]
    for mode in range(1, root.ndim):
        factors[mode] = leading(_project(root, factors, but=mode), mode, factors[mode].shape[1])
    return tuple(factors[1:])


def _rows(outs: State) -> Tensor:
    """The output factors together, (R, O)."""
    rows = outs[0].T
    for factor in outs[1:]:
        rows = torch.kron(rows, factor.T.contiguous())
    return rows


def _orthonormal(state: State) -> State:
    core, *factors = state
    parts = [torch.linalg.qr(factor) for factor in factors]
    return (_project(core, [rest.T for _, rest in parts]), *(basis for basis, _ in parts))
