"""One map of the features, applied to every stream alike: the generator of the original HC."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from temper.generators.base import Modes, Shapes, mode_product
from temper.generators.dense import Dense

if TYPE_CHECKING:
    from temper.decompose.descent import Effort


class PerStream(Dense, name="per-stream"):
    """W[n, d, o.., n'] = w[d, o..] where n = n', else 0: the logits of stream n depend on stream n alone.

    The last output mode is the stream that the logit belongs to, so it must have N entries:
    D -> 1 per stream for pre and post, D -> N per stream for res. Starts at zero.

    Reference: Zhu et al., Hyper-Connections, 2025.
    """

    @classmethod
    def check_modes(cls, in_modes: Sequence[int], out_modes: Sequence[int]) -> tuple[Modes, Modes]:
        in_modes, out_modes = super().check_modes(in_modes, out_modes)
        if out_modes[-1] != in_modes[0]:
            raise ValueError(
                f"the per-stream generator makes one logit per stream: the last of out_modes {out_modes} "
                f"must be {in_modes[0]}. Use a mixer with (N, N) logits, or another generator."
            )
        return in_modes, out_modes

    @classmethod
    def incompressible(cls) -> str:
        return (
            "it is one small map that all streams share (HC's); a low-rank form of it would be larger or lose streams"
        )

    @classmethod
    def shapes(cls, in_modes: Modes, out_modes: Modes, **options: Any) -> Shapes:
        return {"weight": in_modes[1:] + out_modes[:-1]}

    def maps(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        weight = self.weight.to(dtype=dtype)
        weight_PD = weight.flatten(1).T if weight.ndim > 1 else weight[None]
        eye_NN = torch.eye(self.in_modes[0], dtype=weight.dtype, device=weight.device)
        in_map_RND = (weight_PD[:, None, None, :] * eye_NN[..., None]).flatten(0, 1)
        eye_RR = torch.eye(in_map_RND.shape[0], dtype=weight.dtype, device=weight.device)
        return in_map_RND, eye_RR.unflatten(-1, self.out_modes)

    def with_modes_mapped(self, maps: Sequence[Tensor | None]) -> dict[str, Tensor]:
        # Stream n determines its own logits only, so neither the stream mode nor the last output mode is stored.
        weight = self.weight.detach()
        for mode, matrix in enumerate(maps[1:-1]):
            weight = mode_product(weight, matrix, mode)
        return {"weight": weight}

    def assign_dense(self, weight: Tensor) -> None:
        """Least squares: the mean over streams of the entries this form can hold; the rest is dropped."""
        self.weight.copy_(weight.diagonal(dim1=0, dim2=-1).mean(-1))

    def assign_best(self, weight: Tensor, moment: Tensor | None, effort: Effort) -> None:
        """One linear problem: sum_n S[n, :, n, :] w = sum_n (S W)[n, :, .., n]."""
        from temper.decompose.moment import Moment, solve

        if moment is not None:
            measure = Moment(moment.view(*self.in_modes, *self.in_modes))
            system = measure.tensor.diagonal(dim1=0, dim2=2).sum(-1)
            slope = measure.apply(weight - self.to_dense()).diagonal(dim1=0, dim2=-1).sum(-1)
            self.weight.add_(solve(system, slope.flatten(1) if slope.ndim > 1 else slope).view(slope.shape))
