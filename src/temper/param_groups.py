"""Parameter groups that are safe for Muon and for AdamW."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from temper.config import HEADS
from temper.router import Router

ROUTING = ("norm", *HEADS)

# Common names of the layer that mirrors the largest table.
OUTPUT_HEADS = ("head", "lm_head", "output", "embed_out", "unembed", "unembedding")


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    routing_lr: float = 0.005,
    embeddings: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Every trainable parameter of a model in exactly one of four groups, by `group["name"]`.

    * "matrix": two-dimensional weights of hidden layers, the only ones suited to Muon.
    * "embedding": lookup tables and the output head.
    * "vector": everything else (gains, biases, convolutions), without weight decay.
    * "routing": all parameters of the hyper-connections. Some of it is 3-D or scalar, so never Muon; no weight
      decay, which would pull the mixing towards none; and a learning rate of its own.

        groups = temper.param_groups(model, lr=3e-4, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups)

        muon = torch.optim.Muon([group for group in groups if group["name"] == "matrix"], lr=0.02)
        adamw = torch.optim.AdamW([group for group in groups if group["name"] != "matrix"], lr=3e-4)

    Args:
        lr: written into every group but routing; left to the optimizer if None.
        weight_decay: of "matrix" and "embedding".
        embeddings: patterns of names to count as embeddings besides `nn.Embedding` and the output head, which
            is the weight with the shape of the largest table (the one named like a head if there are several).
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups wants a module, got {type(model).__name__}")
    for name, value in (("lr", lr), ("routing_lr", routing_lr), ("weight_decay", weight_decay)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number >= 0")
    tables: list[Tensor] = [
        child.weight for child in model.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)
    ]
    table_ids = {id(table) for table in tables} | _heads(model, tables)
    routing = {
        id(parameter)
        for site in model.modules()
        if isinstance(site, Router)
        for name, parameter in site.named_parameters()
        if name.split(".")[0] in ROUTING
    }
    found: dict[str, list[nn.Parameter]] = {"matrix": [], "embedding": [], "vector": [], "routing": []}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        named = any(fnmatch.fnmatchcase(name, pattern) for pattern in embeddings)
        if id(parameter) in routing:
            group = "routing"
        elif named or id(parameter) in table_ids:
            group = "embedding"
        else:
            group = "matrix" if parameter.ndim == 2 else "vector"
        found[group].append(parameter)
    settings: dict[str, dict[str, Any]] = {
        "matrix": {"lr": lr, "weight_decay": weight_decay},
        "embedding": {"lr": lr, "weight_decay": weight_decay},
        "vector": {"lr": lr, "weight_decay": 0.0},
        "routing": {"lr": routing_lr, "weight_decay": 0.0},
    }
    return [
        {"name": name, "params": parameters} | {key: v for key, v in settings[name].items() if v is not None}
        for name, parameters in found.items()
        if parameters
    ]


def _heads(model: nn.Module, tables: list[Tensor]) -> set[int]:
    """The ids of untied output heads: they have the shape of the table they mirror."""
    shape = max((table.shape for table in tables), key=lambda shape: shape.numel(), default=None)
    tied = {id(table) for table in tables}
    alike = {name: p for name, p in model.named_parameters() if p.shape == shape and id(p) not in tied}
    if len(alike) > 1:
        # A hidden layer may happen to have this shape too.
        alike = {name: p for name, p in alike.items() if name.removesuffix(".weight").split(".")[-1] in OUTPUT_HEADS}
    return {id(parameter) for parameter in alike.values()}
