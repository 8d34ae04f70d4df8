"""The models that can be evaluated: those of this lab, and causal language models of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from temper_lab.checkpoint.model_folder import FORMAT
from temper_lab.engine import KVCache
from temper_lab.io import read_json
from temper_lab.load import load
from temper_lab.model import GPT
from temper_lab.model.loss import chunk_size
from temper_lab.run import RunFolder
from temper_lab.tokenizer import Tokenizer

# Other people's models may read 100,000 tokens; bits per byte are not meant to.
MAX_CONTEXT = 2048


class LanguageModel(Protocol):
    """What an evaluation asks of a model.

    Args:
        limit: tokens that it reads at most.
        can_share: whether `remember` may be called.
        max_tokens: how many, padding included, fit one pass.
        pass_cost: what a pass costs beside its tokens, in tokens.
        notes: what a reader of the results should know.
    """

    limit: int
    can_share: bool
    max_tokens: int
    pass_cost: int
    notes: list[str]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every text, after a BOS."""

    def remember(self, prefix_BP: Tensor, repeats: Sequence[int], room: int) -> Any:
        """Reads beginnings of equal length; each is remembered for so many rows, which go on for `room` tokens."""

    def logits(self, ids_RT: Tensor, rows: Tensor, columns: Tensor, memory: Any = None) -> Iterator[Tensor]:
        """The logits (n, V) after the tokens at some places, a few places at a time; rows may go on from a memory."""

    def fingerprint(self) -> str:
        """A hash of everything that decides the numbers."""


def is_theirs(path: Path) -> bool:
    """Whether a path is a folder of transformers; what is neither theirs nor ours gets our error message."""
    if RunFolder(path).is_run:
        return False
    try:
        config = read_json(path / "config.json", allow_nan=True)
        return "model_type" in config and config.get("format") != FORMAT
    except ValueError:
        return False


def open_model(path: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """A model folder, the folder of a run, or a Hugging Face folder with a causal language model and its tokenizer."""
    path = Path(path)
    if not is_theirs(path):
        return Ours(*load(path, device=device))
    from temper_lab.eval.hugging_face import Theirs, load_theirs

    return Theirs(*load_theirs(path, device=device))


class Losses(NamedTuple):
    """What bits per byte need of a model.

    Args:
        losses: called with ids, `targets_BT` and `reduction="none"`.
        tokenizer: with `bos`, `encode_batch` and `token_bytes`.
        limit: tokens that the model reads at most.
        context: tokens that it reads unless asked otherwise.
    """

    losses: Any
    tokenizer: Any
    limit: int
    context: int


def open_losses(path: str | Path, *, device: torch.device | str = "cpu") -> Losses:
    """The same folders as `open_model` takes, for bits per byte."""
    path = Path(path)
    if not is_theirs(path):
        network, tokenizer = load(path, device=device)
        return Losses(network, tokenizer, network.config.context, network.config.context)
    from temper_lab.eval.hugging_face import ByteTokenizer, TokenLosses, limit_of, load_theirs

    theirs, their_tokenizer = load_theirs(path, device=device)
    limit = limit_of(theirs)
    losses = TokenLosses(theirs, their_tokenizer.num_ids)
    return Losses(losses, ByteTokenizer(their_tokenizer), limit, min(limit, MAX_CONTEXT))


class Ours:
    """A model of this lab."""

    can_share = True

    def __init__(self, network: GPT, tokenizer: Tokenizer) -> None:
        self.network, self.tokenizer = network.eval(), tokenizer
        self.limit = network.config.context
        self.notes: list[str] = []
        self._device = network.head.weight.device
        self.max_tokens, self.pass_cost = sizes(self._device)

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, bos=True)

    def remember(self, prefix_BP: Tensor, repeats: Sequence[int], room: int) -> KVCache:
        cache = KVCache.for_model(self.network, len(prefix_BP), capacity=prefix_BP.shape[1] + room)
        self.network.features(prefix_BP.to(self._device), cache)
        cache.keep([row for row, count in enumerate(repeats) for _ in range(count)])
        return cache

    def logits(self, ids_RT: Tensor, rows: Tensor, columns: Tensor, memory: KVCache | None = None) -> Iterator[Tensor]:
        x_RTD = self.network.features(ids_RT.to(self._device), memory)
        # Of all logits only those before a scored token are ever made.
        for part_nD in x_RTD[rows.to(self._device), columns.to(self._device)].split(chunk_size(self._device)):
            yield self.network.logits(part_nD)

    def fingerprint(self) -> str:
        config = self.network.config.to_dict()
        return fingerprint(self.network, [config, self.tokenizer.fingerprint, self._device.type])


def sizes(device: torch.device) -> tuple[int, int]:
    """The tokens of one pass, and what a pass costs beside them: a GPU wants to be filled, a CPU has a small cache."""
    return (65_536, 4_096) if device.type == "cuda" else (2_048, 64)


def fingerprint(network: nn.Module, settings: Any) -> str:
    """A hash of all weights and of what else is given."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=8)
    for name, tensor in network.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
