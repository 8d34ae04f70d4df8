"""What a model is compared with: the same model with its generators a little poorer."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

import temper
from temper.config import HEADS
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
    state = {key: value for key, value in site.state_dict().items() if ".generator." not in key}
    choices = {}
    for head in HEADS:
        generator = getattr(site, head).generator
        lower = _compressed(generator, to, rank)
        # A copy that was only nudged keeps all its options.
        options = {"rank": lower.rank} if lower.ranked else {}
        same = lower.name == generator.name and options.get("rank") == getattr(generator, "rank", None)
        choices[head] = getattr(site.config, head) if same else temper.Choice(lower.name, **options)
        state |= {f"{head}.generator.{key}": value for key, value in lower.state_dict().items()}
    weight = site.pre.gate
    # Nothing random is drawn for values that are overwritten at once.
    with torch.device("meta"):
        other = temper.HyperConnection(replace(site.config, **choices), layer_index=site.layer_index)
    other = other.to(weight.dtype).to_empty(device=weight.device)
    other.load_state_dict(state)
    return other


def parse_rank(text: str | None) -> Rank:
    """`8`, `2x12` (streams and features, or a number for each mode), or a share of the dense parameters like `0.1`."""
    if text is None:
        return None
    parts = text.lower().split("x")
    if all(part.isdigit() for part in parts):
        numbers = tuple(int(part) for part in parts)
        return numbers[0] if len(numbers) == 1 else numbers
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--rank is {text!r}; expected a number, numbers like 2x12, or a fraction like 0.1") from None


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
