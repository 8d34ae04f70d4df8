"""The local Lipschitz constant of a mixer: the largest singular value of its Jacobian at given logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from temper.mixers import Mixer
from temper.mixers.sinkhorn import Sinkhorn

# Entries of Jacobians that are held at a time.
CHUNK = 1 << 18


def local_lipschitz(mixer: Mixer, logits: Tensor) -> Tensor:
    """The spectral norm of d res / d logits of every token, in float64: (..., *logit_shape) -> (...)."""
    shape = tuple(mixer.logit_shape)
    if not isinstance(logits, Tensor) or logits.ndim < len(shape) or tuple(logits.shape[-len(shape) :]) != shape:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits are {got}; expected (..., {', '.join(map(str, shape))})")
    if not torch.isfinite(logits).all():
        raise ValueError("logits have values that are not finite")
    lead = logits.shape[: logits.ndim - len(shape)]
    tokens = logits.detach().double().reshape(math.prod(lead), *shape)
    if not math.prod(shape):
        return tokens.new_zeros(lead)
    size = max(1, CHUNK // (mixer.num_streams**2 * math.prod(shape)))
    norms = [torch.linalg.matrix_norm(_jacobian(mixer, part), ord=2) for part in tokens.split(size) if len(part)]
    return torch.cat(norms).view(lead) if norms else tokens.new_empty(lead)


def sinkhorn_lipschitz(logits: Tensor) -> Tensor:
    """The same for Sinkhorn's limit at logits (..., N, N): never above 1/2, which N = 2 attains at equal logits."""
    if not isinstance(logits, Tensor) or logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise ValueError(f"logits are {got}; expected (..., N, N)")
    return local_lipschitz(Sinkhorn(logits.shape[-1], method="newton", iters=100), logits)


def _jacobian(mixer: Mixer, logits: Tensor) -> Tensor:
    """(T, *logit_shape) -> (T, N^2, logits). Tokens do not see each other: a copy for every row of the Jacobian."""
    entries = mixer.num_streams**2
    with torch.enable_grad():
        copies = logits.expand(entries, *logits.shape).clone().requires_grad_()
        res = mixer.mix(copies)
    unit = torch.eye(entries, dtype=res.dtype, device=res.device).view(entries, 1, *res.shape[-2:])
    (rows,) = torch.autograd.grad(res, copies, unit.expand(res.shape))
    return rows.movedim(0, 1).flatten(2)
