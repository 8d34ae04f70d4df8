"""Parameters, FLOPs and memory of a site, counted from its configuration without allocating anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from temper.config import RouterConfig, count_parameters
from temper.gates import Gates
from temper.mixers import Mixer


@dataclass(frozen=True)
class Cost:
    """The cost of one site for one forward pass.

    Args:
        parameters: trainable, what the site adds to the model.
        frozen_parameters: saved but not trained.
        flops: of the forward pass, a multiply and add counted as two; a training step takes
            about three times as many.
        activation_bytes: saved for the backward pass (by the "cpu" and "fused" backends; "naive" saves more):
            the streams, the branch output and the routing of every token, and once for all of them the folded
            weights, of which "cpu" saves half. The branch itself comes on top.
    """

    parameters: int
    frozen_parameters: int
    flops: int
    activation_bytes: int

    def __mul__(self, sites: int) -> Cost:
        """The cost of several such sites."""
        return Cost(*(sites * value for value in vars(self).values()))

    __rmul__ = __mul__


def cost(config: RouterConfig, tokens: int, *, dtype: torch.dtype = torch.float32) -> Cost:
    """Parameters, FLOPs and activation memory of one site.

    Args:
        tokens: the number of tokens in one forward pass.
        dtype: of the streams; routing is float32 at least.
    """
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
        raise ValueError(f"tokens is {tokens!r}; expected a whole number >= 0")
    trained = count_parameters(config)
    frozen = count_parameters(config, include_frozen=True) - trained
    num_streams, dim = config.num_streams, config.dim
    if config.is_residual:
        # One add per entry; addition saves nothing.
        return Cost(trained, frozen, tokens * dim, 0)
    assert config.mixer is not None
    mixer, options = Mixer.named(config.mixer.name), config.mixer.options
    fold, rows, out_entries, logits = 0, 0, 0, 0
    for head in config.heads:
        generator, in_modes, out_modes, generator_options = config.generator(head)
        bottleneck = generator.bottleneck(in_modes, out_modes, **generator_options)
        fold += generator.fold_flops(in_modes, out_modes, **generator_options)
        rows += bottleneck
        if generator.direct:
            # The gate scales the map itself.
            fold += bottleneck * math.prod(in_modes)
        else:
            out_entries += bottleneck * math.prod(out_modes)
        logits += math.prod(out_modes)
    width = num_streams * dim
    if config.gain != "none":
        fold += rows * width
    # Per token: squares and their sum, the bottleneck, the logits with gate and bias, the gates (four for a
    # sigmoid), the mixer; then reading, mixing, and scaling and adding what is written.
    routing = 2 * width + (2 * width + 1) * rows + 2 * out_entries + 2 * logits + 8 * num_streams
    routing += mixer.flops(num_streams, **options)
    streams = 2 * width + 2 * num_streams * width + 2 * width
    size = torch.promote_types(dtype, torch.float32).itemsize
    if Gates.named(config.gates).fast and config.norm == "flat":
        # Saved per token: streams and y as they are stored; the routing, the bottleneck and the norm in full precision.
        kept = (width + dim) * dtype.itemsize + (num_streams**2 + 2 * num_streams + rows + 2) * size
    else:
        # Autograd saves: streams, y, norm, the bottleneck twice (before and after the norm), the logits'
        # dynamic part, pre, post, res and what the mixer saves.
        kept = width + dim + 2 + 2 * rows + logits + 4 * num_streams + num_streams**2
        kept += mixer.saved(num_streams, **options)
        if config.norm == "per-stream":
            # Only one scale per token leaves the sum; with one per stream the normed streams are saved as well.
            kept += width
        kept *= size
    # Saved once: the maps, before and after the gain.
    maps = rows * width * (1 if config.gain == "none" else 2) + out_entries
    return Cost(trained, frozen, fold + tokens * (routing + streams), maps * size + tokens * kept)
