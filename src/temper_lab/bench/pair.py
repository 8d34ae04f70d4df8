"""One block pair and one site, and how the site grows with N: all in the same interleaved run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn

from temper_lab.bench.bandwidth import bandwidth, copy_run, site_bytes
from temper_lab.bench.blocks import Stack, branches
from temper_lab.bench.cases import RESIDUAL, Case
from temper_lab.bench.measure import Run, interleave, milliseconds, ratios, spread
from temper_lab.bench.runs import Tensors, site_run, stack_run
from temper_lab.bench.saved import saved_bytes
from temper_lab.bench.setting import Setting

COPY, SITE, PAIR = "copy", "site", "pair"


def measure(setting: Setting, pairs: Sequence[Case], growth: Sequence[Case], what: str) -> dict[str, Any]:
    """The parts "pair", "peers" and "growth" of a report, and what they add to its setting.

    Args:
        pairs: cases as a whole pair and as a site by itself.
        growth: cases as a site by itself.
    """
    tokens, width = setting.tokens, setting.width
    tensors, blocks = Tensors(), branches(width)
    x_shape = RESIDUAL.shape(tokens, width)
    runs: dict[Any, Run] = {COPY: copy_run()}
    saved: dict[Case, int] = {}
    site_of = shared_sites(width)
    for case in dict.fromkeys([RESIDUAL, *pairs, *growth]):
        shape = case.shape(tokens, width)
        streams, grad, sites = tensors.leaf(shape), tensors.grad(shape), [site_of(case, layer) for layer in (0, 1)]
        if case != RESIDUAL:
            grads = [tensors.grad(x_shape), grad]
            runs[SITE, case] = site_run(case, sites[0], streams, tensors.leaf(x_shape), grads)
        if case == RESIDUAL or case in pairs:
            stack = Stack(blocks, sites)
            runs[PAIR, case] = stack_run(case, stack, streams, grad)
            saved[case] = saved_bytes(case, stack, streams)
    return Timed(setting, interleave(runs, setting.rounds, what), saved).report(pairs, growth)


def shared_sites(width: int) -> Any:
    """Makes the site of a case at a layer; the backends of a method share theirs."""

    @cache
    def make(case: Case, layer: int) -> nn.Module:
        return case.site(width, layer)

    return lambda case, layer: make(case._replace(backend=case.backend and "naive"), layer)


@dataclass(frozen=True)
class Timed:
    """One interleaved run, to be made into rows."""

    setting: Setting
    seconds: dict[Any, list[float]]
    saved: dict[Case, int]

    def report(self, pairs: Sequence[Case], growth: Sequence[Case]) -> dict[str, Any]:
        """Rows by part."""
        return {
            "setting": {
                "bandwidth_gb_s": round(bandwidth(self.seconds[COPY]) / 1e9, 2),
                "pair_ms": milliseconds(self.seconds[PAIR, RESIDUAL]),
                "pair_saved_bytes": self.saved[RESIDUAL],
            },
            "pair": [self.pair_row(case) for case in pairs if case.backend is not None],
            "peers": [self.pair_row(case) for case in pairs if case.backend is None],
            "growth": [self.growth_row(case, growth) for case in growth],
        }

    def site_row(self, case: Case) -> dict[str, Any]:
        """A site by itself. Two of them on top of a pair are steadier than the difference of two pairs."""
        seconds = self.seconds[SITE, case]
        ratio = spread(1 + 2 * share for share in ratios(seconds, self.seconds[PAIR, RESIDUAL]))
        return {**case.fields(), "site_ms": milliseconds(seconds), "ratio": ratio["median"], "ratio_spread": ratio}

    def pair_row(self, case: Case) -> dict[str, Any]:
        """A whole pair as well, what it keeps and what it moves."""
        row = self.site_row(case)
        whole = spread(ratios(self.seconds[PAIR, case], self.seconds[PAIR, RESIDUAL]))
        moved = site_bytes(case.streams, self.setting.width, self.setting.tokens)
        speed = moved / row["site_ms"]["median"] * 1000
        return row | {
            "pair_ratio": whole["median"],
            "pair_ratio_spread": whole,
            "saved_ratio": round(self.saved[case] / self.saved[RESIDUAL], 4),
            "bytes": moved,
            "bandwidth_share": round(speed / bandwidth(self.seconds[COPY]), 4),
        }

    def growth_row(self, case: Case, growth: Sequence[Case]) -> dict[str, Any]:
        """A site, and how many times that of the fewest streams it takes."""
        family = (other for other in growth if (other.method, other.backend) == (case.method, case.backend))
        least = min(family, key=lambda other: other.streams)
        times = spread(ratios(self.seconds[SITE, case], self.seconds[SITE, least]))
        return self.site_row(case) | {"times_least": times["median"]}
