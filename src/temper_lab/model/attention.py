"""Causal self-attention with rotary positions.

Letters: B batch, T token, S cached token, H head, D features of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from temper_lab.model.functional import rotate_and_norm

if TYPE_CHECKING:
    from temper_lab.engine import KVCache
    from temper_lab.model.config import ModelConfig


class Attention(nn.Module):
    """Queries, keys and values, rotated and normed, through `scaled_dot_product_attention`.

    Three projections and not one: they are as fast as a fused one on a CPU, each is a matrix of its own for Muon,
    and the names are those that other people's checkpoints have.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.query, self.key, self.value, self.out = (nn.Linear(config.dim, config.dim, bias=False) for _ in range(4))

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], cache: KVCache | None = None) -> Tensor:
        heads = (*x.shape[:-1], -1, self.head_dim)
        query = rotate_and_norm(self.query(x).view(heads), *rotation)
        key = rotate_and_norm(self.key(x).view(heads), *rotation)
        value = self.value(x).view(heads)
        mask = None
        if cache is not None:
            key, value, mask = cache.append(self.layer, key, value)
        # A view of (B, T, H, D) is all the transposes cost: attention reads and writes it strided.
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        is_causal = mask is None and query.shape[2] > 1
        y = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal)
        return self.out(y.transpose(1, 2).flatten(2))


class Rotary(nn.Module):
    """The tables of the rotary position embedding, for every position of the context."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_dim: int, base: float) -> None:
        super().__init__()
        self.base = base
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(context, head_dim), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Writes the tables."""
        if self.cos.is_meta:
            return
        (context, head_dim), device = self.cos.shape, self.cos.device
        # float32 on purpose: the public models of this family were trained with these very angles.
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        position = torch.arange(context, dtype=torch.float32, device=device)
        angle = torch.outer(position, 1.0 / self.base**exponent)
        self.cos.copy_(torch.cat((angle.cos(), angle.cos()), dim=-1))
        self.sin.copy_(torch.cat((angle.sin(), -angle.sin()), dim=-1))

    def forward(self, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        """cos and sin for the first so many positions, or for the given (B, T): (..., T, 1, D)."""
        rows = slice(positions) if isinstance(positions, int) else positions
        return self.cos[rows].unsqueeze(-2), self.sin[rows].unsqueeze(-2)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # Constants that no checkpoint holds: whatever moved them (to_empty leaves garbage), they are written anew.
        super()._apply(fn, recurse)
        self.reset_parameters()
        return self
