"""Causal language models of transformers with their tokenizers, for evaluation.

Letters: B prefix, R row, T token, P token of a prefix, n position, V vocabulary.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from temper_lab.eval.models import fingerprint, sizes
from temper_lab.interop.hf_folder import SAFELY, check_hf_folder, is_upcycled, load_upcycled, read_hf
from temper_lab.tokenizer import byte_alphabet, panics_caught

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Tokens that begin a document where there is no BOS: models trained without one know the token between documents.
DELIMITERS = ("<|endoftext|>", "<|bos|>", "<|begin_of_text|>", "<s>")
# The most logits of one pass.
MAX_LOGITS = 1 << 28


def load_hf(path: Path, *, device: torch.device | str = "cpu") -> tuple[PreTrainedModel, HFTokenizer]:
    """Loads a model and its tokenizer from a folder of `save_pretrained`; downloads nothing and runs no code of it."""
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{path} is a model of transformers, which is not here: pip install 'temper-hc[hf]'"
        ) from error
    # Exported models of ours are models of transformers too.
    import temper_lab.interop.hf  # noqa: F401

    # Silences the messages of transformers while loading.
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        check_hf_folder(path)
        with panics_caught():
            tokenizer = transformers.AutoTokenizer.from_pretrained(path, **SAFELY)
        network: Any = _network(path)
    # Their loaders raise whatever they come across.
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{path}: not a causal language model with its tokenizer, or not complete: {reason}"
        ) from error
    theirs = HFTokenizer(tokenizer, str(path))
    size = network.get_input_embeddings().num_embeddings
    if theirs.num_ids > size:
        raise ValueError(
            f"{path}: the tokenizer has {theirs.num_ids} tokens and the model {size}; they do not belong together"
        )
    return network.to(device).eval(), theirs


def _network(path: Path) -> PreTrainedModel:
    from temper_lab.interop import deepseek

    if (path / deepseek.FILE_NAME).is_file():
        return deepseek.load(path)
    return load_upcycled(path) if is_upcycled(path) else read_hf(path)


class HFTokenizer:
    """A tokenizer of transformers with the lab's interface; text is never parsed for special tokens."""

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
        with panics_caught():
            return [start + ids for ids in self.backend(list(texts), **options)["input_ids"]]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of what determines the ids, as far as it is known."""
        backend = getattr(self.backend, "backend_tokenizer", None)
        content = backend.to_str() if backend is not None else repr(sorted(self.backend.get_vocab().items()))
        return hashlib.sha256(content.encode()).hexdigest()[:16]


class ByteTokenizer:
    """Tokenizes for bits per byte: the bytes of all tokens of a text are exactly the bytes of the text.

    Sentencepiece adds a space before a text. The token with this space gets an id of its own, which counts one byte
    less; `id % num_ids` is the token.
    """

    def __init__(self, tokenizer: HFTokenizer) -> None:
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
        known = [part for part in parts if part is not None]
        if len(known) == len(parts):
            found = b"".join(known)
            if found == expected:
                return ids
            if found == b" " + expected:
                return [ids[0] + self.num_ids, *ids[1:]]
        raise ValueError(
            f"{self._tokenizer.name}: the bytes of the tokens are not those of the text that begins {text[:40]!r}, "
            "so bits per byte cannot be known; expected a tokenizer that changes no text"
        )


class TokenLosses:
    """Wraps a model to give the loss of every target, for bits per byte."""

    def __init__(self, network: PreTrainedModel, num_ids: int) -> None:
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


class HFModel:
    """A causal language model of transformers as `LanguageModel`."""

    def __init__(self, network: PreTrainedModel, tokenizer: HFTokenizer) -> None:
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
            # Logits are computed only at positions followed by a scored token.
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
        """True if continuing from a cache gives the same logits as reading everything; not all models do."""
        length = min(24, self.limit)
        ids = (torch.arange(2 * length).view(2, length) * 7919 + 13) % self.tokenizer.num_ids
        try:
            memory = self.remember(ids[:, : length // 2], [2, 1], length - length // 2)
            # Sliding windows and recurrent states forget, or cannot be copied.
            if not all(type(layer).__name__ == "DynamicLayer" for layer in memory.layers):
                return False
            rows, columns = torch.arange(3), torch.tensor([0, 1, 2])
            after = ids[[0, 0, 1], length // 2 :]
            found = torch.cat(list(self.logits(after, rows, columns, memory)))
            whole = torch.cat(list(self.logits(ids, torch.tensor([0, 0, 1]), columns + length // 2)))
        except Exception:
            return False
        return bool(torch.allclose(found, whole, rtol=1e-3, atol=1e-3 * float(whole.abs().max())))


def limit_of(network: PreTrainedModel) -> int:
    """The context length of a model; infinite if its configuration does not say."""
    config = network.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else sys.maxsize


SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def raw_bytes(tokenizer: Any, num_ids: int, name: str) -> list[bytes | None]:
    """The bytes of each id, none for special tokens, None where they are not known; or a ValueError.

    Args:
        tokenizer: a tokenizer of transformers that is based on the library `tokenizers`.
        name: its name in messages.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"{name}: bytes per token are known for tokenizers with a tokenizer.json only")
    content = json.loads(backend.to_str())
    parts = list(_parts([content.get(step) for step in ("normalizer", "pre_tokenizer", "decoder")]))
    if any(part.get("type") == "ByteLevel" for part in parts):
        byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
        raw = [_byte_level(token, byte_of) for token in _tokens(backend, num_ids)]
    elif any(SPACE in (part.get("replacement"), part.get("content"), _pattern(part)) for part in parts):
        has_bytes = bool(content["model"].get("byte_fallback"))
        raw = [_sentencepiece(token, has_bytes) for token in _tokens(backend, num_ids)]
    else:
        kind = content["model"].get("type")
        raise ValueError(
            f"{name}: its tokenizer ({kind}) is neither byte-level nor like sentencepiece, so the bytes of its tokens "
            "and bits per byte cannot be known"
        )
    for index, token in tokenizer.added_tokens_decoder.items():
        # Added tokens stand for their own text, whatever the alphabet of the others.
        raw[index] = b"" if token.special else token.content.encode()
    for index in tokenizer.all_special_ids:
        raw[index] = b""
    return raw


def _tokens(backend: Any, num_ids: int) -> list[str | None]:
    return [backend.id_to_token(index) for index in range(num_ids)]


def _byte_level(token: str | None, byte_of: dict[str, int]) -> bytes | None:
    if token is None or any(char not in byte_of for char in token):
        return None
    return bytes(byte_of[char] for char in token)


def _sentencepiece(token: str | None, has_bytes: bool) -> bytes | None:
    if token is None:
        return None
    if has_bytes and (found := BYTE.fullmatch(token)):
        return bytes([int(found[1], 16)])
    return token.replace(SPACE, " ").encode()


def _parts(value: Any) -> Any:
    """Every mapping inside a value."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _parts(part)


def _pattern(part: dict[str, Any]) -> Any:
    pattern = part.get("pattern")
    return pattern.get("String") if isinstance(pattern, dict) else None
