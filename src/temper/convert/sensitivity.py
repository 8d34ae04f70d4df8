"""Sensitivity of the loss to errors in each generator's logits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from temper.convert.moments import routed_sites

# (O, O) matrices over the logits of a head, keyed by site and head.
Sensitivities = dict[str, dict[str, Tensor]]


def sensitivities(model: nn.Module, losses: Iterable[Tensor]) -> Sensitivities:
    """E[g g^T] of g = d loss / d bias for every head, over the losses of some texts.

    The loss is nearly flat in some logits (those of a mixer that stays near the identity) and steep in others: to
    second order an error e of the logits costs e^T E[g g^T] e, up to a common factor.

        temper.convert.sensitivities(model, (model.loss(row, targets) for row, targets in rows))

    Args:
        losses: an iterable of one scalar per text, evaluated lazily.
    """
    sites = routed_sites(model)
    keys = [(name, head) for name, site in sites.items() for head in site.config.heads]
    biases = [getattr(sites[name], head).bias for name, head in keys]
    had = [bias.requires_grad for bias in biases]
    sums, seen = [torch.zeros(bias.numel(), bias.numel(), dtype=torch.float64) for bias in biases], 0
    for bias in biases:
        bias.requires_grad_(True)
    try:
        with torch.enable_grad():
            for loss in losses:
                for total, grad in zip(sums, torch.autograd.grad(loss, biases), strict=True):
                    flat = grad.flatten().double().cpu()
                    total.addr_(flat, flat)
                seen += 1
    finally:
        for bias, needed in zip(biases, had, strict=True):
            bias.requires_grad_(needed)
    if not seen:
        raise ValueError("no losses: expected at least one")
    found: Sensitivities = {name: {} for name in sites}
    for (name, head), total in zip(keys, sums, strict=True):
        found[name][head] = total / seen
    return found
