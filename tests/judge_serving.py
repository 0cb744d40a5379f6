"""A real chat server on a free port of this machine, which judges images by their brightness."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import numpy
from PIL import Image


@dataclass(frozen=True)
class Said:
    """One response; `released`, if given, holds it back until the event is set."""

    body: bytes
    status: int = 200
    retry_after: str = ""
    released: threading.Event | None = None


def completion(content: str | None, finish_reason: str = "stop", **message: Any) -> Said:
    """A chat completion that cost 100 and 10 tokens."""
    choice = {"message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return Said(json.dumps({"id": "x", "choices": [choice], "usage": usage}).encode())


class ChatServer(ThreadingHTTPServer):
    """Gives the responses of `script` first, and then brightness from 0 to 10; waits at the `meeting`, if any."""

    request_queue_size = 128
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Chat)
        self.script: list[Said] = []
        self.requests: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        self.meeting: threading.Barrier | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def respond(self, request: dict[str, Any], token: str | None) -> Said:
        with self.lock:
            self.requests.append(request)
            self.tokens.append(token)
            said = self.script.pop(0) if self.script else None
        if self.meeting is not None:
            self.meeting.wait()
        return said or completion(f'Bright. {{"score": {brightness_of(request)}}}')


def images_of(request: dict[str, Any]) -> list[Any]:
    """The images of a request as arrays, which must be PNG files in data URLs."""
    urls = [part["image_url"]["url"] for part in request["messages"][0]["content"] if part["type"] == "image_url"]
    assert all(url.startswith("data:image/png;base64,") for url in urls)
    return [numpy.asarray(Image.open(BytesIO(base64.b64decode(url.partition(",")[2])))) for url in urls]


def text_of(request: dict[str, Any]) -> str:
    """The text of a request."""
    return "".join(part["text"] for part in request["messages"][0]["content"] if part["type"] == "text")


def brightness_of(request: dict[str, Any]) -> float:
    """The mean over all images, from 0 to 10."""
    return float(numpy.mean([image.mean() for image in images_of(request)])) / 25.5


class _Chat(BaseHTTPRequestHandler):
    server: ChatServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            said = Said(b"no such path", status=404)
        else:
            said = self.server.respond(body, self.headers.get("Authorization"))
        if said.released is not None:
            said.released.wait(timeout=60)
            return
        self.send_response(said.status)
        if said.retry_after:
            self.send_header("Retry-After", said.retry_after)
        self.send_header("Content-Length", str(len(said.body)))
        self.end_headers()
        self.wfile.write(said.body)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def judging(server: ChatServer | None = None) -> Iterator[ChatServer]:
    """The running server."""
    server = server or ChatServer()
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
