"""Downloads of ClimbMix and the books: transfers resume, are verified, and get their name when complete."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from temper_lab.data import web
from temper_lab.data.corpus import files_of, open_parquet
from temper_lab.data.web import DownloadError, Pace, SourceError
from temper_lab.io import FileError, brief, entry, fsync, open_new, parse_json

COPY_BYTES = 1 << 20
# What a server says of a hundred files.
MAX_INFO_BYTES = 1 << 20
HUB = "https://huggingface.co"
SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Info:
    """The size and hash that a source gives for a file."""

    size: int
    sha256: str | None = None


class Source(Protocol):
    """A source of files."""

    def info(self, names: list[str]) -> dict[str, Info]:
        """The known facts about those of the files that exist."""

    def open(self, name: str, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The bytes of a file from an offset on, and the offset at which they really start."""


class Hub:
    """A data set on the Hugging Face hub, or on a mirror of it."""

    def __init__(self, repo: str, endpoint: str | None = None) -> None:
        self.repo = repo
        self.endpoint = endpoint
        self._is_checked: set[str] = set()

    @property
    def _server(self) -> str:
        from huggingface_hub import constants

        return (self.endpoint or constants.ENDPOINT).rstrip("/")

    def __str__(self) -> str:
        return f"{self._server}/datasets/{self.repo}"

    def info(self, names: list[str]) -> dict[str, Info]:
        found: dict[str, Info] = {}
        for start in range(0, len(names), 100):
            form = [*(("paths", name) for name in names[start : start + 100]), ("expand", "false")]
            url = f"{self._server}/api/datasets/{self.repo}/paths-info/main"
            _check_online()
            with web.request(url, secrets=self._secrets(), form=form, is_checked=False) as answer:
                text = answer.read(MAX_INFO_BYTES).decode(errors="replace")
            try:
                found |= _listed(parse_json(text, url), url)
            except FileError as error:
                raise DownloadError(f"the answer of {error}") from error
        # The hashes are there to check the files by.
        self._is_checked = {name for name, info in found.items() if info.sha256}
        return found

    @contextmanager
    def open(self, name: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        _check_online()
        url = f"{self._server}/datasets/{self.repo}/resolve/main/{urllib.parse.quote(name)}"
        is_checked = name in self._is_checked
        with web.request(url, headers=_from(offset), secrets=self._secrets(), is_checked=is_checked) as answer:
            # A server that does not support ranges answers 200 and starts from the beginning.
            yield (offset if answer.status == 206 else 0), answer.chunks

    def _secrets(self) -> dict[str, str]:
        """The user's token, for the hub alone."""
        import huggingface_hub

        token = huggingface_hub.get_token() if self._server == HUB else None
        return {"Authorization": f"Bearer {token}"} if token else {}


def _listed(content: Any, url: str) -> dict[str, Info]:
    """Parses what the hub says of files into their infos by name, or raises FileError."""
    found = {}
    for file in content if isinstance(content, list) else [content]:
        if entry(file, "type", str, url) != "file":
            continue
        size = entry(file, "size", int, url)
        large = file.get("lfs")
        sha256 = None if large is None else entry(large, "oid", str, url)
        if size < 0 or (sha256 is not None and not SHA256.fullmatch(sha256)):
            raise FileError(f"{url} has a file of {size:,} bytes with the hash {brief(sha256)}; expected a SHA-256")
        found[entry(file, "path", str, url)] = Info(size, sha256)
    return found


def _from(offset: int) -> dict[str, str]:
    return {"Range": f"bytes={offset}-"}


def _check_online() -> None:
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise SourceError("HF_HUB_OFFLINE is set")


@dataclass(frozen=True)
class Manifest:
    """Files of a GitHub repository that a corpus is made of.

    Args:
        host: the host that serves raw files.
        revision: a commit.
        paths: the path of every file in the repository.
        files: the expected size and hash of every file, by its local name.
    """

    host: str
    repository: str
    revision: str
    paths: Mapping[str, str]
    files: Mapping[str, Info]

    @classmethod
    def load(cls, name: str) -> Manifest:
        """Loads one of the manifests in this package."""
        content = json.loads((resources.files("temper_lab.data") / f"{name}.json").read_text(encoding="utf-8"))
        paths = {file["name"]: file["path"] for file in content["files"]}
        files = {file["name"]: Info(file["size"], file["sha256"]) for file in content["files"]}
        return cls(content["host"], content["repository"], content["revision"], paths, files)


class GitHub:
    """The files of a manifest, from GitHub or a mirror of it."""

    def __init__(self, manifest: Manifest, host: str | None = None) -> None:
        self.manifest, self.host = manifest, (host or manifest.host).rstrip("/")

    def __str__(self) -> str:
        return f"{self.host}/{self.manifest.repository}"

    def info(self, names: list[str]) -> dict[str, Info]:
        return {name: self.manifest.files[name] for name in names}

    @contextmanager
    def open(self, name: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        _check_online()
        path = urllib.parse.quote(self.manifest.paths[name])
        url = f"{self.host}/{self.manifest.repository}/{self.manifest.revision}/{path}"
        with web.request(url, headers=_from(offset), is_checked=True) as answer:
            yield (offset if answer.status == 206 else 0), answer.chunks


class Folder:
    """A local folder with the same files, such as a copy on a shared disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    def info(self, names: list[str]) -> dict[str, Info]:
        if not self.path.is_dir():
            raise SourceError("no such folder")
        files = {name: self.path / name for name in names}
        return {name: Info(path.stat().st_size, sha256_of(path)) for name, path in files.items() if path.is_file()}

    @contextmanager
    def open(self, name: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        with open(self.path / name, "rb") as file:
            file.seek(offset)
            yield offset, iter(lambda: file.read(COPY_BYTES), b"")


def find_source(source: str | Path | Source | None, repo: str) -> Source:
    if source is None:
        return Hub(repo)
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return Hub(repo, source)
    return Folder(source) if isinstance(source, str | Path) else source


def find_github(source: str | Path | Source | None, manifest: Manifest) -> Source:
    if source is None or (isinstance(source, str) and source.startswith(("http://", "https://"))):
        return GitHub(manifest, source)
    return Folder(source) if isinstance(source, str | Path) else source


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


REPO = "karpathy/climbmix-400b-shuffle"
LAST_SHARD = 6542
# Seconds to wait before each further attempt at a file. Any progress starts the list again.
PAUSES = (1.0, 4.0, 15.0)
PROGRESS = 500

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in total."""


def shard_name(index: int) -> str:
    return f"shard_{index:05d}.parquet"


def download(
    shards: int,
    folder: str | Path,
    *,
    repo: str = REPO,
    source: str | Path | Source | None = None,
    last_shard: int = LAST_SHARD,
    progress: Progress | None = None,
) -> list[Path]:
    """Downloads the first `shards` training shards and the validation shard into a folder.

    Intact files are kept, corrupt ones are fetched again, and a partial file never has its final name.

    Args:
        source: None for the hub, the address of a mirror, or a local folder laid out like the data set.
        last_shard: the number of the validation shard.
        progress: called with the bytes done and the bytes in total.
    """
    if not 1 <= shards <= last_shard:
        raise ValueError(f"shards is {shards}; expected 1 to {last_shard} (the validation shard is added)")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    where = find_source(source, repo)
    names = [shard_name(index) for index in (*range(shards), last_shard)]
    paths = [folder / name for name in names]
    try:
        known = where.info(names)
    except SourceError as error:
        if all(path.exists() and _trouble(path, None) is None for path in paths):
            return paths
        raise DownloadError(f"cannot reach {where} ({error}). Go online, and run the same command again.") from error
    if missing := [name for name in names if name not in known]:
        raise DownloadError(f"{where} has no {', '.join(missing[:3])}; expected the layout of {REPO}")

    # Only the requested files are fetched, whatever else the source lists.
    _fetch_all(where, folder, {name: known[name] for name in names}, progress)
    return paths


def download_books(
    folder: str | Path, *, source: str | Path | Source | None = None, progress: Progress | None = None
) -> list[Path]:
    """Downloads the books of the manifest into a folder, each verified by its SHA-256; files of other names stay.

    Args:
        source: None for GitHub, the address of a mirror, or a local folder with the same files.
        progress: called with the bytes done and the bytes in total.
    """
    manifest = Manifest.load("books")
    folder = Path(folder)
    if check(manifest, folder):
        where = find_github(source, manifest)
        try:
            found = where.info(list(manifest.files))
        except SourceError as error:
            raise DownloadError(f"cannot read {where} ({error}); expected a folder with the books") from error
        # Checked before anything is written.
        if wrong := [name for name, info in manifest.files.items() if found.get(name) != info]:
            state = "other text" if wrong[0] in found else "missing"
            raise DownloadError(
                f"{where} does not have the books of the manifest: {len(wrong)} differ, {wrong[0]} is {state}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _fetch_all(where, folder, manifest.files, progress)
    return [folder / name for name in manifest.files]


def check(manifest: Manifest, folder: str | Path) -> list[str]:
    """Describes every file of a manifest that is missing or wrong in a folder, one line per file; changes nothing."""
    found = []
    for name, info in manifest.files.items():
        path = Path(folder) / name
        trouble = _trouble(path, info) if path.is_file() else "it is not there"
        if trouble:
            found.append(f"{name}: {trouble}")
    return found


def strays(manifest: Manifest, folder: str | Path) -> list[str]:
    """The names of files in a folder that are not in a manifest, and that a corpus of this folder would read."""
    try:
        found = [name for _, name in files_of(Path(folder))]
    except ValueError:
        # The folder has no text at all.
        return []
    return [name for name in found if name not in manifest.files]


def _fetch_all(where: Source, folder: Path, known: Mapping[str, Info], progress: Progress | None) -> None:
    """Fetches the files that are missing or not intact."""
    paths = [folder / name for name in known]
    wanted = [path for path in paths if not path.exists() or _trouble(path, known[path.name])]
    total = sum(known[path.name].size for path in wanted)
    free = shutil.disk_usage(folder).free
    if not 0 <= total <= free:
        raise DownloadError(f"{where} has {total:,} bytes to send, and there is room for {free:,} in {folder}")
    done = 0
    for path in wanted:
        _fetch(where, path, known[path.name], partial(_report, progress, done, total))
        done += path.stat().st_size


def _fetch(where: Source, path: Path, info: Info, report: Callable[[int], object]) -> None:
    """Fetches one file, continuing an earlier attempt."""
    # The name is hidden, so that no corpus takes the partial file for a shard.
    part = path.with_name(f".{path.name}.part")
    resumed = part.exists()
    _receive(where, part, info, report)
    trouble = _trouble(part, info)
    if trouble and resumed:
        # The partial file was of another version, or damaged.
        part.unlink()
        _receive(where, part, info, report)
        trouble = _trouble(part, info)
    if trouble:
        part.unlink()
        raise DownloadError(
            f"{path.name} from {where} is not what was expected: {trouble}. Run the same command again."
        )
    os.replace(part, path)
    fsync(path.parent)


def _receive(where: Source, part: Path, info: Info, report: Callable[[int], object]) -> None:
    """Appends to a partial file until it has its full size, with several attempts."""
    name = part.name[1:-5]
    pauses = list(PAUSES)
    with open_new(part) as file:
        while file.tell() != info.size:
            before = file.tell() if file.tell() < info.size else 0
            try:
                with where.open(name, before) as (start, chunks):
                    file.truncate(start)
                    file.seek(start)
                    pace = Pace()
                    for chunk in chunks:
                        if file.tell() + len(chunk) > info.size:
                            # After an overlong answer, the bytes so far cannot be trusted.
                            part.unlink()
                            raise DownloadError(f"{name} from {where} has more than the {info.size:,} bytes announced")
                        _write(file, chunk)
                        report(file.tell())
                        pace.check(file.tell() - start)
                if file.tell() < info.size:
                    raise SourceError(f"it ended after {file.tell():,} of {info.size:,} bytes")
                break
            except SourceError as error:
                # A byte now and then does not count as progress.
                pauses = list(PAUSES) if file.tell() - before > PROGRESS else pauses
                if not pauses:
                    message = f"{name} from {where} stopped at {file.tell():,} bytes ({error}). "
                    raise DownloadError(message + "Run the same command again to continue from there.") from error
                time.sleep(pauses.pop(0))
        file.flush()
        os.fsync(file.fileno())


def _report(progress: Progress | None, done: int, total: int, here: int) -> None:
    if progress is not None:
        progress(done + here, total)


def _write(file: BinaryIO, chunk: bytes) -> None:
    try:
        file.write(chunk)
    except OSError as error:
        # A full disk is not a network error, so there is no further attempt.
        raise DownloadError(f"cannot write {file.name} ({error.strerror}). Make room, and run it again.") from error


def _trouble(path: Path, info: Info | None) -> str | None:
    """Describes the fault of a file, or None."""
    size = path.stat().st_size
    if info is not None and size != info.size:
        return f"it has {size:,} bytes, expected {info.size:,}"
    if info is not None and info.sha256 and sha256_of(path) != info.sha256:
        return f"its SHA-256 is not {info.sha256[:12]}..."
    if path.name.removesuffix(".part").endswith(".parquet"):
        try:
            open_parquet(path).close()
        except ValueError as error:
            return str(error)
    return None
