"""The best CP, Tucker or TT approximation of a dense W at a given rank, in plain or data-weighted norm."""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import Tensor

from temper.decompose.descent import Effort
from temper.decompose.moment import Moment
from temper.generators import Generator
from temper.generators.base import Rank


def factorize(
    weight: Tensor,
    generator: str,
    rank: Rank = None,
    *,
    moment: Tensor | None = None,
    seed: int = 0,
    restarts: int = 2,
    iters: int | None = None,
    tol: float | None = None,
    **options: Any,
) -> Generator:
    """The generator of this kind and rank that is closest to a dense W, as far as it can be found.

    Without a moment the error is ||W - What||_F, and the result is never worse than `Generator.from_dense`. With
    one it is the error of the logits on data, sqrt(tr((W - What)^T S (W - What))), and the result is never
    worse than the one without. A singular S is fine: in directions it does not see, the plain
    approximation is used. Computed in float64 on the CPU; the same arguments give the same result, and the
    global random state is left alone.

    Args:
        weight: W (N, D, *out_modes), or the `to_dense()` of any generator.
        generator: "cp", "tucker", "tt", or any registered name.
        rank: as that generator takes it: a number, one per mode or bond, a share of the dense parameters.
        moment: S = E[vec(Hhat) vec(Hhat)^T], (N * D, N * D), row n * D + d.
        seed: for the random starts.
        restarts: random starts of cp and tucker, beside those that W suggests.
        iters: sweeps over all factors, at most; None for 500, or 30 with a moment.
        tol: stop when a sweep lowers the error by less than this share of it; None for 1e-7, or 1e-5 with a moment.
        options: further options of the generator, such as `freeze_core=True`.
    """
    weight = checked(weight)
    kind = Generator.named(generator)
    rounding = torch.finfo(weight.dtype).eps / 2
    effort = Effort(restarts=restarts, iters=iters, tol=tol, seed=seed, rounding=rounding)
    exact = weight.detach().to("cpu", torch.float64)
    measure = None if moment is None else checked_moment(moment, exact)
    # Padding a rank larger than W needs draws from the global random generator.
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(seed)
        found = kind.from_dense(exact, rank, **options)
        if exact.any() and (measure is None or measure.any()):
            plain = copy.deepcopy(found)
            found.assign_best(exact, measure, effort)
            # The guarantee holds for user-defined generators too, and where the error is NaN.
            if not square(exact - dense(found), measure) <= square(exact - dense(plain), measure):
                found = plain
    return found.to(device=weight.device, dtype=weight.dtype)


def relative_error(weight: Tensor, approximation: Tensor | Generator, moment: Tensor | None = None) -> float:
    """||W - What|| / ||W||, on data if there is a moment; 0 where both norms are zero."""
    exact = checked(weight).detach().to("cpu", torch.float64)
    if isinstance(approximation, Generator):
        approximation = dense(approximation)
    if not isinstance(approximation, Tensor) or approximation.shape != weight.shape:
        got = tuple(approximation.shape) if isinstance(approximation, Tensor) else type(approximation).__name__
        raise ValueError(f"the approximation is {got}; expected a generator or a tensor {tuple(weight.shape)}")
    measure = None if moment is None else checked_moment(moment, exact)
    error = square(exact - approximation.detach().to("cpu", torch.float64), measure)
    norm = square(exact, measure)
    return 0.0 if error == 0 else math.inf if norm == 0 else math.sqrt(error / norm)


def dense(generator: Generator) -> Tensor:
    """W of a generator in float64; its stored tensors are widened before they are multiplied."""
    with torch.no_grad():
        in_map_RND, out_map = generator.maps(torch.float64)
        return torch.tensordot(in_map_RND.movedim(0, -1), out_map, dims=1).cpu()


def square(difference: Tensor, moment: Tensor | None) -> float:
    """The squared norm that the fit minimises."""
    if moment is None:
        return difference.square().sum().item()
    return Moment(moment.view(*difference.shape[:2], *difference.shape[:2])).square(difference)


def checked(weight: Tensor) -> Tensor:
    """Checks a dense W; raises ValueError with the reason if it is invalid."""
    if not isinstance(weight, Tensor) or weight.ndim < 3 or not weight.numel():
        got = tuple(weight.shape) if isinstance(weight, Tensor) else type(weight).__name__
        raise ValueError(f"the weight is {got}; expected a tensor (num_streams, dim, *out_modes)")
    if not weight.is_floating_point() or not torch.isfinite(weight).all():
        raise ValueError(f"the weight ({weight.dtype}) must be a finite floating-point tensor")
    return weight


def checked_moment(moment: Tensor, weight: Tensor) -> Tensor:
    """S in float64; raises ValueError with the reason if it is not a second moment of this weight's inputs."""
    size = weight.shape[0] * weight.shape[1]
    if not isinstance(moment, Tensor) or moment.shape != (size, size):
        got = tuple(moment.shape) if isinstance(moment, Tensor) else type(moment).__name__
        raise ValueError(f"the moment is {got}; expected ({size}, {size}) for a weight {tuple(weight.shape)}")
    if not moment.is_floating_point() or not torch.isfinite(moment).all():
        raise ValueError(f"the moment ({moment.dtype}) must be a finite floating-point tensor")
    moment = moment.detach().to("cpu", torch.float64)
    # Comparing S v with S^T v is enough; forming S - S^T would take longer than a decomposition.
    probe = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one, other = moment @ probe, moment.T @ probe
    if (one - other).norm() > 1e-3 * one.norm() or moment.diagonal().min() < 0 or probe @ one < 0:
        raise ValueError("the moment is not symmetric positive semidefinite; expected E[x x^T] of the inputs x")
    return moment
