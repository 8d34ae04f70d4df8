"""The hyper-connection once more, in float64, slow and plain: what the tests compare the library with.

Everything is computed from a state dict with the public keys and a config, by the definitions: the dense W by outer
products, Sinkhorn by division, permutation mixtures by a loop over permutations. Autograd differentiates it in the
streams, in y and in every tensor of the state. It imports nothing from the library.
"""

import itertools
import math
import string
from typing import NamedTuple

import torch

HEADS = ("pre", "res", "post")


class Routing(NamedTuple):
    pre: torch.Tensor
    res: torch.Tensor
    post: torch.Tensor


def prime_factors(number):
    """Ascending; (1,) for 1."""
    factors, candidate = [], 2
    while number > 1:
        while number % candidate == 0:
            factors.append(candidate)
            number //= candidate
        candidate += 1
    return tuple(factors) or (1,)


def logit_shape(mixer, num_streams):
    """How many logits a mixer reads, or None for a mixer that this file does not know."""
    if mixer in ("unconstrained", "sinkhorn"):
        return (num_streams, num_streams)
    if mixer == "identity":
        return (0,)
    if mixer == "birkhoff":
        return (math.factorial(num_streams),)
    if mixer == "kronecker":
        return (sum(math.factorial(size) for size in prime_factors(num_streams)),)
    return None


# Generators: the stored tensors of one generator (keys after `X.generator.`) to W of shape (N, D, *out_modes).


def _listed(tensors, name):
    """`name.0`, `name.1`, .. in order."""
    return [tensors[f"{name}.{k}"] for k in range(sum(key.startswith(f"{name}.") for key in tensors))]


def dense_weight(tensors, num_streams, out_modes):
    return tensors["weight"]


def per_stream_weight(tensors, num_streams, out_modes):
    weight = tensors["weight"]
    eye = torch.eye(num_streams, dtype=weight.dtype)
    if len(out_modes) == 1:
        return torch.einsum("si,c->sci", eye, weight)
    return torch.einsum("sn,cm->scmn", eye, weight)


def cp_weight(tensors, num_streams, out_modes):
    factors = _listed(tensors, "factors")
    total = 0
    for q in range(factors[0].shape[1]):
        term = factors[0][:, q]
        for factor in factors[1:]:
            term = term.unsqueeze(-1) * factor[:, q]
        total = total + term
    return total


def tucker_weight(tensors, num_streams, out_modes):
    factors = _listed(tensors, "factors")
    ranks, modes = string.ascii_lowercase[: len(factors)], string.ascii_uppercase[: len(factors)]
    pairs = [mode + rank for mode, rank in zip(modes, ranks, strict=True)]
    return torch.einsum(f"{','.join([ranks, *pairs])}->{modes}", tensors["core"], *factors)


def tt_weight(tensors, num_streams, out_modes):
    cores = _listed(tensors, "cores")
    weight = cores[0][0]
    for core in cores[1:]:
        weight = torch.einsum("...r,rms->...ms", weight, core)
    return weight[..., 0]


WEIGHTS = {
    "dense": dense_weight,
    "per-stream": per_stream_weight,
    "cp": cp_weight,
    "tucker": tucker_weight,
    "tt": tt_weight,
}


# Mixers: logits of one token after another, (T, *logit_shape) -> (T, N, N).


def unconstrained(logits, num_streams):
    return logits


def sinkhorn(logits, num_streams, iters=20, tol=None, last="rows", eps=0.0, clamp=False, method="plain"):
    """Division by column sums and row sums in turn; each token stops after the first round that is within tol.

    The limit that "newton" goes to is a plain iteration that is never stopped but by float64 itself.
    """
    if method == "newton":
        iters, tol = 100_000, 1e-14
    first_axis, last_axis = (0, 1) if last == "rows" else (1, 0)  # axis 0 of (m, n) summed away: the column sums
    tokens = []
    for token in logits:
        matrix = torch.exp(token - token.detach().amax(dim=first_axis, keepdim=True))
        for k in range(iters):
            if clamp:
                matrix = matrix / matrix.sum(dim=first_axis, keepdim=True).clamp(min=eps)
                matrix = matrix / matrix.sum(dim=last_axis, keepdim=True).clamp(min=eps)
                continue
            if k == 0:
                matrix = matrix / matrix.sum(dim=first_axis, keepdim=True) + eps
            else:
                matrix = matrix / (matrix.sum(dim=first_axis, keepdim=True) + eps)
            matrix = matrix / (matrix.sum(dim=last_axis, keepdim=True) + eps)
            if tol is not None and all((matrix.sum(dim=axis) - 1).abs().max() <= tol for axis in (0, 1)):
                break
        tokens.append(matrix)
    return torch.stack(tokens) if tokens else logits.reshape(0, num_streams, num_streams)


def permutation_mixture(logits, size):
    weights = torch.exp(logits - logits.detach().amax(dim=-1, keepdim=True))
    weights = weights / weights.sum(dim=-1, keepdim=True)
    total = logits.new_zeros(*logits.shape[:-1], size, size)
    for p, permutation in enumerate(itertools.permutations(range(size))):
        matrix = logits.new_zeros(size, size)
        for i, j in enumerate(permutation):
            matrix[i, j] = 1
        total = total + weights[..., p, None, None] * matrix
    return total


def kronecker(logits, num_streams):
    tokens = []
    for token in logits:
        result, start = torch.ones(1, 1, dtype=logits.dtype), 0
        for size in prime_factors(num_streams):
            part = token[start : start + math.factorial(size)]
            start += math.factorial(size)
            result = torch.kron(permutation_mixture(part, size), result)
        tokens.append(result)
    return torch.stack(tokens) if tokens else logits.new_zeros(0, num_streams, num_streams)


def identity(logits, num_streams):
    # Plus a sum of nothing, so that autograd finds the logits.
    return torch.eye(num_streams, dtype=logits.dtype).repeat(len(logits), 1, 1) + logits.sum(-1)[:, None, None]


MIXERS = {
    "identity": identity,
    "unconstrained": unconstrained,
    "sinkhorn": sinkhorn,
    "birkhoff": permutation_mixture,
    "kronecker": kronecker,
}


def gain(state, config):
    shape = (config.num_streams, config.dim)
    if config.gain == "none":
        return torch.ones(shape, dtype=torch.float64)
    if config.gain == "rank-one":
        return torch.outer(state["norm.stream"], state["norm.feature"])
    return state["norm.weight"].expand(shape)


def reference_forward(state, config, streams, y, *, weights=None, mix=None):
    """Read, routing and the next streams of one hyper-connection: x, Routing, streams.

    Args:
        state: tensors under the public state-dict keys, of any floating dtype.
        streams: (..., N, D).
        y: what the branch gave, (..., D), or the branch itself.
        weights: head -> dense W, for a generator that this file does not know.
        mix: logits -> res, for a mixer that this file does not know.
    """
    N, D = config.num_streams, config.dim
    leading = streams.shape[:-2]
    state = {key: tensor.double() for key, tensor in state.items()}
    streams = streams.double().reshape(math.prod(leading), N, D)

    square = streams**2
    mean = square.mean(dim=2, keepdim=True) if config.norm == "per-stream" else square.mean(dim=(1, 2), keepdim=True)
    if config.norm_outside:
        root = mean.sqrt() + config.norm_eps
    else:
        root = (mean.clamp(min=config.norm_eps) if config.norm_clamp else mean + config.norm_eps).sqrt()
    normed = streams / root * gain(state, config)

    logits = {}
    for head in HEADS:
        if logit_shape(config.mixer.name, N) == (0,) and head == "res":
            assert not any(key.startswith("res.") for key in state)
            logits[head] = streams.flatten(1)[:, :0]
            continue
        choice, bias = getattr(config, head), state[f"{head}.bias"]
        prefix = f"{head}.generator."
        tensors = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
        known = WEIGHTS.get(choice.name)
        weight = known(tensors, N, bias.shape) if known else weights[head].double()
        assert weight.shape == (N, D, *bias.shape)
        z = torch.einsum("tsc,sc...->t...", normed, weight)
        if config.gates == "tanh":
            z = torch.tanh(z)
        logits[head] = state[f"{head}.gate"] * z + bias

    pre, post = logits["pre"], logits["post"]
    if config.gates == "sigmoid":
        pre, post = 1 / (1 + torch.exp(-pre)), 2 / (1 + torch.exp(-post))
    pre = pre + config.pre_eps
    if config.mixer.name in MIXERS:
        res = MIXERS[config.mixer.name](logits["res"], N, **config.mixer.options)
    else:
        res = mix(logits["res"])

    x = torch.einsum("tn,tnd->td", pre, streams).reshape(*leading, D)
    y = y(x) if callable(y) else y.double()
    out = torch.einsum("tmn,tnd->tmd", res, streams) + torch.einsum("tm,td->tmd", post, y.reshape(len(streams), D))
    routing = Routing(pre.reshape(*leading, N), res.reshape(*leading, N, N), post.reshape(*leading, N))
    return x, routing, out.reshape(*leading, N, D)
