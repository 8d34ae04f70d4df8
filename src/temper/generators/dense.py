"""The dense W, which mHC, mHC-lite and KromHC store."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from temper.generators.base import Generator, Modes, Shapes, mode_product
from temper.ops.plan import GeneratorSpec


class Dense(Generator, name="dense"):
    """The full tensor, N * D * prod(out_modes) parameters; starts at zero."""

    direct = True

    def __init__(self, in_modes: Modes, out_modes: Modes, *, init_std: float | None = None) -> None:
        super().__init__(in_modes, out_modes, init_std=init_std)
        self.weight = nn.Parameter(torch.empty(self.shapes(self.in_modes, self.out_modes)["weight"]))
        self.reset_parameters()

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        return {"weight": in_modes + out_modes}

    @classmethod
    def bottleneck(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> int:
        return math.prod(out_modes)

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.normal_(0, self.init_std) if self.init_std else self.weight.zero_()

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        in_map_RND = self.weight.to(dtype=dtype).flatten(2).movedim(-1, 0)
        eye_RR = torch.eye(in_map_RND.shape[0], dtype=in_map_RND.dtype, device=in_map_RND.device)
        return in_map_RND, eye_RR.unflatten(-1, self.out_modes)

    def native(self) -> GeneratorSpec:
        return GeneratorSpec("dense")

    def stored(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        weight = self.weight.detach()
        for mode, matrix in enumerate(maps):
            weight = mode_product(weight, matrix, mode)
        return {"weight": weight}

    def assign_dense(self, weight: Tensor) -> None:
        self.weight.copy_(weight)
