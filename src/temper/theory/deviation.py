"""Two sites on the same streams: how far apart they are, measured beside what theory allows (Lemma, Theorem 2).

Letters: N streams, D features, O logits of a head. Norms are of one token. docs/math.md has the derivations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from temper.config import HEADS
from temper.connection import HyperConnection
from temper.theory.gap import Gap
from temper.theory.view import EPS, View, norm, widened

Branch = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Deviation:
    """The deviation between two sites, by head where there are three.

    Args:
        tokens: the number of tokens compared.
        logits: ||Z - Zt|| of the generators, before gate and bias, and the Lemma.
        routing: ||pre - pret||, ||res - rest||, ||post - postt||.
        block: ||H' - Ht'|| and Theorem 2; None without a branch.
        terms: the three parts of Theorem 2, each beside what it bounds; empty without a branch.
        branch_lipschitz: L_f, the largest ||f(x) - f(xt)|| over the largest ||x - xt||.
        branch_norm: M_f, the largest ||f(x)||.
    """

    tokens: int
    logits: dict[str, Gap]
    routing: dict[str, Gap]
    block: Gap | None
    terms: dict[str, Gap]
    branch_lipschitz: float | None
    branch_norm: float | None

    @property
    def gaps(self) -> dict[str, Gap]:
        """Every comparison by a name of its own."""
        kinds = {"logits": self.logits, "routing": self.routing, "term": self.terms}
        named = {f"{kind} {head}": gap for kind, gaps in kinds.items() for head, gap in gaps.items()}
        return named if self.block is None else {**named, "block": self.block}

    @property
    def exceeded(self) -> list[str]:
        """The bounds that do not hold; there should be none."""
        return [name for name, gap in self.gaps.items() if not gap.holds]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def deviation(
    site: HyperConnection, other: HyperConnection, streams: Tensor, branch: Branch | None = None
) -> Deviation:
    """Compares two sites of equal N and D, such as a dense one and its compressed form, on the same streams.

        deviation(dense, compressed, streams, mlp).block.ratio_max

    All but the branch is computed in float64, and every bound includes the rounding of that.

    Args:
        streams: (..., N, D).
        branch: f, the same for both, which is given x in the dtype of the streams. Without it, and without one in
            `site`, there is no block to compare.
    """
    return compare(site, other, streams, branch)[0]


def compare(
    site: HyperConnection, other: HyperConnection, streams: Tensor, branch: Branch | None = None
) -> tuple[Deviation, Tensor | None, Tensor | None]:
    """The deviation, and the next streams of both sites in float64, if there is a branch."""
    _check(site, other, streams)
    branch = site.branch if branch is None else branch
    with torch.no_grad():
        wide = streams.detach().double()
        first, second = View(widened(site), wide), View(widened(other), wide)
        lemmas = {head: _lemma(first, second, head) for head in HEADS}
        bounds = {head: _logit_bound(first, second, head, lemma) for head, lemma in lemmas.items()}
        bounds = _routing_bounds(first, second, bounds)
        result = Deviation(
            tokens=first.size.numel(),
            logits={head: Gap.of(norm(first.dynamic[head] - second.dynamic[head]), lemmas[head]) for head in HEADS},
            routing={head: Gap.of(norm(first.weights[head] - second.weights[head]), bounds[head]) for head in HEADS},
            block=None,
            terms={},
            branch_lipschitz=None,
            branch_norm=None,
        )
        return (result, None, None) if branch is None else _block(result, first, second, bounds, branch, streams.dtype)


def _lemma(first: View, second: View, head: str) -> Tensor:
    """The bound on ||Z - Zt||."""
    one, two = first.head(head).generator.to_dense(), second.head(head).generator.to_dense()
    # Z - Zt = <Hhat, W - Wt> + <Hhat - Hhatt, Wt>: the second part is there only where norms or gains differ.
    apart = norm(first.hat - second.hat, 2) * two.norm()
    return norm(first.hat, 2) * (one - two).norm() + apart + first.rounding[head] + second.rounding[head]


def _logit_bound(first: View, second: View, head: str, lemma: Tensor) -> Tensor:
    """The bound on what gate and bias make of it: a squash(Z) + b, where squash has slopes up to one."""
    one, two = first.head(head), second.head(head)
    gates = (one.gate - two.gate).abs() * norm(first.site.gates.squash(second.dynamic[head]))
    sums = norm(first.logits[head]) + norm(second.logits[head]) + one.bias.norm() + two.bias.norm()
    rounding = two.gate.abs() * second.rounding[head] + 4 * EPS * sums
    return one.gate.abs() * lemma + gates + (one.bias - two.bias).norm() + rounding


def _routing_bounds(first: View, second: View, logits: dict[str, Tensor]) -> dict[str, Tensor]:
    """From logits to routing: the slopes of the gates, the constant of the mixer and what it leaves out."""
    mixer, num_streams = first.site.mixer, first.site.config.num_streams
    pre, post = first.site.gates.slopes
    rounding = 8 * EPS * num_streams**0.5
    parts = []
    for view in (first, second):
        parts += [view.logits["res"].unflatten(-1, mixer.logit_shape), view.res]
    # An entry of res follows from sums of N logits, each known to its own rounding.
    # Padded with a zero, for a mixer may take no logits.
    largest = 2 + sum(pad(view.logits["res"].abs(), (0, 1)).amax(-1) for view in (first, second))
    res = mixer.lipschitz() * logits["res"] + mixer.slack(*parts) + rounding * num_streams**1.5 * largest
    return {"pre": pre * logits["pre"] + rounding, "res": res, "post": post * logits["post"] + rounding}


def _block(
    result: Deviation, first: View, second: View, bounds: dict[str, Tensor], branch: Branch, dtype: torch.dtype
) -> tuple[Deviation, Tensor, Tensor]:
    """Theorem 2: H' - Ht' = (res - rest) H + (post - postt) f(x) + postt (f(x) - f(xt))."""
    streams, size = first.streams, first.size
    x, state = first.site.begin(streams)
    x_other, state_other = second.site.begin(streams)
    y, y_other = (branch(part.to(dtype)).double() for part in (x, x_other))
    following, following_other = first.site.finish(state, y), second.site.finish(state_other, y_other)
    # A branch such as attention sees all tokens: two inputs are as far apart as the token that is farthest.
    moved, turned = norm(x - x_other).max(), norm(y - y_other).max()
    if moved == 0 and turned > 0:
        raise ValueError("the branch gave two results for one input; expected a function (no dropout: call eval())")
    slope = turned / moved if moved > 0 else moved
    unit = 4 * first.site.config.num_streams * EPS
    read = size * (bounds["pre"] + unit * (norm(first.weights["pre"]) + norm(second.weights["pre"])))
    written = second.site.gates.most_written(second.head("post").gate, second.head("post").bias)
    noise = norm(first.weights["res"]) * size + norm(first.weights["post"]) * norm(y)
    noise = noise + norm(second.weights["res"]) * size + norm(second.weights["post"]) * norm(y_other)
    bound = {
        "res": bounds["res"] * size,
        "post": bounds["post"] * norm(y).max(),
        "pre": (written * slope * read.max()).expand(size.shape),
    }
    bound = {name: term + unit * noise for name, term in bound.items()}
    measured = {
        "res": norm((first.res - second.res) @ streams, 2),
        "post": norm(first.weights["post"] - second.weights["post"]) * norm(y),
        "pre": norm(second.weights["post"]) * norm(y - y_other),
    }
    result = replace(
        result,
        block=Gap.of(norm(following - following_other, 2), bound["res"] + bound["post"] + bound["pre"]),
        terms={name: Gap.of(measured[name], bound[name]) for name in HEADS},
        branch_lipschitz=slope.item(),
        branch_norm=norm(y).max().item(),
    )
    return result, following, following_other


def _check(site: HyperConnection, other: HyperConnection, streams: Tensor) -> None:
    for given in (site, other):
        if not isinstance(given, HyperConnection):
            raise TypeError(f"deviation compares two HyperConnections, got a {type(given).__name__}")
        if given.config.is_residual:
            raise ValueError("a residual site routes nothing: there is nothing to compare")
    site.check_streams(streams)
    one, two = site.config, other.config
    for what, first, second in (
        ("num_streams", one.num_streams, two.num_streams),
        ("dim", one.dim, two.dim),
        ("mixer", one.mixer, two.mixer),
        ("gates", one.gates, two.gates),
        ("pre_eps", one.pre_eps, two.pre_eps),
    ):
        if first != second:
            raise ValueError(f"the two sites differ in {what}, {first!r} and {second!r}; the bounds need the same")
    if not streams.numel():
        raise ValueError(f"streams have shape {tuple(streams.shape)}; expected at least one token")
    if not torch.isfinite(streams).all():
        raise ValueError("streams have values that are not finite")
