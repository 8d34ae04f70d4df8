"""A model for the page to run by itself: its sizes, and its weights as bytes.

Letters: R bottleneck rows, N streams, D width.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import temper
from temper_lab.model import GPT
from temper_lab.report.explorer import bpe
from temper_lab.report.explorer.trace import Trace, trace
from temper_lab.tokenizer import Tokenizer

# What engine.js can compute.
MIXERS = ("birkhoff", "identity", "kronecker", "sinkhorn", "unconstrained")
GATES = ("sigmoid", "tanh")
# How far the numbers of the traced texts may move where weights are shortened: a tenth of what could be seen (1e-3),
# because other texts will be typed.
TOLERANCE = 1e-4


def refusal(model: GPT, tokenizer: Tokenizer) -> str | None:
    """Why the page cannot run this model, or None."""
    config = model.config.routing()
    if config.mixer is not None and config.mixer.name not in MIXERS:
        return f"the page does not know the mixer {config.mixer.name}"
    if config.gates not in GATES:
        return f"the page does not know the gates {config.gates}"
    return bpe.refusal(tokenizer)


def describe(model: GPT) -> dict[str, Any]:
    """Everything about a model that engine.js must know besides its weights."""
    config, routing = model.config, model.config.routing()
    sizes = {"width": config.dim, "heads": config.num_heads, "layers": config.num_layers, "context": config.context}
    if routing.is_residual:
        return {**sizes, "streams": 1, "routing": None}
    site = model.sites()[0]
    heads = (site.pre, site.res, site.post)
    return {
        **sizes,
        "streams": routing.num_streams,
        "routing": {
            "rows": [head.generator.maps()[0].shape[0] for head in heads],
            "logits": [head.bias.numel() for head in heads],
            "direct": [head.generator.direct for head in heads],
            "gates": routing.gates,
            "norm": routing.norm,
            "eps": routing.norm_eps,
            "clamp": routing.norm_clamp,
            "preEps": routing.pre_eps,
            "mixer": {"name": routing.mixer.name, **routing.mixer.options},
        },
    }


@torch.no_grad()
def tensors(model: GPT) -> dict[str, Tensor]:
    """The weights in the order in which engine.js reads them: first the large matrices, then what stays float32."""
    named = {"embedding": model.embedding.weight, "head": model.head.weight}
    for layer, block in enumerate(model.blocks):
        attention, mlp = block.attention, block.mlp
        parts = {"query": attention.query, "key": attention.key, "value": attention.value, "out": attention.out}
        for name, linear in {**parts, "up": mlp.up, "down": mlp.down}.items():
            named[f"{layer}.{name}"] = linear.weight
    # Both halves of the tables are alike.
    half = model.config.head_dim // 2
    named |= {"cos": model.rotary.cos[:, :half], "sin": model.rotary.sin[:, :half]}
    for index, site in enumerate(model.sites()):
        if not site.config.is_residual:
            named |= {f"site{index}.{name}": tensor for name, tensor in _folded(site).items()}
    return {name: tensor.detach().float().cpu() for name, tensor in named.items()}


def _folded(site: temper.HyperConnection) -> dict[str, Tensor]:
    """A site as two maps, gates and biases, whatever its generators: `Router.fold`, but with the gates apart.

    HC squashes between the maps and the gates, so there they cannot be folded; one form for all is simpler.
    """
    heads = (site.pre, site.res, site.post)
    maps = [head.generator.maps(torch.float32) for head in heads]
    in_map_RND, gain = torch.cat([in_map for in_map, _ in maps]), site.norm.gain()
    outs = [out.flatten() for head, (_, out) in zip(heads, maps, strict=True) if not head.generator.direct]
    return {
        "in": in_map_RND if gain is None else in_map_RND * gain,
        "out": torch.cat([torch.empty(0), *outs]),
        "gate": torch.cat([head.gate for head in heads]),
        "bias": torch.cat([head.bias.flatten() for head in heads]),
    }


def is_large(name: str) -> bool:
    """Whether a tensor is one of the backbone's matrices, which may be shortened."""
    return not name.startswith("site") and name not in ("cos", "sin")


def shorten(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as 16-bit whole numbers and a scale for every row: ten times closer than float16, at its size."""
    scale = (matrix.abs().amax(1, keepdim=True) / 32767).clamp_min(torch.finfo(torch.float32).tiny)
    return (matrix / scale).round().to(torch.int16), scale


def encode(weights: Mapping[str, Tensor], *, short: bool) -> tuple[list[dict[str, Any]], str]:
    """The list of tensors, and their bytes in base64, little-endian."""
    table, chunks = [], []
    for name, tensor in weights.items():
        parts = shorten(tensor) if short and is_large(name) else (tensor,)
        table.append({"name": name, "size": tensor.numel(), "rows": len(tensor) if len(parts) == 2 else None})
        for part in parts:
            raw = part.contiguous().numpy().tobytes()
            # A reader's views of float32 numbers want to be aligned.
            chunks.append(raw + bytes(-len(raw) % 4))
    return table, base64.b64encode(b"".join(chunks)).decode()


def encoded_size(weights: Mapping[str, Tensor], *, short: bool) -> int:
    """Characters of base64 that `encode` gives, without doing it."""
    num_bytes = 0
    for name, tensor in weights.items():
        size = tensor.numel()
        num_bytes += -(-2 * size // 4) * 4 + 4 * len(tensor) if short and is_large(name) else 4 * size
    return -(-num_bytes // 3) * 4


def can_be_short(model: GPT, tokenizer: Tokenizer, traces: Sequence[Trace]) -> bool:
    """Whether with shortened matrices every shown number of these texts stays within TOLERANCE."""
    rounded = copy.deepcopy(model)
    large = [rounded.embedding, rounded.head]
    large += [linear for linear in rounded.blocks.modules() if isinstance(linear, torch.nn.Linear)]
    with torch.no_grad():
        for module in large:
            numbers, scale = shorten(module.weight)
            module.weight.copy_(numbers * scale)
    return all(_distance(given, trace(rounded, tokenizer, given.text)) <= TOLERANCE for given in traces)


def _distance(one: Trace, other: Trace) -> float:
    """The largest difference of two traces of one text, relative where numbers are larger than 1."""
    numbers = [torch.tensor(trace.surprise[1:], dtype=torch.float64) for trace in (one, other)]
    pairs = [numbers, [one.packed().double(), other.packed().double()]]
    pairs += [[a.composite.double(), b.composite.double()] for a, b in zip(one.sites, other.sites, strict=True)]
    return max(((a - b).abs() / a.abs().clamp_min(1)).max().item() for a, b in pairs if a.numel())
