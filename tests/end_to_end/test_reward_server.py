"""A real server and client on one machine: same scores as in process, and errors that name the sample."""

from __future__ import annotations

import base64
import json
import math
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from reward_serving import TOKEN, serving
from tiny_rewards import tiny_settings
from torch import Tensor

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.table import HttpSettings, parse_rewards
from digenrl.rewards.building import build_reward, build_rewards
from digenrl.rewards.contract import RewardBatch, RewardError
from digenrl.rewards.function import FunctionReward
from digenrl.rewards.http import HttpReward, check_server
from digenrl.rewards.serving import http_messages
from digenrl.rewards.serving.http_messages import Limits
from digenrl.rewards.serving.server import TlsFiles, create_app, serve, token_for

PIXELS = torch.rand(5, 2, 3, 24, 40, generator=torch.Generator().manual_seed(1))
PROMPTS = ["one", "two", "three — drei", "four", "five"]
METADATA: list[dict[str, Any]] = [{"text": "a", "weight": 0.5, "tags": ["x", None]}, {}, {}, {}, {}]
AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


def moody(pixels: Tensor, prompts: list[str], metadata: list[dict[str, Any]]) -> RewardBatch:
    """Fails in the way that the metadata says."""
    moods = [one.get("mood") for one in metadata]
    if "raise" in moods:
        raise ZeroDivisionError("a bad day")
    values = tuple(
        math.nan if mood == "nan" else float(len(prompt)) for mood, prompt in zip(moods, prompts, strict=True)
    )
    return RewardBatch(values)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the moody reward with small limits."""
    limits = Limits(
        body_bytes=40_000, samples=4, frames_per_sample=2, pixels_per_frame=24 * 40, pixels_in_total=6 * 24 * 40
    )
    with serving(FunctionReward("moody", moody, {}), limits) as address:
        yield address


def client(url: str, token: str = TOKEN, **settings: Any) -> HttpReward:
    return HttpReward(HttpSettings(url=url, backoff_s=0.01, **settings), token)


def png(width: int = 8, height: int = 8, mode: str = "RGB", kind: str = "PNG") -> str:
    file = BytesIO()
    Image.new(mode, (width, height)).save(file, format=kind)
    return base64.b64encode(file.getvalue()).decode()


def sample(*frames: str) -> dict[str, Any]:
    return {"prompt": "p", "frames": list(frames or (png(),))}


def post(url: str, *samples: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}/score", json={"samples": samples}, headers=AUTHORIZED, trust_env=False)


def test_scores_over_http_are_the_scores_in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clip = tiny_settings("pickscore", tmp_path).model_copy(update={"weight": 0.25})
    reward = build_rewards([*parse_rewards("jpeg_incompressibility"), clip])
    here = reward.score(PIXELS, PROMPTS, METADATA)
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", TOKEN)
    with serving(reward) as url:
        there = build_reward(HttpSettings(url=url)).score(PIXELS, PROMPTS, METADATA)
        in_pieces = client(url, batch_size=2).score(PIXELS, PROMPTS, METADATA)
    assert there == here
    assert in_pieces.values == pytest.approx(here.values, rel=1e-4)
    assert list(in_pieces.parts) == list(here.parts)


def test_prompts_metadata_and_frames_arrive_as_they_were_sent() -> None:
    seen: list[Any] = []

    def witness(pixels: Tensor, prompts: object, metadata: object) -> list[float]:
        seen.append((pixels, prompts, metadata))
        return [0.0] * len(pixels)

    with serving(FunctionReward("witness", witness, {})) as url:
        client(url).score(PIXELS, PROMPTS, METADATA)
        client(url, frame_stride=2).score(PIXELS, PROMPTS, METADATA)
    pixels, prompts, metadata = seen[0]
    assert torch.equal(pixels, (PIXELS * 255).round() / 255)
    assert (prompts, metadata) == (PROMPTS, METADATA)
    assert torch.equal(seen[1][0], pixels[:, :1])


def test_large_samples_are_sent_in_more_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_messages, "PIXELS_PER_REQUEST", 5 * 24 * 40)
    sources: list[dict[str, Any]] = [{}, {}, {"source_images": (torch.rand(3, 24, 80),)}, {}, {}]
    rows = [(each.start, each.stop) for each in http_messages.requests_of(PIXELS, sources, 16)]
    assert rows == [(0, 2), (2, 3), (3, 5)]
    monkeypatch.setattr(http_messages, "PIXELS_PER_REQUEST", 1)
    assert len(list(http_messages.requests_of(PIXELS, METADATA, 16))) == 5
    with serving(FunctionReward("moody", moody, {})) as url:
        assert client(url).score(PIXELS, PROMPTS, METADATA).values == tuple(len(prompt) for prompt in PROMPTS)


def test_a_wrong_token_is_rejected_before_the_body_is_read(url: str) -> None:
    with pytest.raises(RewardError, match="401"):
        client(url, token="another token").score(PIXELS[:1], PROMPTS[:1], METADATA[:1])
    for headers in (
        {},
        {"Authorization": TOKEN},
        {"Authorization": "Bearer x"},
        {"Authorization": f"Basic {TOKEN}"},
    ):
        response = httpx.post(f"{url}/score", content=b"x" * 90_000, headers=headers, trust_env=False)
        assert response.status_code == 401
        assert response.headers["WWW-Authenticate"] == "Bearer"


def test_a_server_that_refuses_every_request_is_reported_before_the_run(
    url: str, tls: TlsFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(address: str, token: str = TOKEN) -> None:
        monkeypatch.setenv("DIGENRL_REWARD_TOKEN", token)
        check_server(HttpSettings(url=address))

    check(url)
    check("http://127.0.0.1:9")  # which may be started later
    with pytest.raises(ConfigError, match="refuses the token; set DIGENRL_REWARD_TOKEN"):
        check(url, "another token")
    with pytest.raises(ConfigError, match="no /score"):
        check(f"{url}/score")
    with pytest.raises(ConfigError, match="does not use TLS; write http://"):
        check(url.replace("http", "https"))
    with serving(FunctionReward("moody", moody, {}), tls=tls) as secured:
        for address, what in (
            (secured, "ca_file"),
            (secured.replace("https", "http"), "uses TLS; write https://"),
        ):
            with pytest.raises(ConfigError, match=what):
                check(address)


def test_health_is_public_and_says_nothing_else(url: str) -> None:
    response = httpx.get(f"{url}/health", trust_env=False)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    for path in ("/docs", "/openapi.json", "/redoc"):
        assert httpx.get(url + path, trust_env=False).status_code == 404


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([sample("not base64!")], "samples.0.frames.0: "),
        ([sample(), sample(base64.b64encode(b"hello").decode())], "samples.1.frames.0: "),
        ([sample(png()[: len(png()) // 2])], "samples.0.frames.0: "),
        ([sample(png(kind="JPEG"))], "samples.0.frames.0: "),
        ([sample(base64.b64encode(pickle.dumps([1])).decode())], "samples.0.frames.0: "),
        ([sample(png(mode="RGBA"))], "samples.0.frames.0: "),
        ([sample(png(41, 24))], "samples.0.frames.0: 41 x 24"),
        ([sample(png(), png(9, 8))], "samples.0.frames.1: (3, 8, 9)"),
        ([sample(), sample(png(), png())], "samples.1: "),
        ([sample(png(), png(), png())], "3 frames are more than the 2 allowed"),
        ([sample()] * 5, "5 samples are more than the 4 allowed"),
        ([sample(png(40, 24), png(40, 24))] * 4, "samples.3.frames.0: more than 5760 pixels in one request"),
        ([], "samples: "),
        ([{"prompt": "p", "frames": []}], "samples.0.frames: "),
        ([{"frames": [png()]}], "samples.0.prompt: "),
    ],
)
def test_a_malformed_request_is_422_and_names_the_place(
    url: str, samples: list[dict[str, Any]], message: str
) -> None:
    response = post(url, *samples)
    assert response.status_code == 422
    assert response.json()["error"].startswith(message)


def test_a_body_that_is_not_json_is_422_and_one_that_is_too_large_is_413(url: str) -> None:
    broken = httpx.post(f"{url}/score", content=b"\x80\x04K\x01.", headers=AUTHORIZED, trust_env=False)
    assert (broken.status_code, "JSON" in broken.json()["error"]) == (422, True)

    def unannounced() -> Iterator[bytes]:
        for _ in range(50):
            yield b"x" * 1000

    for content in (b"x" * 50_000, unannounced()):
        response = httpx.post(f"{url}/score", content=content, headers=AUTHORIZED, trust_env=False)
        assert response.status_code == 413


def test_a_failing_reward_is_an_error_not_a_number(url: str) -> None:
    with pytest.raises(RewardError, match=r"500: .*'moody', all samples: ZeroDivisionError"):
        client(url, batch_size=2).score(PIXELS[:2], PROMPTS[:2], [{}, {"mood": "raise"}])
    with pytest.raises(RewardError, match=r"500: .*nan") as caught:
        client(url, batch_size=2).score(PIXELS[:4], PROMPTS[:4], [{}, {}, {}, {"mood": "nan"}])
    assert caught.value.samples == (3,)
    assert client(url, batch_size=2).score(PIXELS[:2], PROMPTS[:2], METADATA[:2]).values == (3.0, 3.0)


def test_metadata_that_json_cannot_represent_is_an_error(url: str) -> None:
    with pytest.raises(RewardError, match=r"metadata.*JSON"):
        client(url).score(PIXELS[:1], PROMPTS[:1], [{"thing": object()}])


class Scripted(BaseHTTPRequestHandler):
    """Responds with the list of (status, body) of its server, repeating the last one."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        script: list[tuple[int, bytes]] = self.server.script  # type: ignore[attr-defined]
        self.server.asked += 1  # type: ignore[attr-defined]
        status, body = script.pop(0) if len(script) > 1 else script[0]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for name, value in getattr(self.server, "headers", {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def scripted() -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Scripted)
    server.asked = 0  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def ask(
    server: HTTPServer, *script: tuple[int, bytes], retries: int = 3
) -> tuple[RewardBatch | RewardError, list[float]]:
    """The result of a client for these responses, and its waits between attempts."""
    server.script = list(script)  # type: ignore[attr-defined]
    server.asked = 0  # type: ignore[attr-defined]
    waits: list[float] = []
    settings = HttpSettings(
        url=f"http://127.0.0.1:{server.server_port}", retries=retries, backoff_s=0.5, max_backoff_s=1.5
    )
    try:
        return HttpReward(settings, TOKEN, sleep=waits.append).score(PIXELS[:2], PROMPTS[:2], METADATA[:2]), waits
    except RewardError as error:
        return error, waits


GOOD = (200, b'{"values": [1, 2.5]}')


def test_temporary_failures_are_retried_after_growing_waits(scripted: HTTPServer) -> None:
    batch, waits = ask(scripted, (503, b""), (502, b""), (429, b""), GOOD)
    assert isinstance(batch, RewardBatch)
    assert batch.values == (1.0, 2.5)
    assert waits == [0.5, 1.0, 1.5]


def test_retries_are_bounded_and_the_error_has_the_last_failure(scripted: HTTPServer) -> None:
    error, waits = ask(scripted, (503, b""), retries=2)
    assert "3 attempts, last: status 503" in str(error)
    assert waits == [0.5, 1.0]


def test_an_unreachable_server_is_an_error_after_the_last_attempt() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(RewardError, match="2 attempts, last: ConnectError"):
            client(address, retries=1).score(PIXELS, PROMPTS, METADATA)


def test_a_server_that_does_not_respond_in_time_is_an_error() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RewardError, match="ReadTimeout"):
            client(address, retries=0, timeout_s=0.2).score(PIXELS, PROMPTS, METADATA)


@pytest.mark.parametrize(
    "body",
    [b'{"values": [1, NaN]}', b'{"values": [1, "2"]}', b'{"values": [1, null]}', b'{"values": [true, 1]}',
     b"<html>", b'{"values": [1]}', b'{"values": [1, 2], "parts": {"p": [1]}}', b'{"values": [1, 1e999]}'],
)  # fmt: skip
def test_a_reply_without_finite_numbers_is_an_error_and_not_retried(scripted: HTTPServer, body: bytes) -> None:
    error, waits = ask(scripted, (200, body), GOOD)
    assert isinstance(error, RewardError)
    assert error.samples == (0, 1)
    assert waits == []


@pytest.mark.parametrize("status", [302, 400, 401, 404, 422, 500])
def test_a_refusal_is_not_retried(scripted: HTTPServer, status: int) -> None:
    error, waits = ask(scripted, (status, json.dumps({"error": "no", "samples": [1]}).encode()), GOOD)
    assert isinstance(error, RewardError)
    assert f"{status}: no" in str(error)
    assert (error.samples, waits) == ((1,), [])


def test_a_token_is_needed_if_other_machines_can_reach_the_server() -> None:
    reward = FunctionReward("moody", moody, {})
    for host in ("0.0.0.0", "::", "192.168.0.7", "example.org"):
        with pytest.raises(ConfigError, match="token"):
            serve(reward, host=host, port=1)
    with pytest.raises(ConfigError, match="at least 16"):
        serve(reward, host="0.0.0.0", port=1, token="short")
    with pytest.raises(ValueError, match="needs a token"):
        create_app(reward, "")
    assert token_for("0.0.0.0", "0123456789abcdef") == "0123456789abcdef"
    first, second = token_for("127.0.0.1", None), token_for("localhost", None)
    assert first != second
    assert len(first) >= 32


def test_the_error_for_a_missing_token_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ValueError, match=r"MY_TOKEN is not listed .*DIGENRL_TOKEN_ENV=MY_TOKEN"):
        HttpSettings(url="http://127.0.0.1:9", token_env="MY_TOKEN")
    with pytest.raises(ValueError, match="not a token itself") as refused:
        HttpSettings(url="http://127.0.0.1:9", token_env="hf-secret")
    assert "hf-secret" not in str(refused.value.errors()[0]["msg"])
    monkeypatch.setenv("DIGENRL_TOKEN_ENV", "OTHER, MY_TOKEN")
    settings = HttpSettings(url="http://127.0.0.1:9", token_env="MY_TOKEN")
    with pytest.raises(ConfigError, match="MY_TOKEN"):
        build_reward(settings)
    monkeypatch.setenv("MY_TOKEN", "secret\n")
    with pytest.raises(ConfigError, match="ASCII") as caught:
        build_reward(settings)
    assert "secret" not in str(caught.value)


def test_the_client_waits_as_long_as_the_server_asks_it_to(scripted: HTTPServer) -> None:
    scripted.headers = {"Retry-After": "1"}  # type: ignore[attr-defined]
    batch, waits = ask(scripted, (503, b""), (503, b""), (503, b""), GOOD)
    assert isinstance(batch, RewardBatch) and waits == [1.0, 1.0, 1.5]
    scripted.headers = {"Retry-After": "3600"}  # type: ignore[attr-defined]
    assert ask(scripted, (503, b""), GOOD)[1] == [1.5], "never longer than max_backoff_s"


def test_a_request_whose_client_has_given_up_is_not_scored() -> None:
    gate, entered, scored = threading.Event(), threading.Event(), []

    def slow(pixels: Tensor, prompts: list[str], metadata: object) -> list[float]:
        scored.extend(prompts)
        entered.set()
        gate.wait(60)
        return [0.0] * len(pixels)

    with serving(FunctionReward("slow", slow, {})) as url:
        first = threading.Thread(target=post, args=(url, sample()))
        first.start()
        assert entered.wait(60)
        with pytest.raises(RewardError, match="ReadTimeout"):
            client(url, retries=0, timeout_s=0.3).score(PIXELS[:1], ["given up"], METADATA[:1])
        gate.set()
        first.join()
        client(url).score(PIXELS[:1], ["last"], METADATA[:1])
    assert scored == ["p", "last"]


def test_an_overloaded_server_answers_503_and_its_health_stays_good() -> None:
    gate, entered = threading.Event(), threading.Event()

    def slow(pixels: Tensor, prompts: object, metadata: object) -> list[float]:
        entered.set()
        gate.wait(60)
        return [0.0] * len(pixels)

    with serving(FunctionReward("slow", slow, {}), Limits(waiting_requests=1)) as url:
        first = threading.Thread(target=post, args=(url, sample()))
        first.start()
        assert entered.wait(60)
        refused = post(url, sample())
        healthy = httpx.get(f"{url}/health", trust_env=False)
        gate.set()
        first.join()
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert healthy.status_code == 200
        assert post(url, sample()).status_code == 200


def test_hundreds_of_hostile_connections_do_not_disturb_clients_with_the_token() -> None:
    body = json.dumps({"samples": [sample()]})
    hostile: list[socket.socket] = []
    openings = [
        b"",
        b"POST /score HT",
        b"POST /score HTTP/1.1\r\nHost: a\r\n",
        b"\x16\x03\x01",
        b"GET /health HTTP/1.1\r\n",
    ]

    def attack(port: int) -> None:
        for opening in openings:
            one = socket.create_connection(("127.0.0.1", port), timeout=60)
            one.sendall(opening)
            hostile.append(one)

    def honest(port: int) -> int:
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", "/score", body, AUTHORIZED)
        status = connection.getresponse().status
        connection.close()
        return status

    with serving(FunctionReward("moody", moody, {})) as url, ThreadPoolExecutor(8) as pool:
        port = int(url.rpartition(":")[2])
        statuses = []
        for _ in range(100):  # 500 hostile and 500 honest connections
            attack(port)
            statuses += list(pool.map(honest, [port] * 5))
        for each in hostile:
            each.close()
    assert statuses == [200] * 500


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command, *names, *files], check=True, capture_output=True)
    return TlsFiles(certificate, key)


def test_a_server_with_a_certificate_is_reached_over_https_only(tls: TlsFiles, tmp_path: Path) -> None:
    with serving(FunctionReward("moody", moody, {}), tls=tls) as url:
        trusting = client(url, ca_file=str(tls.certificate))
        assert trusting.score(PIXELS[:1], PROMPTS[:1], METADATA[:1]).values == (3.0,)
        with pytest.raises(RewardError, match="certificate of an unknown authority"):
            client(url, retries=0).score(PIXELS[:1], PROMPTS[:1], METADATA[:1])
        with pytest.raises(RewardError, match=r"did not respond.*uses TLS"):
            client(url.replace("https", "http"), retries=0).score(PIXELS[:1], PROMPTS[:1], METADATA[:1])
    (tmp_path / "key.pem").write_text("not a key")
    with pytest.raises(ConfigError, match="not a certificate with its private key"):
        TlsFiles(tls.certificate, tmp_path / "key.pem").context()


def test_clients_that_never_complete_a_tls_handshake_are_disconnected(tls: TlsFiles) -> None:
    with serving(FunctionReward("moody", moody, {}), tls=tls) as url:
        port, ca_file = int(url.rpartition(":")[2]), str(tls.certificate)
        silent = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(300)]
        assert client(url, ca_file=ca_file).score(PIXELS[:1], PROMPTS[:1], METADATA[:1]).values == (3.0,)
        with suppress(ConnectionResetError):
            assert silent[0].recv(1) == b"", "the oldest of more than the guard allows"
        for each in silent:
            each.close()


def test_an_address_that_is_in_use_is_reported_before_anything_is_served(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(ConfigError, match="in use"):
        serve(FunctionReward("moody", moody, {}), port=other.getsockname()[1])
    assert not capsys.readouterr().out


def test_serve_in_a_separate_process_prints_a_working_token() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = (
        "from digenrl.config.rewards.table import parse_rewards\n"
        "from digenrl.rewards.building import build_rewards\n"
        "from digenrl.rewards.serving.server import serve\n"
        f"serve(build_rewards(parse_rewards('jpeg_compressibility')), port={port})\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        assert process.stdout is not None
        token = process.stdout.readline().removeprefix("token: ").strip()
        assert process.stdout.readline() == f"serving reward 'jpeg_compressibility' on http://127.0.0.1:{port}\n"
        remote = HttpReward(
            HttpSettings(url=f"http://127.0.0.1:{port}", retries=20, backoff_s=0.1), token, time.sleep
        )
        here = build_rewards(parse_rewards("jpeg_compressibility")).score(PIXELS, PROMPTS, METADATA)
        assert remote.score(PIXELS, PROMPTS, METADATA) == here
    finally:
        process.terminate()
        process.wait(timeout=30)
