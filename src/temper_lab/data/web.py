"""HTTP for downloads: whatever a server does, an answer is bounded in time, and nothing of it is decompressed."""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

CHUNK = 1 << 20
# Seconds that a server may take for one step: a connection, the head of an answer, the next bytes of its body.
TIMEOUT = 60.0


class DownloadError(ValueError):
    """A file did not arrive. The bytes that did arrive are kept, and the next attempt continues from them."""


class SourceError(Exception):
    """A source stopped answering; another attempt may succeed."""


class Pace:
    """Raises SourceError when a transfer stays below a minimum rate for some time."""

    def __init__(self, *, seconds: float = 60.0, rate: int = 2_000) -> None:
        self.seconds, self.rate = seconds, rate
        self._since, self._before = time.monotonic(), 0

    def check(self, done: int) -> None:
        """Checks the rate, given the bytes that have arrived so far."""
        now = time.monotonic()
        if now - self._since < self.seconds:
            return
        if done - self._before < self.rate * self.seconds:
            raise SourceError(f"it sends less than {self.rate:,} bytes a second")
        self._since, self._before = now, done


@dataclass(frozen=True)
class Answer:
    """The answer of a server.

    Args:
        length: the length of the body as the server announces it, if it does.
        chunks: the body as it arrives; an exhausted iterator does not mean that it is complete.
    """

    status: int
    length: int | None
    chunks: Iterator[bytes]

    def read(self, limit: int) -> bytes:
        """The whole body; SourceError if it is too slow, DownloadError if it is longer than the limit."""
        body, pace = bytearray(), Pace()
        for chunk in self.chunks:
            body += chunk
            if len(body) > limit:
                raise DownloadError(f"the answer has more than {limit:,} bytes")
            pace.check(len(body))
        return bytes(body)


@contextmanager
def request(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    secrets: Mapping[str, str] | None = None,
    form: list[tuple[str, str]] | None = None,
    is_checked: bool,
) -> Iterator[Answer]:
    """Requests an address; raises SourceError if another attempt may help, and DownloadError if not.

    Args:
        secrets: headers that no redirect is followed with.
        form: what to post.
        is_checked: the content is checked against a SHA-256, so redirects to other hosts are followed.
    """
    check_address(url)
    # Offsets into a compressed body would not be offsets into the file.
    plain = {"Accept-Encoding": "identity", "User-Agent": "temper", **(headers or {})}
    data = None if form is None else urllib.parse.urlencode(form).encode()
    asked = urllib.request.Request(url, data=data, headers=plain)
    for name, value in (secrets or {}).items():
        asked.add_unredirected_header(name, value)
    watch = _Watch()
    opener = urllib.request.build_opener(_Redirects(is_checked=is_checked), _Http(watch), _Https(watch))
    with watch:
        with _failing(url, watch):
            response = opener.open(asked, timeout=TIMEOUT)
        with response:
            length = response.headers.get("Content-Length") or ""
            total = int(length) if length.isdecimal() and len(length) < 20 else None
            yield Answer(response.status, total, _chunks(url, response, watch))


@contextmanager
def _failing(url: str, watch: _Watch) -> Iterator[None]:
    """Turns whatever the libraries raise into SourceError or DownloadError."""
    try:
        yield
    except urllib.error.HTTPError as error:
        # Its body is not read: it could be endless.
        error.close()
        kind = SourceError if _is_passing(error.code) else DownloadError
        raise kind(f"{url} answered {error.code} {_line(error.reason)}") from error
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        if watch.is_late:
            raise SourceError(f"it sent nothing for {TIMEOUT:.0f} seconds") from error
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise SourceError(f"{type(error).__name__}: {_line(reason)}") from error


def check_address(url: str) -> None:
    """Raises ValueError unless an address is http or https; other schemes read local files."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"the address is {url!r}; expected http:// or https://")


def _chunks(url: str, response: Any, watch: _Watch) -> Iterator[bytes]:
    chunk = b"-"
    while chunk:
        with _failing(url, watch):
            # What there is, so that a slow server is noticed.
            chunk = response.read1(CHUNK)
        watch.touch()
        if chunk:
            yield chunk
    if watch.is_late:
        raise SourceError(f"it sent nothing for {TIMEOUT:.0f} seconds")


def _is_passing(status: int) -> bool:
    """True if an HTTP error is worth another attempt."""
    return status >= 500 or status in (408, 429)


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]


class _Watch:
    """Ends a connection on which nothing gets done for TIMEOUT seconds.

    The timeout of a socket alone is not enough: a head that arrives byte by byte, or interim answers without an end,
    never reach it.
    """

    def __init__(self) -> None:
        self.is_late = False
        self._socket: socket.socket | None = None
        self._ended = threading.Event()
        self.touch()

    def touch(self) -> None:
        """Starts the time again."""
        self._until = time.monotonic() + TIMEOUT

    def hold(self, connection: socket.socket) -> None:
        self._socket = connection

    def __enter__(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(max(0.001, self._until - time.monotonic())):
            if time.monotonic() >= self._until:
                self.is_late = True
                if self._socket is not None:
                    # Whoever is reading sees the end of the connection. TLS would wait for an answer.
                    with suppress(OSError):
                        socket.socket.shutdown(self._socket, socket.SHUT_RDWR)
                # A redirect may open another connection.
                self._ended.wait(0.1)


class _Watched(http.client.HTTPConnection):
    """A connection that a watch can end."""

    def __init__(self, watch: _Watch, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._watch = watch

    def connect(self) -> None:
        super().connect()
        self._watch.hold(self.sock)


class _WatchedTls(_Watched, http.client.HTTPSConnection):
    """The same over TLS."""


class _Http(urllib.request.HTTPHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._connect = partial(_Watched, watch)

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self._connect = partial(_WatchedTls, watch)

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._connect, req, context=ssl.create_default_context())


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, and without a SHA-256 only on the same host."""

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
