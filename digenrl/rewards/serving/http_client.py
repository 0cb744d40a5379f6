"""What clients of reward servers share: the connection, and how long to wait before a retry."""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Callable

import httpx

from digenrl.config.reading import ConfigError, one_line
from digenrl.config.rewards.table import ServerSettings
from digenrl.rewards.serving.http_messages import check_token

# Worth a retry: the server is overloaded or still starting. Other errors would repeat.
RETRIED_STATUS = frozenset({429, 502, 503, 504})
NOT_TLS = re.compile("WRONG_VERSION_NUMBER|record layer failure|HTTP_REQUEST")  # the reply of a plain HTTP server
HANDSHAKE_S = 5.0


class NoResponseError(RuntimeError):
    """A server did not respond in any attempt."""


def make_client(settings: ServerSettings, token: str, connections: int = 1) -> httpx.Client:
    """A client for JSON, which may be used from several threads. Sends no token if it is empty.

    It talks to the configured address only: no proxy, no redirect.
    """
    # Before the HTTP library, which would put a bad token into its error message.
    check_token(token, f"reward '{settings.shown_as}'")
    headers = {"Content-Type": "application/json"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    return httpx.Client(
        headers=headers,
        timeout=settings.timeout_s,
        verify=_accepted_certificates(settings),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
        follow_redirects=False,
    )


def _accepted_certificates(settings: ServerSettings) -> ssl.SSLContext | bool:
    """Those of the `ca_file`, or the usual ones. Raises ConfigError if the file cannot be used."""
    if settings.ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=settings.ca_file)
    except OSError as error:  # ssl.SSLError is one
        where = f"reward '{settings.shown_as}': ca_file"
        raise ConfigError(f"{where}: {settings.ca_file} has no certificates: {one_line(error)}") from None


def describe_failure(url: str, error: httpx.TransportError) -> str:
    """Why a server gave no response: that the two sides disagree about TLS, or in the words of the library."""
    return tls_mismatch(url, error) or f"{type(error).__name__}: {error}"


def tls_mismatch(url: str, error: httpx.TransportError) -> str:
    """What the two sides of a failed connection disagree about, as a predicate of the server; empty if nothing."""
    what, address = str(error), httpx.URL(url)
    if "CERTIFICATE_VERIFY_FAILED" in what:
        if "mismatch" in what:
            return f"has a certificate for another name than {address.host}; use its name in `url`"
        return "has a certificate of an unknown authority; name its file in `ca_file`"
    if address.scheme == "https" and NOT_TLS.search(what):
        return "does not use TLS; write http:// in `url`, or start it with --certificate and --key"
    closed = isinstance(error, httpx.RemoteProtocolError | httpx.ReadError)
    if address.scheme == "http" and closed and _speaks_tls(address):
        return "uses TLS; write https:// in `url`, and the file of its certificate in `ca_file`"
    return ""


def _speaks_tls(address: httpx.URL) -> bool:
    """Whether a TLS handshake succeeds. Nothing is sent after it, so the certificate does not matter."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection((address.host, address.port or 80), HANDSHAKE_S) as plain:
            context.wrap_socket(plain, server_hostname=address.host).close()
    except OSError:  # ssl.SSLError is one
        return False
    return True


def post_with_retries(
    client: httpx.Client, settings: ServerSettings, path: str, body: bytes, sleep: Callable[[float], None]
) -> httpx.Response:
    """The response of the server; retries temporary failures, doubling the wait each time, or NoResponseError.

    It waits longer if the server asks for it, but never longer than `max_backoff_s`.
    """
    failure, asked_s = "", 0.0
    for attempt in range(settings.retries + 1):
        if attempt:
            sleep(backoff_s(settings, attempt, asked_s))
        try:
            response = client.post(f"{settings.url}{path}", content=body)
        except httpx.TransportError as error:
            failure, asked_s = describe_failure(settings.url, error), 0.0
            continue
        if response.status_code not in RETRIED_STATUS:
            return response
        failure, asked_s = f"status {response.status_code}", retry_after_s(response)
    attempts = settings.retries + 1
    raise NoResponseError(f"{settings.url} did not respond in {attempts} attempts, last: {failure}")


def backoff_s(settings: ServerSettings, attempt: int, asked_s: float = 0.0) -> float:
    """The seconds to wait before this retry, from 1: doubles each time; longer if the server has asked for it."""
    return min(settings.max_backoff_s, max(asked_s, settings.backoff_s * 2.0 ** (attempt - 1)))


def retry_after_s(response: httpx.Response) -> float:
    """The seconds that the server asks to wait; 0 if it gives none, or a date."""
    text = response.headers.get("Retry-After", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
