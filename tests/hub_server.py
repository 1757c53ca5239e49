"""A hub on loopback: the parts of the Hugging Face Hub's API and of ModelScope's for downloads.

It serves files from memory, records every request, and fails as a test configures.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LFS = (".safetensors", ".bin", ".onnx", ".h5", ".gguf")


@dataclass
class Repository:
    files: dict[str, bytes]
    branch: str = "main"
    tags: dict[str, str] = field(default_factory=dict)
    """Additional names of revisions, and their commits."""

    @property
    def commit(self) -> str:
        digest = hashlib.sha1()
        for name, content in sorted(self.files.items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def resolve(self, revision: str) -> str | None:
        if revision in (self.branch, self.commit, "master"):
            return self.commit
        return self.tags.get(revision)


@dataclass
class Asked:
    method: str
    path: str
    file: str = ""
    range: str | None = None


class LoopbackHub:
    """`url` is its address; `refuse` and `cut` make it fail."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.asked: list[Asked] = []
        self.refuse: dict[str, tuple[int, dict[str, str]]] = {}
        """A part of a path, and the status and headers of the response to such requests."""
        self.cut: dict[str, list[int]] = {}
        """A file, and after how many bytes of the body its next requests lose their connection."""
        self.hold: threading.Event | None = None
        """If set, weight files stop halfway until the event is set."""
        self.claimed_bytes: dict[str, int] = {}
        """A file, and the size that its listing claims."""
        self.token: str | None = None
        """If set, requests with another token are rejected."""
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def add(self, name: str, files: dict[str, bytes]) -> Repository:
        self.repositories[name] = Repository(files)
        return self.repositories[name]

    def downloads(self, file: str) -> list[Asked]:
        """The requests for a file's content."""
        return [asked for asked in self.asked if asked.method == "GET" and asked.file == file]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def running_hub() -> Iterator[LoopbackHub]:
    hub = LoopbackHub()
    try:
        yield hub
    finally:
        hub.close()


def files_in(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir() if file.is_file()}


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), {name: values[0] for name, values in parse_qs(parts.query).items()}
        self._asked = Asked(self.command, self.path, range=self.headers.get("Range"))
        self.hub.asked.append(self._asked)
        for part, (status, headers) in self.hub.refuse.items():
            if part in self.path:
                return self._refuse(status, headers)
        given = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.hub.token is not None and given != self.hub.token:
            message = {"X-Error-Message": "Invalid credentials in Authorization header"} if given else {}
            return self._refuse(401, message)
        if match := re.fullmatch(r"/api/v1/models/([^/]+/[^/]+)/repo(/files)?", path):
            return self._modelscope(match[1], bool(match[2]), query)
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            return self._describe(match[1], match[2], match[3])
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[2], match[3])
        if match := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", path):
            return self._send_file(match[2], self.hub.repositories[match[1]].files[match[2]], {})
        self._refuse(404, {})

    def _describe(self, name: str, what: str | None, revision: str | None) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(404, {"X-Error-Code": "RepoNotFound"})
        commit = repository.resolve(revision or "main")
        if commit is None:
            return self._refuse(404, {"X-Error-Code": "RevisionNotFound"})
        if what == "tree":
            return self._send_json([_tree_entry(file, content) for file, content in repository.files.items()])
        siblings = [
            _sibling(file, content) | self._claimed(file) for file, content in repository.files.items()
        ]
        self._send_json({"id": name, "modelId": name, "sha": commit, "siblings": siblings, "tags": []})

    def _claimed(self, file: str) -> dict[str, int]:
        return {"size": self.hub.claimed_bytes[file]} if file in self.hub.claimed_bytes else {}

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None or (commit := repository.resolve(revision)) is None:
            return self._refuse(
                404, {"X-Error-Code": "RepoNotFound" if repository is None else "RevisionNotFound"}
            )
        if file not in repository.files:
            return self._refuse(404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        content = repository.files[file]
        headers = {"X-Repo-Commit": commit, "ETag": f'"{_oid(content)}"'}
        if not file.endswith(LFS):
            return self._send_file(file, content, headers)
        headers |= {
            "X-Linked-ETag": f'"{_sha256(content)}"',
            "X-Linked-Size": str(len(content)),
            "Location": f"{self.hub.url}/cdn/{name}/{file}".replace("127.0.0.1", "localhost"),
        }
        self._refuse(302, headers)

    def _modelscope(self, name: str, is_listing: bool, query: dict[str, str]) -> None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self._refuse(
                404, {}, {"Code": 10010205001, "Message": "model does not exist", "Success": False}
            )
        commit = repository.resolve(query["Revision"])
        if not is_listing:
            if commit is None or query["FilePath"] not in repository.files:
                return self._refuse(404, {}, {"Code": 404, "Message": "no such file", "Success": False})
            return self._send_file(query["FilePath"], repository.files[query["FilePath"]], {})
        files = None if commit is None else [
            {"Path": file, "Name": file, "Type": "blob", "Size": len(content), "Sha256": _sha256(content),
             "Revision": commit, "CommittedDate": 1_700_000_000, "IsLFS": file.endswith(LFS)}
            for file, content in repository.files.items()
        ]  # fmt: skip
        latest = {"Id": "", "ShortId": (commit or "")[:8]}
        self._send_json({"Code": 200, "Success": True, "Data": {"Files": files, "LatestCommitter": latest}})

    def _send_file(self, file: str, content: bytes, headers: dict[str, str]) -> None:
        self._asked.file = file
        begin, status = 0, 200
        if match := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            begin, status = int(match[1]), 206
            headers = headers | {"Content-Range": f"bytes {begin}-{len(content) - 1}/{len(content)}"}
        body = content[begin:]
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body)), "Accept-Ranges": "bytes"}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        cuts = self.hub.cut.get(file)
        if cuts:
            self.wfile.write(body[: cuts.pop(0)])
            self.close_connection = True
            return
        if self.hub.hold is not None and file.endswith(LFS):
            self.wfile.write(body[: len(body) // 2])
            self.hub.hold.wait()
            self.close_connection = True
            return
        self.wfile.write(body)

    def _send_json(self, document: Any) -> None:
        self._refuse(200, {}, document)

    def _refuse(self, status: int, headers: dict[str, str], document: Any = None) -> None:
        body = json.dumps({"error": "refused"} if document is None else document).encode()
        self.send_response(status)
        for name, value in (
            headers | {"Content-Type": "application/json", "Content-Length": str(len(body))}
        ).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _tree_entry(file: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": file, "size": len(content), "oid": _oid(content)}
    if file.endswith(LFS):
        entry["lfs"] = {"oid": _sha256(content), "size": len(content), "pointerSize": 135}
    return entry


def _sibling(file: str, content: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": file, "size": len(content), "blobId": _oid(content)}
    if file.endswith(LFS):
        entry["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 135}
    return entry
