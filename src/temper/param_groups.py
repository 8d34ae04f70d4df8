"""Parameter groups that are safe for Muon and for AdamW."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from temper.config import HEADS
from temper.router import Router

ROUTING = ("norm", *HEADS)

# Modules of these names are output heads; of the others only where they have the shape of the largest table.
HEAD_NAMES = ("head", "lm_head")
OTHER_HEAD_NAMES = ("output", "embed_out", "unembed", "unembedding")
# Parts of a parameter's name that torch.compile, FSDP and checkpointing put in.
WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def param_groups(
    model: nn.Module,
    *,
    lr: float | None = None,
    weight_decay: float = 0.0,
    routing_lr: float = 0.005,
    embeddings: Sequence[str] = (),
    heads: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """Every trainable parameter of a model in exactly one of five groups, by `group["name"]`.

    * "matrix": two-dimensional weights of hidden layers, the only ones suited to Muon.
    * "embedding": lookup tables; one that is also the output head (tied) is here.
    * "head": the output head.
    * "vector": everything else (gains, biases, convolutions), without weight decay.
    * "routing": all parameters of the hyper-connections. Some of it is 3-D or scalar, so never Muon; no weight
      decay, which would pull the mixing towards none; and a learning rate of its own.

        groups = temper.param_groups(model, lr=3e-4, weight_decay=0.1)
        optimizer = torch.optim.AdamW(groups)

        muon = torch.optim.Muon([group for group in groups if group["name"] == "matrix"], lr=0.02)
        adamw = torch.optim.AdamW([group for group in groups if group["name"] != "matrix"], lr=3e-4)

    Args:
        lr: written into every group but routing; left to the optimizer if None.
        weight_decay: of "matrix", "embedding" and "head".
        embeddings: patterns of names to count as embeddings besides `nn.Embedding`.
        heads: patterns of names of the output head, [] for none. By default it is the matrix called `head` or
            `lm_head`, or else the one with the shape of the largest table; several such matrices are a ValueError.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups wants a module, got {type(model).__name__}")
    for name, value in (("lr", lr), ("routing_lr", routing_lr), ("weight_decay", weight_decay)):
        if value is not None and not value >= 0:
            raise ValueError(f"{name} is {value!r}; expected a number >= 0")
    routing = {
        id(parameter)
        for site in model.modules()
        if isinstance(site, Router)
        for name, parameter in site.named_parameters()
        if name.split(".")[0] in ROUTING
    }
    modules = [child for child in model.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)]
    tables: list[Tensor] = [child.weight for child in modules]
    settings: dict[str, dict[str, Any]] = {
        "matrix": {"lr": lr, "weight_decay": weight_decay},
        "embedding": {"lr": lr, "weight_decay": weight_decay},
        "head": {"lr": lr, "weight_decay": weight_decay},
        "vector": {"lr": lr, "weight_decay": 0.0},
        "routing": {"lr": routing_lr, "weight_decay": 0.0},
    }
    found: dict[str, dict[str, nn.Parameter]] = {name: {} for name in settings}
    trained = {plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    for kind, patterns in (("embeddings", embeddings), ("heads", heads or ())):
        for pattern in patterns:
            if not fnmatch.filter(trained, pattern):
                raise ValueError(f"{kind}: no trainable parameter is called {pattern!r}")
    table_ids = set(map(id, tables))
    for name, parameter in trained.items():
        if id(parameter) in routing:
            group = "routing"
        elif _matches(name, heads or ()):
            group = "head"
        elif id(parameter) in table_ids or _matches(name, embeddings):
            group = "embedding"
        else:
            group = "matrix" if parameter.ndim == 2 else "vector"
        found[group][name] = parameter
    if heads is None:
        found["head"] = _find_head(model, found["matrix"], tables)
        found["matrix"] = {name: p for name, p in found["matrix"].items() if name not in found["head"]}
    return [
        {"name": name, "params": list(parameters.values())}
        | {key: v for key, v in settings[name].items() if v is not None}
        for name, parameters in found.items()
        if parameters
    ]


def _find_head(model: nn.Module, hidden: dict[str, nn.Parameter], tables: list[Tensor]) -> dict[str, nn.Parameter]:
    """The output head among the matrices that are not tables; empty if it is a table, or if there is none."""
    largest = max(tables, key=lambda table: table.numel(), default=None)
    alike = {name: p for name, p in hidden.items() if largest is not None and p.shape == largest.shape}
    named = {name: p for name, p in alike.items() if _module(name) in HEAD_NAMES + OTHER_HEAD_NAMES}
    if named := named or {name: p for name, p in hidden.items() if _module(name) in HEAD_NAMES}:
        return named
    users = [child for child in model.modules() if any(p is largest for p in child.parameters(recurse=False))]
    if len(users) > 1:
        return {}
    # With a vocabulary of 4 x width the MLP has this shape too, and a guess would train it with the wrong optimizer.
    if len(alike) > 1:
        assert largest is not None
        raise ValueError(
            f"{len(alike)} matrices have the shape {tuple(largest.shape)} of the largest embedding "
            f"({', '.join(list(alike)[:3])}, ...): say which is the output head with heads=[...], [] for none"
        )
    return alike


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it was before it was wrapped."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _module(name: str) -> str:
    """The name of the module that a weight belongs to."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
