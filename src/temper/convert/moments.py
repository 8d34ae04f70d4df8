"""Mean and covariance of every site's normed streams on data: the inputs of its generators.

Letters: c = N * D entries of a token's streams, n tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from temper.connection import HyperConnection
from temper.streams import Routing, no_autocast, widen

# Tokens whose products are summed in the precision of routing before they are added in float64.
CHUNK = 1024
# Relative to the second moment, a variance below this is rounding: products in float32 are no better.
ROUNDING = 1e-6
# Ridge on every variance, relative to their mean: directions absent from the calibration data may occur elsewhere,
# and without a ridge the fit is arbitrary there (streams start as copies of each other).
RIDGE = 1e-2
# Total bytes of covariances beyond which they are stored in memory-mapped files.
LIMIT = 2 << 30


class Moment(NamedTuple):
    """Input statistics of one site, in float64; Hhat is the generators' input: normed streams with the gain.

    Args:
        mean: E[vec(Hhat)], entry n * D + d.
        covariance: E[vec(Hhat) vec(Hhat)^T] - mean mean^T, with RIDGE times its mean diagonal added to the diagonal.
    """

    mean: Tensor
    covariance: Tensor
    tokens: int


@contextmanager
def moments(model: nn.Module, *, limit: int = LIMIT) -> Iterator[Mapping[str, Moment]]:
    """Collects the moments of every routed site, by its name in the model, over the forward passes inside the `with`.

        with temper.convert.moments(model) as seen:
            for ids in batches:
                model(ids)
        temper.convert.compress(model, "tucker", rank=(2, 12), moments=seen)

    The mapping is empty until the `with` block ends.

    Args:
        limit: if all covariances, 8 (N D)^2 bytes each, would take more than this, they are stored in
            unlinked files in the folder for temporary files.
    """
    sites = routed_sites(model)
    sizes = {name: site.config.num_streams * site.config.dim for name, site in sites.items()}
    in_files = sum(8 * size**2 for size in sizes.values()) > limit
    tallies = {name: _Tally(size, in_files) for name, size in sizes.items()}
    before = {name: site.observers for name, site in sites.items()}
    seen: dict[str, Moment] = {}
    for name, site in sites.items():
        site.observers = (*site.observers, tallies[name].see)
    try:
        yield seen
    finally:
        for name, site in sites.items():
            site.observers = before[name]
    if unseen := [name for name, tally in tallies.items() if not tally.tokens]:
        raise ValueError(f"no tokens went through {', '.join(unseen)}: run the model inside `with moments(model)`")
    for name in list(tallies):
        seen[name] = tallies.pop(name).settle()


def routed_sites(model: nn.Module) -> dict[str, HyperConnection]:
    """The hyper-connections of a model that have generators, by name."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module, got {type(model).__name__}")
    sites = {name: site for name, site in model.named_modules() if isinstance(site, HyperConnection)}
    routed = {name: site for name, site in sites.items() if not site.config.is_residual}
    if not routed:
        what = "only plain residuals" if sites else "no HyperConnection"
        raise ValueError(f"{type(model).__name__} has {what}: there are no generators in it")
    return routed


class _Tally:
    """Running sums of one site."""

    def __init__(self, size: int, in_file: bool) -> None:
        self.tokens = 0
        self.total_c = torch.zeros(size, dtype=torch.float64)
        self.products_cc = _square(size, in_file)

    @torch.no_grad()
    def see(self, site: HyperConnection, streams: Tensor, routing: Routing) -> None:
        """Takes one forward pass into account."""
        with no_autocast(streams):
            wide = widen(streams)
            normed = wide * site.norm.rstd(wide)
            gain = site.norm.gain()
            if gain is not None:
                normed = normed * gain.to(normed.dtype)
            for part_nc in normed.reshape(-1, len(self.total_c)).split(CHUNK):
                self.tokens += len(part_nc)
                self.total_c += part_nc.double().sum(0).to(self.total_c.device)
                self.products_cc += (part_nc.T @ part_nc).to(self.products_cc)

    def settle(self) -> Moment:
        """The moments, in the memory of the sums."""
        mean, second = self.total_c.div_(self.tokens), self.products_cc.div_(self.tokens)
        noise = ROUNDING * second.trace()
        covariance = second.addr_(mean, mean, alpha=-1)
        # Rounding may make the variance of a constant negative.
        covariance.diagonal().clamp_(min=0)
        if covariance.trace() <= noise:
            covariance.zero_()
        covariance.diagonal().add_(RIDGE * covariance.diagonal().mean())
        return Moment(mean, covariance, self.tokens)


def _square(size: int, in_file: bool) -> Tensor:
    if not in_file:
        return torch.zeros(size, size, dtype=torch.float64)
    # The file is unlinked at once and freed with the tensor.
    with tempfile.NamedTemporaryFile(prefix="temper-moment-") as file:
        return torch.from_file(file.name, shared=True, size=size**2, dtype=torch.float64).view(size, size)
