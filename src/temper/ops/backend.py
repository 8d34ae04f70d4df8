"""The backend interface, the list of backends, and the choice of one by device and dtype or by the user.

A fast backend implements `Kernels`: the operations on streams with backwards written by
hand. `KernelBackend` (autograd.py) turns it into a `Backend`, which sites call; `naive` implements `Backend` itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from temper.ops import cpu, fused, gpu
from temper.ops.autograd import KernelBackend
from temper.ops.naive import Naive
from temper.ops.plan import FoldedWeights, RawWeights, Routed, SiteSpec, State
from temper.registry import unknown

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

VARIABLE = "TEMPER_BACKEND"


class Described(Protocol):
    """The description that every backend gives of itself.

    Args:
        name: what users call it.
        scope: the sites it is chosen for, in a few words.
        device: the type of device it runs on; None for any.
    """

    name: str
    scope: str
    device: str | None

    def refusal(self, spec: SiteSpec, mixer: Mixer, streams: Tensor, asked: bool) -> str | None:
        """Why this backend cannot run a site on streams of this dtype and type on its device; None if it can.

        Called for every forward pass, and traced by torch.compile: it must be cheap and not depend on values.

        Args:
            asked: whether the user named this backend instead of leaving the choice to the library.
        """

    def unavailable(self) -> str | None:
        """Why this backend cannot run anything on this machine; None if it can."""

    def limits(self) -> Sequence[str]:
        """Which sites it leaves to the next backend, each in a few words."""


class Folding(Protocol):
    """Folding by kernels. A backend without it gets weights that torch has folded, under autograd."""

    def fold(self, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype) -> FoldedWeights:
        """The gain, generators, gates and biases folded together, for streams of this dtype.

        Only called if `spec.generators` is not None and every tensor is as wide as the routing.
        """

    def fold_backward(
        self, d_folded: FoldedWeights, raw: Sequence[Tensor], spec: SiteSpec, dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """The gradients of the raw weights, in their order."""


class Kernels(Described, Protocol):
    """The operations on streams, forward and backward, for autograd.py to make differentiable.

    Streams are contiguous (T, N, D); gradients may have any strides, zero included. T may be zero. None means no
    gradient. Operations never write to their inputs, except with `in_place`. Weights, z, norms, folded weights and
    their gradients are float32, or float64 for float64 streams; everything else has the dtype of the streams, but y
    and its gradient may have any floating-point dtype of their own.
    """

    @property
    def folding(self) -> Folding | None:
        """The fold kernels of this backend, if it has any."""

    def begin(self, streams_TND: Tensor, folded: FoldedWeights, spec: SiteSpec, mixer: Mixer) -> tuple[Tensor, Routed]:
        """x (T, D), and the routing with what is saved for the backward."""

    def begin_backward(
        self,
        grad_TND: Tensor | None,
        d_x_TD: Tensor | None,
        d_weights_TK: Tensor | None,
        streams_TND: Tensor,
        folded: FoldedWeights,
        routed: Routed,
        spec: SiteSpec,
        mixer: Mixer,
    ) -> tuple[Tensor, FoldedWeights]:
        """The gradients of the streams and of the folded weights.

        Args:
            grad_TND: the gradient of the next streams, as `finish_backward` received it; multiplied by res^T here.
        """

    def finish(
        self, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec, in_place: bool = False
    ) -> Tensor:
        """The next streams.

        Args:
            in_place: the streams may be overwritten and returned.
        """

    def finish_backward(
        self, grad_TND: Tensor, streams_TND: Tensor, y_TD: Tensor, weights_TK: Tensor, spec: SiteSpec
    ) -> tuple[Tensor, Tensor]:
        """The gradients of y and of the routing weights; the streams get theirs from `begin_backward`."""

    def finish_begin(
        self,
        streams_TND: Tensor,
        y_TD: Tensor,
        weights_TK: Tensor,
        folded: FoldedWeights,
        spec: SiteSpec,
        mixer: Mixer,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor, Routed]:
        """`finish` of one site and `begin` of the next: the next streams, and x and the routing of the next site.

        Args:
            weights_TK: routing of the site that is finished.
            folded, spec, mixer: of the site that begins, which has as many streams and features.
        """

    def finish_begin_backward(
        self,
        grad_TND: Tensor | None,
        d_x_TD: Tensor | None,
        d_next_weights_TK: Tensor | None,
        next_TND: Tensor,
        folded: FoldedWeights,
        routed: Routed,
        streams_TND: Tensor,
        y_TD: Tensor,
        weights_TK: Tensor,
        spec: SiteSpec,
        mixer: Mixer,
    ) -> tuple[Tensor, FoldedWeights, Tensor, Tensor]:
        """`begin_backward` of the later site, then `finish_backward` of the earlier one on what that gives.

        Args:
            grad_TND, d_x_TD, d_next_weights_TK, next_TND, folded, routed: as for `begin_backward` of the later site.
            streams_TND, y_TD, weights_TK: as for `finish_backward` of the earlier site.

        Returns:
            The gradients of the next streams, of the folded weights, of y and of the earlier site's weights.
        """

    def mix(self, logits: Tensor, mixer: Mixer) -> Tensor:
        """res (T, N, N) of logits (T, *logit_shape)."""

    def mix_backward(self, logits: Tensor, res: Tensor, grad: Tensor, mixer: Mixer) -> Tensor:
        """The gradient of the logits."""


class Backend(Described, Protocol):
    """The differentiable operations that a site calls, on streams with any leading dimensions."""

    @property
    def folding(self) -> Folding | None:
        """The fold kernels, if torch does not fold the weights; a site then passes `RawWeights`."""

    def open_site(
        self, streams: Tensor, weights: FoldedWeights | RawWeights, spec: SiteSpec, mixer: Mixer, group: int
    ) -> tuple[Tensor, State]:
        """The branch input (..., D), and the state that `close_site` takes.

        Args:
            group: save the streams of every `group`-th site for the backward pass and recompute the others; 0 saves
                all.
        """

    def close_site(self, state: State, y: Tensor, in_place: bool) -> Tensor:
        """The next streams (..., N, D)."""

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
        """`close_site` of one site and `open_site` of the next, which this backend serves and which is as large."""

    def mix(self, logits: Tensor, mixer: Mixer) -> Tensor:
        """res (..., N, N) of logits (..., *logit_shape)."""


# In the order in which they are tried.
BACKENDS: dict[str, Backend] = {
    "triton": KernelBackend(gpu),
    "cpu": KernelBackend(cpu),
    "fused": KernelBackend(fused),
    "naive": Naive(),
}

# The name that `use_backend` asks for; None leaves the choice to the device and the dtype.
_asked: str | None = None


def choose(streams: Tensor, spec: SiteSpec, mixer: Mixer) -> Backend:
    """The first backend that serves these streams, starting with the requested one."""
    asked = _asked or os.environ.get(VARIABLE) or "auto"
    if asked != "auto" and asked not in BACKENDS:
        raise unknown(f"backend in {VARIABLE}", asked, ["auto", *BACKENDS])
    if asked == gpu.name:
        # Without a GPU streams are elsewhere, and nothing would ask the kernels.
        gpu.warn_if_unavailable()
    is_reached, device = asked == "auto", streams.device.type
    for name, backend in BACKENDS.items():
        is_reached = is_reached or name == asked
        # The device first, which is cheaper than a call.
        is_possible = is_reached and backend.device in (None, device)
        if is_possible and backend.refusal(spec, mixer, streams, name == asked) is None:
            return backend
    raise AssertionError("naive runs everything")


def explain(streams: Tensor, spec: SiteSpec, mixer: Mixer) -> str:
    """The name of the backend that runs these streams, and why those before it do not."""
    backend = choose(streams, spec, mixer)
    asked = _asked or os.environ.get(VARIABLE) or "auto"
    reasons = []
    for name, other in BACKENDS.items():
        if other is backend:
            break
        is_elsewhere = other.device not in (None, streams.device.type)
        reason = (
            f"the streams are on {streams.device.type}"
            if is_elsewhere
            else other.refusal(spec, mixer, streams, name == asked)
        )
        reasons.append(f"not {name}: {reason or f'{asked} was asked for'}")
    return backend.name + (f" ({'; '.join(reasons)})" if reasons else "")


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Runs every site inside the `with` on one backend, or on the next one that can where that cannot.

        with temper.use_backend("naive"):
            model(tokens)

    The backward pass runs where its forward pass did. The environment variable TEMPER_BACKEND does the same for a
    whole process. Both hold for all threads.

    Args:
        name: "triton" (kernels for GPUs), "cpu" (native kernels), "fused" (torch with backwards written by hand),
            "naive" (plain torch, and the only one whose gradients can be differentiated again) or "auto".
    """
    global _asked
    if name != "auto" and name not in BACKENDS:
        raise unknown("backend", name, ["auto", *BACKENDS])
    before = _asked
    _asked = name
    try:
        yield
    finally:
        _asked = before


@dataclass(frozen=True)
class BackendInfo:
    """A backend's availability and scope on this machine.

    Args:
        available: whether it can run on this machine.
        serves: the sites it is chosen for.
        lacks: the sites it leaves to the next backend, or why it cannot run.
    """

    name: str
    available: bool
    serves: str
    lacks: str

    def __str__(self) -> str:
        return f"{self.name:6} {'yes' if self.available else 'no':4} {self.serves}; {self.lacks}"


def list_backends() -> tuple[BackendInfo, ...]:
    """Every backend, in the order in which they are tried: print(*temper.list_backends(), sep="\\n")."""
    infos = []
    for name, backend in BACKENDS.items():
        reason, limits = backend.unavailable(), backend.limits()
        lacks = f"falls back for {', '.join(limits)}" if limits else "falls back for nothing"
        infos.append(BackendInfo(name, reason is None, backend.scope, reason or lacks))
    return tuple(infos)
