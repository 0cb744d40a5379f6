"""Serves a reward over HTTP to clients that have the token: JSON and PNG in, numbers out."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import secrets
import socket
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from anyio import from_thread
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from digenrl.config.reading import ConfigError, one_line
from digenrl.config.token_variables import REWARD_TOKEN
from digenrl.rewards.contract import Reward, RewardError
from digenrl.rewards.serving.connection_guard import ConnectionGuard, guarded_protocol
from digenrl.rewards.serving.http_messages import (
    Limits,
    MessageError,
    Refusal,
    ScoreReply,
    check_token,
    decode_request,
)

DEFAULT_PORT = 8790
KEEP_ALIVE_S = 30
RETRY_AFTER_S = 1
MIN_TOKEN_LENGTH = 16  # if the server is reachable from other machines


def create_app(
    reward: Reward, token: str, limits: Limits | None = None, guard: ConnectionGuard | None = None
) -> FastAPI:
    """GET /health (public, only says that the server is up) and POST /score (needs the bearer token).

    Requests are scored one at a time, so that rewards need not be thread-safe; those whose clients disconnect
    meanwhile are not scored. If a reward fails, the response is status 500 with the reason, never a number. If too
    many requests wait, it is 503 with a Retry-After header.
    """
    if not token:
        raise ValueError("a reward server needs a token, got an empty one")
    accepted = limits or Limits()
    scoring = threading.Lock()
    waiting: set[object] = set()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        if not token_fits(request.headers.get("authorization", ""), token):
            return _refusal(401, "wrong or missing token; send `Authorization: Bearer <token>`")
        if guard is not None and request.client is not None:
            guard.forget((request.client.host, request.client.port))
        if len(waiting) >= accepted.waiting_requests:
            return _refusal(503, f"{len(waiting)} requests are waiting; try again later")
        waiting.add(request)
        try:
            async with asyncio.timeout(accepted.body_s):
                body = await _read_body(request, accepted.body_bytes)
            if body is None:
                return _refusal(413, f"the body is larger than the {accepted.body_bytes} bytes allowed")
            return await run_in_threadpool(_answer, reward, request, body, accepted, scoring)
        except TimeoutError:
            return _refusal(408, f"the body did not arrive in {accepted.body_s:.0f} s")
        finally:
            waiting.discard(request)

    return app


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The certificate of a server and its private key, in PEM format."""

    certificate: Path
    key: Path

    def context(self) -> ssl.SSLContext:
        """Raises ConfigError if they cannot be used."""
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.certificate, self.key)
            return context
        except OSError as error:  # ssl.SSLError is one
            files = f"{self.certificate} and {self.key}"
            raise ConfigError(f"{files}: not a certificate with its private key: {one_line(error)}") from None


def server_config(
    reward: Reward, token: str, limits: Limits | None = None, tls: TlsFiles | None = None, **options: Any
) -> uvicorn.Config:
    """The configuration of a server that clients without the token cannot block."""
    guard = ConnectionGuard()
    return uvicorn.Config(
        create_app(reward, token, limits, guard),
        http=guarded_protocol(guard, None if tls is None else tls.context()),
        log_level="warning",
        proxy_headers=False,  # the guard knows clients by their real addresses
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


def serve(
    reward: Reward,
    host: str = "127.0.0.1",
    port: int = DEFAULT_PORT,
    token: str | None = None,
    tls: TlsFiles | None = None,
) -> None:
    """Serves until interrupted. On a loopback address, a token is generated and printed if none is given."""
    accepted = token_for(host, token)
    config = server_config(reward, accepted, tls=tls, host=host, port=port)
    check_address(host, port)
    if token is None:
        print(f"token: {accepted}", flush=True)
    scheme = "http" if tls is None else "https"
    print(f"serving reward '{reward.label}' on {scheme}://{_bracketed(host)}:{port}", flush=True)
    if tls is None and not is_loopback(host):
        print("not encrypted: use --certificate and --key, or a network that you trust", flush=True)
    uvicorn.Server(config).run()


def check_address(host: str, port: int) -> None:
    """Raises ConfigError if no server can listen there, for example because another one does."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = (error.strerror or one_line(error)).partition(" (")[0]
        where = f"--host {host} --port {port}"
        raise ConfigError(
            f"{where}: cannot listen on this address: {reason}; choose another host or port"
        ) from None


def token_for(host: str, token: str | None) -> str:
    """The token to serve with. Raises ConfigError if other machines can reach the host and it is weak."""
    check_token(token or "", "the server")
    if is_loopback(host):
        if token == "":
            raise ConfigError("the token is empty; omit it to generate one")
        return token or secrets.token_urlsafe(32)
    if not token:
        raise ConfigError(
            f"host {host} is reachable from other machines and needs a token of at least {MIN_TOKEN_LENGTH} "
            f"characters; set it in the variable of --token-env, by default {REWARD_TOKEN}, or use 127.0.0.1"
        )
    if len(token) < MIN_TOKEN_LENGTH:
        raise ConfigError(
            f"the token for host {host} has {len(token)} characters; at least {MIN_TOKEN_LENGTH} are needed"
        )
    return token


def is_loopback(host: str) -> bool:
    """True if only this machine can reach the address; any other host name may point anywhere."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def token_fits(authorization: str, token: str) -> bool:
    """Whether the header has this token; compared in constant time."""
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode(), token.encode())


def _answer(
    reward: Reward, request: Request, body: bytes, limits: Limits, scoring: threading.Lock
) -> JSONResponse:
    with scoring:  # includes unpacking: waiting requests hold their bodies but no pixels
        if from_thread.run(request.is_disconnected):  # the client has given up, and may have asked again
            return _refusal(503, "the client has disconnected")
        try:
            batch = reward.score(*decode_request(body, limits))
        except MessageError as error:
            return _refusal(422, str(error))
        except RewardError as error:
            return _refusal(500, str(error), error.samples)
    reply = ScoreReply(values=list(batch.values), parts={name: list(part) for name, part in batch.parts.items()})
    return JSONResponse(reply.model_dump())


async def _read_body(request: Request, limit: int) -> bytes | None:
    """The body, or None once it exceeds the limit, whatever its header says."""
    announced = request.headers.get("content-length", "0")
    if not announced.isdigit() or int(announced) > limit:
        return None
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            return None
    return bytes(body)


def _refusal(status: int, error: str, samples: tuple[int, ...] = ()) -> JSONResponse:
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": str(RETRY_AFTER_S)}}.get(status)
    return JSONResponse(
        Refusal(error=error, samples=list(samples)).model_dump(), status_code=status, headers=headers
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
