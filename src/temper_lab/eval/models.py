"""The models that can be evaluated: those of this lab, and causal language models of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from temper_lab.engine import KVCache
from temper_lab.interop.hf_folder import is_hf_folder
from temper_lab.model import GPT
from temper_lab.model.functional import chunk_size
from temper_lab.tokenizer import Tokenizer
from temper_lab.train.model_dir import load

# Some models read 100,000 tokens, which is too much for bits per byte.
MAX_CONTEXT = 2048


class LanguageModel(Protocol):
    """The interface of a model that can be evaluated.

    Args:
        limit: the most tokens that it reads.
        can_share: whether `remember` may be called.
        max_tokens: the most tokens of one pass, including padding.
        pass_cost: the fixed cost of a pass, in tokens.
        notes: remarks for readers of the results.
    """

    limit: int
    can_share: bool
    max_tokens: int
    pass_cost: int
    notes: list[str]

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The tokens of every text, after a BOS."""

    def remember(self, prefix_BP: Tensor, repeats: Sequence[int], room: int) -> Any:
        """Reads prefixes of equal length and caches each for a number of rows, which continue for `room` tokens."""

    def logits(self, ids_RT: Tensor, rows: Tensor, columns: Tensor, memory: Any = None) -> Iterator[Tensor]:
        """The logits (n, V) at some positions, a few positions at a time; rows may continue from a cache."""

    def fingerprint(self) -> str:
        """A hash of everything that determines the numbers."""


def open_model(path: str | Path, *, device: torch.device | str = "cpu") -> LanguageModel:
    """Opens a model folder, the folder of a run, or a Hugging Face folder with a causal language model."""
    path = Path(path)
    if not is_hf_folder(path):
        return LabModel(*load(path, device=device))
    from temper_lab.eval.hugging_face import HFModel, load_hf

    return HFModel(*load_hf(path, device=device))


class Losses(NamedTuple):
    """The interface of a model for bits per byte.

    Args:
        losses: called with ids, `targets_BT` and `reduction="none"`.
        tokenizer: an object with `bos`, `encode_batch` and `token_bytes`.
        limit: the most tokens that the model reads.
        context: the tokens that it reads by default.
    """

    losses: Any
    tokenizer: Any
    limit: int
    context: int


def open_losses(path: str | Path, *, device: torch.device | str = "cpu") -> Losses:
    """Opens the folders that `open_model` takes, for bits per byte."""
    path = Path(path)
    if not is_hf_folder(path):
        network, tokenizer = load(path, device=device)
        return Losses(network, tokenizer, network.config.context, network.config.context)
    from temper_lab.eval.hugging_face import ByteTokenizer, TokenLosses, limit_of, load_hf

    theirs, their_tokenizer = load_hf(path, device=device)
    limit = limit_of(theirs)
    losses = TokenLosses(theirs, their_tokenizer.num_ids)
    return Losses(losses, ByteTokenizer(their_tokenizer), limit, min(limit, MAX_CONTEXT))


class LabModel:
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
        # Only the logits before a scored token are computed.
        for part_nD in x_RTD[rows.to(self._device), columns.to(self._device)].split(chunk_size(self._device)):
            yield self.network.logits(part_nD)

    def fingerprint(self) -> str:
        config = self.network.config.to_dict()
        return fingerprint(self.network, [config, self.tokenizer.fingerprint, self._device.type])


def sizes(device: torch.device) -> tuple[int, int]:
    """The tokens of one pass and the fixed cost of a pass: a GPU should be filled, a CPU has a small cache."""
    return (65_536, 4_096) if device.type == "cuda" else (2_048, 64)


def fingerprint(network: nn.Module, settings: Any) -> str:
    """A hash of all weights and of what else is given."""
    digest = hashlib.blake2b(json.dumps(settings, sort_keys=True, default=str).encode(), digest_size=8)
    for name, tensor in network.state_dict().items():
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
