"""A real reward server on a free port of this machine, for the duration of a test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from digenrl.rewards.contract import Reward
from digenrl.rewards.serving.http_messages import Limits
from digenrl.rewards.serving.server import TlsFiles, server_config

TOKEN = "a token for tests alone"


@contextmanager
def serving(reward: Reward, limits: Limits | None = None, tls: TlsFiles | None = None) -> Iterator[str]:
    """The server's address."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(server_config(reward, TOKEN, limits, tls))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True  # clients may keep connections open
        thread.join(timeout=30)
