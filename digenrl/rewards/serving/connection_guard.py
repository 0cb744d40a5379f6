"""Limits connections whose clients have not shown the token, so that they cannot lock out those who have it."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from uvicorn.protocols.http.auto import AutoHTTPProtocol

Address = tuple[str, int]


@dataclass(slots=True)
class ConnectionGuard:
    """The connections without a token so far, oldest first.

    Each is closed after `patience_s`. If there are more than `limit`, the oldest one of the client with most of
    them is closed: an honest client sends its token at once, and is never among the oldest.
    """

    limit: int = 256
    patience_s: float = 10.0
    _strangers: dict[Address, asyncio.Transport] = field(default_factory=dict)

    def opened(self, address: Address, transport: asyncio.Transport) -> None:
        self._strangers[address] = transport
        asyncio.get_running_loop().call_later(self.patience_s, self._expire, address, transport)
        if len(self._strangers) > self.limit:
            ((host, _),) = Counter(each[0] for each in self._strangers).most_common(1)
            self._close(next(each for each in self._strangers if each[0] == host))

    def forget(self, address: Address) -> None:
        """The client has shown the token, or has disconnected."""
        self._strangers.pop(address, None)

    def _expire(self, address: Address, transport: asyncio.Transport) -> None:
        if self._strangers.get(address) is transport:
            self._close(address)

    def _close(self, address: Address) -> None:
        self._strangers.pop(address).abort()


def guarded_protocol(guard: ConnectionGuard, tls: ssl.SSLContext | None = None) -> type[asyncio.Protocol]:
    """uvicorn's HTTP protocol, inside of TLS if there is a context for it, with a guard over its connections.

    The guard sees a connection before the TLS handshake, which a client may never complete.
    """
    base: Any = AutoHTTPProtocol if tls is None else _tls_protocol(tls)

    class GuardedProtocol(base):  # type: ignore[misc]
        """Reports connections to the guard."""

        def connection_made(self, transport: Any) -> None:
            self._address = tuple(transport.get_extra_info("peername") or ("", 0))[:2]
            guard.opened(self._address, transport)
            super().connection_made(transport)

        def connection_lost(self, exc: Exception | None) -> None:
            guard.forget(self._address)
            super().connection_lost(exc)

    return GuardedProtocol


def _tls_protocol(context: ssl.SSLContext) -> type[SSLProtocol]:
    class TlsProtocol(SSLProtocol):
        """The TLS handshake, and then uvicorn's HTTP protocol."""

        def __init__(self, **options: Any) -> None:
            waiter: Any = None  # no future waits for the handshake
            http = AutoHTTPProtocol(**options)
            super().__init__(asyncio.get_running_loop(), http, context, waiter, server_side=True)

    return TlsProtocol
