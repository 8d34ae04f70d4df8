"""Parameters and FLOPs of the runs of a study, without allocating any of it."""

from __future__ import annotations

from functools import cache

import torch

import temper
from temper_lab.compare.method import Method
from temper_lab.compare.study import Cell, Study
from temper_lab.model import GPT, ModelConfig


def counts_of(study: Study, cell: Cell, vocab_size: int) -> dict[str, int]:
    """Trainable parameters in total, those of the routing, and what is stored but not trained."""
    config, model = study.routing(cell), study.settings_of(cell).model
    added = model.num_sites * temper.count_parameters(config)
    stored = model.num_sites * temper.count_parameters(config, include_frozen=True)
    plain = {"preset": "residual", "num_streams": 1, "router": {}, "routers": {}}
    backbone = _backbone(model.with_(**plain, vocab_size=vocab_size))
    return {"total": backbone + added, "added": added, "frozen": stored - added}


def flops_of(study: Study, cell: Cell, vocab_size: int) -> int:
    """Of a training step, per token; for a run that is not skipped."""
    return _flops(study.settings_of(cell).model, cell.method, cell.streams, vocab_size)


@cache
def _flops(model: ModelConfig, method: Method, streams: int, vocab_size: int) -> int:
    changes = {"preset": method.preset, "num_streams": streams, "router": method.options, "vocab_size": vocab_size}
    with torch.device("meta"):
        return GPT(model.with_(**changes)).flops_per_token()


@cache
def _backbone(model: ModelConfig) -> int:
    """Parameters of a residual model."""
    with torch.device("meta"):
        return GPT(model).num_parameters()["total"]
