"""Downloads from a server that means no good: nothing but what was asked for arrives, and nothing else is left."""

from __future__ import annotations

import gzip
import hashlib
import http.server
import importlib
import io
import json
import threading
import time
import zipfile

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from temper_lab.data import web
from temper_lab.data.web import DownloadError, Pace, SourceError
from temper_lab.eval.core import bundle as bundles
from temper_lab.eval.core.bundle import download_bundle

# The module; the package has a function of its name.
downloading = importlib.import_module("temper_lab.data.download")


def parquet() -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"text": [f"text {index}" for index in range(50)]}), out)
    return out.getvalue()


def bundle() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("core.yaml", "icl_tasks: []")
    return out.getvalue()


# A small answer that unpacks to something large.
BOMB = gzip.compress(bytes(1 << 24))


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as `server.manner` says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_POST(self):
        """What the hub says of its files, which the manner may make a lie."""
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.list_manner is not None:
            self.server.list_manner(self)
            return
        body, lie = self.server.body, self.server.lies
        size, digest = lie.get("size", len(body)), lie.get("sha256", hashlib.sha256(body).hexdigest())
        lfs = {"oid": digest, "size": size, "pointerSize": 130} if digest else None
        names = ["shard_00000.parquet", "shard_00001.parquet", "../../escape", "/etc/escape"]
        files = [{"type": "file", "path": name, "size": size, "oid": "0" * 40, "lfs": lfs} for name in names]
        self.server.tokens.append(self.headers.get("Authorization"))
        self._send(200, json.dumps(files).encode(), [("Content-Type", "application/json")])

    def do_GET(self):
        self.server.tokens.append(self.headers.get("Authorization"))
        body = self.server.body
        match self.server.manner:
            case "short":
                self._send(200, body[: len(body) // 2], length=len(body))
                self.close_connection = True
            case "no length":
                self._send(200, body, [("Connection", "close")], length=None)
            case "strange length":
                self._send(200, body, [("Connection", "close")], length="9" * 30)
            case "endless":
                self._send(200, b"", [("Connection", "close")], length=None)
                self._forever(b"x" * (1 << 16), 0)
            case "drip":
                self._send(200, b"", [("Connection", "close")], length=None)
                self._forever(b"x", 0.02)
            case "gzip":
                self._send(200, BOMB, [("Content-Encoding", "gzip")])
            case "head drip":
                self._forever(b"x", 0.02)
            case "interim":
                self._forever(b"HTTP/1.1 100 Continue\r\n\r\n", 0.02)
            case "endless refusal":
                self._send(404, b"", [("Connection", "close")], length=None)
                self._forever(b"x" * (1 << 16), 0)
            case ("redirect", address):
                self._send(302, b"", [("Location", address)])
            case _:
                self._send(200, body)

    def _send(self, status, body, headers=(), length=0):
        self.send_response(status)
        for key, value in headers:
            self.send_header(key, value)
        if length is not None:
            self.send_header("Content-Length", str(length or len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _forever(self, piece, pause):
        self.close_connection = True
        try:
            while not self.server.is_ending:
                self.wfile.write(piece)
                time.sleep(pause)
        except OSError:
            pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(downloading, "PAUSES", (0.01, 0.01))
    for module in (downloading, bundles, web):
        monkeypatch.setattr(module, "Pace", lambda: Pace(seconds=0.5, rate=10_000))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        running.daemon_threads = True
        running.body, running.manner, running.lies, running.is_ending, running.tokens = parquet(), None, {}, False, []
        running.list_manner = None
        running.address = f"http://127.0.0.1:{running.server_port}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.is_ending = True
        running.shutdown()
        thread.join()


SHARDS = {
    "short": ("short", {}, "stopped at|is not what was expected"),
    "another hash": (None, {"sha256": "0" * 64}, "SHA-256"),
    "another size": (None, {"size": 17}, "more than the 17 bytes"),
    "a size beyond the disk": (None, {"size": 1 << 60}, "there is room for"),
    "a negative size": (None, {"size": -5}, "expected a SHA-256"),
    "endless": ("endless", {}, "more than the"),
    "drip": ("drip", {"size": 1 << 24}, "less than 10,000 bytes a second"),
    "a gzip bomb": ("gzip", {}, "more than the"),
    "a head that drips": ("head drip", {}, "sent nothing for"),
    "interim answers without an end": ("interim", {}, "sent nothing for"),
    "an endless refusal": ("endless refusal", {}, "answered 404"),
    "a redirect to a file": (("redirect", "file:///etc/passwd"), {}, "not allowed"),
    "a redirect to another host": (("redirect", "http://localhost:{port}/x"), {"sha256": None}, "another host"),
}


@pytest.mark.parametrize("name", SHARDS)
def test_shards(name, server, tmp_path, monkeypatch):
    server.manner, server.lies, said = SHARDS[name]
    if "sent nothing" in said:
        monkeypatch.setattr(web, "TIMEOUT", 0.3)
    if isinstance(server.manner, tuple):
        server.manner = (server.manner[0], server.manner[1].format(port=server.server_port))
    if name == "a gzip bomb":
        server.lies = {"size": 1000}
    with pytest.raises(DownloadError, match=said):
        downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    monkeypatch.setattr(web, "TIMEOUT", 60)
    # A beginning is kept to go on from, under a name that no corpus reads.
    assert set(left) <= {".shard_00000.parquet.part"}
    server.manner, server.lies = None, {}
    paths = downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    assert [path.read_bytes() for path in paths] == [server.body] * 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["data", "shard_00000.parquet", "shard_00001.parquet"]


def _body(content, *headers):
    return lambda handler: handler._send(200, content, headers)


def _endless(handler):
    handler._send(200, b"", [("Connection", "close")], length=None)
    handler._forever(b" " * (1 << 16), 0)


LISTS = {
    "nothing": (lambda handler: time.sleep(1), "sent nothing for"),
    "a head that drips": (lambda handler: handler._forever(b"x", 0.02), "sent nothing for"),
    "endless": (_endless, "more than 1,048,576 bytes"),
    "a gzip bomb": (_body(BOMB, ("Content-Encoding", "gzip")), "not JSON"),
    "deep": (_body(b"[" * 100_000), "nested too deeply"),
    "numbers": (_body(b"[1, null]"), "an object with 'type' was expected"),
    "a size in words": (_body(b'[{"type": "file", "path": "shard_00000.parquet", "size": "x"}]'), "a whole number"),
    "no size": (_body(b'[{"type": "file", "path": "shard_00000.parquet"}]'), "has no 'size'"),
    "a hash that is none": (_body(b'[{"type": "file", "path": "x", "size": 1, "lfs": {"oid": "../x"}}]'), "a SHA-256"),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_files(name, server, tmp_path, monkeypatch):
    server.list_manner, said = LISTS[name]
    if "sent nothing" in said:
        monkeypatch.setattr(web, "TIMEOUT", 0.3)
    with pytest.raises(DownloadError, match=said):
        downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    assert not list((tmp_path / "data").iterdir())


def test_the_token_goes_to_the_hub_alone(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setattr(downloading, "HUB", server.address)
    server.manner = ("redirect", f"http://localhost:{server.server_port}/x")
    with pytest.raises(DownloadError):
        downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    # The list, the file, and where its redirect led.
    assert server.tokens[:3] == ["Bearer hf_secret", "Bearer hf_secret", None]


def test_a_mirror_is_not_told_the_token(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    assert server.tokens
    assert set(server.tokens) == {None}


def test_a_link_in_the_place_of_a_part_is_not_followed(server, tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / ".shard_00000.parquet.part").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError, match="part"):
        downloading.download(1, tmp_path / "data", source=server.address, last_shard=1)
    assert (tmp_path / "victim").read_text() == "mine"


BUNDLES = {
    "short": ("short", "ended after|did not come"),
    "strange length": ("strange length", None),
    "no length": ("no length", None),
    "endless": ("endless", "more than 1,000,000 bytes"),
    "drip": ("drip", "less than 10,000 bytes a second"),
    "a head that drips": ("head drip", "sent nothing for"),
    "interim answers without an end": ("interim", "sent nothing for"),
    "a gzip bomb": ("gzip", "not a zip"),
    "a redirect to a file": (("redirect", "file:///etc/passwd"), "which is not followed|not allowed"),
    "a redirect to a path": (("redirect", "/etc/passwd"), "did not come|answered 302"),
    "a redirect to another host": (("redirect", "http://localhost:{port}/bundle.zip"), "leads to another host"),
}


@pytest.mark.parametrize("name", BUNDLES)
def test_bundles(name, server, tmp_path, monkeypatch):
    monkeypatch.setattr(bundles, "MAX_PACKED_BYTES", 1_000_000)
    server.body = bundle()
    manner, said = BUNDLES[name]
    if said and "sent nothing" in said:
        monkeypatch.setattr(web, "TIMEOUT", 0.3)
    if isinstance(manner, tuple):
        manner = (manner[0], manner[1].format(port=server.server_port))
    server.manner = manner
    folder = tmp_path / "bundle"
    if said is None:
        download_bundle(f"{server.address}/bundle.zip", folder)
        assert [path.name for path in tmp_path.rglob("*")] == ["bundle", "core.yaml"]
        return
    with pytest.raises(ValueError, match=said):
        download_bundle(f"{server.address}/bundle.zip", folder)
    assert not list(tmp_path.iterdir())


def test_the_pace_of_a_modest_line_is_enough(monkeypatch):
    now = 0.0
    monkeypatch.setattr(downloading.time, "monotonic", lambda: now)
    pace, done = Pace(), 0
    for _ in range(100):
        now, done = now + 10, done + 30_000
        pace.check(done)
    pace = Pace()
    now += 60
    with pytest.raises(SourceError, match="less than 2,000 bytes a second"):
        pace.check(100_000)
