"""A tokenizer for the page to run by itself."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from temper_lab.tokenizer import Tokenizer, byte_alphabet


def describe(tokenizer: Tokenizer) -> dict[str, Any]:
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


def refusal(tokenizer: Tokenizer) -> str | None:
    """Why the page cannot make tokens as this tokenizer does, or None."""
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
    """The regular expression of a tokenizer that splits by one and then looks at bytes."""
    steps = (content.get("pre_tokenizer") or {}).get("pretokenizers") or []
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"] or steps[1].get("use_regex"):
        return None
    split = steps[0]
    if split.get("behavior") != "Isolated" or split.get("invert"):
        return None
    return split["pattern"].get("Regex")


def javascript_pattern(pattern: str) -> str | None:
    """A pattern of the tokenizers library as JavaScript writes it (flag u), or None where there is no telling.

    White space is Unicode's there, JavaScript's own \\s differs; and flags for a group are too new to rely on.
    """
    # Possessive quantifiers, atomic groups, look-behind, flags for all that follows, and rarer escapes.
    if re.search(r"(?:[?*+]|\{[\d,]+\})\+|\(\?(?!i:|:|!|=)|\\[AZzGhHRXKbB]|\[\[:|&&", pattern):
        return None
    pattern = re.sub(r"\(\?i:([^()\\]*)\)", lambda group: f"(?:{_any_case(group[1])})", pattern)
    if "(?i" in pattern:
        return None
    return pattern.replace(r"\s", r"\p{White_Space}").replace(r"\S", r"\P{White_Space}")


def _any_case(pattern: str) -> str:
    """Letters in both cases, and the long s that folds to s: `[st]|ll` -> `[sS\u017ftT]|[lL][lL]`."""
    shown, is_class = "", False
    for char in pattern:
        is_class = char == "[" or (is_class and char != "]")
        cases = char.lower() + char.upper() + ("\u017f" if char in "sS" else "") if char.isalpha() else char
        shown += cases if is_class or not char.isalpha() else f"[{cases}]"
    return shown
