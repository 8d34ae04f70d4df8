"""How each kind of file is read: its row groups, and the documents of one of them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import pyarrow.parquet

# Lines of jsonl are read in groups of about this many bytes, text files in groups of up to this many.
GROUP_BYTES = 1 << 18
CHUNK = 1 << 20
# A document of this length is not one: all of it would have to fit the memory several times.
MAX_LINE_BYTES = 1 << 28


@dataclass(frozen=True)
class Part:
    """A stretch of one file: a parquet row group, a byte range of jsonl, or a whole text file.

    Args:
        size: about how many bytes of text it holds.
    """

    path: Path
    name: str
    start: int
    stop: int
    size: int


Document = tuple[str, str]
"""Where a document begins in its file, and its text."""


def parts(path: Path, name: str) -> list[Part]:
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


def read(part: Part) -> Iterator[Document]:
    """The documents of one part; empty ones are left out."""
    documents = {".parquet": _read_parquet, ".jsonl": _read_jsonl}.get(part.path.suffix, _read_text)(part)
    return ((position, text) for position, text in documents if text)


def open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    """Opens a parquet file that has a string column `text`, or says what it is instead."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
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
        try:
            # One thread: the tokenizer wants the cores.
            column = file.read_row_group(part.start, columns=["text"], use_threads=False).column("text")
            texts = column.to_pylist()
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            message = f"{part.path}: row group {part.start} cannot be read, it is corrupted ({_line(error)})"
            raise ValueError(message) from error
    for row, text in enumerate(texts):
        yield f"{part.start}/{row}", text


def _read_jsonl(part: Part) -> Iterator[Document]:
    """The lines that begin inside the part, so that every line belongs to exactly one part."""
    with open(part.path, "rb") as file:
        if part.start:
            # From one byte before, so that a line that begins exactly at the start is not skipped.
            _skip_line(file, part.start - 1)
        while (offset := file.tell()) < part.stop:
            line = file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"{part.path}: the line at byte {offset} has more than {MAX_LINE_BYTES:,} bytes")
            if not line:
                raise ValueError(f"{part.path}: ends at byte {offset}, and had more when the corpus was opened")
            if line.strip():
                yield str(offset), _line_text(line, f"{part.path}: the line at byte {offset}")


# The last long line of some files: a line of many parts is looked through once, not once for each of them.
_long_lines: dict[tuple[int, ...], tuple[int, int]] = {}


def _skip_line(file: BinaryIO, start: int) -> None:
    """Goes to the end of the line that a byte is in."""
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
        # Bytes, so that line ends stay as they are.
        yield "0", part.path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{part.path}: byte {error.start} is not UTF-8 ({error.reason}); expected UTF-8 text"
        ) from error


def sample(path: Path, size: int = 4096) -> bytes:
    """The length and both ends of a file: enough to notice that it is not the same file any more."""
    with open(path, "rb") as file:
        length = os.fstat(file.fileno()).st_size
        head = file.read(size)
        file.seek(max(length - size, 0))
        return b"%d:%b%b" % (length, head, file.read(size))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
