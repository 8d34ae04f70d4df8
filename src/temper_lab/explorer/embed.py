"""A model and its tokenizer for the page to run by itself: sizes, weights as bytes, merges.

Letters: R bottleneck rows, N streams, D width.
"""

from __future__ import annotations

import base64
import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import temper
from temper_lab.explorer.trace import Trace, trace
from temper_lab.model import GPT
from temper_lab.model.gpt import Block
from temper_lab.tokenizer import Tokenizer, byte_alphabet

# The mixers and gates that engine.js implements.
MIXERS = ("birkhoff", "identity", "kronecker", "sinkhorn", "unconstrained")
GATES = ("sigmoid", "tanh")
# The largest error that 16-bit weights may cause on the traced texts: a tenth of what is visible (1e-3), because other
# texts will be typed.
TOLERANCE = 1e-4


def refusal(model: GPT, tokenizer: Tokenizer) -> str | None:
    """The reason why the page cannot run this model, or None."""
    config = model.config.routing()
    if config.mixer is not None and config.mixer.name not in MIXERS:
        return f"the page does not know the mixer {config.mixer.name}"
    if config.gates not in GATES:
        return f"the page does not know the gates {config.gates}"
    if config.norm_outside or (config.mixer is not None and config.mixer.options.get("clamp")):
        return "the page does not know Megatron-Core's guards (norm_outside, clamp)"
    return tokenizer_refusal(tokenizer)


def describe(model: GPT) -> dict[str, Any]:
    """Everything about a model that engine.js must know besides its weights."""
    config, routing = model.config, model.config.routing()
    sizes = {"width": config.dim, "heads": config.num_heads, "layers": config.num_layers, "context": config.context}
    if routing.is_residual or routing.mixer is None:
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
        assert isinstance(block, Block)
        attention, mlp = block.attention, block.mlp
        parts = {"query": attention.query, "key": attention.key, "value": attention.value, "out": attention.out}
        for name, linear in {**parts, "up": mlp.up, "down": mlp.down}.items():
            named[f"{layer}.{name}"] = linear.weight
    # Both halves of the tables are equal.
    half = model.config.head_dim // 2
    named |= {"cos": model.rotary.cos[:, :half], "sin": model.rotary.sin[:, :half]}
    for index, site in enumerate(model.sites()):
        if not site.config.is_residual:
            named |= {f"site{index}.{name}": tensor for name, tensor in _folded(site).items()}
    return {name: tensor.detach().float().cpu() for name, tensor in named.items()}


def _folded(site: temper.HyperConnection) -> dict[str, Tensor]:
    """A site as two maps, gates and biases, whatever its generators: `Router.fold` with separate gates.

    HC applies tanh between the maps and the gates, so its gates cannot be folded; one form for all is simpler.
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
    """True if a tensor is one of the backbone's matrices, which may be stored in 16 bits."""
    return not name.startswith("site") and name not in ("cos", "sin")


def shorten(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A matrix as 16-bit integers with a scale per row: ten times as accurate as float16 at the same size."""
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
            # JavaScript's float32 views must be aligned.
            chunks.append(raw + bytes(-len(raw) % 4))
    return table, base64.b64encode(b"".join(chunks)).decode()


def encoded_size(weights: Mapping[str, Tensor], *, short: bool) -> int:
    """The number of base64 characters that `encode` would give."""
    num_bytes = 0
    for name, tensor in weights.items():
        size = tensor.numel()
        num_bytes += -(-2 * size // 4) * 4 + 4 * len(tensor) if short and is_large(name) else 4 * size
    return -(-num_bytes // 3) * 4


def can_be_short(model: GPT, tokenizer: Tokenizer, traces: Sequence[Trace]) -> bool:
    """True if with 16-bit matrices every displayed number of these texts stays within TOLERANCE."""
    rounded = copy.deepcopy(model)
    large: list[torch.nn.Embedding | torch.nn.Linear] = [rounded.embedding, rounded.head]
    large += [linear for block in rounded.blocks for linear in block.modules() if isinstance(linear, torch.nn.Linear)]
    with torch.no_grad():
        for module in large:
            numbers, scale = shorten(module.weight)
            module.weight.copy_(numbers * scale)
    return all(_distance(given, trace(rounded, tokenizer, given.text)) <= TOLERANCE for given in traces)


def _distance(one: Trace, other: Trace) -> float:
    """The largest difference of two traces of one text, relative where numbers are larger than 1."""
    numbers = [torch.tensor(trace.surprise[1:], dtype=torch.float64) for trace in (one, other)]
    pairs = [numbers, [one.packed().double(), other.packed().double()]]
    for a, b in zip(one.sites, other.sites, strict=True):
        assert a.composite is not None
        assert b.composite is not None
        pairs.append([a.composite.double(), b.composite.double()])
    return max(((a - b).abs() / a.abs().clamp_min(1)).max().item() for a, b in pairs if a.numel())


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer as tokenizer.js wants it: how to split, the id of every byte, merges as (left, right, result)."""
    content = json.loads(tokenizer.to_json())
    vocab = content["model"]["vocab"]
    merges = []
    for merge in content["model"]["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        merges += [vocab[left], vocab[right], vocab[left + right]]
    return {
        "pattern": javascript_pattern(_split_pattern(content) or ""),
        "bytes": [vocab[char] for char in byte_alphabet()],
        "merges": merges,
        "bos": tokenizer.bos,
    }


def tokenizer_refusal(tokenizer: Tokenizer) -> str | None:
    """The reason why the page cannot run this tokenizer, or None."""
    content = json.loads(tokenizer.to_json())
    model = content["model"]
    unusual = [
        key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges") if model.get(key)
    ]
    if unusual:
        return f"the page does not know a tokenizer with {', '.join(unusual)}"
    pattern = _split_pattern(content)
    if pattern is None or javascript_pattern(pattern) is None:
        return "the page does not know this tokenizer's way of splitting texts"
    return None


def _split_pattern(content: Mapping[str, Any]) -> str | None:
    """The regular expression of a tokenizer that splits by one and then works on bytes."""
    steps = (content.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex"):
        return None
    split = steps[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    pattern: str | None = split["pattern"].get("Regex")
    return pattern


def javascript_pattern(pattern: str) -> str | None:
    """A pattern of the tokenizers library in JavaScript's syntax (flag u), or None if it cannot be translated.

    Its white space is Unicode's, while JavaScript's \\s differs; and flags for a group are too new to rely on.
    """
    # Not translated: possessive quantifiers, atomic groups, look-behind, inline flags, and rarer escapes.
    if re.search(r"(?:[?*+]|\{[\d,]+\})\+|\(\?(?!i:|:|!|=)|\\[AZzGhHRXKbB]|\[\[:|&&", pattern):
        return None
    pattern = re.sub(r"\(\?i:([^()\\]*)\)", lambda group: f"(?:{_any_case(group[1])})", pattern)
    if "(?i" in pattern:
        return None
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _any_case(pattern: str) -> str:
    """Matches letters in both cases, and the long s that folds to s: `[st]|ll` -> `[sS\u017ftT]|[lL][lL]`."""
    shown, is_class = "", False
    for char in pattern:
        is_class = char == "[" or (is_class and char != "]")
        cases = char.lower() + char.upper() + ("\u017f" if char in "sS" else "") if char.isalpha() else char
        shown += cases if is_class or not char.isalpha() else f"[{cases}]"
    return shown
