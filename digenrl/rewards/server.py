"""Serves a reward over HTTP to clients that have the token: JSON and PNG in, numbers out."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import threading

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool

from digenrl.config.reading import ConfigError
from digenrl.rewards.contract import Reward, RewardError
from digenrl.rewards.http_messages import Limits, MessageError, Refusal, ScoreReply, check_token, decode_request

DEFAULT_PORT = 8790
OPEN_REQUESTS = 64
MIN_TOKEN_LENGTH = 16  # if the server is reachable from other machines


def create_app(reward: Reward, token: str, limits: Limits | None = None) -> FastAPI:
    """GET /health (public, only says that the server is up) and POST /score (needs the bearer token).

    Requests are scored one at a time, so that rewards need not be thread-safe. If a reward fails, the response is
    status 500 with the reason, never a number.
    """
    if not token:
        raise ValueError("a reward server needs a token, got an empty one")
    accepted = limits or Limits()
    scoring = threading.Lock()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/score")
    async def score(request: Request) -> JSONResponse:
        if not token_fits(request.headers.get("authorization", ""), token):
            return _refusal(401, "wrong or missing token; send `Authorization: Bearer <token>`")
        body = await _read_body(request, accepted.body_bytes)
        if body is None:
            return _refusal(413, f"the body is larger than the {accepted.body_bytes} bytes allowed")
        return await run_in_threadpool(_answer, reward, body, accepted, scoring)

    return app


def serve(reward: Reward, host: str = "127.0.0.1", port: int = DEFAULT_PORT, token: str | None = None) -> None:
    """Serves until interrupted. On a loopback address, a token is generated and printed if none is given."""
    accepted = token_for(host, token)
    if token is None:
        print(f"token: {accepted}", flush=True)
    print(f"serving reward '{reward.label}' on http://{_bracketed(host)}:{port}", flush=True)
    uvicorn.run(
        create_app(reward, accepted), host=host, port=port, log_level="warning", limit_concurrency=OPEN_REQUESTS
    )


def token_for(host: str, token: str | None) -> str:
    """The token to serve with. Raises ConfigError if other machines can reach the host and it is weak."""
    check_token(token or "", "the server")
    if is_loopback(host):
        if token == "":
            raise ConfigError("the token is empty; omit it to generate one")
        return token or secrets.token_urlsafe(32)
    if not token:
        raise ConfigError(
            f"host {host} is reachable from other machines and needs a token; set one, or use 127.0.0.1"
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


def _answer(reward: Reward, body: bytes, limits: Limits, scoring: threading.Lock) -> JSONResponse:
    with scoring:  # includes unpacking: waiting requests hold their bodies but no pixels
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
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
    return JSONResponse(
        Refusal(error=error, samples=list(samples)).model_dump(), status_code=status, headers=headers
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
