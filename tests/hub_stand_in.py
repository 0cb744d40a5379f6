"""A small HTTP server that answers like the Hugging Face hub, as far as huggingface_hub asks, and counts bytes.

Repositories are folders: every file of `root/OWNER/NAME` is a file of the repository OWNER/NAME.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", COMMIT)
TOKEN = "hf_a_token_with_access"


@dataclass
class HubStandIn:
    """The server. Files of repositories in `gated` need TOKEN; `withheld` files are listed, but not served."""

    root: Path
    endpoint: str = ""
    gated: set[str] = field(default_factory=set)
    withheld: set[str] = field(default_factory=set)
    served: dict[str, int] = field(default_factory=dict)  # bytes, by the file's path in the repository

    @property
    def bytes_served(self) -> int:
        return sum(self.served.values())


@contextmanager
def serving(root: Path) -> Iterator[HubStandIn]:
    """Serves the repositories below `root` until the context ends."""
    hub = HubStandIn(root)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, with_body: bool) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        api = parts[:2] == ["api", "models"]
        parts = parts[2:] if api else parts
        repository, (what, revision, *path) = "/".join(parts[:2]), [*parts[2:], "", ""]
        folder = self.hub.root / repository
        if not folder.is_dir():
            self._fail(401, "RepoNotFound")
        elif what == "refs":
            branches = [{"name": "main", "ref": "refs/heads/main", "targetCommit": COMMIT}]
            self._send_json({"branches": branches, "tags": [], "converts": []})
        elif (revision or "main") not in REVISIONS:
            self._fail(404, "RevisionNotFound")
        elif api:
            self._send_json(self._tree(folder) if what == "tree" else self._info(repository, folder))
        elif repository in self.hub.gated and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._fail(401, "GatedRepo")
        else:
            self._send_file(folder, "/".join(part for part in path if part), with_body)

    def _info(self, repository: str, folder: Path) -> dict[str, Any]:
        files = [{"rfilename": name, "size": path.stat().st_size} for name, path in _files(folder)]
        return {"id": repository, "modelId": repository, "sha": COMMIT, "siblings": files, "private": False}

    def _tree(self, folder: Path) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
            for name, path in _files(folder)
        ]

    def _send_file(self, folder: Path, name: str, with_body: bool) -> None:
        path = folder / name
        if not path.is_file() or name in self.hub.withheld:
            return self._fail(404, "EntryNotFound")
        content = path.read_bytes()
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        self._send(content, headers, with_body)
        if with_body:
            self.hub.served[name] = self.hub.served.get(name, 0) + len(content)
        return None

    def _send_json(self, content: Any) -> None:
        self._send(json.dumps(content).encode(), {"Content-Type": "application/json"}, with_body=True)

    def _fail(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, content: bytes, headers: dict[str, str], with_body: bool) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if with_body:
            self.wfile.write(content)


def _files(folder: Path) -> list[tuple[str, Path]]:
    return [(path.relative_to(folder).as_posix(), path) for path in sorted(folder.rglob("*")) if path.is_file()]


def _etag(path: Path) -> str:
    return sha1(path.read_bytes()).hexdigest()
