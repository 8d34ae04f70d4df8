"""Bytes that autograd keeps between forward and backward."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from temper_lab.bench.cases import Case


class _Held:
    """A saved tensor; gone when the graph that saved it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(forward: Callable[[], object], own: Iterable[Tensor] = ()) -> int:
    """The bytes of distinct storages that are kept for the backward of what `forward` returns.

    Args:
        own: tensors that are there anyway.
    """
    held: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        entry = _Held(tensor.detach())
        held.add(entry)
        return entry

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        result = forward()
    # Parts of the graph that nobody holds but themselves.
    gc.collect(1)
    storages = [entry.tensor.untyped_storage() for entry in held]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in own:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    # The graph lived until here.
    del result
    return sum(sizes.values())


def saved_bytes(case: Case, model: nn.Module, *inputs: Any) -> int:
    """What a model keeps of a forward pass, its parameters and buffers left out."""
    with case.chosen():
        return kept_bytes(lambda: model(*inputs), [*model.parameters(), *model.buffers()])
