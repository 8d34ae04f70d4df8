"""A site in plain torch: the reference for every faster backend, and the only backend that serves every site.

Letters: N streams, M destination streams, D features, R bottleneck rows, K = N^2 + 2N routing weights of a token.
The functions compute in the dtype of the streams: widen them first. Autograd does the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.gates import Gates
from temper.ops.plan import FoldedWeights, RawWeights, SiteSpec, State
from temper.streams import widen

if TYPE_CHECKING:
    from temper.mixers.base import Mixer


def begin(streams: Tensor, folded: FoldedWeights, spec: SiteSpec, mixer: Mixer) -> tuple[Tensor, Tensor]:
    """x (..., D) and the routing weights (..., K) of streams (..., N, D)."""
    gates = Gates.named(spec.gates)(spec.pre_eps)
    rstd = reciprocal_rms(streams, spec.norm_per_stream, spec.norm_eps, spec.norm_clamp, spec.norm_outside)
    rows = project(streams, folded.in_map, rstd).split(spec.rows, dim=-1)
    maps = folded.out.split(spec.map_sizes)
    dynamic = [
        gates.squash(row if direct else row @ out.view(row.shape[-1], -1))
        for row, out, direct in zip(rows, maps, spec.direct, strict=True)
    ]
    if folded.scale is not None:
        scales = folded.scale.split(spec.head_logits)
        dynamic = [scale * value for scale, value in zip(scales, dynamic, strict=True)]
    biases = folded.bias.split(spec.head_logits)
    pre, res, post = (value + bias for value, bias in zip(dynamic, biases, strict=True))
    pre, post = gates.pre(pre), gates.post(post)
    return read(streams, pre), spec.pack(pre, mixer.mix(res.unflatten(-1, mixer.logit_shape)), post)


def reciprocal_rms(streams: Tensor, per_stream: bool, eps: float, clamp: bool, outside: bool) -> Tensor:
    """1 / RMS of streams (..., N, D), guarded by eps as `StreamNorm` says."""
    axes = -1 if per_stream else (-2, -1)
    if outside:
        # A norm has the gradient zero at zero, where a square root has none.
        entries = streams.shape[-1] * (1 if per_stream else streams.shape[-2])
        return (torch.linalg.vector_norm(streams, dim=axes, keepdim=True) / entries**0.5 + eps).reciprocal()
    mean = streams.square().mean(axes, keepdim=True)
    return (mean.clamp_min(eps) if clamp else mean + eps).rsqrt()


def finish(streams: Tensor, y: Tensor, weights: Tensor, spec: SiteSpec) -> Tensor:
    """The next streams (..., N, D)."""
    _, res, post = spec.split(weights)
    return write(streams, y, res, post)


def project(streams: Tensor, in_map: Tensor, rstd: Tensor) -> Tensor:
    """The bottleneck of normed streams: out[r] = sum_{n,d} rstd H[n, d] in_map[r, n, d].

    Shape:
        streams: (..., N, D), in_map: (R, N, D), rstd: (..., 1, 1) or (..., N, 1) -> (..., R).
    """
    weight = in_map.flatten(1).T
    if rstd.shape[-2] == 1:
        # A scale per token factors out of the sum, so the streams are read once and never copied.
        return (streams.flatten(-2) @ weight) * rstd.squeeze(-1)
    return (streams * rstd).flatten(-2) @ weight


def read(streams: Tensor, pre: Tensor) -> Tensor:
    """x = sum_n pre[n] H[n]: (..., N, D), (..., N) -> (..., D)."""
    return (pre.to(streams.dtype).unsqueeze(-2) @ streams).squeeze(-2)


def write(streams: Tensor, y: Tensor, res: Tensor, post: Tensor) -> Tensor:
    """H'[m] = sum_n res[m, n] H[n] + post[m] y: (..., N, D), (..., D), (..., M, N), (..., M) -> (..., M, D)."""
    dtype = streams.dtype
    return res.to(dtype) @ streams + post.to(dtype).unsqueeze(-1) * y.to(dtype).unsqueeze(-2)


class Naive:
    """The backend of the functions above."""

    name = "naive"
    device: str | None = None
    scope = "everything, in plain torch, with gradients of gradients"
    folding = None

    def refusal(self, spec: SiteSpec, mixer: Mixer, streams: Tensor, asked: bool) -> str | None:
        return None

    def unavailable(self) -> str | None:
        return None

    def limits(self) -> list[str]:
        return []

    def open_site(
        self, streams: Tensor, weights: FoldedWeights | RawWeights, spec: SiteSpec, mixer: Mixer, group: int
    ) -> tuple[Tensor, State]:
        assert isinstance(weights, FoldedWeights)
        # One wide copy of half-precision streams serves routing, reading and mixing.
        wide = widen(streams)
        x, routing = begin(wide, weights, spec, mixer)
        return x.to(streams.dtype), State(wide, streams.dtype, routing, spec, self)

    def close_site(self, state: State, y: Tensor, in_place: bool) -> Tensor:
        assert state.spec is not None
        assert state.weights is not None
        return finish(state.streams, y, state.weights, state.spec).to(state.dtype)

    def close_and_open(
        self,
        state: State,
        y: Tensor,
        weights: FoldedWeights | RawWeights,
        spec: SiteSpec,
        mixer: Mixer,
        group: int,
        in_place: bool,
    ) -> tuple[Tensor, State]:
        return self.open_site(self.close_site(state, y, in_place), weights, spec, mixer, group)

    def mix(self, logits: Tensor, mixer: Mixer) -> Tensor:
        return mixer.mix(logits)
