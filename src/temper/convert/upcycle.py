"""Upcycling: from one stream to N, and from N to k N, with unchanged outputs.

The derivations are in docs/math.md, "Upcycling".
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from temper.config import HEADS
from temper.connection import HyperConnection
from temper.mixers.base import copy_map
from temper.registry import is_int
from temper.wrap import reduce_by

Module = TypeVar("Module", bound=nn.Module)

# Tolerance for the row and column sums of the initial `res`.
TOLERANCE = 1e-5


def upcycle(module: Module) -> Module:
    """Starts every site of a model so that its N streams compute what one stream computed, in place.

        temper.wrap(model, "model.layers.*", preset="temper-tucker", num_streams=4)
        temper.convert.upcycle(model)

    Every site reads the mean of the streams and adds the branch to it, more to one stream than to the others: the
    streams differ, and learn different things, from the first step on. Whatever the sites held is overwritten; the
    weights of the branches stay as they are. A wrapped model reduces by the mean from then on: give `temper.wrap` the
    same `reduce="mean"` where you load its weights again. A model that sums its streams itself gets N times the
    original output, which a norm right behind the sum removes up to its eps.

    Args:
        module: a site, or any model with sites.

    Returns:
        The same module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"upcycle wants a module, got {type(module).__name__}")
    sites = [site for site in module.modules() if isinstance(site, HyperConnection)]
    routed = [site for site in sites if not site.config.is_residual]
    if not routed:
        raise ValueError(
            f"{type(module).__name__} has "
            + ("plain residual sites only, which have nothing to start" if sites else "no HyperConnection")
            + ": temper.wrap it with num_streams of 2 or more and a preset other than 'residual'"
        )
    # Check every site before changing any.
    biases = [_checked(site) for site in routed]
    for site, (pre, post) in zip(routed, biases, strict=True):
        _start(site, pre, post)
    reduce_by(module, "mean")
    return module


def _checked(site: HyperConnection) -> tuple[Tensor, Tensor]:
    """The biases of pre and post at which this site starts exactly; raises ValueError if there are none."""
    config = site.config
    if site.pre.bias.is_meta:
        raise ValueError(
            "the site is on the meta device and has no values to set; materialise the model first (to_empty)"
        )
    bias = site.mixer.initial_bias().to(site.res.bias.device, torch.float64)
    res = site.mixer.mix(bias)
    error = max(float((res.sum(axis) - 1).abs().max()) for axis in (-1, -2))
    if error > TOLERANCE:
        assert config.mixer is not None
        raise ValueError(
            f"{config.mixer} starts {error:.1e} away from doubly stochastic; expected at most {TOLERANCE:.0e}, so that "
            "mixing keeps the mean of the streams"
        )
    return site.gates.exact_bias(config.num_streams, site.layer_index % config.num_streams)


@torch.no_grad()
def _start(site: HyperConnection, pre: Tensor, post: Tensor) -> None:
    site.reset_parameters()
    silent = [site.pre, site.post]
    # Doubly stochastic mixing preserves the mean whatever its logits are.
    if (site.mixer.row_stochastic, site.mixer.column_stochastic) != ("exact", "exact"):
        silent.append(site.res)
    for head in silent:
        head.generator.zero_output()
    site.pre.bias.copy_(pre)
    site.post.bias.copy_(post)


def grow(site: HyperConnection, num_streams: int, *, spread: float = 2**-10) -> HyperConnection:
    """A site with k times as many streams, equivalent to this one when the streams are copies.

    Stream m is a copy of stream m mod N; ranks, gates and the branch stay. The branch input is k times as large, so
    the branch has to begin with a norm, as those of pre-norm blocks do. After the last site the sum of the streams is
    k times what it was, and their mean the same.

    Args:
        num_streams: a multiple of the site's own number.
        spread: how far the write biases of copies are moved apart. Identical copies would get equal gradients and
            stay copies; the outputs change by the order of its square.
    """
    if not isinstance(site, HyperConnection):
        raise TypeError(f"grow wants a HyperConnection, got {type(site).__name__}")
    config = site.config
    if config.is_residual:
        raise ValueError("a plain residual has no routing to grow: build a site of several streams and upcycle it")
    before = config.num_streams
    if not is_int(num_streams) or num_streams <= before or num_streams % before:
        raise ValueError(
            f"num_streams is {num_streams!r}; {before} streams become {2 * before}, {3 * before} or another multiple: "
            "every stream is copied as often as every other"
        )
    copies = num_streams // before
    repeat = copy_map(before, copies)
    with torch.no_grad():
        growth = site.mixer.grow(site.res.bias.detach(), copies)
        apart = torch.linspace(-spread, spread, copies).repeat_interleave(before).to(site.post.bias)
        maps = dict.fromkeys(HEADS, (repeat,)) | {"res": growth.maps}
        biases = {
            "pre": site.pre.bias.repeat(copies),
            "res": growth.bias,
            "post": site.post.bias.repeat(copies) + apart,
        }
        state: dict[str, Tensor] = {}
        for name in config.heads:
            head = getattr(site, name)
            # k copies share one stream's weight, so divide by k.
            stretched = head.generator.with_modes_mapped([repeat / copies, None, *maps[name]])
            state |= {f"{name}.generator.{key}": value for key, value in stretched.items()}
            state |= {f"{name}.bias": biases[name], f"{name}.gate": head.gate * (growth.gate if name == "res" else 1.0)}
        for key, value in site.norm.state_dict().items():
            has_streams = key == "stream" or config.gain == "full"
            state[f"norm.{key}"] = value.repeat(copies, *(1,) * (value.ndim - 1)) if has_streams else value
    with torch.device("meta"):
        grown = HyperConnection(replace(config, num_streams=num_streams), layer_index=site.layer_index)
    grown = grown.to(site.pre.bias.dtype).to_empty(device=site.pre.bias.device)
    grown.load_state_dict(state)
    # After the move, which must not include the branch.
    grown.branch, grown.recompute, grown.observers = site.branch, site.recompute, site.observers
    return grown.train(site.training)
