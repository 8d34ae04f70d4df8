"""Bundles as they travel: a zip that is looked at before it is unpacked, and its download."""

from __future__ import annotations

import hashlib
import http.client
import lzma
import stat
import struct
import tempfile
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from temper_lab.data.sources import DownloadError, Pace, SourceError
from temper_lab.io import atomic_dir

# The public bundle has some 160 MB packed, and well below these limits unpacked.
MAX_BYTES, MAX_PACKED_BYTES, MAX_FILES = 2 << 30, 1 << 30, 10_000
CHUNK = 1 << 20
TIMEOUT = 60


@contextmanager
def opened(bundle: Path) -> Iterator[Path]:
    """The folder of a bundle; a zip is unpacked into one that vanishes afterwards."""
    if not bundle.is_file():
        yield bundle
        return
    with tempfile.TemporaryDirectory(prefix="temper-core-") as folder:
        unpack(bundle, Path(folder))
        yield Path(folder)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks a zip. Names that lead elsewhere, or too much, are a ValueError before anything is written."""
    try:
        with zipfile.ZipFile(archive) as file:
            members = file.infolist()
            _check(members)
            for member in members:
                # Reads no more than the size that was checked, and compares the checksum.
                file.extract(member, folder)
    # Encrypted archives raise RuntimeError, unknown compression NotImplementedError, damaged streams their own errors.
    except (zipfile.BadZipFile, EOFError, RuntimeError, zlib.error, lzma.LZMAError, struct.error) as error:
        raise ValueError(f"{archive} is not a zip that can be unpacked: {error}") from error
    except ValueError as error:
        raise ValueError(f"{archive}: {error}") from error


def _check(members: list[zipfile.ZipInfo]) -> None:
    if len(members) > MAX_FILES:
        raise ValueError(f"{len(members):,} files; an evaluation bundle has at most {MAX_FILES:,}")
    if (total := sum(member.file_size for member in members)) > MAX_BYTES:
        raise ValueError(f"{total:,} bytes when unpacked; an evaluation bundle has at most {MAX_BYTES:,}")
    for member in members:
        # The library would quietly write such a file somewhere else.
        path = PurePosixPath(member.orig_filename.replace("\\", "/"))
        if path.is_absolute() or ".." in path.parts or ":" in str(path):
            raise ValueError(f"{member.orig_filename!r} leads out of the archive; nothing was unpacked")
        if stat.S_ISLNK(member.external_attr >> 16):
            raise ValueError(f"{member.orig_filename!r} is a link; expected files and folders")


def check_address(url: str) -> None:
    """Raises ValueError for anything but an address of the web: there are others, which read files."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address is {url!r}; expected http:// or https://")


def download(
    url: str, folder: Path, *, sha256: str | None = None, progress: Callable[[int, int | None], None] | None = None
) -> str:
    """Brings a zip and unpacks it into a new folder, whole or not at all; gives the SHA-256 of the zip.

    Args:
        sha256: what it has to be.
        progress: called with the bytes that have come, and with how many there are if that is known.
    """
    if folder.exists():
        raise ValueError(f"{folder} exists; expected the name of a folder that the bundle can be unpacked into")
    check_address(url)
    folder = folder.absolute()
    with atomic_dir(folder) as work:
        # Beside the folder, which gets its name when all of it is there.
        packed = work.with_name("bundle.zip")
        found = _receive(url, packed, progress, is_checked=sha256 is not None)
        if sha256 is not None and found != sha256.lower():
            raise DownloadError(f"what {url} sent has the SHA-256 {found}, expected {sha256.lower()}")
        unpack(packed, work)
    return found


class _SameHost(urllib.request.HTTPRedirectHandler):
    """Redirects to other addresses of the web, and without a SHA-256 to check by, of the same host only."""

    def __init__(self, *, is_checked: bool) -> None:
        self.is_checked = is_checked

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        old, new = urllib.parse.urlsplit(req.full_url), urllib.parse.urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme == "http"):
            raise DownloadError(f"{req.full_url} leads to {newurl[:200]!r}, which is not followed")
        if not self.is_checked and new.hostname != old.hostname:
            raise DownloadError(
                f"{req.full_url} leads to another host, {str(new.hostname)[:200]!r}; give --sha256, or that address"
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _receive(url: str, path: Path, progress: Callable[[int, int | None], None] | None, *, is_checked: bool) -> str:
    digest, done, pace = hashlib.sha256(), 0, Pace()
    opener = urllib.request.build_opener(_SameHost(is_checked=is_checked))
    try:
        with opener.open(url, timeout=TIMEOUT) as response, open(path, "xb") as file:
            length = response.headers.get("Content-Length") or ""
            total = int(length) if length.isdecimal() and len(length) < 20 else None
            # As it comes, so that a server that lets it drip is noticed.
            while chunk := response.read1(CHUNK):
                done += len(chunk)
                pace.check(done)
                if max(done, total or 0) > MAX_PACKED_BYTES:
                    raise DownloadError(f"{url}: more than {MAX_PACKED_BYTES:,} bytes; too many for a bundle")
                file.write(chunk)
                digest.update(chunk)
                if progress is not None:
                    progress(done, total)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError, SourceError) as error:
        raise DownloadError(f"{url} did not come ({error}). Go online, or take --bundle from elsewhere.") from error
    if total is not None and done != total:
        raise DownloadError(f"{url} ended after {done:,} of {total:,} bytes. Run the same command again.")
    return digest.hexdigest()
