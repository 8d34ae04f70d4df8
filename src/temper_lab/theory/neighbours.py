"""What a model is compared with: the same model with its generators a little poorer."""

from __future__ import annotations

import copy

import torch

import temper
from temper.generators import Generator
from temper.generators.base import Rank
from temper_lab.model import GPT

# By what share the stored tensors move where there is no lower rank.
NUDGE = 0.01


def with_neighbours(network: GPT, to: str | None = None, rank: Rank = None) -> GPT:
    """A copy of the model in which every site is its neighbour."""
    if network.config.routing().is_residual:
        raise ValueError(f"the {network.config.preset} model routes nothing: there is no generator to look at")
    other = copy.deepcopy(network)
    for block in other.blocks:
        block.attention_site = neighbour(block.attention_site, to, rank)
        block.mlp_site = neighbour(block.mlp_site, to, rank)
    return other


def neighbour(site: temper.HyperConnection, to: str | None = None, rank: Rank = None) -> temper.HyperConnection:
    """The site with every generator compressed: to a kind and rank, or one notch below what it is.

    One notch: what has no rank becomes Tucker at its default rank; of others every rank is lowered by one; where all
    are one, the stored tensors move by 1%.
    """
    other = copy.deepcopy(site)
    other.set_generators(**{head: _compressed(getattr(site, head).generator, to, rank) for head in site.config.heads})
    return other


def _compressed(generator: Generator, to: str | None, rank: Rank) -> Generator:
    weight = generator.to_dense().detach()
    if to is not None or rank is not None:
        name = to or (generator.name if generator.ranked else "tucker")
        return Generator.named(name).from_dense(weight, rank)
    if not generator.ranked:
        return Generator.named("tucker").from_dense(weight)
    lower = _one_less(generator.rank)
    return _nudged(generator) if lower == generator.rank else type(generator).from_dense(weight, lower)


def _one_less(rank: int | tuple[int, ...]) -> int | tuple[int, ...]:
    return tuple(max(1, r - 1) for r in rank) if isinstance(rank, tuple) else max(1, rank - 1)


def _nudged(generator: Generator) -> Generator:
    moved = copy.deepcopy(generator)
    source = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in moved.parameters():
            step = torch.randn(parameter.shape, generator=source, dtype=torch.float64).to(parameter)
            parameter += NUDGE * parameter.square().mean().sqrt() * step
    return moved
