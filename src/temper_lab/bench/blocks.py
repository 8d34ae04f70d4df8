"""One block pair in plain torch: attention and MLP, each behind a norm and inside a site."""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 128


class Attention(nn.Module):
    """Causal, with heads of 128 where the width allows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.num_heads = next(n for n in range(max(1, width // HEAD_DIM), 0, -1) if width % n == 0)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """D -> 4 D -> D with a squared ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class Residual(nn.Module):
    """The site that everything is compared with: x + f(x)."""

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y


class Stack(nn.Module):
    """Sites around branches that take turns; two of each are a pair."""

    def __init__(self, branches: Iterable[nn.Module], sites: Iterable[nn.Module]) -> None:
        super().__init__()
        self.branches, self.sites = nn.ModuleList(branches), nn.ModuleList(sites)

    def forward(self, streams: Tensor) -> Tensor:
        for index, site in enumerate(self.sites):
            x, state = site.begin(streams)
            streams = site.finish(state, self.branches[index % len(self.branches)](x))
        return streams


def branches(width: int) -> list[nn.Module]:
    """Attention and MLP."""
    return [Attention(width), MLP(width)]
