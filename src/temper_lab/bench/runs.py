"""Forward and backward of a stack and of a site, as things to time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from temper_lab.bench.cases import Case
from temper_lab.bench.measure import Run

# A site is a small part of a pair: the median of a few stands for its turn.
REPEATS = 3


class Tensors:
    """Random inputs and gradients, shared by all runs of one shape."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], bool], Tensor] = {}

    def leaf(self, shape: tuple[int, ...]) -> Tensor:
        """What is differentiated."""
        return self._make(shape, True)

    def grad(self, shape: tuple[int, ...]) -> Tensor:
        """What comes back to an output of this shape."""
        return self._make(shape, False)

    def _make(self, shape: tuple[int, ...], is_leaf: bool) -> Tensor:
        if (shape, is_leaf) not in self._made:
            self._made[shape, is_leaf] = torch.randn(shape, requires_grad=is_leaf)
        return self._made[shape, is_leaf]


def stack_run(case: Case, stack: nn.Module, streams: Tensor, grad: Tensor) -> Run:
    """Sites with their branches."""

    def action() -> None:
        with case.chosen():
            out = stack(streams)
        out.backward(grad)

    return Run(action, [streams, *stack.parameters()])


def site_run(case: Case, site: nn.Module, streams: Tensor, y: Tensor, grads: Sequence[Tensor]) -> Run:
    """One site by itself.

    Args:
        y: stands for what its branch gives.
        grads: of the branch input and of the next streams.
    """

    def action() -> None:
        with case.chosen():
            x, state = site.begin(streams)
            out = site.finish(state, y)
        torch.autograd.backward([x, out], grads)

    return Run(action, [streams, y, *site.parameters()], REPEATS)
