"""Compression of a trained model: replaces the generators of all sites by their best low-rank approximation."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from temper.config import count_parameters
from temper.convert.factorize import factorize
from temper.convert.moments import Moment, routed_sites
from temper.convert.ranks import ranks_for
from temper.convert.sensitivity import Sensitivities
from temper.convert.targets import Target, dense_of, size_of, targets_of
from temper.generators import Generator
from temper.generators.base import Rank, count, mode_product
from temper.registry import check_int

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class HeadReport:
    """The result for one generator.

    Args:
        site: its name in the model.
        head: pre, res or post.
        rank: the resolved rank, None for a form without ranks.
        before, after: parameters of the generator.
        weight_error: ||W - What|| / ||W||.
        data_error: the same for the token-dependent part of the logits on the calibration data; None without data.
    """

    site: str
    head: str
    rank: Rank
    before: int
    after: int
    weight_error: float
    data_error: float | None


class Compressed(NamedTuple, Generic[Model]):
    """A compressed model and its report.

    Args:
        error: of all logits together, sqrt(sum w ||W - What||^2 / sum w ||W||^2) over all generators, on data if there
            are moments; w is the square of the gate, times the sensitivity if it is known.
        before, after: parameters of all sites: generators, gains, biases and gates.
    """

    model: Model
    heads: list[HeadReport]
    error: float
    before: int
    after: int


@torch.no_grad()
def compress(
    model: Model,
    to: str,
    *,
    rank: Rank = None,
    error: float | None = None,
    params: int | None = None,
    moments: Mapping[str, Moment] | None = None,
    sensitivities: Sensitivities | None = None,
    plain: bool = False,
    in_place: bool = True,
) -> Compressed[Model]:
    """Replaces every generator of every hyper-connection in a model by one of another form.

        temper.convert.compress(model, "tucker", rank=(2, 12))
        temper.convert.compress(model, "cp", error=0.1, moments=seen, in_place=False).model

    Sites stay the objects they are, with their gains, gates, branches and hooks. Parameters are new, so do this before
    you build the optimizer. An error leaves the model as it was.

    Args:
        to: a generator, "tucker", "cp" or "tt".
        rank: of every generator, as `temper.preset` takes it.
        error: instead of a rank, the largest `Compressed.error`; every generator gets the rank it needs.
        params: instead of a rank, the total parameter budget of all sites, gains, biases and gates included.
        moments: from `temper.convert.moments`: the fit minimises the error of the logits on that data, and every bias
            absorbs the mean of what is lost.
        sensitivities: from `temper.convert.sensitivities`: an error or parameter budget is distributed by the
            sensitivity of the loss, and with a rank or a parameter budget every fit is weighted by it too. Without
            them all logits count the same.
        plain: `Generator.from_dense` (HOSVD, TT-SVD, nested SVDs) instead of the best fit; for comparison.
        in_place: change this model instead of a copy.
    """
    form = Generator.named(to)
    targets = targets_of(model, moments, sensitivities)
    if plain and moments is not None:
        raise ValueError("plain is without moments: the decompositions that it stands for know nothing of data")
    before = sum(count_parameters(site.config, include_frozen=True) for site in routed_sites(model).values())
    ranks = _ranks(form, targets, rank, error, params)
    # `error` limits the unweighted error of all logits, so the fit is unweighted too.
    weighted = error is None and form.with_modes_mapped is not Generator.with_modes_mapped
    found = [_fit(form, target, chosen, plain, weighted) for target, chosen in zip(targets, ranks, strict=True)]
    heads, lost, whole = [], 0.0, 0.0
    for target, generator in zip(targets, found, strict=True):
        report, squares = _report(target, generator)
        heads.append(report)
        lost, whole = lost + squares[0], whole + squares[1]
    if not in_place:
        model = copy.deepcopy(model)
    sites = routed_sites(model)
    for target, generator in zip(targets, found, strict=True):
        _put(target._replace(site=sites[target.site_name]), generator)
    after = sum(count_parameters(site.config, include_frozen=True) for site in sites.values())
    return Compressed(model, heads, math.sqrt(lost / whole) if whole else 0.0, before, after)


def check(
    model: nn.Module, to: str, *, rank: Rank = None, error: float | None = None, params: int | None = None
) -> None:
    """Raises ValueError for arguments that `compress` cannot satisfy, before any work."""
    form, targets = Generator.named(to), targets_of(model, None, None)
    _check_request(form, rank, error, params)
    if rank is not None:
        _resolved(form, targets, rank)
    if params is not None:
        _generator_budget(form, targets, params)


def _ranks(
    form: type[Generator], targets: Sequence[Target], rank: Rank, error: float | None, params: int | None
) -> list[Rank]:
    """The rank of every generator."""
    _check_request(form, rank, error, params)
    if not form.ranked:
        return [None] * len(targets)
    if rank is not None:
        return _resolved(form, targets, rank)
    weights = [dense_of(target.head.generator) for target in targets]
    measures = None if targets[0].moment is None else [target.moment.covariance for target in targets if target.moment]
    if params is not None:
        params = _generator_budget(form, targets, params)
    shares = [target.share for target in targets]
    return ranks_for(weights, form.name, error=error, params=params, moments=measures, weighting=shares)


def _check_request(form: type[Generator], rank: Rank, error: float | None, params: int | None) -> None:
    given = [name for name, value in (("rank", rank), ("error", error), ("params", params)) if value is not None]
    if not form.ranked:
        if given:
            raise ValueError(f"the {form.name} generator has no ranks, got {' and '.join(given)}")
        return
    if len(given) != 1:
        raise ValueError(f"expected one of rank, error and params, got {' and '.join(given) or 'none of them'}")


def _resolved(form: type[Generator], targets: Sequence[Target], rank: Rank) -> list[Rank]:
    ranks = []
    for target in targets:
        generator = target.head.generator
        try:
            ranks.append(form.resolve_rank(generator.in_modes, generator.out_modes, rank))
        except ValueError as problem:
            raise ValueError(f"{target.site_name}, {target.head_name}: {problem}") from problem
    return ranks


def _generator_budget(form: type[Generator], targets: Sequence[Target], params: int) -> int:
    """The parameters left for the generators after gains, biases and gates."""
    check_int("params", params)
    sites = dict.fromkeys(target.site for target in targets)
    own = sum(count_parameters(site.config, include_frozen=True) for site in sites)
    own -= sum(size_of(target.head.generator) for target in targets)
    least = own
    for target in targets:
        modes = (target.head.generator.in_modes, target.head.generator.out_modes)
        least += count(form.shapes(*modes, rank=1))
    if params < least:
        raise ValueError(
            f"params is {params:,}; expected at least {least:,}: rank 1 everywhere, "
            f"with {own:,} for gains, biases and gates"
        )
    return params - own


def _fit(form: type[Generator], target: Target, rank: Rank, plain: bool, weighted: bool) -> Generator:
    """The new generator, in the dtype of the old one."""
    old = target.head.generator
    weight, metrics = dense_of(old), target.metrics() if weighted else None
    if plain:
        new = form.from_dense(weight, rank)
    elif metrics is None:
        new = factorize(weight, form.name, rank, moment=target.measure)
    else:
        # Scale W by the sensitivity before the fit, and undo the scaling afterwards.
        roots, stretched = [_root(metric) for metric in metrics], weight.double().cpu()
        for mode, root in enumerate(roots, 2):
            stretched = mode_product(stretched, root, mode)
        new = factorize(stretched, form.name, rank, moment=target.measure)
        new.load_state_dict(new.with_modes_mapped([None, None, *(torch.linalg.inv(root) for root in roots)]))
    old_tensor = next(iter(old.state_dict().values()))
    return new.to(old_tensor.device, old_tensor.dtype)


def _root(metric: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(metric)
    return (vectors * values.sqrt()) @ vectors.T


def _report(target: Target, generator: Generator) -> tuple[HeadReport, tuple[float, float]]:
    """The lost part of W, and the squared norms of the lost and of the original logits, as the fit measures them."""
    old = target.head.generator
    weight, rest = dense_of(old), dense_of(old) - dense_of(generator)
    squares = _square(rest, target.measure), _square(weight, target.measure)
    report = HeadReport(
        target.site_name,
        target.head_name,
        getattr(generator, "rank", None),
        size_of(old),
        size_of(generator),
        _ratio(_square(rest, None), _square(weight, None)),
        None if target.moment is None else _ratio(*squares),
    )
    return report, (target.share * squares[0], target.share * squares[1])


def _put(target: Target, generator: Generator) -> None:
    head = target.head
    if target.moment is not None and target.site.gates.fast:
        # The bias absorbs the mean of the lost logits.
        lost = dense_of(head.generator).double() - dense_of(generator).double()
        mean = target.moment.mean.to(lost.device).view(lost.shape[:2])
        head.bias.add_(head.gate.double() * torch.tensordot(mean, lost, dims=2))
    generator.requires_grad_(any(parameter.requires_grad for parameter in head.parameters()))
    target.site.set_generators(**{target.head_name: generator})


def _square(weight: Tensor, measure: Tensor | None) -> float:
    """tr(W^T S W): the mean square of the logits that W makes, or the sum of its squares."""
    flat = weight.double().cpu().flatten(2).flatten(0, 1)
    return max(0.0, (flat * (flat if measure is None else measure @ flat)).sum().item())


def _ratio(lost: float, whole: float) -> float:
    # Directions absent from the data do not count.
    return math.sqrt(lost / whole) if whole else 0.0
