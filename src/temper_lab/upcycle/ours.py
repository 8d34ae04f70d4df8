"""Our own model with more streams than it had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import temper
from temper_lab.model import GPT, ModelConfig


def upcycle_gpt(
    model: GPT, *, preset: str, num_streams: int, router: Mapping[str, Any] | None = None, seed: int = 0
) -> GPT:
    """A copy of a model with one stream that has N, with the same logits.

    Our model norms the sum of its streams, N times what it was, so the logits differ by what the eps of that norm
    weighs: a share of 5e-7 (docs/math.md).

    Args:
        preset: how the streams are routed.
        router: changes of the preset, as for `temper.preset`.
        seed: of the generators' random factors.
    """
    if not model.config.routing().is_residual:
        raise ValueError(
            f"the model has {model.num_streams} streams of {model.config.preset} already; expected one stream "
            "(`grow_gpt` gives it a multiple of its streams)"
        )
    check_streams(preset, num_streams)
    config = model.config.with_(preset=preset, num_streams=num_streams, router=dict(router or {}))
    grown = _like(model, config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        temper.convert.upcycle(grown)
    return grown


def grow_gpt(model: GPT, num_streams: int) -> GPT:
    """A copy of a model with several streams that has a multiple of them: preset, ranks and, nearly, the logits stay.

    A branch reads k times what it read, which its norm removes up to eps, and the copies of a stream are written with
    biases that are 2^-10 apart, without which they would stay copies.
    """
    sites = [temper.convert.grow(site, num_streams) for site in model.sites()]
    config = sites[0].config
    if any(site.config != config for site in sites):
        raise ValueError("the sites of this model are not all alike, so that no one configuration holds the grown ones")
    # The ranks stay, where the preset would choose others for more streams.
    usual = temper.preset(model.config.preset, num_streams=num_streams, dim=config.dim).to_dict()
    router = {key: value for key, value in config.to_dict().items() if value != usual[key]}
    grown = _like(model, model.config.with_(num_streams=num_streams, router=router))
    for new, site in zip(grown.sites(), sites, strict=True):
        new.load_state_dict(site.state_dict())
    return grown


def check_streams(preset: str, num_streams: int) -> None:
    """Raises ValueError for what has one stream only."""
    if num_streams < 2:
        raise ValueError(f"streams is {num_streams}; expected 2 or more: one stream is the model as it is")
    if temper.preset(preset, num_streams=num_streams, dim=8).is_residual:
        raise ValueError(
            f"the preset {preset!r} has one stream, whatever is asked for; expected one that routes several"
        )


def _like(model: GPT, config: ModelConfig) -> GPT:
    """A model with this configuration and the backbone of another; its sites have no values yet."""
    like = model.head.weight
    with torch.device("meta"):
        grown = GPT(config).to(like.dtype)
    grown.to_empty(device=like.device)
    grown.rotary.reset_parameters()
    routing = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, temper.HyperConnection))
    backbone = {key: value for key, value in model.state_dict().items() if not key.startswith(routing)}
    _, unexpected = grown.load_state_dict(backbone, strict=False)
    assert not unexpected
    return grown.train(model.training)
