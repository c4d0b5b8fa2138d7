"""A hub on a loopback port: its routes for models and files, which can cut, damage and refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PATIENCE_S = 60.0
LARGE = (".gguf", ".safetensors")  # are stored with their sha256, as with git-lfs


@dataclass
class FakeHub:
    """What the hub has and does.

    repositories: the files of each repository by name.
    cut: how many bytes of a file come before its connection ends, by name; once for each entry.
    damaged: files of which other bytes come than the hub says.
    refused: status and X-Error-Code of the files of a repository, as of gated ones, which are listed.
    slow: files of which the first half comes alone until `go_on` is set.
    requests: how often each path was asked for. sent: bytes of each file that came.
    """

    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cut: dict[str, list[int]] = field(default_factory=dict)
    damaged: set[str] = field(default_factory=set)
    refused: dict[str, tuple[int, str]] = field(default_factory=dict)
    slow: set[str] = field(default_factory=set)
    go_on: threading.Event = field(default_factory=threading.Event)
    requests: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    url: str = ""

    def commit(self, name: str) -> str:
        return hashlib.sha1(json.dumps(sorted(self.repositories[name])).encode()).hexdigest()

    def siblings(self, name: str) -> list[dict[str, Any]]:
        return [
            {
                "rfilename": file,
                "size": len(data),
                "blobId": git_digest(data),
                **(
                    {"lfs": {"sha256": digest(data), "size": len(data), "pointerSize": 130}}
                    if is_large(file)
                    else {}
                ),
            }
            for file, data in self.repositories[name].items()
        ]


def is_large(file: str) -> bool:
    return file.endswith(LARGE)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def git_digest(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._file(unquote(urlsplit(self.path).path))

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests[path] += 1
        if not path.startswith("/api/models/"):
            self._file(path)
            return
        name, _, rest = path.removeprefix("/api/models/").partition("/revision/")
        name, _, tree = name.partition("/tree/")
        if name not in self.hub.repositories:
            self._json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
        elif tree:
            self._json(200, [_entry(each) for each in self.hub.siblings(name)])
        elif rest not in ("", "main", self.hub.commit(name)):
            self._json(404, {"error": "Revision not found"}, {"X-Error-Code": "RevisionNotFound"})
        else:
            siblings = self.hub.siblings(name)
            if "blobs" not in parse_qs(url.query):
                siblings = [{"rfilename": each["rfilename"]} for each in siblings]
            self._json(200, {"id": name, "sha": self.hub.commit(name), "siblings": siblings})

    def do_POST(self) -> None:
        path = unquote(urlsplit(self.path).path)
        name = path.removeprefix("/api/models/").partition("/paths-info/")[0]
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        wanted = parse_qs(body).get("paths") or json.loads(body)["paths"]
        self._json(200, [_entry(each) for each in self.hub.siblings(name) if each["rfilename"] in wanted])

    def _file(self, path: str) -> None:
        name, _, rest = path.removeprefix("/").partition("/resolve/")
        file = rest.partition("/")[2]
        if name in self.hub.refused:
            status, code = self.hub.refused[name]
            self._json(status, {"error": "Access is restricted"}, {"X-Error-Code": code})
            return
        data = self.hub.repositories.get(name, {}).get(file)
        if data is None:
            self._json(404, {"error": "Entry not found"}, {"X-Error-Code": "EntryNotFound"})
            return
        tag = digest(data) if is_large(file) else git_digest(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": self.hub.commit(name), "Accept-Ranges": "bytes"}
        if is_large(file):
            headers["X-Linked-Size"] = str(len(data))
            headers["X-Linked-Etag"] = headers["ETag"]
        begin, end = _range(self.headers.get("range"), len(data))
        sent = data[begin:end]
        if file in self.hub.damaged:
            sent = bytes(len(sent))
        self.send_response(206 if "range" in self.headers else 200)
        if "range" in self.headers:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(data)}"
        for key, value in {**headers, "Content-Length": str(len(sent))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if cuts := self.hub.cut.get(file):
            sent = sent[: cuts.pop(0)]
            self.close_connection = True
        half = len(sent) // 2 if file in self.hub.slow else 0
        for part in (sent[:half], sent[half:]):
            self.hub.sent[file] += len(part)
            self.wfile.write(part)
            if part and file in self.hub.slow:
                self.hub.go_on.wait(PATIENCE_S)

    def _json(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"content-type": "application/json", **(headers or {})}.items():
            self.send_header(key, text)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _entry(sibling: dict[str, Any]) -> dict[str, Any]:
    more = {"lfs": {"oid": sibling["lfs"]["sha256"], **sibling["lfs"]}} if "lfs" in sibling else {}
    return {
        "type": "file",
        "path": sibling["rfilename"],
        "size": sibling["size"],
        "oid": sibling["blobId"],
        **more,
    }


def _range(header: str | None, size: int) -> tuple[int, int]:
    if header is None:
        return 0, size
    first, _, last = header.removeprefix("bytes=").partition("-")
    return int(first), min(size, int(last) + 1 if last else size)


@contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, cache: Any) -> Iterator[FakeHub]:
    """Yield a hub that this process takes for the real one, with an empty cache."""
    from huggingface_hub import constants

    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
