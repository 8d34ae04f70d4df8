"""Which combinations can run here, and why the others cannot."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import temper
from temper.ops import backend
from temper_lab.bench import peers
from temper_lab.bench.blocks import Residual

# Routing parameters of a site beyond which it says nothing more about cost that anybody would pay.
LIMIT = 10_000_000


class Case(NamedTuple):
    """A method at a number of streams.

    Args:
        backend: of `temper`; None for what does not use it.
    """

    method: str
    streams: int
    backend: str | None

    def __str__(self) -> str:
        return f"{self.method}, N={self.streams}" + (f", {self.backend}" if self.backend else "")

    def fields(self) -> dict[str, Any]:
        """As a row begins."""
        return self._asdict()

    def site(self, width: int, layer_index: int = 0) -> nn.Module:
        """Something with `begin` and `finish`."""
        if self == RESIDUAL:
            return Residual()
        if self.backend is None:
            return peers.PeerSite(self.method, self.streams, width, layer_index)
        config = temper.preset(self.method, num_streams=self.streams, dim=width)
        return temper.HyperConnection(config, layer_index=layer_index)

    def shape(self, tokens: int, width: int) -> tuple[int, ...]:
        """Of the streams of one row of tokens."""
        return (self.streams, tokens, width) if self.backend is None else (1, tokens, self.streams, width)

    def chosen(self) -> AbstractContextManager[None]:
        """In which its sites run as it says."""
        return nullcontext() if self.backend is None else temper.backend(self.backend)


# What everything is compared with.
RESIDUAL = Case("residual", 1, None)


def sort_out(
    methods: tuple[str, ...], streams: tuple[int, ...], backends: tuple[str, ...], width: int
) -> tuple[list[Case], list[dict[str, Any]]]:
    """The cases that run, and those that do not with the reason; other people's sites last."""
    cases, skipped = [], []
    for method in methods:
        for n in streams:
            if reason := _refusal(method, n, width):
                skipped.append({"method": method, "streams": n, "backend": None, "reason": reason})
                continue
            for name in backends:
                case = Case(method, n, name)
                if reason := _fallback(case, width):
                    skipped.append({**case.fields(), "reason": reason})
                else:
                    cases.append(case)
    cases += [Case(name, n, None) for name in peers.find()[1] for n in streams]
    return cases, skipped


def _refusal(method: str, num_streams: int, width: int) -> str | None:
    try:
        config = temper.preset(method, num_streams=num_streams, dim=width)
    except ValueError as error:
        return str(error)
    count = temper.count_parameters(config)
    return f"{count:,} parameters in a site, more than {LIMIT:,}" if count > LIMIT else None


def _fallback(case: Case, width: int) -> str | None:
    """What runs instead of the backend that was asked for, if something does."""
    with torch.device("meta"):
        site = case.site(width)
    assert case.backend is not None
    ran = runs_on(case.backend, torch.empty(1, case.streams, width), site)
    return None if ran == case.backend else f"the backend {case.backend} leaves this to {ran}"


def runs_on(name: str, tensor: Tensor, part: Any) -> str:
    """The backend that runs a site or a mixer when this one is asked for.

    Args:
        part: a site or a mixer.
    """
    spec, mixer = (part.site_spec(), part) if isinstance(part, temper.Mixer) else (part.spec, part.mixer)
    with temper.use_backend(name):
        return backend.choose(tensor, spec, mixer).name
