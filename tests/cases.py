"""One site's operations with random inputs, run by kernels and by plain autograd in float64."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import temper
from temper.mixers import Mixer
from temper.ops import naive
from temper.ops.plan import FoldedWeights, SiteSpec

# Every form of mixing that the kernels know, by a name for the test ids.
MIXERS = {
    "unconstrained": {"name": "unconstrained"},
    "identity": {"name": "identity"},
    "sinkhorn": {"name": "sinkhorn"},
    "sinkhorn, columns": {"name": "sinkhorn", "iters": 3, "last": "columns"},
    "sinkhorn, tol": {"name": "sinkhorn", "iters": 30, "tol": 1e-3},
    "sinkhorn, tol, columns": {"name": "sinkhorn", "iters": 30, "tol": 1e-2, "last": "columns"},
    "guarded": {"name": "sinkhorn", "iters": 4, "eps": 1e-2},
    "guarded, columns": {"name": "sinkhorn", "iters": 5, "eps": 1e-3, "last": "columns"},
    "newton": {"name": "sinkhorn", "method": "newton"},
    "newton, columns": {"name": "sinkhorn", "method": "newton", "last": "columns"},
    "birkhoff": {"name": "birkhoff"},
    "kronecker": {"name": "kronecker"},
}


@dataclass
class Case:
    """What a site is given in the forward pass (to y), and in the backward pass (the rest)."""

    spec: SiteSpec
    mixer: Mixer
    folded: FoldedWeights
    streams: Tensor
    y: Tensor
    grad: Tensor | None
    d_x: Tensor | None
    d_weights: Tensor | None

    def but(self, **changes):
        return replace(self, **changes)


def make(
    mixer="sinkhorn",
    num_streams=4,
    dim=7,
    tokens=9,
    *,
    generator="cp",
    dtype=torch.float64,
    y_dtype=None,
    seed=0,
    **config,
):
    """Unit-normal streams, logits of order one: nothing is small enough to hide."""
    options = MIXERS[mixer] if isinstance(mixer, str) else mixer
    site = temper.HyperConnection(
        temper.preset("mhc", num_streams=num_streams, dim=dim, generator=generator, mixer=options, **config)
    )
    spec, source = site.spec, torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def normal(*shape, scale=1.0, dtype=wide):
        return (scale * torch.randn(shape, generator=source, dtype=torch.float64)).to(dtype)

    folded = FoldedWeights(
        normal(spec.num_rows, num_streams, dim, scale=(num_streams * dim) ** -0.5),
        normal(sum(spec.map_sizes), scale=0.7),
        normal(sum(spec.head_logits)),
    )
    shape = (tokens, num_streams, dim)
    return Case(
        spec,
        site.mixer,
        folded,
        streams=normal(*shape, dtype=dtype),
        y=normal(tokens, dim, dtype=y_dtype or dtype),
        grad=normal(*shape, dtype=dtype),
        d_x=normal(tokens, dim, dtype=dtype),
        d_weights=normal(tokens, spec.num_weights),
    )


def run(kernels, case):
    """Everything that the operations give, by name; gradients come from the backwards written by hand."""
    spec, mixer = case.spec, case.mixer
    x, routed = kernels.begin(case.streams, case.folded, spec, mixer)
    weights = routed.weights
    results = {"x": x, "weights": weights, "next": kernels.finish(case.streams, case.y, weights, spec)}
    d_weights = case.d_weights
    if case.grad is not None:
        results["d_y"], through = kernels.finish_backward(case.grad, case.streams, case.y, weights, spec)
        d_weights = through if d_weights is None else d_weights + through
    d_streams, d_folded = kernels.begin_backward(
        case.grad, case.d_x, d_weights, case.streams, case.folded, routed, spec, mixer
    )
    names = ("d_in_map", "d_out", "d_bias")
    return results | {"d_streams": d_streams} | dict(zip(names, d_folded[:3], strict=True))


CHAINED = ("next", "x", "weights", "d_next", "d_in_map", "d_out", "d_bias", "d_y", "d_weights")


def run_chained(kernels, case):
    """The chained operation and its backward: the site is followed by one with the same weights."""
    streams, y, folded, spec, mixer = case.streams, case.y, case.folded, case.spec, case.mixer
    weights = kernels.begin(streams, folded, spec, mixer)[1].weights
    following, x, routed = kernels.finish_begin(streams, y, weights, folded, spec, mixer)
    later = (case.grad, case.d_x, case.d_weights, following, folded, routed)
    d_next, d_folded, *rest = kernels.finish_begin_backward(*later, streams, y, weights, spec, mixer)
    return dict(zip(CHAINED, (following, x, routed.weights, d_next, *d_folded[:3], *rest), strict=True))


def run_one_by_one(kernels, case):
    """The same by two operations each way."""
    streams, y, folded, spec, mixer = case.streams, case.y, case.folded, case.spec, case.mixer
    weights = kernels.begin(streams, folded, spec, mixer)[1].weights
    following = kernels.finish(streams, y, weights, spec)
    x, routed = kernels.begin(following, folded, spec, mixer)
    later = (case.grad, case.d_x, case.d_weights, following, folded, routed)
    d_next, d_folded = kernels.begin_backward(*later, spec, mixer)
    rest = kernels.finish_backward(d_next, streams, y, weights, spec)
    return dict(zip(CHAINED, (following, x, routed.weights, d_next, *d_folded[:3], *rest), strict=True))


def expected_chained(case):
    """The same from the definition in float64; streams between the sites are rounded as they are stored."""
    stored, spec, mixer = case.streams.dtype, case.spec, case.mixer
    streams, y = case.streams.double(), case.y.double().requires_grad_()
    folded = FoldedWeights(*(tensor.double().requires_grad_() for tensor in case.folded[:3]))
    weights = naive.begin(streams, folded, spec, mixer)[1].detach().requires_grad_()
    following = naive.finish(streams, y, weights, spec)
    later = following.detach().to(stored).double().requires_grad_()
    x, routing = naive.begin(later, folded, spec, mixer)
    mixed = spec.split(routing.detach()).res @ later
    pairs = [(mixed, case.grad), (x, case.d_x), (routing, case.d_weights)]
    d_next, *d_folded = _slopes(pairs, (later, *folded[:3]))
    rest = _slopes([(following, d_next.to(stored))], (y, weights))
    results = (following, x, routing, d_next, *d_folded, *rest)
    return {name: value.detach() for name, value in zip(CHAINED, results, strict=True)}


def _slopes(pairs, leaves):
    outputs, cotangents = zip(*[(o, c.double()) for o, c in pairs if c is not None], strict=True)
    found = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    return [torch.zeros_like(leaf) if slope is None else slope for leaf, slope in zip(leaves, found, strict=True)]


def expected(case):
    """The same from the definition, differentiated by autograd, in float64."""
    tensors = (case.streams, case.y, *case.folded[:3])
    streams, y, *folded = (tensor.double().requires_grad_() for tensor in tensors)
    x, weights = naive.begin(streams, FoldedWeights(*folded), case.spec, case.mixer)
    following = naive.finish(streams, y, weights, case.spec)
    pairs = [(following, case.grad), (x, case.d_x), (weights, case.d_weights)]
    gradients = _slopes(pairs, [streams, y, *folded])
    names = ("d_streams", "d_y", "d_in_map", "d_out", "d_bias")
    results = {"x": x, "weights": weights, "next": following} | dict(zip(names, gradients, strict=True))
    if case.grad is None:
        del results["d_y"]
    return {name: value.detach() for name, value in results.items()}


def worst(actual, wanted):
    """The largest error of each result, in units of the largest entry there is."""
    errors = {}
    for name, want in wanted.items():
        got = actual[name].double()
        assert got.shape == want.shape, name
        scale = want.abs().max() if want.numel() else torch.ones(())
        errors[name] = ((got - want).abs().max() / scale.clamp_min(1e-30)).item() if want.numel() else 0.0
    return errors


def assert_near(actual, wanted, tolerance):
    errors = worst(actual, wanted)
    # Not "any is larger": what is not a number is wrong too.
    assert all(error <= tolerance for error in errors.values()), errors
