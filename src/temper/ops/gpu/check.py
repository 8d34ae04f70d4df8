"""Self-check: before a kind of site first runs on a GPU, a case is compared there with the definition.

The case is small, but every loop runs several times, and what is split at large sizes is split. Every operation and
folding, outputs and gradients, once for each device, spec and dtype in a process (and so for each version of triton).
Where the kernels differ or do not compile there is one warning, and `fused` runs the site.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from temper.ops import naive
from temper.ops.gpu import fold_check, launch, tiles
from temper.ops.plan import FoldedWeights, SiteSpec

if TYPE_CHECKING:
    from temper.mixers.base import Mixer

# In units of the largest entry: approximate division and exponentials in float32, a rounding or two in bfloat16.
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float64: 1e-9}
# At the tiles of every GPU at least two tiles of tokens in each of two shares, and three of features in any loop.
TOKENS, FEATURES = 261, 640

# The failure by device, spec and dtype; None where the check passed.
_found: dict[tuple[Any, ...], str | None] = {}


def passes(spec: SiteSpec, mixer: Mixer, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernels are correct for this spec on this device; cached after the first check."""
    key = (device, checked(spec), dtype)
    if key not in _found:
        # The user's mistake, not the kernels'.
        tiles.check_file(device)
        try:
            _found[key] = _difference(key[1], mixer, dtype, device)
        except Exception as error:  # compilers fail in many ways, and training should go on
            _found[key] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        if _found[key] is not None:
            warnings.warn(
                f"the Triton kernels failed their check on {_name(device)} with {spec.num_streams} streams, {dtype} "
                f"and the {mixer.name} mixer ({_found[key]}); `fused` runs such sites instead. "
                "Please send in what `temper gpu-check` writes (docs/gpu.md).",
                RuntimeWarning,
                stacklevel=2,
            )
    return _found[key] is None


# The effect of torch.compiler.assume_constant_result, without importing the compiler.
passes._dynamo_marked_constant = True  # type: ignore[attr-defined]


# Every forward pass of a site asks for it.
@lru_cache(maxsize=1024)
def checked(spec: SiteSpec) -> SiteSpec:
    """The spec of the case that stands for a spec."""
    # The number of features is a run-time number to the kernels, except for what it is modulo 16. More than one program
    # projects them.
    dim = max(FEATURES, 16 * (launch.CHUNK // (16 * spec.num_streams) + 1)) + spec.dim % 16
    generators = None if spec.generators is None else (spec.num_streams, dim, *spec.generators[2:])
    return dataclasses.replace(spec, dim=dim, generators=generators)


def failures() -> list[str]:
    """The failures so far, for the list of backends."""
    return [
        f"{spec.num_streams} streams in {dtype} ({reason})"
        for (_, spec, dtype), reason in _found.items()
        if reason is not None
    ]


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _difference(spec: SiteSpec, mixer: Mixer, dtype: torch.dtype, device: torch.device) -> str | None:
    # Independent of the caller's modes (a trial on fake tensors is one), of autocast and of the random state.
    calm = torch.inference_mode(False), torch.autocast(device.type, enabled=False)
    with _disable_current_modes(), calm[0], calm[1], torch.no_grad(), launch.two_shares():
        errors = _site_errors(spec, mixer, dtype, device) if spec.num_rows else mixer_errors(spec, mixer, dtype, device)
        wrong = {name: error for name, error in errors.items() if not error <= TOLERANCES[dtype]}
        if spec.generators is not None:
            wide = torch.promote_types(dtype, torch.float32)
            wrong |= {
                name: error for name, error in fold_errors(spec, wide, device).items() if not error <= TOLERANCES[wide]
            }
    return ", ".join(f"{name} is off by {error:.1e}" for name, error in wrong.items()) or None


def _site_errors(spec: SiteSpec, mixer: Mixer, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    case = random_case(spec, dtype, device, TOKENS)
    return worst(results(case, spec), definition(case, spec, mixer))


def fold_errors(spec: SiteSpec, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The errors of folding random weights of this spec, which has generators for the kernels."""
    assert spec.generators is not None
    case = fold_check.random_case(spec.generators, dtype, device)
    return worst(fold_check.results(case), fold_check.definition(case))


def mixer_errors(spec: SiteSpec, mixer: Mixer, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """The errors of a mixer by itself, whose spec has no rows."""
    source, n = torch.Generator().manual_seed(0), spec.num_streams
    logits, grad = (
        torch.randn(TOKENS, *shape, generator=source, dtype=torch.float64).to(device, dtype)
        for shape in (mixer.logit_shape, (n, n))
    )
    res = launch.mix(logits, spec)
    got = {"res": res, "d_logits": launch.mix_backward(logits, res, grad, spec)}
    with torch.enable_grad():
        leaf = logits.double().requires_grad_()
        want = mixer.mix(leaf)
        (d_logits,) = _gradients(((want, grad.double()),), (leaf,)) if want.requires_grad else (torch.zeros_like(leaf),)
    return worst(got, {"res": want.detach(), "d_logits": d_logits.detach()})


def random_case(
    spec: SiteSpec, dtype: torch.dtype, device: torch.device, tokens: int, seed: int = 0
) -> dict[str, Tensor]:
    """Inputs of order one for every operation: those of a site, of the site after it, and gradients."""
    source, wide = torch.Generator().manual_seed(seed), torch.promote_types(dtype, torch.float32)
    n, dim = spec.num_streams, spec.dim

    def normal(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> Tensor:
        return (scale * torch.randn(shape, generator=source, dtype=torch.float64)).to(device, kind)

    return {
        "streams": normal(tokens, n, dim),
        "y": normal(tokens, dim),
        "in_map": normal(spec.num_rows, n, dim, scale=(n * dim) ** -0.5, kind=wide),
        "out": normal(sum(spec.map_sizes), scale=0.5, kind=wide),
        "bias": normal(sum(spec.head_logits), kind=wide),
        "grad": normal(tokens, n, dim),
        "d_x": normal(tokens, dim),
        "d_weights": normal(tokens, spec.num_weights, kind=wide),
    }


def results(case: dict[str, Tensor], spec: SiteSpec) -> dict[str, Tensor]:
    """The kernels' results for a case."""
    streams, y, in_map, out, bias, grad, d_x, d_weights = case.values()
    folded = FoldedWeights(in_map, out, bias)
    x, routed = launch.begin(streams, folded, spec)
    following = torch.empty_like(streams)
    launch.finish(following, streams, y, routed.weights, spec)
    d_y, through = launch.finish_backward(grad, streams, y, routed.weights, spec)
    d_streams, d_folded = launch.begin_backward(grad, d_x, d_weights + through, streams, folded, routed, spec)
    made = {"x": x, "weights": routed.weights, "next": following, "d_streams": d_streams, "d_y": d_y}
    made |= dict(zip(("d_in_map", "d_out", "d_bias"), d_folded[:3], strict=True))
    # The same weights serve the next site, whose input is rounded to the dtype of the streams.
    chained = torch.empty_like(streams)
    next_x, next_routed = launch.finish_begin(chained, streams, y, routed.weights, folded, spec)
    slopes = launch.finish_begin_backward(
        grad, d_x, d_weights, following, folded, next_routed, streams, y, routed.weights, spec
    )
    made |= {"chained next": chained, "chained x": next_x, "chained weights": next_routed.weights}
    made |= {"chained d_next": slopes[0], "chained d_y": slopes[2], "chained d_weights": slopes[3]}
    return made | dict(zip(("chained d_in_map", "chained d_out", "chained d_bias"), slopes[1][:3], strict=True))


def definition(
    case: dict[str, Tensor], spec: SiteSpec, mixer: Mixer, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """The same from `naive` in float64 or another dtype, differentiated by autograd."""
    stored = case["streams"].dtype
    wide = {name: tensor.detach().to(dtype) for name, tensor in case.items()}
    with torch.enable_grad():
        leaves = {name: wide[name].requires_grad_() for name in ("streams", "y", "in_map", "out", "bias")}
        streams, y = leaves["streams"], leaves["y"]
        folded = FoldedWeights(leaves["in_map"], leaves["out"], leaves["bias"])
        x, weights = naive.begin(streams, folded, spec, mixer)
        following = naive.finish(streams, y, weights, spec)
        slopes = _gradients(
            ((following, wide["grad"]), (x, wide["d_x"]), (weights, wide["d_weights"])), tuple(leaves.values())
        )
        made = {"x": x, "weights": weights, "next": following}
        made |= {f"d_{name}": slope for name, slope in zip(leaves, slopes, strict=True)}
        later = following.detach().to(stored).to(dtype).requires_grad_()
        next_x, next_weights = naive.begin(later, folded, spec, mixer)
        mixed = spec.split(next_weights.detach()).res @ later
        pairs = ((mixed, wide["grad"]), (next_x, wide["d_x"]), (next_weights, wide["d_weights"]))
        d_next, *d_folded = _gradients(pairs, (later, *folded[:3]))
        fixed = weights.detach().requires_grad_()
        earlier = naive.finish(streams, y, fixed, spec)
        d_y, d_weights = _gradients(((earlier, d_next.to(stored).to(dtype)),), (y, fixed))
    made |= {"chained next": following, "chained x": next_x, "chained weights": next_weights}
    made |= {"chained d_next": d_next, "chained d_y": d_y, "chained d_weights": d_weights}
    made |= dict(zip(("chained d_in_map", "chained d_out", "chained d_bias"), d_folded, strict=True))
    return {name: value.detach() for name, value in made.items()}


def _gradients(pairs: tuple[tuple[Tensor, Tensor], ...], leaves: tuple[Any, ...]) -> list[Tensor]:
    outputs, cotangents = zip(*pairs, strict=True)
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(leaves, found, strict=True)]


def worst(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest error of each result, in units of its largest entry."""
    errors = {}
    for name, want in wanted.items():
        if want.numel():
            scale = want.abs().max().clamp_min(1e-30)
            errors[name] = float((got[name].double() - want).abs().max() / scale)
    return errors
