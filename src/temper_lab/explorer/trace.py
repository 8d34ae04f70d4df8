"""A model's reading of a text: the routing of every token at every site.

Letters: T token, N stream, M destination stream.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import temper
from temper.observe import TokenReport
from temper_lab.model import GPT
from temper_lab.model.functional import chunked_cross_entropy
from temper_lab.tokenizer import BOS, Tokenizer
from temper_lab.train.plan import corpus_of
from temper_lab.train.run_dir import recipe_of

# The measures of a token at a site, besides its routing.
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
    """The routing of one text by a model.

    Args:
        ids: the ids, including the BOS that every text begins with.
        surprise: the bits of every token, given those before it; None for the BOS.
        is_cut: true if the text is longer than the model's context.
        sites: the sites in the order in which they ran; every tensor has one row per token.
        method: the routing of the model, as people write it.
    """

    text: str
    ids: list[int]
    pieces: list[str]
    surprise: list[float | None]
    is_cut: bool
    sites: list[TokenReport]
    method: str

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
    return Trace(text, ids, pieces(tokenizer, ids), [None, *bits], is_cut, sites, model.config.method)


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
    """The routing of a site without the batch axis, on the CPU, with the site's display name."""
    assert report.composite is not None
    numbers = {number: getattr(report, number)[0].cpu() for number in NUMBERS}
    routing = temper.Routing(*(part[0].cpu() for part in report.routing))
    return TokenReport(name=name, routing=routing, composite=report.composite[0].cpu(), **numbers)


def _plain(site: TokenReport) -> dict[str, Any]:
    tensors = {**site.routing._asdict(), "composite": site.composite}
    tensors |= {number: getattr(site, number) for number in NUMBERS}
    return {"name": site.name} | {key: tensor.tolist() for key, tensor in tensors.items()}


# A text with numbers, punctuation, a name and repeated words.
ALWAYS = (
    "The people of the United States, and the people of every state, have asked for peace. "
    'In 1947 the budget was 38 billion; in 1948 it was 33. "Why," said Mr. Adams, "have they asked for peace?"'
)
PASSAGES = 3
TOKENS = 64
# The documents that passages are taken from, and how far into each.
DOCUMENTS, CHARACTERS = 12, 4000


def default_texts(run: Path | None, tokenizer: Tokenizer) -> list[str]:
    """The constant text, and passages of the validation documents if the run's corpus can be opened from here."""
    return [ALWAYS, *(validation_passages(run, tokenizer) if run is not None else [])]


def validation_passages(run: Path, tokenizer: Tokenizer) -> list[str]:
    """Some passages of TOKENS tokens, each from the beginning of a sentence; none without the corpus."""
    recipe = recipe_of(run)
    if recipe is None:
        return []
    try:
        documents = list(itertools.islice(corpus_of(recipe.data).texts("val"), DOCUMENTS))
    # If the corpus is not on this machine, only the constant text is shown.
    except (ValueError, OSError):
        return []
    # The first documents and the last are often by one author.
    stride = max(1, len(documents) // PASSAGES)
    found = (passage(document, tokenizer) for document in documents[::stride])
    return [text for text in found if text][:PASSAGES]


def passage(document: str, tokenizer: Tokenizer) -> str:
    """About TOKENS tokens from somewhere inside a document."""
    start = min(len(document) // 3, CHARACTERS)
    sentence = re.compile(r"[.!?][\u201d\"']?\s+(?=[A-Z\u201c\"])").search(document, start)
    start = sentence.end() if sentence else 0
    ids = tokenizer.encode(document[start : start + CHARACTERS])[:TOKENS]
    # Cut between two words, so that tokenizing the text again gives the same tokens.
    return re.sub(r"\s+", " ", tokenizer.decode(ids).rsplit(" ", 1)[0]).strip()


def titles(texts: Sequence[str]) -> list[str]:
    """The first words of every text."""
    short = [" ".join(text.split())[:44] for text in texts]
    return [f"{start.rsplit(' ', 1)[0]} \u2026" if len(start) == 44 else start or "(empty)" for start in short]
