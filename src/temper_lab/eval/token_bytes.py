"""The bytes behind every token of somebody's tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any

from temper_lab.tokenizer import byte_alphabet

SPACE = "▁"
BYTE = re.compile(r"<0x([0-9A-F]{2})>")


def raw_bytes(tokenizer: Any, num_ids: int, name: str) -> list[bytes | None]:
    """The bytes of each id, none for special tokens, None where they are not known; or a ValueError.

    Args:
        tokenizer: of transformers, on top of the library `tokenizers`.
        name: what to call it in a message.
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
        # Added tokens stand for themselves, whatever the alphabet of the others is.
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
