"""Limits connections whose clients have not shown the token, so that nobody can lock out those who have it."""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from collections import Counter
from collections.abc import Callable
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


def guarded_protocol(
    guard: ConnectionGuard, tls: ssl.SSLContext | None = None
) -> Callable[..., asyncio.BaseProtocol]:
    """uvicorn's HTTP protocol, inside of TLS if there is a context for it, with a guard over its connections.

    The guard sees a connection before the TLS handshake, which a client may never complete.
    """

    class Guarded:
        """Reports connections to the guard."""

        def connection_made(self, transport: Any) -> None:
            self._address = tuple(transport.get_extra_info("peername") or ("", 0))[:2]
            guard.opened(self._address, transport)
            super().connection_made(transport)  # type: ignore[misc]

        def connection_lost(self, exc: Exception | None) -> None:
            guard.forget(self._address)
            super().connection_lost(exc)  # type: ignore[misc]

    class GuardedHttp(Guarded, AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """A connection without TLS."""

    class GuardedTls(Guarded, SSLProtocol):
        """A connection that begins with a TLS handshake."""

        def __init__(self, **options: Any) -> None:
            loop, waiter = asyncio.get_running_loop(), None
            super().__init__(loop, AutoHTTPProtocol(**options), tls, waiter, server_side=True)

    return GuardedHttp if tls is None else GuardedTls
