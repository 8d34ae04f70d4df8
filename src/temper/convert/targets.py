"""The generators of a model, each with its weights, statistics and sensitivity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from temper.connection import HyperConnection
from temper.convert.moments import Moment, routed_sites
from temper.convert.sensitivity import Sensitivities
from temper.generators import Generator
from temper.router import Head

# Ridge on the sensitivity, relative to its mean: calibration text under-samples it.
RIDGE = 0.1


class Target(NamedTuple):
    """One generator to be replaced."""

    site_name: str
    site: HyperConnection
    head_name: str
    moment: Moment | None
    sensitivity: Tensor | None

    @property
    def head(self) -> Head:
        return getattr(self.site, self.head_name)

    @property
    def measure(self) -> Tensor | None:
        return None if self.moment is None else self.moment.covariance

    @property
    def share(self) -> float:
        """The weight of this generator's squared error among the others."""
        mean = 1.0 if self.sensitivity is None else self.sensitivity.diagonal().mean().item()
        return self.head.gate.item() ** 2 * mean

    def metrics(self) -> list[Tensor] | None:
        """Sensitivity of the loss along every output mode, (O, O) with mean diagonal 1; None if unknown.

        Their Kronecker product approximates the full matrix: one matrix per mode preserves low rank.
        """
        if self.sensitivity is None or not self.sensitivity.any():
            return None
        modes, found = self.head.generator.out_modes, []
        for k, mode in enumerate(modes):
            before, after = math.prod(modes[:k]), math.prod(modes[k + 1 :])
            part = torch.einsum("apbaqb->pq", self.sensitivity.view(before, mode, after, before, mode, after))
            found.append(part / part.diagonal().mean() + RIDGE * torch.eye(mode, dtype=part.dtype))
        return found


def targets_of(
    model: nn.Module, moments: Mapping[str, Moment] | None, sensitivities: Sensitivities | None
) -> list[Target]:
    """Every generator of a model; raises ValueError for those that cannot be compressed."""
    targets = []
    for name, site in routed_sites(model).items():
        for what, given in (("moments", moments), ("sensitivities", sensitivities)):
            if given is not None and name not in given:
                raise ValueError(f"{what} has nothing of {name!r}; expected those of this model")
        for head in site.config.heads:
            generator = getattr(site, head).generator
            if reason := generator.incompressible():
                raise ValueError(f"{name}: {head} is a {generator.name} generator, nothing to compress: {reason}")
            if not all(torch.isfinite(tensor).all() for tensor in generator.state_dict().values()):
                raise ValueError(f"{name}: {head} has values that are not finite")
            moment = None if moments is None else moments[name]
            targets.append(Target(name, site, head, moment, sensitivities[name][head] if sensitivities else None))
    return targets


def dense_of(generator: Generator) -> Tensor:
    """W from stored tensors, widened before they are multiplied."""
    dtype = torch.promote_types(next(iter(generator.state_dict().values())).dtype, torch.float32)
    in_map, out_map = generator.maps(dtype)
    return torch.tensordot(in_map.movedim(0, -1), out_map, dims=1)


def size_of(generator: Generator) -> int:
    return sum(tensor.numel() for tensor in generator.state_dict().values())
