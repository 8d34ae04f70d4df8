"""Bits per byte: the bits that a model needs for a byte of text, independent of its tokenizer.

bpb = sum of nats / (ln 2 x sum of bytes), over the targets that stand for bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from temper_lab.distributed import World

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Bpb:
    """The sums behind a number of bits per byte.

    Args:
        nats: the sum of losses over targets that stand for bytes.
        num_bytes: the bytes of those targets.
        num_tokens: the number of those targets.
        loss: the mean loss in nats over all targets, including special tokens.
    """

    nats: float
    num_bytes: int
    num_tokens: int
    loss: float

    @property
    def bpb(self) -> float:
        return self.nats / (math.log(2) * self.num_bytes)


@torch.no_grad()
def bits_per_byte(
    model: nn.Module,
    batches: Sequence[Batch],
    token_bytes: Tensor,
    *,
    world: World | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    progress: Callable[[int], object] = lambda done: None,
) -> Bpb:
    """Bits per byte over all batches, which are divided among the processes.

    Args:
        model: called with ids, `targets_BT` and `reduction="none"`, as a `GPT` is.
        batches: the same on every process.
        token_bytes: the bytes of every id, 0 for special tokens.
        progress: called with the number of batches done by this process.
    """
    if not batches:
        raise ValueError("no batches to measure bits per byte on")
    world = world or World()
    sums = torch.zeros(5, dtype=torch.float64, device=world.device)
    token_bytes = token_bytes.to(world.device)
    # Sharded models communicate in every pass, so every process makes the same number, some of them without data.
    for turn in range(-(-len(batches) // world.size)):
        index = turn * world.size + world.rank
        ids, targets = (part.to(world.device) for part in batches[index % len(batches)])
        with autocast():
            nats_BT = model(ids, targets_BT=targets, reduction="none").double()
        if index < len(batches):
            bytes_BT = token_bytes[targets]
            counted = bytes_BT > 0
            parts = (nats_BT[counted].sum(), bytes_BT.sum(), counted.sum(), nats_BT.sum(), targets.numel())
            sums += torch.stack([torch.as_tensor(part, dtype=torch.float64, device=world.device) for part in parts])
        progress(turn + 1)
    nats, num_bytes, num_tokens, all_nats, all_tokens = world.sum(*sums.tolist())
    if not num_bytes:
        raise ValueError("the batches have no targets that stand for bytes, only special tokens")
    return Bpb(nats, int(num_bytes), int(num_tokens), all_nats / all_tokens)
