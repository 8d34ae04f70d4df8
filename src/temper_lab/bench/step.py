"""Whole training steps of the lab's model: forward and backward. The optimizer, the same for all, is left out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from temper_lab.bench.cases import RESIDUAL, Case
from temper_lab.bench.measure import Run, interleave, milliseconds, ratios, spread
from temper_lab.bench.saved import saved_bytes
from temper_lab.bench.setting import Setting
from temper_lab.model import GPT, ModelConfig
from temper_lab.model.functional import rms_norm

ROWS = 4


class Step(nn.Module):
    """A model that gives its loss on one batch."""

    def __init__(self, model: GPT, batch: Tensor) -> None:
        super().__init__()
        self.model = model
        self.ids, self.targets = batch

    def forward(self) -> Tensor:
        return self.model.loss(self.ids, self.targets)


class PeerGPT(GPT):
    """The same backbone with other people's sites, whose streams are (B N, T, D)."""

    def __init__(self, config: ModelConfig, case: Case) -> None:
        super().__init__(config)
        self.num_streams = case.streams
        for index, block in enumerate(self.blocks):
            block.attention_site = case.site(config.dim, 2 * index)
            block.mlp_site = case.site(config.dim, 2 * index + 1)

    def features(self, ids_BT: Tensor, cache: None = None) -> Tensor:
        """As the model it comes from, but for the place of the streams."""
        rotation = self.rotary(ids_BT.shape[1])
        streams = rms_norm(self.embedding(ids_BT)).repeat_interleave(self.num_streams, dim=0)
        for block in self.blocks:
            streams = block(streams, rotation)
        return rms_norm(streams.unflatten(0, (-1, self.num_streams)).sum(1))


def model_config(setting: Setting) -> ModelConfig:
    """Four rows of half the tokens, a third of the width: depth 4, width 256 and 256 tokens at the default sizes."""
    depth, context = max(1, setting.width // 192), setting.tokens // 2
    return ModelConfig(depth=depth, vocab_size=4096, context=context, head_dim=64)


def measure(setting: Setting, cases: Sequence[Case], what: str) -> dict[str, Any]:
    """The part "step" of a report, and what it adds to its setting."""
    config = model_config(setting)
    batch = torch.randint(config.vocab_size, (2, ROWS, config.context))

    # The backends of a method share its model.
    @cache
    def model_of(method: str, num_streams: int, is_peer: bool) -> Step:
        if is_peer:
            return Step(PeerGPT(config, Case(method, num_streams, None)), batch)
        return Step(GPT(config.with_(preset=method, num_streams=num_streams)), batch)

    runs: dict[Case, Run] = {}
    saved: dict[Case, int] = {}
    for case in (RESIDUAL, *cases):
        step = model_of(case.method, case.streams, case.backend is None and case != RESIDUAL)
        runs[case], saved[case] = step_run(case, step), saved_bytes(case, step)
    # A step is the longest turn of all, and with that the steadiest.
    rounds = (setting.rounds + 1) // 2
    seconds = interleave(runs, rounds, what)

    def row(case: Case) -> dict[str, Any]:
        ratio = spread(ratios(seconds[case], seconds[RESIDUAL]))
        return {
            **case.fields(),
            "step_ms": milliseconds(seconds[case]),
            "ratio": ratio["median"],
            "ratio_spread": ratio,
            "saved_ratio": round(saved[case] / saved[RESIDUAL], 4),
        }

    added = {
        "depth": config.depth,
        "width": config.dim,
        "context": config.context,
        "tokens": batch[0].numel(),
        "vocab_size": config.vocab_size,
        "rounds": rounds,
        "times": "forward + backward",
        "step_ms": milliseconds(seconds[RESIDUAL]),
    }
    return {"setting": {"step": added}, "step": [row(case) for case in cases]}


def step_run(case: Case, step: Step) -> Run:
    """Forward and backward."""

    def action() -> None:
        with case.chosen():
            loss = step()
        loss.backward()

    return Run(action, list(step.parameters()))
