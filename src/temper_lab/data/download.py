"""ClimbMix from the hub, books from GitHub: files that resume, are verified, and land by rename."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import BinaryIO

from temper_lab.data.formats import open_parquet
from temper_lab.data.sources import (
    DownloadError,
    Info,
    Manifest,
    Pace,
    Source,
    SourceError,
    find_github,
    find_source,
    sha256_of,
)
from temper_lab.io import fsync, open_new

REPO = "karpathy/climbmix-400b-shuffle"
LAST_SHARD = 6542
# Seconds before each further attempt at a file that stopped arriving; any progress starts the list again.
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
    """Brings the first `shards` training shards and the validation shard into a folder.

    Intact files stay, corrupt ones are fetched again, and half of one never has its final name.

    Args:
        source: None for the hub, the address of a mirror, or a local folder laid out like the data set.
        last_shard: the number of the validation shard.
        progress: called with the bytes done and the bytes in total.
    """
    if not 1 <= shards <= last_shard:
        raise ValueError(f"shards is {shards}; expected 1 to {last_shard} (the validation shard comes along)")
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

    # Whatever else the source has told of, only what was asked for is fetched.
    _fetch_all(where, folder, {name: known[name] for name in names}, progress)
    return paths


def download_books(
    folder: str | Path, *, source: str | Path | Source | None = None, progress: Progress | None = None
) -> list[Path]:
    """Brings the books of the manifest into a folder, each verified by its SHA-256; files of other names stay.

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
        # Before anything is written.
        if wrong := [name for name, info in manifest.files.items() if found.get(name) != info]:
            state = "other text" if wrong[0] in found else "missing"
            raise DownloadError(
                f"{where} does not have the books of the manifest: {len(wrong)} differ, {wrong[0]} is {state}"
            )
        folder.mkdir(parents=True, exist_ok=True)
        _fetch_all(where, folder, manifest.files, progress)
    return [folder / name for name in manifest.files]


def check(manifest: Manifest, folder: str | Path) -> list[str]:
    """What is wrong with a folder that should hold the files of a manifest, a line for each file; reads only."""
    found = []
    for name, info in manifest.files.items():
        path = Path(folder) / name
        trouble = _trouble(path, info) if path.is_file() else "it is not there"
        if trouble:
            found.append(f"{name}: {trouble}")
    return found


def _fetch_all(where: Source, folder: Path, known: Mapping[str, Info], progress: Progress | None) -> None:
    """Brings those files that are not there yet, or not intact."""
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
    """Brings one file under its name, from where an earlier attempt stopped."""
    # Hidden, so that no corpus takes it for a shard.
    part = path.with_name(f".{path.name}.part")
    resumed = part.exists()
    _receive(where, part, info, report)
    trouble = _trouble(part, info)
    if trouble and resumed:
        # The beginning was of another day, or broken.
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
    """Appends to a partial file until it has its size, patiently."""
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
                            # Nobody knows what the beginning is worth.
                            part.unlink()
                            raise DownloadError(f"{name} from {where} has more than the {info.size:,} bytes announced")
                        _write(file, chunk)
                        report(file.tell())
                        pace.check(file.tell() - start)
                if file.tell() < info.size:
                    raise SourceError(f"it ended after {file.tell():,} of {info.size:,} bytes")
                break
            except SourceError as error:
                # A byte now and then is no progress.
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
        # A full disk is not a bad line: no further attempt.
        raise DownloadError(f"cannot write {file.name} ({error.strerror}). Make room, and run it again.") from error


def _trouble(path: Path, info: Info | None) -> str | None:
    """What is wrong with a file, or None."""
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
