"""Which implementation runs a site: by device and dtype, or as the user says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from temper.ops import build, cpu, fused, naive, operators
from temper.ops.plan import Plan
from temper.registry import unknown

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

IMPLEMENTATIONS: dict[str, ModuleType] = {"cpu": cpu, "fused": fused, "naive": naive}
VARIABLE = "TEMPER_BACKEND"

# What `backend` asks for now; None leaves it to the device and the dtype.
_asked: str | None = None


def choose(streams: Tensor, plan: Plan, mixer: Mixer) -> ModuleType:
    """The fastest implementation that can run this, of those that were asked for."""
    asked = _asked or os.environ.get(VARIABLE) or "auto"
    if asked != "auto" and asked not in IMPLEMENTATIONS:
        raise unknown(f"backend in {VARIABLE}", asked, ["auto", *IMPLEMENTATIONS])
    if asked == "naive":
        return naive
    # float64 is for checking, where plain torch is easier to believe; the kernels have it for those who ask.
    wants = (torch.float32, torch.bfloat16) if asked == "auto" else tuple(operators.STORED)
    on_cpu = streams.device.type == "cpu" and streams.dtype in wants
    if asked != "fused" and on_cpu and cpu.serves(plan, mixer, streams.dtype):
        return cpu
    return fused if fused.serves(plan, mixer, streams.dtype) else naive


@contextmanager
def backend(name: str) -> Iterator[None]:
    """Has every site inside the `with` run on one implementation, wherever that can do it.

        with temper.backend("naive"):
            model(tokens)

    The backward pass runs where its forward pass did. The environment variable TEMPER_BACKEND says the same for
    a whole process. For all threads, not only this one.

    Args:
        name: "cpu" (native kernels), "fused" (torch with backwards written by hand), "naive" (plain
            torch, and the only one whose gradients can be differentiated again) or "auto".
    """
    global _asked
    if name != "auto" and name not in IMPLEMENTATIONS:
        raise unknown("backend", name, ["auto", *IMPLEMENTATIONS])
    before = _asked
    _asked = name
    try:
        yield
    finally:
        _asked = before


@dataclass(frozen=True)
class Backend:
    """An implementation of the operations on streams.

    Args:
        available: whether it can run here.
        serves: what it is chosen for.
        lacks: what falls to the next one; or why it cannot run.
    """

    name: str
    available: bool
    serves: str
    lacks: str

    def __str__(self) -> str:
        return f"{self.name:6} {'yes' if self.available else 'no':4} {self.serves}; {self.lacks}"


def backends() -> tuple[Backend, ...]:
    """What can run here, the first that serves a site coming first: print(*temper.backends(), sep="\\n")."""
    from temper.mixers import Mixer

    known = {name: Mixer.named(name) for name in sorted(Mixer.members)}
    slow = [name for name, mixer in known.items() if mixer.pull is Mixer.pull]
    foreign = [name for name, mixer in known.items() if mixer.native is Mixer.native]
    reason = build.why_not()
    unfolded = 'sites with tanh gates or a per-stream norm ("hc")'
    return (
        Backend(
            "cpu",
            reason is None,
            "float32 and bfloat16 streams on a CPU, by native kernels",
            reason or f"falls back for {_list([unfolded, *foreign, 'sinkhorn with tol and eps at once'])}",
        ),
        Backend(
            "fused",
            True,
            "every other device and dtype, in torch with backwards written by hand",
            f"falls back for {_list([unfolded, *slow, 'sinkhorn with tol'])}",
        ),
        Backend("naive", True, "everything, in plain torch, with gradients of gradients", "the slowest"),
    )


def _list(things: list[str]) -> str:
    return ", ".join(things)
