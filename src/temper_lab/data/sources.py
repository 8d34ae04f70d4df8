"""Where data comes from: the hub, GitHub, a mirror of one of them, or a local folder with the same files."""

from __future__ import annotations

import hashlib
import json
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

CHUNK = 1 << 20


class DownloadError(ValueError):
    """A file did not arrive. What did arrive is kept, and the next attempt continues from it."""


class SourceError(Exception):
    """A source stopped answering; worth another attempt."""


class Pace:
    """Raises SourceError when less than a modest line would bring has come for a while."""

    def __init__(self, *, seconds: float = 60.0, rate: int = 2_000) -> None:
        self.seconds, self.rate = seconds, rate
        self._since, self._before = time.monotonic(), 0

    def check(self, done: int) -> None:
        """Called with the bytes that have come so far."""
        now = time.monotonic()
        if now - self._since < self.seconds:
            return
        if done - self._before < self.rate * self.seconds:
            raise SourceError(f"it sends less than {self.rate:,} bytes a second")
        self._since, self._before = now, done


@dataclass(frozen=True)
class Info:
    """What a source says about a file."""

    size: int
    sha256: str | None = None


class Source(Protocol):
    """Where files come from."""

    def info(self, names: list[str]) -> dict[str, Info]:
        """What is known of those files that exist."""

    def open(self, name: str, offset: int) -> AbstractContextManager[tuple[int, Iterator[bytes]]]:
        """The bytes of a file from an offset on, and the offset they really start at."""


class Hub:
    """A data set on the Hugging Face hub, or on a mirror of it."""

    def __init__(self, repo: str, endpoint: str | None = None) -> None:
        self.repo = repo
        self.endpoint = endpoint

    @property
    def _token(self) -> bool | None:
        """The user's own is for the hub; a mirror is not told."""
        return None if self.endpoint is None else False

    def __str__(self) -> str:
        return f"{self.endpoint or 'https://huggingface.co'}/datasets/{self.repo}"

    def info(self, names: list[str]) -> dict[str, Info]:
        import huggingface_hub

        api = huggingface_hub.HfApi(endpoint=self.endpoint, token=self._token)
        found = {}
        with _network():
            for start in range(0, len(names), 100):
                for file in api.get_paths_info(self.repo, names[start : start + 100], repo_type="dataset"):
                    if isinstance(file, huggingface_hub.RepoFile):
                        found[file.path] = Info(file.size, file.lfs.sha256 if file.lfs else None)
        return found

    @contextmanager
    def open(self, name: str, offset: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        import huggingface_hub
        from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

        url = huggingface_hub.hf_hub_url(self.repo, name, repo_type="dataset", endpoint=self.endpoint)
        # Compressed on the way, the offsets would not be those of the file.
        headers = {**build_hf_headers(token=self._token), "Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
        with _network(), get_session().stream("GET", url, headers=headers, timeout=60) as response:
            hf_raise_for_status(response)
            # A server that knows no ranges answers 200 and starts from the beginning. Nothing is unpacked, whatever the
            # server calls it, and every piece is handed on as it comes: who waits can tell how slow it is.
            yield (offset if response.status_code == 206 else 0), response.iter_raw()


@dataclass(frozen=True)
class Manifest:
    """Files of a GitHub repository that a corpus is made of.

    Args:
        host: where raw files are served from.
        revision: a commit.
        paths: of every file in the repository.
        files: what every file has to be, by the name it gets here.
    """

    host: str
    repository: str
    revision: str
    paths: Mapping[str, str]
    files: Mapping[str, Info]

    @classmethod
    def load(cls, name: str) -> Manifest:
        """One of the manifests in this package."""
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
        from huggingface_hub.utils import get_session

        path = urllib.parse.quote(self.manifest.paths[name])
        url = f"{self.host}/{self.manifest.repository}/{self.manifest.revision}/{path}"
        headers = {"Range": f"bytes={offset}-", "Accept-Encoding": "identity"}
        options = {"headers": headers, "timeout": 60, "follow_redirects": True}
        with _network(), get_session().stream("GET", url, **options) as response:
            if response.status_code >= 400:
                kind = SourceError if _is_passing(response.status_code) else DownloadError
                raise kind(f"{url} answered {response.status_code} {response.reason_phrase}")
            yield (offset if response.status_code == 206 else 0), response.iter_raw()


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
            yield offset, iter(lambda: file.read(CHUNK), b"")


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


@contextmanager
def _network() -> Iterator[None]:
    """Whatever the hub's library and the HTTP library below it raise, as one of two things."""
    from huggingface_hub.utils import HfHubHTTPError

    try:
        yield
    except (DownloadError, SourceError):
        raise
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status is not None and not _is_passing(status):
            raise DownloadError(f"the hub refused: {_line(error)}") from error
        raise SourceError(_line(error)) from error
    except OSError as error:
        raise SourceError(_line(error)) from error
    except Exception as error:
        # The HTTP library has changed its name between versions of the hub's; its errors share this base's name.
        if not any(base.__name__ in ("HTTPError", "TransportError") for base in type(error).__mro__):
            raise
        raise SourceError(f"{type(error).__name__}: {_line(error)}") from error


def _is_passing(status: int) -> bool:
    """Whether an HTTP error is worth another attempt."""
    return status >= 500 or status in (408, 429)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
