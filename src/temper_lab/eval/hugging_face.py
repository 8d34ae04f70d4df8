"""Causal language models of transformers with their tokenizers, for evaluation.

Letters: B beginning, R row, T token, P token of a beginning, n place, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from temper_lab.eval.models import fingerprint, sizes
from temper_lab.eval.token_bytes import raw_bytes
from temper_lab.upcycle.theirs import SAFELY, check_theirs, is_upcycled, read_hf
from temper_lab.upcycle.theirs import load as load_upcycled

# What begins a document where no BOS is named: models trained without one know the token between documents.
DELIMITERS = ("<|endoftext|>", "<|bos|>", "<|begin_of_text|>", "<s>")
# Logits of one pass, at most.
MAX_LOGITS = 1 << 28


def load_theirs(path: Path, *, device: torch.device | str = "cpu") -> tuple[nn.Module, TheirTokenizer]:
    """A model and its tokenizer from a folder of `save_pretrained`; nothing is downloaded, no foreign code run."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is a model of transformers, which is not here: pip install 'temper-hc[hf]'"
        ) from error
    # Our own models, exported, are among theirs.
    import temper_lab.hf  # noqa: F401

    # What it says while loading is for its own users.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        check_theirs(path)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **SAFELY)
        network = _network(path)
    # Their loaders raise whatever they come across.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path}: not a causal language model with its tokenizer, or not complete: {reason}"
        ) from error
    theirs = TheirTokenizer(tokenizer, str(path))
    size = network.get_input_embeddings().num_embeddings
    if theirs.num_ids > size:
        raise ValueError(
            f"{path}: the tokenizer has {theirs.num_ids} tokens and the model {size}; they do not belong together"
        )
    return network.to(device).eval(), theirs


def _network(path: Path) -> nn.Module:
    from temper_lab import deepseek

    if (path / deepseek.FILE_NAME).is_file():
        return deepseek.load(path)
    return load_upcycled(path) if is_upcycled(path) else read_hf(path)


class TheirTokenizer:
    """A tokenizer of transformers as this lab uses tokenizers: text is never parsed for special tokens."""

    def __init__(self, backend: Any, name: str) -> None:
        self.backend, self.name = backend, name
        self.num_ids = max(backend.get_vocab().values()) + 1
        self.bos = self._find_bos()

    def _find_bos(self) -> int:
        backend = self.backend
        if backend.bos_token_id is not None:
            return backend.bos_token_id
        specials = dict(zip(backend.all_special_tokens, backend.all_special_ids, strict=True))
        specials |= {str(token): index for index, token in backend.added_tokens_decoder.items() if token.special}
        for token in DELIMITERS:
            if token in specials:
                return specials[token]
        if backend.eos_token_id is not None:
            return backend.eos_token_id
        raise ValueError(
            f"{self.name}: the tokenizer has no BOS, none of {', '.join(DELIMITERS)}, and no EOS; "
            "expected one to begin a prompt with (bos_token in tokenizer_config.json)"
        )

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False) -> list[list[int]]:
        """The ids of many texts."""
        if not texts:
            return []
        options = {"add_special_tokens": False, "split_special_tokens": True, "verbose": False}
        start = [self.bos] if bos else []
        return [start + ids for ids in self.backend(list(texts), **options)["input_ids"]]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what decides the ids, as far as it can be told."""
        backend = getattr(self.backend, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else repr(sorted(self.backend.get_vocab().items()))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class ByteTokenizer:
    """Tokenizes for bits per byte: the bytes of all tokens of a text are exactly the bytes of the text.

    Sentencepiece writes a space before a text that has none there. The token with such a space gets an id of its own,
    which counts one byte less; `id % num_ids` is the token.
    """

    def __init__(self, tokenizer: TheirTokenizer) -> None:
        self.bos, self.num_ids = tokenizer.bos, tokenizer.num_ids
        self.fingerprint = tokenizer.fingerprint
        self._tokenizer = tokenizer
        self._raw = raw_bytes(tokenizer.backend, tokenizer.num_ids, tokenizer.name)
        self._raw[tokenizer.bos] = b""
        lengths = torch.tensor([len(raw) if raw else 0 for raw in self._raw])
        self.token_bytes = torch.cat((lengths, (lengths - 1).clamp(min=0)))

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self._checked(text, ids) for text, ids in zip(texts, self._tokenizer.encode_batch(texts), strict=True)]

    def _checked(self, text: str, ids: list[int]) -> list[int]:
        expected = text.encode()
        parts = [self._raw[index] for index in ids]
        if None not in parts:
            found = b"".join(parts)
            if found == expected:
                return ids
            if found == b" " + expected:
                return [ids[0] + self.num_ids, *ids[1:]]
        raise ValueError(
            f"{self._tokenizer.name}: the bytes of the tokens are not those of the text that begins {text[:40]!r}, "
            "so bits per byte cannot be known; expected a tokenizer that changes no text"
        )


class TokenLosses:
    """A model as bits per byte calls it: the loss of every target."""

    def __init__(self, network: nn.Module, num_ids: int) -> None:
        self.network, self.num_ids = network, num_ids

    def __call__(self, ids_BT: Tensor, *, targets_BT: Tensor, reduction: str) -> Tensor:
        assert reduction == "none"
        ids_BT, targets_BT = ids_BT % self.num_ids, targets_BT % self.num_ids
        rows = max(1, MAX_LOGITS // (ids_BT.shape[1] * self.num_ids))
        parts = []
        for ids, targets in zip(ids_BT.split(rows), targets_BT.split(rows), strict=True):
            logits_BTV = self.network(input_ids=ids, use_cache=False).logits
            parts.append(nn.functional.cross_entropy(logits_BTV.float().mT, targets, reduction="none"))
        return torch.cat(parts)


class Theirs:
    """A causal language model of transformers as `LanguageModel`."""

    def __init__(self, network: nn.Module, tokenizer: TheirTokenizer) -> None:
        self.network, self.tokenizer = network, tokenizer
        self.limit = limit_of(network)
        self._device = next(network.parameters()).device
        max_tokens, self.pass_cost = sizes(self._device)
        self.max_tokens = max(1, min(max_tokens, MAX_LOGITS // tokenizer.num_ids))
        self._keeps = "logits_to_keep" in inspect.signature(network.forward).parameters
        self.notes = [f"every prompt begins with {tokenizer.backend.convert_ids_to_tokens(tokenizer.bos)}"]
        self.can_share = self._is_exact()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        return self.tokenizer.encode_batch(texts, bos=True)

    def remember(self, prefix_BP: Tensor, repeats: Sequence[int], room: int) -> Any:
        options = {"logits_to_keep": 1} if self._keeps else {}
        memory = self.network(input_ids=prefix_BP.to(self._device), use_cache=True, **options).past_key_values
        rows = [row for row, count in enumerate(repeats) for _ in range(count)]
        memory.batch_select_indices(torch.tensor(rows, device=self._device))
        return memory

    def logits(self, ids_RT: Tensor, rows: Tensor, columns: Tensor, memory: Any = None) -> Iterator[Tensor]:
        options: dict[str, Any] = {"use_cache": False} if memory is None else {"past_key_values": memory}
        if self._keeps:
            # Of the logits only the columns with a scored token after them are made.
            kept, columns = columns.unique(return_inverse=True)
            options["logits_to_keep"] = kept.to(self._device)
        logits_RTV = self.network(input_ids=ids_RT.to(self._device), **options).logits
        yield logits_RTV[rows.to(self._device), columns.to(self._device)].float()

    def fingerprint(self) -> str:
        config = self.network.config.to_dict()
        settings = [config, self.tokenizer.fingerprint, self.tokenizer.bos, self.limit, self._device.type]
        return fingerprint(self.network, settings)

    @torch.no_grad()
    def _is_exact(self) -> bool:
        """Whether going on from a memory gives what reading everything gives; there are models of many kinds."""
        length = min(24, self.limit)
        ids = (torch.arange(2 * length).view(2, length) * 7919 + 13) % self.tokenizer.num_ids
        try:
            memory = self.remember(ids[:, : length // 2], [2, 1], length - length // 2)
            # Windows and recurrent states forget, or cannot be repeated.
            if not all(type(layer).__name__ == "DynamicLayer" for layer in memory.layers):
                return False
            rows, columns = torch.arange(3), torch.tensor([0, 1, 2])
            after = ids[[0, 0, 1], length // 2 :]
            found = torch.cat(list(self.logits(after, rows, columns, memory)))
            whole = torch.cat(list(self.logits(ids, torch.tensor([0, 0, 1]), columns + length // 2)))
        except Exception:
            return False
        return bool(torch.allclose(found, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max())))


def limit_of(network: nn.Module) -> int:
    """How many tokens a model reads; without end if its configuration does not say."""
    config = network.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else sys.maxsize
