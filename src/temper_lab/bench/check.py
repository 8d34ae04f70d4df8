"""Outputs and gradients against `naive` before anything is timed: speed is never bought with a wrong number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

import temper
from temper_lab.bench.cases import Case

# Not a multiple of what a kernel takes at once, so that its last tokens are looked at too.
TOKENS = 37
# Of the largest entry. Float32 sums over N D entries and the rounds of Sinkhorn leave 1e-5 at most, and a wrong formula
# is off by far more.
TOLERANCE = 1e-4
# A gate's gradient is one sum over all tokens and entries, of which much cancels.
TOLERANCE_OF_ONE = 1e-3


def check_site(case: Case, width: int) -> None:
    """Raises ValueError if the site differs from `naive`."""
    assert case.backend is not None
    site = case.site(width)
    scatter(site)
    streams = torch.randn(TOKENS, case.streams, width, requires_grad=True)
    y = torch.randn(TOKENS, width, requires_grad=True)
    grads = torch.randn(TOKENS, width), torch.randn(TOKENS, case.streams, width)
    leaves = {"streams": streams, "y": y, **dict(site.named_parameters())}

    def run(name: str) -> dict[str, Tensor]:
        with temper.backend(name):
            x, state = site.begin(streams)
            out = site.finish(state, y)
        torch.autograd.backward([x, out], grads)
        return {"x": x.detach(), "the next streams": out.detach(), **take_grads(leaves)}

    compare(str(case), run(case.backend), run("naive"))


@torch.no_grad()
def scatter(site: nn.Module) -> None:
    """Random values for every parameter, with logits of size 1: at the initial ones most gradients nearly vanish."""
    for parameter in site.norm.parameters():
        parameter.normal_(1.0, 0.1)
    for name in site.config.heads:
        head = getattr(site, name)
        for parameter in head.generator.parameters():
            parameter.normal_()
        size = head.generator.to_dense().norm() / math.sqrt(math.prod(head.generator.out_modes))
        head.gate.fill_(1 / size)
        head.bias.normal_()


def take_grads(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The gradients, which are dropped from the tensors."""
    grads = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            grads[f"the gradient of {name}"], leaf.grad = leaf.grad, None
    return grads


def compare(
    label: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Raises ValueError unless all are the same within the tolerance."""
    if missing := expected.keys() ^ got.keys():
        raise ValueError(f"{label}: {min(missing)} is there only once; nothing is reported")
    for name, value in expected.items():
        largest = float(value.abs().max())
        error = float((got[name] - value).abs().max())
        allowed = tolerance if value.numel() > 1 else max(tolerance, TOLERANCE_OF_ONE)
        # Not "greater than": what is not a number is wrong too.
        if not error <= allowed * largest:
            share = error / largest if largest else math.inf
            raise ValueError(
                f"{label}: {name} is off by {share:.1e} of its largest entry (allowed: {allowed:.0e}); "
                "nothing is reported"
            )
