"""The tokenizer: byte-level BPE with one special token, `<|bos|>`, at the top id."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from temper.registry import check_int
from temper_lab.io import FileError, atomic_write, brief, parse_json, read_text

BOS = "<|bos|>"
FILE_NAME = "tokenizer.json"
# 256 bytes and the BOS; at most as many as a model can have, because the backend allocates memory for all of them.
MIN_VOCAB_SIZE, MAX_VOCAB_SIZE = 257, 1 << 24

SPLIT_PATTERN = "|".join(
    (
        r"'(?i:[sdmt]|ll|ve|re)",  # English contractions
        r"[^\r\n\p{L}\p{N}]?\p{L}+",  # a word with the space or sign before it
        r"\p{N}{1,2}",  # short runs of digits, so that a small vocabulary spends few tokens on numbers
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",  # signs, and the line end after them
        r"\s*[\r\n]+",  # line ends
        r"\s+(?!\S)",  # spaces; the last one belongs to the next word
        r"\s+",
    )
)


class Tokenizer:
    """Converts text to ids and back, byte for byte. `train` makes one, `load` reads one."""

    def __init__(self, backend: Backend) -> None:
        # Text never becomes a special token: "<|bos|>" in a document is seven ordinary characters.
        backend.encode_special_tokens = True
        self._backend = backend
        self.vocab_size: int = backend.get_vocab_size()
        bos = backend.token_to_id(BOS)
        if bos is None or bos != self.vocab_size - 1:
            raise ValueError(f"{BOS} has id {bos}; expected the top id, {self.vocab_size - 1}")
        self.bos: int = bos
        self._bytes = [*_raw_bytes(backend, bos), b""]
        self.token_bytes = torch.tensor([len(raw) for raw in self._bytes], dtype=torch.int64)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Tokenizer:
        """Trains on texts; the same texts give the same tokenizer.

        Args:
            vocab_size: the number of tokens, including bytes and BOS; too little text gives a smaller vocabulary.
        """
        limits = f"at least {MIN_VOCAB_SIZE} (256 bytes and {BOS}) and at most {MAX_VOCAB_SIZE:,}"
        check_int("vocab_size", vocab_size, MIN_VOCAB_SIZE, MAX_VOCAB_SIZE, limits)
        if isinstance(texts, str):
            raise ValueError("texts is one string; expected an iterable of strings")
        backend = Backend(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,
            min_frequency=2,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.train_from_iterator(_checked(texts), trainer)
        backend.add_special_tokens([AddedToken(BOS, normalized=False)])
        return cls(backend)

    def encode(self, text: str, *, bos: bool = False) -> list[int]:
        """The ids of a text, after a BOS if requested."""
        return self.encode_batch([text], bos=bos)[0]

    def encode_batch(self, texts: Sequence[str], *, bos: bool = False) -> list[list[int]]:
        """The ids of many texts, on all cores."""
        try:
            encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            # The backend's error names neither the text nor the cause.
            list(_checked(texts))
            raise
        start = [self.bos] if bos else []
        return [start + encoding.ids for encoding in encodings]

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The exact bytes of some ids; a special token has none."""
        table, size = self._bytes, self.vocab_size
        ids = ids.tolist() if isinstance(ids, torch.Tensor) else list(ids)
        if any(not 0 <= index < size for index in ids):
            raise ValueError(f"ids from {min(ids)} to {max(ids)}; expected 0 to {size - 1}")
        return b"".join([table[index] for index in ids])

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids; a character cut in two becomes U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def bytes_per_token(self, texts: Iterable[str]) -> float:
        """The mean number of UTF-8 bytes per token in these texts."""
        num_bytes = num_tokens = 0
        for text in texts:
            num_bytes += len(text.encode())
            num_tokens += len(self.encode(text))
        if not num_tokens:
            raise ValueError("no text to measure bytes per token on")
        return num_bytes / num_tokens

    @cached_property
    def fingerprint(self) -> str:
        """A hash of everything that decides the ids."""
        canonical = json.dumps(json.loads(self._backend.to_str()), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """The content of `tokenizer.json`."""
        return self._backend.to_str(pretty=True)

    def save(self, folder: str | Path) -> Path:
        """Writes `tokenizer.json` atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        atomic_write(folder / FILE_NAME, self.to_json())
        return folder / FILE_NAME

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a saved tokenizer, from its file or from the folder that holds it."""
        path = Path(path)
        path = path / FILE_NAME if path.is_dir() else path
        if not path.is_file():
            raise FileError(f"{path}: no tokenizer there; expected {FILE_NAME}")
        return cls.from_json(read_text(path), path)

    @classmethod
    def from_json(cls, text: str, path: str | Path) -> Tokenizer:
        """A tokenizer from the content of a file; `path` is used in messages."""
        if reason := _foreign(parse_json(text, path, allow_nan=True)):
            raise FileError(f"{path}: not a tokenizer of this lab: {reason}")
        try:
            with panics_caught():
                return cls(Backend.from_str(text))
        # The backend raises plain Exceptions.
        except Exception as error:
            raise FileError(f"{path}: not a tokenizer of this lab: {error}") from error


@contextmanager
def panics_caught() -> Iterator[None]:
    """Turns a panic of the backend, which is a BaseException and prints a stack to stderr, into a ValueError."""
    with ExitStack() as stack:
        # If it is closed there is nothing to keep clean.
        with suppress(OSError):
            kept = os.dup(2)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 2)
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 2)
            os.close(silent)
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ValueError(f"the library tokenizers failed: {error}") from error


def _checked(texts: Iterable[str]) -> Iterator[str]:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(f"text {index} is a {type(text).__name__}; expected a string")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text {index} has no UTF-8 form ({error.reason}, at character {error.start})") from error
        yield text


def _foreign(content: Any) -> str | None:
    """The reason why the content of a tokenizer.json cannot be one of ours, or None."""
    if not isinstance(content, dict) or not isinstance(content.get("model"), dict):
        return "it has no model"
    if content["model"].get("type") != "BPE":
        return f"its model is {str(content['model'].get('type'))[:40]}, expected BPE"
    pre = content.get("pre_tokenizer")
    steps = pre.get("pretokenizers") if isinstance(pre, dict) else None
    last = steps[-1] if isinstance(steps, list) and steps else pre
    if not isinstance(last, dict) or last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return "it is not byte-level"
    for step in ("normalizer", "post_processor"):
        if content.get(step) is not None:
            return f"it has a {step}, which changes texts; expected none"
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if content["model"].get(option) is not None:
            return f"its model has a {option}, which changes ids; expected none"
    added, vocab = content.get("added_tokens") or [], content["model"].get("vocab")
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        return "it has no list of special tokens"
    specials = [token.get("content") for token in added]
    if specials != [BOS]:
        return f"its special tokens are {brief(specials)}, expected {BOS} alone"
    if not isinstance(vocab, dict):
        return "its model has no vocabulary"
    # The backend would silently move it.
    if (bos := added[0].get("id")) != len(vocab):
        return f"{BOS} has id {brief(bos)}, expected the top id, {len(vocab)}"
    return None


def _raw_bytes(backend: Backend, size: int) -> list[bytes]:
    """The bytes of each of the first `size` tokens, which the backend represents as printable characters."""
    byte_of = {char: byte for byte, char in enumerate(byte_alphabet())}
    # An id in a gap of the vocabulary has no token and no bytes.
    tokens = [backend.id_to_token(index) or "\0" for index in range(size)]
    try:
        raw = [bytes(byte_of[char] for char in token) for token in tokens]
    except KeyError as error:
        raise ValueError(f"its vocabulary is not made of bytes ({error})") from error
    if missing := {bytes([byte]) for byte in range(256)}.difference(raw):
        raise ValueError(f"{len(missing)} of the 256 bytes have no token")
    return raw


def byte_alphabet() -> list[str]:
    """The character for each byte in byte-level BPE: the byte itself if it is printable, otherwise one from 256 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]
