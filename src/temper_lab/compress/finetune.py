"""A few steps of training for a compressed model, to get back what it lost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

from torch import nn

import temper
from temper_lab.compress.subject import Subject
from temper_lab.compress.text import Text
from temper_lab.optim import Optimizers, OptimSettings
from temper_lab.progress import Bar


def finetune(
    subject: Subject, text: Text, steps: int, *, everything: bool = False, optim: OptimSettings | None
) -> None:
    """Trains the routing, or everything, on the training text: one batch a step, with the schedule of a run.

    Args:
        optim: learning rates for 2^19 tokens a step, as in a recipe; the lab's own if None.
    """
    with _trainable(subject.network, everything), text.training(subject) as batches:
        optimizers = Optimizers.build(
            subject.network, optim, batch_tokens=text.rows * text.context, width=subject.width
        )
        device = next(subject.network.parameters()).device
        with Bar("finetuning", steps) as bar:
            for step, batch in enumerate(islice(batches, steps)):
                ids, targets = (part.to(device) for part in batch)
                loss = subject.losses(ids, targets_BT=targets, reduction="none").mean()
                if not math.isfinite(loss.item()):
                    raise FloatingPointError(f"finetuning step {step + 1}: the loss is {loss.item()}")
                loss.backward()
                optimizers.step(step, steps)
                bar.update(step + 1, f"loss {loss.item():.4f}")


@contextmanager
def _trainable(network: nn.Module, everything: bool) -> Iterator[None]:
    """Only what is to be trained has gradients, for the time being."""
    before = {parameter: parameter.requires_grad for parameter in network.parameters()}
    network.requires_grad_(True)
    groups = {group["name"]: group["params"] for group in temper.param_groups(network)}
    routing = set(map(id, groups["routing"]))
    for parameter, had in before.items():
        parameter.requires_grad_(id(parameter) in routing or (everything and had))
    try:
        yield
    finally:
        for parameter, had in before.items():
            parameter.requires_grad_(had)
            parameter.grad = None
