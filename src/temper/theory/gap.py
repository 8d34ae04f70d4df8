"""A measured distance beside the bound on it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Gap:
    """Measured and bound of many tokens. A ratio is measured / bound: 1 is tight, above 1 would be a mistake.

    Args:
        measured_max, measured_mean, bound_max, bound_mean, ratio_max, ratio_mean: over tokens.
        measured_total, bound_total: of all tokens together, the root of the sum of squares.
    """

    measured_max: float
    measured_mean: float
    measured_total: float
    bound_max: float
    bound_mean: float
    bound_total: float
    ratio_max: float
    ratio_mean: float

    @classmethod
    def of(cls, measured: Tensor, bound: Tensor) -> Gap:
        """From the numbers of every token."""
        # A zero deviation satisfies every bound, including zero (0/0).
        ratio = torch.where(measured == 0, torch.zeros_like(measured), measured / bound)
        return cls(
            measured_max=measured.max().item(),
            measured_mean=measured.mean().item(),
            measured_total=measured.norm().item(),
            bound_max=bound.max().item(),
            bound_mean=bound.mean().item(),
            bound_total=bound.norm().item(),
            ratio_max=ratio.max().item(),
            ratio_mean=ratio.mean().item(),
        )

    @property
    def holds(self) -> bool:
        """Whether no measured value exceeds its bound."""
        # Not "is not larger": NaN must fail too.
        return self.ratio_max <= 1
