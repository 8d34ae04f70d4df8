"""Tensor train: TT-SVD, sweeps over pairs of cores, and the same under a moment.

A state is the chain of cores (r, mode, r'). Letters as in steps.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from temper.decompose.descent import PLAIN, WEIGHTED, Effort, State, best
from temper.decompose.moment import Moment, Problem
from temper.decompose.steps import Outputs, alternate


def useful_bonds(modes: Sequence[int], bonds: Sequence[int]) -> tuple[int, ...]:
    """The bond ranks that change anything: none exceeds a neighbour times the mode between them."""
    useful = list(bonds)
    for k in range(len(useful)):
        useful[k] = min(useful[k], (useful[k - 1] if k else 1) * modes[k])
    for k in reversed(range(len(useful))):
        useful[k] = min(useful[k], (useful[k + 1] if k + 1 < len(useful) else 1) * modes[k + 1])
    return tuple(useful)


def tt(weight: Tensor, bonds: Sequence[int], effort: Effort) -> State:
    """The best chain found: TT-SVD from both ends, then the best of every pair of neighbours in turn."""
    bonds = useful_bonds(weight.shape, bonds)
    order = tuple(reversed(range(weight.ndim)))
    mirrored = _chain(weight.permute(order), tuple(reversed(bonds)))
    starts = [_chain(weight, bonds), _to_right(weight, _mirror(mirrored))]
    return best(
        starts,
        lambda cores: _to_right(weight, _to_left(weight, cores)),
        lambda cores: (weight - dense(cores)).square().sum().item(),
        effort,
        exact=1e-28 * weight.square().sum().item(),
        defaults=PLAIN,
    )


def weighted_tt(weight: Tensor, bonds: Sequence[int], moment: Moment, effort: Effort) -> State:
    """The best chain found in the measure of a moment; not worse than the plain one."""
    bonds = useful_bonds(weight.shape, bonds)
    problem = Problem(moment, weight.flatten(2))
    form = Outputs(_rows, lambda root, outs: _improve(root.view(-1, *weight.shape[2:]), outs))

    def sweep(state: State) -> State:
        stream, *rest = alternate(problem, state[0][0], state[1], state[2:], form)
        return (stream[None], *rest)

    def error(state: State) -> float:
        return problem.error(torch.tensordot(state[0][0], state[1], dims=1), _rows(state[2:]))

    white, (_, stream_back), (_, feature_back) = problem.white()
    first, second, *rest = tt(white.view(weight.shape), bonds, effort)
    back = (stream_back @ first, torch.einsum("dc,acr->adr", feature_back, second), *rest)
    starts = [_orthonormal(tt(weight, bonds, effort)), _orthonormal(back)]
    return best(starts, sweep, error, effort, exact=1e-28 * moment.square(weight), defaults=WEIGHTED)


def dense(cores: State) -> Tensor:
    """The tensor that a chain represents."""
    product = cores[0]
    for core in cores[1:]:
        product = torch.tensordot(product, core, dims=1)
    return product.squeeze(-1).squeeze(0)


def _chain(weight: Tensor, bonds: Sequence[int]) -> State:
    """TT-SVD: one truncated SVD per bond, from left to right; all cores but the last are orthonormal."""
    cores, carry, left = [], weight.reshape(1, -1), 1
    for mode, r in zip(weight.shape, bonds, strict=False):
        unfolding = carry.reshape(left * mode, -1)
        basis = torch.linalg.svd(unfolding, full_matrices=False).U[:, :r]
        cores.append(basis.view(left, mode, -1))
        carry, left = basis.T @ unfolding, basis.shape[1]
    return (*cores, carry.view(left, weight.shape[-1], 1))


def _mirror(cores: State) -> State:
    return tuple(core.permute(2, 1, 0) for core in reversed(cores))


def _to_right(weight: Tensor, cores: State) -> State:
    """The best pair at every bond in turn.

    The cores right of a pair have to be orthonormal seen from it; those left of it come out so.
    """
    done = list(cores)
    carry = weight[None, ..., None]
    for k in range(len(cores) - 1):
        pair = carry
        for core in reversed(cores[k + 2 :]):
            pair = torch.tensordot(pair, core, dims=([-2, -1], [1, 2]))
        _, mode, r = cores[k].shape
        basis, scales, rows = torch.linalg.svd(pair.reshape(carry.shape[0] * mode, -1), full_matrices=False)
        done[k] = basis[:, :r].reshape(-1, mode, r)
        done[k + 1] = (scales[:r, None] * rows[:r]).view(r, *cores[k + 1].shape[1:])
        carry = torch.tensordot(done[k], carry, dims=([0, 1], [0, 1]))
    return tuple(done)


def _to_left(weight: Tensor, cores: State) -> State:
    order = tuple(reversed(range(weight.ndim)))
    return _mirror(_to_right(weight.permute(order), _mirror(cores)))


def _orthonormal(cores: State) -> State:
    """The same tensor with an orthonormal stream core and output cores; the features carry the rest."""
    done = list(cores)
    for k in reversed(range(2, len(done))):
        basis, rest = torch.linalg.qr(done[k].flatten(1).T)
        done[k] = basis.T.reshape(-1, *done[k].shape[1:])
        done[k - 1] = done[k - 1] @ rest.T
    basis, rest = torch.linalg.qr(done[0][0])
    return (basis[None], torch.tensordot(rest, done[1], dims=1), *done[2:])


def _improve(root: Tensor, outs: State) -> State:
    """One sweep there and back over X (K, O..) with these output cores, whose first mode is free."""
    rank = outs[0].shape[0]
    first = root.new_zeros(1, root.shape[0], rank)
    return _to_left(root, _to_right(root, (first, *outs)))[1:]


def _rows(outs: State) -> Tensor:
    """The output cores together, (R, O)."""
    product = outs[0]
    for core in outs[1:]:
        product = torch.tensordot(product, core, dims=1)
    return product.flatten(1)
