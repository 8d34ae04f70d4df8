"""Watch the hyper-connections of a model from outside while it runs.

Letters: N streams, M destination streams, K = N^2 + 2N routing numbers of a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from temper.connection import HyperConnection
from temper.ops.backend import explain
from temper.streams import Routing

# A gate this close to a bound of its range counts as saturated.
SATURATED = 0.05


@dataclass(frozen=True)
class SiteReport:
    """One site, over every token seen. Gains are largest absolute sums, averaged over tokens.

    Args:
        name: the site's name in the model.
        tokens: the number of tokens seen.
        row_error, column_error: the largest distance of a row or column sum of `res` from 1.
        off_diagonal: the weight a stream takes from the others: absolute off-diagonal entries of a row of `res`, summed
            over the row and averaged over rows and tokens; 0 where streams are not mixed.
        forward_gain: the largest absolute row sum of `res`: how much mixing can amplify a signal.
        backward_gain: the largest absolute column sum: the same for a gradient.
        composite_forward_gain, composite_backward_gain: of the product of all `res` from the first site to
            this one; None where the product is not defined (another number of streams or tokens).
        stream_similarity: the mean cosine between two different streams; 1 means copies.
        pre_saturation, post_saturation: the share of read and write weights within 5% of a bound of their range.
        effective_rank: in how many directions the routing varies from token to token (exponential of the
            entropy of its covariance spectrum); 0 if it does not vary.
    """

    name: str
    tokens: int
    row_error: float
    column_error: float
    off_diagonal: float
    forward_gain: float
    backward_gain: float
    composite_forward_gain: float | None
    composite_backward_gain: float | None
    stream_similarity: float
    pre_saturation: float
    post_saturation: float
    effective_rank: float


@dataclass(frozen=True)
class TokenReport:
    """One forward of one site, token by token. Numbers are those of `SiteReport`, in float64.

    Shape:
        routing: pre (..., N), res (..., M, N), post (..., M), as the site used it.
        composite: (..., M, N), the product of all `res` from the first site to this one; None where it is not defined.
        row_error, column_error, forward_gain, backward_gain, stream_similarity: (...).
        composite_forward_gain, composite_backward_gain: (...), or None.
    """

    name: str
    routing: Routing
    composite: Tensor | None
    row_error: Tensor
    column_error: Tensor
    forward_gain: Tensor
    backward_gain: Tensor
    composite_forward_gain: Tensor | None
    composite_backward_gain: Tensor | None
    stream_similarity: Tensor


@contextmanager
def observe(model: nn.Module, *, per_token: bool = False) -> Iterator[Observation]:
    """Records the routing of every forward pass inside the `with`; costs nothing outside it.

        with temper.observe(model) as observation:
            model(tokens)
        print(observation)

    Watch plain forward passes: activation checkpointing runs a site twice.

    Args:
        per_token: also record the routing of every token in `observation.tokens`; memory grows with the tokens.
    """
    sites = {name: site for name, site in model.named_modules() if isinstance(site, HyperConnection)}
    if not sites:
        raise ValueError(f"{type(model).__name__} has no HyperConnection to observe")
    observation = Observation({site: name for name, site in sites.items()}, per_token=per_token)
    before = {site: site.observers for site in sites.values()}
    for site in before:
        site.observers = (*site.observers, observation.see)
    try:
        yield observation
    finally:
        for site, observers in before.items():
            site.observers = observers


class Observation:
    """Running statistics of every site; `reports()` for the numbers, `print` for a table.

    Args:
        per_token: keep a `TokenReport` of every forward of every site, in the order in which they ran, in `tokens`.

    Attributes:
        backends: by the name of the site, what computed it and why no other backend did.
    """

    def __init__(self, names: dict[HyperConnection, str], *, per_token: bool = False) -> None:
        self.tokens: list[TokenReport] = []
        self.backends: dict[str, str] = {}
        self._per_token = per_token
        self._names = names
        self._tallies: dict[HyperConnection, _Tally] = {}
        self._in_this_pass: set[HyperConnection] = set()
        self._product: Tensor | None = None

    @torch.no_grad()
    def see(self, site: HyperConnection, streams: Tensor, routing: Routing) -> None:
        """Records one forward pass of one site."""
        if site in self._in_this_pass:
            self._in_this_pass.clear()
        starts = not self._in_this_pass
        self._in_this_pass.add(site)
        res = routing.res.detach()
        if starts:
            self._product = res
        elif self._product is not None and self._product.shape == res.shape:
            self._product = res @ self._product
        else:
            self._product = None
        if streams[..., 0, 0].numel():
            tally = self._tallies.setdefault(site, _Tally())
            if site.spec is not None:
                self.backends[self._names[site]] = explain(streams, site.spec, site.mixer)
            routing = Routing(*(part.detach() for part in routing))
            tally.add(streams.detach(), routing, self._product)
            if self._per_token:
                self.tokens.append(_token_report(self._names[site], streams.detach(), routing, self._product))

    def reports(self) -> list[SiteReport]:
        """A report for every site that ran, in the order in which they first did."""
        return [tally.report(self._names[site]) for site, tally in self._tallies.items()]

    def to_dict(self) -> list[dict[str, Any]]:
        """The reports as plain values, for JSON."""
        return [asdict(report) for report in self.reports()]

    def __str__(self) -> str:
        head = (
            "site",
            "row err",
            "col err",
            "off diag",
            "fwd gain",
            "bwd gain",
            "composite",
            "similarity",
            "saturated",
            "rank",
        )
        rows = [head]
        for r in self.reports():
            composite = (r.composite_forward_gain, r.composite_backward_gain)
            both = "-" if None in composite else "{:.3f}/{:.3f}".format(*composite)
            errors = (f"{r.row_error:.1e}", f"{r.column_error:.1e}", f"{r.off_diagonal:.1e}")
            gains = (f"{r.forward_gain:.3f}", f"{r.backward_gain:.3f}", both)
            saturated = f"{r.pre_saturation:.0%}/{r.post_saturation:.0%}"
            similarity, rank = f"{r.stream_similarity:.3f}", f"{r.effective_rank:.2f}"
            rows.append((r.name or "(model)", *errors, *gains, similarity, saturated, rank))
        widths = [max(len(row[k]) for row in rows) for k in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if k == 0 else cell.rjust(w) for k, (cell, w) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return "\n".join([*lines, *(f"backend: {text}" for text in dict.fromkeys(self.backends.values()))])


class _Tally:
    """Running sums over tokens, so that memory stays constant."""

    def __init__(self) -> None:
        self.tokens = 0
        self.composite_tokens = 0
        self.errors = torch.zeros(2, dtype=torch.float64)
        self.sums = torch.zeros(6, dtype=torch.float64)
        self.composite = torch.zeros(2, dtype=torch.float64)
        self.moments: tuple[Tensor, Tensor] | None = None

    def add(self, streams: Tensor, routing: Routing, product: Tensor | None) -> None:
        pre, res, post = (part.double() for part in routing)
        tokens = streams[..., 0, 0].numel()
        errors = torch.stack([(res.sum(axis) - 1).abs().max() for axis in (-1, -2)])
        self.errors = torch.maximum(self.errors, errors.cpu())
        forward, backward = _gains(res)
        sums = [_off_diagonal(res), forward, backward]
        sums += [_similarity(streams), _saturation(pre, 1.0), _saturation(post, 2.0)]
        self.sums += torch.stack([value.mean() for value in sums]).cpu() * tokens
        self.tokens += tokens
        if product is not None:
            self.composite += torch.stack([gain.mean() for gain in _gains(product.double())]).cpu() * tokens
            self.composite_tokens += tokens
        features = torch.cat([pre.flatten(0, -2), res.flatten(-2).flatten(0, -2), post.flatten(0, -2)], dim=-1)
        first, second = features.sum(0), features.T @ features
        if self.moments is not None:
            first, second = first + self.moments[0], second + self.moments[1]
        self.moments = (first, second)

    def report(self, name: str) -> SiteReport:
        off_diagonal, forward, backward, similarity, pre, post = (self.sums / self.tokens).tolist()
        row, column = self.errors.tolist()
        composite: list[float | None] = [None, None]
        if self.composite_tokens:
            composite = [*(self.composite / self.composite_tokens).tolist()]
        return SiteReport(
            name=name,
            tokens=self.tokens,
            row_error=row,
            column_error=column,
            off_diagonal=off_diagonal,
            forward_gain=forward,
            backward_gain=backward,
            composite_forward_gain=composite[0],
            composite_backward_gain=composite[1],
            stream_similarity=similarity,
            pre_saturation=pre,
            post_saturation=post,
            effective_rank=self._effective_rank(),
        )

    def _effective_rank(self) -> float:
        assert self.moments is not None
        mean = self.moments[0] / self.tokens
        covariance = self.moments[1] / self.tokens - torch.outer(mean, mean)
        spectrum = torch.linalg.eigvalsh(covariance.cpu()).clamp_min(0)
        # Differences of moments leave rounding noise of this size even where nothing varies.
        noise = 1e-12 * float(self.moments[1].diagonal().max().cpu()) / self.tokens
        spectrum = spectrum[spectrum > noise]
        if not len(spectrum):
            return 0.0
        share = spectrum / spectrum.sum()
        return float((-(share * share.log()).sum()).exp())


def _token_report(name: str, streams: Tensor, routing: Routing, product: Tensor | None) -> TokenReport:
    res = routing.res.double()
    forward, backward = _gains(res)
    composite = (None, None) if product is None else _gains(product.double())
    return TokenReport(
        name=name,
        routing=routing,
        composite=product,
        row_error=(res.sum(-1) - 1).abs().amax(-1),
        column_error=(res.sum(-2) - 1).abs().amax(-1),
        forward_gain=forward,
        backward_gain=backward,
        composite_forward_gain=composite[0],
        composite_backward_gain=composite[1],
        stream_similarity=_similarity(streams),
    )


def _off_diagonal(res: Tensor) -> Tensor:
    """Absolute off-diagonal entries of a row, summed over the row and averaged over rows: (..., N, N) -> (...)."""
    size = res.abs()
    # Not the difference of two sums, which would leave the rounding of the diagonal.
    return size.masked_fill(torch.eye(res.shape[-1], dtype=torch.bool, device=res.device), 0).sum(-1).mean(-1)


def _gains(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Largest absolute row sum and column sum: (..., M, N) -> (...), (...)."""
    return matrix.abs().sum(-1).amax(-1), matrix.abs().sum(-2).amax(-1)


def _similarity(streams: Tensor) -> Tensor:
    """Mean cosine of different streams: (..., N, D) -> (...)."""
    unit = torch.nn.functional.normalize(streams.double(), dim=-1)
    num_streams = unit.shape[-2]
    if num_streams == 1:
        return torch.ones_like(unit[..., 0, 0])
    # The square of the sum holds every pair twice and every stream with itself once.
    pairs = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    return pairs / (num_streams * (num_streams - 1))


def _saturation(weights: Tensor, top: float) -> Tensor:
    """Share of weights within 5% of 0 or of the top of their range: (..., N) -> (...)."""
    share = weights / top
    return ((share < SATURATED) | (share > 1 - SATURATED)).double().mean(-1)
