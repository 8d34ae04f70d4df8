"""Rank and null space of every compression: the part of the streams that the logits see (Theorem 1).

Letters: N streams, D features, R rows of a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from temper.connection import HyperConnection
from temper.generators import Generator


@dataclass(frozen=True)
class Spectrum:
    """The singular values of a linear map of Hhat (N x D), and its numerical rank.

    Args:
        values: largest first, in float64.
        rank: how many of them are not zero.
        nullity: the dimension of what the map cannot see, N D - rank.
        tolerance: up to this share of the largest, a singular value counts as zero: the rounding of the stored numbers.
    """

    values: tuple[float, ...]
    rank: int
    nullity: int
    tolerance: float


def compression_spectrum(generator: Generator) -> Spectrum:
    """The spectrum of the compression map: L(Hhat) = U^T Hhat C for Tucker, else in_map."""
    with torch.no_grad():
        return _spectrum(generator.compression(torch.float64), math.prod(generator.in_modes), _eps(generator))


def routing_spectrum(generator: Generator) -> Spectrum:
    """The spectrum of in_map (R x N D), whose row space is all that this generator's logits can depend on."""
    with torch.no_grad():
        in_map = generator.maps(torch.float64)[0].flatten(1)
        return _spectrum([in_map], math.prod(generator.in_modes), _eps(generator))


def site_spectrum(site: HyperConnection) -> Spectrum:
    """The spectrum of the in_maps of pre, res and post together, each scaled to norm one: all that a site sees."""
    if site.config.is_residual:
        raise ValueError("a residual site routes nothing: it has no maps")
    generators = [getattr(site, head).generator for head in site.config.heads]
    with torch.no_grad():
        maps = [generator.maps(torch.float64)[0].flatten(1) for generator in generators]
        # A head with small weights sees as much as one with large ones.
        stacked = torch.cat([part / part.norm().clamp_min(torch.finfo(part.dtype).tiny) for part in maps])
        return _spectrum([stacked], stacked.shape[1], max(map(_eps, generators)))


def visible_basis(generator: Generator) -> Tensor:
    """Orthonormal directions (r, N, D), in float64, that span what the logits can see."""
    with torch.no_grad():
        in_map = generator.maps(torch.float64)[0]
        _, values, rows = torch.linalg.svd(in_map.flatten(1), full_matrices=False)
        # In float64 whatever the weights are stored in: what is left out must not be seen at all.
        rank = int((values > max(in_map.shape[0], rows.shape[1]) * torch.finfo(torch.float64).eps * values[0]).sum())
        return rows[:rank].unflatten(1, generator.in_modes)


def null_project(generator: Generator, directions: Tensor) -> Tensor:
    """The part of directions (..., N, D) that the logits cannot see, in float64: the projection onto the null space."""
    if directions.shape[-2:] != generator.in_modes:
        raise ValueError(f"directions have shape {tuple(directions.shape)}; expected (..., {generator.in_modes})")
    basis_RC = visible_basis(generator).flatten(1)
    hidden = directions.double().flatten(-2)
    # Twice, as in Gram-Schmidt: one pass leaves rounding errors.
    for _ in range(2):
        hidden = hidden - (hidden @ basis_RC.T) @ basis_RC
    return hidden.unflatten(-1, generator.in_modes)


def null_direction(generator: Generator, seed: int = 0) -> Tensor:
    """A random direction (N, D) of norm one, in float64, that leaves the logits of every Hhat as they are."""
    if not isinstance(generator, Generator):
        raise TypeError(f"null_direction wants a Generator, got {type(generator).__name__}")
    inputs = math.prod(generator.in_modes)
    if len(visible_basis(generator)) == inputs:
        raise ValueError(f"the logits of this generator see all {inputs} directions: none is null")
    source = torch.Generator().manual_seed(seed)
    start = torch.randn(generator.in_modes, generator=source, dtype=torch.float64)
    hidden = null_project(generator, start.to(next(generator.parameters()).device))
    return hidden / hidden.norm()


def _spectrum(factors: Sequence[Tensor], inputs: int, eps: float) -> Spectrum:
    """The spectrum of the factors' Kronecker product: all products of singular values; ranks multiply."""
    values, rank, tolerance = torch.ones(1, dtype=torch.float64), 1, 0.0
    for factor in factors:
        own = torch.linalg.svdvals(factor).cpu()
        share = max(factor.shape) * eps
        rank *= int((own > share * own[0]).sum())
        values = torch.outer(values, own).flatten()
        tolerance = max(tolerance, share)
    return Spectrum(tuple(values.sort(descending=True).values.tolist()), rank, inputs - rank, tolerance)


def _eps(generator: Generator) -> float:
    return torch.finfo(next(generator.parameters()).dtype).eps
