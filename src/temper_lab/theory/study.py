"""Every site of a model beside another's: ranks, bounds and constants, as plain values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

import temper
from temper import theory
from temper.mixers.sinkhorn import Sinkhorn
from temper_lab.model import GPT
from temper_lab.model.functional import rms_norm
from temper_lab.ranks import show_rank

# A Jacobian has N^2 rows for every token: so many tokens say enough.
JACOBIANS = 256


def study(
    network: GPT,
    other: GPT,
    ids_BT: Tensor,
    targets_BT: Tensor,
    *,
    progress: Callable[[int], object] = lambda done: None,
) -> dict[str, Any]:
    """What theory says of two models that differ in their routing alone, and what is measured, in float64.

    Args:
        other: with the same backbone.
        progress: called with the number of sites done.
    """
    check_backbone(network, other)
    stored = zip(network.sites(), other.sites(), strict=True)
    network, other = (copy.deepcopy(model).double().eval() for model in (network, other))
    with torch.no_grad():
        streams = temper.expand_streams(rms_norm(network.embedding(ids_BT)), network.num_streams)
        names, steps = zip(*_steps(network, other, network.rotary(ids_BT.shape[1])), strict=True)
        sites = []
        for name, pair, step, depth in zip(names, stored, steps, theory.through_depth(steps, streams), strict=True):
            sites.append({"site": name, **_ranks(*pair), **_measured(step[0], depth)})
            progress(len(sites))
        return {
            "tokens": ids_BT.numel(),
            "streams": network.num_streams,
            "width": network.config.dim,
            "sites": sites,
            "whole": _whole(network, other, ids_BT, targets_BT, sites[-1]),
            "exceeded": [f"{site['site']}: {what}" for site in sites for what in site["exceeded"]],
        }


def check_backbone(network: GPT, other: GPT) -> None:
    """Raises unless all but the sites is the same: the branches have to be."""
    if network.config.routing().is_residual or other.config.routing().is_residual:
        raise ValueError("a residual model routes nothing: there is no generator to look at")
    mine, theirs = (_backbone(model) for model in (network, other))
    if mine.keys() != theirs.keys():
        raise ValueError("the two models have different layers; expected the same backbone")
    for name, value in mine.items():
        if value.shape != theirs[name].shape or not torch.equal(value, theirs[name].to(value.dtype)):
            raise ValueError(
                f"the two models differ in {name}; expected the same backbone, because the bounds are for sites that "
                "share their branch (compress one model into the other, without training its branches)"
            )


def _backbone(network: GPT) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if "_site." not in name}


def _steps(network: GPT, other: GPT, rotation: tuple[Tensor, Tensor]) -> Iterator[tuple[str, theory.Step]]:
    """Every pair of sites with the branch between them, by name, in the order in which they run."""
    for index, (mine, theirs) in enumerate(zip(network.blocks, other.blocks, strict=True)):
        attend = partial(mine.attend, rotation=rotation)
        yield f"block {index} attention", (mine.attention_site, theirs.attention_site, attend)
        yield f"block {index} mlp", (mine.mlp_site, theirs.mlp_site, mine.think)


def _ranks(site: temper.HyperConnection, other: temper.HyperConnection) -> dict[str, Any]:
    """As they are stored: the rounding of float32 weights decides what counts as zero."""
    return {
        "heads": {
            head: _head(getattr(site, head).generator, getattr(other, head).generator) for head in site.config.heads
        },
        "together": asdict(theory.site_spectrum(site)),
    }


def _measured(site: temper.HyperConnection, depth: theory.Depth) -> dict[str, Any]:
    return {
        "mixer": _mixer(site, depth.streams),
        "deviation": depth.deviation.to_dict(),
        "growth": depth.growth,
        "measured": depth.measured,
        "bound": depth.bound,
        "size": depth.size,
        "exceeded": depth.exceeded,
    }


def _head(generator: temper.Generator, other: temper.Generator) -> dict[str, Any]:
    dense = generator.to_dense()
    size, apart = dense.norm().item(), (dense - other.to_dense()).norm().item()
    return {
        "generator": describe(generator),
        "against": describe(other),
        # Nothing compared with something is as far away as can be said.
        "relative_error": apart / size if size else float(apart > 0),
        "compression": asdict(theory.compression_spectrum(generator)),
        "routing": asdict(theory.routing_spectrum(generator)),
    }


def describe(generator: temper.Generator) -> str:
    """`dense`, `cp 2`, `tucker 2x12x2x2`."""
    rank = getattr(generator, "rank", None)
    return generator.name if rank is None else f"{generator.name} {show_rank(rank)}"


def _mixer(site: temper.HyperConnection, streams: Tensor) -> dict[str, Any]:
    """The mixer's proved constant, and its slope at the logits of some tokens: as it runs, and in Sinkhorn's limit."""
    logits = theory.res_logits(site, streams).flatten(0, streams.ndim - 3)
    some = logits[:: math.ceil(len(logits) / JACOBIANS)]
    slopes = theory.local_lipschitz(site.mixer, some)
    found = {
        "name": site.mixer.name,
        "constant": site.mixer.lipschitz(),
        "slope_max": slopes.max().item(),
        "slope_mean": slopes.mean().item(),
    }
    if isinstance(site.mixer, Sinkhorn):
        limit = Sinkhorn(site.mixer.num_streams, method="newton", iters=100)(logits)
        found["limit_slope_max"] = theory.sinkhorn_lipschitz(some).max().item()
        found["distance_max"] = torch.linalg.matrix_norm(site.mixer(logits) - limit).max().item()
    return found


def _whole(network: GPT, other: GPT, ids_BT: Tensor, targets_BT: Tensor, last: dict[str, Any]) -> dict[str, Any]:
    one, two = (model.features(ids_BT) for model in (network, other))
    change = max(
        (network.logits(part) - network.logits(part_other)).abs().max().item()
        for part, part_other in zip(one.flatten(0, 1).split(256), two.flatten(0, 1).split(256), strict=True)
    )
    return {
        "measured": last["measured"],
        "bound": last["bound"],
        "size": last["size"],
        "loss": network.loss(ids_BT, targets_BT).item(),
        "loss_against": other.loss(ids_BT, targets_BT).item(),
        "largest_logit_change": change,
    }
