"""What a model did with a text: the routing of every token at every site.

Letters: T token, N stream, M destination stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import temper
from temper.observe import TokenReport
from temper_lab.model import GPT
from temper_lab.model.loss import chunked_cross_entropy
from temper_lab.tokenizer import BOS, Tokenizer

# The numbers of a token at a site besides its routing.
NUMBERS = (
    "row_error",
    "column_error",
    "forward_gain",
    "backward_gain",
    "composite_forward_gain",
    "composite_backward_gain",
    "stream_similarity",
)


@dataclass(frozen=True)
class Trace:
    """One text as a model read it.

    Args:
        ids: with the BOS that every text begins with.
        surprise: bits of every token, given those before it; None for the BOS.
        is_cut: the text goes on, the model's context does not.
        sites: in the order in which they ran; every tensor has one row for a token.
    """

    text: str
    ids: list[int]
    pieces: list[str]
    surprise: list[float | None]
    is_cut: bool
    sites: list[TokenReport]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, in full precision."""
        return {
            "text": self.text,
            "ids": self.ids,
            "tokens": self.pieces,
            "surprise": self.surprise,
            "is_cut": self.is_cut,
            "sites": [_plain(site) for site in self.sites],
        }

    def packed(self) -> Tensor:
        """All routing as one float32 vector: for each site pre (T, N), res (T, M, N), post (T, M), similarity (T)."""
        parts = [(*site.routing, site.stream_similarity) for site in self.sites]
        return torch.cat([part.float().flatten() for site in parts for part in site])


@torch.no_grad()
def trace(model: GPT, tokenizer: Tokenizer, text: str) -> Trace:
    """Reads a text, as far as the context goes."""
    ids = tokenizer.encode(text, bos=True)
    context = model.config.context
    is_cut, ids = len(ids) > context, ids[:context]
    ids_T = torch.tensor(ids, device=model.head.weight.device)
    with temper.observe(model, per_token=True) as observation:
        x_TD = model.features(ids_T[None])[0]
    nats = (
        chunked_cross_entropy(x_TD[:-1], model.head.weight, ids_T[1:], reduction="none") if len(ids) > 1 else ids_T[1:]
    )
    names = [f"{kind} {layer}" for layer in range(model.config.num_layers) for kind in ("attention", "mlp")]
    sites = [_of_one_text(name, report) for name, report in zip(names, observation.tokens, strict=True)]
    bits = (nats / math.log(2)).tolist()
    return Trace(text, ids, pieces(tokenizer, ids), [None, *bits], is_cut, sites)


def pieces(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """Every token as text; bytes that are not a whole character as <0xE2>."""
    shown = []
    for index in ids:
        raw = tokenizer.decode_bytes([index])
        try:
            shown.append(BOS if index == tokenizer.bos else raw.decode())
        except UnicodeDecodeError:
            shown.append("".join(f"<0x{byte:02X}>" for byte in raw))
    return shown


def summary(traces: Sequence[Trace]) -> list[dict[str, Any]]:
    """Every site over all tokens of some texts: means, and the largest errors."""
    rows = []
    for sites in zip(*(trace.sites for trace in traces), strict=True):
        routing = [torch.cat([getattr(site.routing, head).double() for site in sites]) for head in ("pre", "post")]
        numbers = {name: torch.cat([getattr(site, name) for site in sites]) for name in NUMBERS}
        row = {name: (part.max() if name.endswith("error") else part.mean()).item() for name, part in numbers.items()}
        rows.append(
            {"name": sites[0].name, "pre": routing[0].mean(0).tolist(), "post": routing[1].mean(0).tolist()} | row
        )
    return rows


def _of_one_text(name: str, report: TokenReport) -> TokenReport:
    """Without the batch, on the CPU, under the name that people know the site by."""
    assert report.composite is not None
    numbers = {number: getattr(report, number)[0].cpu() for number in NUMBERS}
    routing = temper.Routing(*(part[0].cpu() for part in report.routing))
    return TokenReport(name=name, routing=routing, composite=report.composite[0].cpu(), **numbers)


def _plain(site: TokenReport) -> dict[str, Any]:
    tensors = {**site.routing._asdict(), "composite": site.composite}
    tensors |= {number: getattr(site, number) for number in NUMBERS}
    return {"name": site.name} | {key: tensor.tolist() for key, tensor in tensors.items()}
