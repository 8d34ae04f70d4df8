"""Which parameter goes to which optimizer."""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence

import torch
from torch import nn

import temper

GROUPS = ("matrix", "embedding", "head", "routing", "vector")
HEAD_NAMES = ("head.weight", "lm_head.weight", "*.head.weight", "*.lm_head.weight")
# What wrappers put into the name of a parameter; a checkpoint must not depend on them.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def named_trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by the names they have in the plain model, however it is wrapped."""
    while isinstance(model, nn.parallel.DistributedDataParallel | torch._dynamo.OptimizedModule):
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._orig_mod
    found = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        if parameter.requires_grad:
            found[name] = parameter
    return found


def assign(
    model: nn.Module, *, embeddings: Sequence[str] = (), heads: Sequence[str] = ()
) -> dict[str, dict[str, nn.Parameter]]:
    """Every trainable parameter in exactly one group of `GROUPS`, by name.

    Routing is what `temper.param_groups` says; embeddings are `nn.Embedding` tables; the head is a matrix called
    `head` or `lm_head`, or else the one matrix with the shape of the largest table; a table that is also the head
    (tied) is an embedding. Other matrices are Muon's, and the rest are vectors.

    Args:
        embeddings, heads: patterns of names that decide instead.
    """
    parameters = named_trainable(model)
    for kind, patterns in (("embeddings", embeddings), ("heads", heads)):
        for pattern in patterns:
            if not fnmatch.filter(parameters, pattern):
                raise ValueError(f"{kind}: no trainable parameter is called {pattern!r}")
    routing = {
        id(parameter)
        for group in temper.param_groups(model)
        if group["name"] == "routing"
        for parameter in group["params"]
    }
    tables = {
        id(child.weight): child.weight for child in model.modules() if isinstance(child, nn.Embedding | nn.EmbeddingBag)
    }
    groups: dict[str, dict[str, nn.Parameter]] = {name: {} for name in GROUPS}
    hidden: dict[str, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if id(parameter) in routing:
            groups["routing"][name] = parameter
        elif _matches(name, heads):
            groups["head"][name] = parameter
        elif id(parameter) in tables or _matches(name, embeddings):
            groups["embedding"][name] = parameter
        elif parameter.ndim == 2:
            hidden[name] = parameter
        else:
            groups["vector"][name] = parameter
    if not groups["head"]:
        groups["head"] = _find_head(hidden, list(tables.values()))
    groups["matrix"] = {name: parameter for name, parameter in hidden.items() if name not in groups["head"]}
    return groups


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _find_head(hidden: dict[str, nn.Parameter], tables: list[nn.Parameter]) -> dict[str, nn.Parameter]:
    if by_name := {name: parameter for name, parameter in hidden.items() if _matches(name, HEAD_NAMES)}:
        return by_name
    shape = max((table.shape for table in tables), key=lambda shape: shape.numel(), default=None)
    by_shape = {name: parameter for name, parameter in hidden.items() if parameter.shape == shape}
    # With a vocabulary of 4 x width the MLP has this shape too, and a guess would train it with the wrong optimizer.
    if len(by_shape) > 1:
        raise ValueError(
            f"{len(by_shape)} matrices have the shape {tuple(shape)} of the largest embedding "
            f"({', '.join(list(by_shape)[:3])}, ...): say which is the output head with heads=[...]"
        )
    return by_shape
