"""What a deep stack keeps for its backward, with `temper.recompute` and without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import temper
from temper_lab.bench.blocks import Stack, branches
from temper_lab.bench.cases import RESIDUAL, Case
from temper_lab.bench.check import TOKENS, compare, scatter, take_grads
from temper_lab.bench.saved import saved_bytes
from temper_lab.bench.setting import Setting
from temper_lab.progress import Bar

BLOCKS = 8


def measure(setting: Setting, cases: Sequence[Case], what: str) -> dict[str, Any]:
    """The part "recompute" of a report; gradients are compared before anything is said."""
    width, blocks = setting.width, branches(setting.width)
    plain = Stack(blocks, [RESIDUAL.site(width) for _ in range(2 * BLOCKS)])
    base = saved_bytes(RESIDUAL, plain, torch.randn(RESIDUAL.shape(setting.tokens, width), requires_grad=True))
    rows = []
    with Bar(what, len(cases)) as bar:
        for done, case in enumerate(cases):
            bar.update(done, str(case))
            stack = Stack(blocks, [case.site(width, layer) for layer in range(2 * BLOCKS)])
            streams = torch.randn(case.shape(setting.tokens, width), requires_grad=True)
            kept = saved_bytes(case, stack, streams)
            with_less = saved_bytes(case, temper.recompute(stack), streams)
            rows.append(
                {
                    **case.fields(),
                    "blocks": BLOCKS,
                    "group": stack.sites[0].recompute,
                    "saved_ratio": round(kept / base, 4),
                    "recompute_saved_ratio": round(with_less / base, 4),
                }
            )
            _check(case, stack, width)
    return {"recompute": rows}


def _check(case: Case, stack: Stack, width: int) -> None:
    for site in stack.sites:
        scatter(site)
    streams = torch.randn(case.shape(TOKENS, width), requires_grad=True)
    grad = torch.randn_like(streams)
    leaves = {"streams": streams, **dict(stack.named_parameters())}

    def run(group: int | None) -> dict[str, Tensor]:
        temper.recompute(stack, group)
        with case.chosen():
            out = stack(streams)
        out.backward(grad)
        return {"the last streams": out.detach(), **take_grads(leaves)}

    compare(f"{case} with recompute", run(None), run(0))
