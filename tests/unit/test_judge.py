"""The judge against a real chat server: what it asks, what it accepts, what it retries, and what it keeps."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from judge_serving import ChatServer, Said, completion, images_of, judging, text_of
from PIL import Image
from reward_serving import TOKEN, serving

from digenrl.config.reading import ConfigError
from digenrl.config.rewards.judge import TEMPLATES
from digenrl.config.rewards.table import HttpSettings, JudgeSettings, judge_template, parse_reward
from digenrl.rewards.building import build_reward
from digenrl.rewards.contract import RewardBatch, RewardError
from digenrl.rewards.judge import JudgeReward
from digenrl.rewards.parts.judge_answers import score_in

PIXELS = torch.stack([torch.full((2, 3, 6, 8), value) for value in (0.2, 0.4, 1.0)])
PROMPTS = ['a "cat"', 'a "dog"', 'an "owl"']
NOTHING: list[dict[str, Any]] = [{}, {}, {}]


@pytest.fixture(scope="module")
def running() -> Iterator[ChatServer]:
    with judging() as server:
        yield server


@pytest.fixture
def server(running: ChatServer) -> ChatServer:
    """Without what earlier tests have left."""
    running.script, running.requests, running.tokens, running.meeting = [], [], [], None
    return running


def settings_of(server: ChatServer, **more: Any) -> JudgeSettings:
    content = {"name": "judge", "url": server.url, "model": "vlm", "template": "video_quality", **more}
    settings = parse_reward(content)
    assert isinstance(settings, JudgeSettings)
    return settings


def ask_once(
    server: ChatServer, *script: Said, retries: int = 2, **more: Any
) -> tuple[RewardBatch | RewardError, list[float]]:
    """The result for one sample and these first responses, and the waits between attempts."""
    waits: list[float] = []
    server.script = list(script)
    settings = settings_of(server, retries=retries, backoff_s=0.5, max_backoff_s=20, **more)
    reward = JudgeReward(settings, sleep=waits.append)
    try:
        return reward.score(PIXELS[:1], PROMPTS[:1], NOTHING[:1]), waits
    except RewardError as error:
        return error, waits


def test_every_sample_is_asked_about_with_its_frames_and_counts_its_tokens(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DIGENRL_JUDGE_TOKEN", "a secret")
    batch = build_reward(settings_of(server)).score(PIXELS, PROMPTS, NOTHING)
    assert batch.values == pytest.approx((2.0, 4.0, 10.0))
    assert batch.parts == {
        "prompt_tokens": (100.0,) * 3,
        "completion_tokens": (10.0,) * 3,
        "requests": (1.0,) * 3,
        "cached": (0.0,) * 3,
    }
    assert server.tokens == ["Bearer a secret"] * 3
    asked = {text_of(request): request for request in server.requests}
    assert [sum(prompt in text for text in asked) for prompt in PROMPTS] == [1, 1, 1]
    for request in server.requests:
        assert request["model"] == "vlm" and request["temperature"] == 0.0
        assert [image.shape for image in images_of(request)] == [(6, 8, 3)] * 2
    build_reward(settings_of(server, frame_stride=2, token_env=None)).score(PIXELS, PROMPTS, NOTHING)
    assert len(images_of(server.requests[-1])) == 1
    assert server.tokens[-1] is None


UNUSABLE = {
    "malformed": Said(b"<html>busy</html>"),
    "no choices": Said(b'{"choices": []}'),
    "empty": completion(None),
    "refusal": completion(None, refusal="I cannot help with this"),
    "filtered": completion("", finish_reason="content_filter"),
    "cut off": completion('{"score": 3}', finish_reason="length"),
    "no JSON": completion("a fine video: 7 of 10"),
    "other key": completion('{"rating": 7}'),
    "text": completion('{"score": "7"}'),
    "boolean": completion('{"score": true}'),
    "null": completion('{"score": null}'),
    "not finite": completion('{"score": NaN}'),
    "too large": completion('{"score": 11}'),
    "huge": completion('{"score": 1' + "0" * 400 + "}"),
    "nested": completion('{"score":' * 3000),
    "too small": completion('{"score": -0.5}'),
    "500": Said(b"out of memory", status=500),
    "503": Said(b"", status=503),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_what_is_no_score_is_retried_and_then_an_error_never_a_number(server: ChatServer, kind: str) -> None:
    batch, waits = ask_once(server, UNUSABLE[kind], completion('{"score": 3}'))
    assert isinstance(batch, RewardBatch) and batch.values == (3.0,)
    assert (batch.parts["requests"], waits) == ((2.0,), [0.5])
    error, waits = ask_once(server, *[UNUSABLE[kind]] * 3)
    assert isinstance(error, RewardError) and error.samples == (0,)
    assert "attempt 3" in error.reason and waits == [0.5, 1.0]
    assert server.script == []


def test_the_tokens_of_retries_are_counted(server: ChatServer) -> None:
    batch, _ = ask_once(server, completion("no idea"), completion('{"score": 3}'))
    assert isinstance(batch, RewardBatch)
    assert (batch.parts["prompt_tokens"], batch.parts["completion_tokens"]) == ((200.0,), (20.0,))
    uncounted = b'{"choices": [{"message": {"content": "{\\"score\\": 3}"}}], "usage": {"prompt_tokens": null}}'
    batch, _ = ask_once(server, Said(uncounted))
    assert isinstance(batch, RewardBatch)
    assert (batch.values, batch.parts["prompt_tokens"]) == ((3.0,), (0.0,))


def test_a_rate_limit_waits_as_long_as_the_server_asks_up_to_the_longest_wait(server: ChatServer) -> None:
    limited = [Said(b"slow down", status=429, retry_after=text) for text in ("7", "", "999")]
    batch, waits = ask_once(server, *limited, retries=3)
    assert isinstance(batch, RewardBatch) and batch.values == pytest.approx((2.0,))
    assert waits == [7.0, 1.0, 20.0]


def test_a_server_that_does_not_respond_in_time_is_asked_again(server: ChatServer) -> None:
    released = threading.Event()
    silent = Said(b"", released=released)
    batch, waits = ask_once(
        server, silent, timeout_s=3
    )  # the second response must be faster, on a busy machine too
    error, _ = ask_once(server, silent, timeout_s=0.2, retries=0)
    released.set()
    assert isinstance(batch, RewardBatch) and batch.values == pytest.approx((2.0,))
    assert waits == [0.5]
    assert isinstance(error, RewardError) and "ReadTimeout" in error.reason


@pytest.mark.parametrize("status", [302, 400, 401, 404, 422])
def test_a_request_that_the_server_rejects_is_not_repeated(server: ChatServer, status: int) -> None:
    error, waits = ask_once(server, Said(b"wrong model", status=status))
    assert isinstance(error, RewardError) and f"{status}: wrong model" in error.reason
    assert waits == []


def test_64_requests_are_open_at_a_time_and_no_more(server: ChatServer) -> None:
    server.meeting = threading.Barrier(64, timeout=30)  # breaks unless 64 requests meet
    reward = JudgeReward(settings_of(server, retries=0))
    pixels = torch.linspace(0, 1, 128).reshape(128, 1, 1, 1, 1).expand(128, 1, 3, 4, 4)
    batch = reward.score(pixels, ["p"] * 128, [{}] * 128)
    assert batch.values == pytest.approx([row / 12.7 for row in range(128)], abs=0.02)
    server.meeting = threading.Barrier(3, timeout=0.3)
    with pytest.raises(RewardError):
        JudgeReward(settings_of(server, retries=0, concurrency=2)).score(PIXELS, PROMPTS, NOTHING)


def test_the_error_names_every_sample_without_a_score_and_the_others_are_kept(
    server: ChatServer, tmp_path: Path
) -> None:
    broken = Said(b"", status=500)
    reward = JudgeReward(settings_of(server, retries=0, concurrency=1, cache=str(tmp_path)))
    server.script = [broken, completion('{"score": 5}'), broken]
    with pytest.raises(RewardError) as caught:
        reward.score(PIXELS, PROMPTS, NOTHING)
    assert caught.value.samples == (0, 2)
    again = reward.score(PIXELS, PROMPTS, NOTHING)
    assert again.values == pytest.approx((2.0, 5.0, 10.0))
    assert again.parts["cached"] == (0.0, 1.0, 0.0)


def test_answers_are_kept_on_disk_by_model_template_prompt_and_images(server: ChatServer, tmp_path: Path) -> None:
    def requests_for(prompts: list[str] = PROMPTS, brighter: float = 0.0, **more: Any) -> int:
        reward = JudgeReward(settings_of(server, cache=str(tmp_path / "answers"), **more))
        batch = reward.score((PIXELS + brighter).clamp(0, 1), prompts, NOTHING)
        assert batch.values[0] == pytest.approx(2.0 + 10 * brighter)
        free = [count == 0 for count in batch.parts["requests"]]
        assert free == [count == 0 for count in batch.parts["prompt_tokens"]]
        return int(sum(batch.parts["requests"]))

    assert requests_for() == 3
    assert requests_for() == 0
    assert requests_for(prompts=["another", *PROMPTS[1:]]) == 1
    assert requests_for(brighter=0.2) == 2, "the brightest sample is white already"
    assert requests_for(model="other") == 3
    assert requests_for(template="ocr") == 3
    for file in (tmp_path / "answers").rglob("*.json"):
        file.write_text("damaged")
    assert requests_for() == 3
    assert requests_for(answer={"field": "score", "highest": 11}) == 0, "answers are kept, not scores"
    assert requests_for(answer={"pattern": r'"score": (.*)}'}) == 0
    assert requests_for(answer={"field": "score", "lowest": 1.99}) == 0


def test_a_pattern_takes_the_last_match(server: ChatServer) -> None:
    said = completion("I first thought Final Score: 2, but it is sharp.\n**Final Score:** 4.5")
    batch, _ = ask_once(server, said, template="unified_reward")
    assert isinstance(batch, RewardBatch) and batch.values == (4.5,)
    error, _ = ask_once(server, completion("Final Score: 9"), template="unified_reward", retries=0)
    assert isinstance(error, RewardError) and "from 1 to 5" in error.reason


def test_json_is_found_among_other_text(server: ChatServer) -> None:
    said = completion('The range {0 to 10}.\n```json\n{"detail": {"score": 1}, "score": 6.5}\n```\n')
    batch, _ = ask_once(server, said)
    assert isinstance(batch, RewardBatch) and batch.values == (6.5,)


def test_a_template_file_is_filled_with_metadata(server: ChatServer, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text('Is $animal worth $$5? Answer {"worth": 1}. $prompt')
    settings = settings_of(server, template=str(file), answer={"field": "worth"}, structured=True)
    server.script = [completion('{"reasoning": "", "worth": 8}')]
    reward = JudgeReward(settings)
    assert reward.score(PIXELS[:1], ["${animal}"], [{"animal": "a cat"}]).values == (8.0,)
    assert text_of(server.requests[0]) == 'Is a cat worth $5? Answer {"worth": 1}. ${animal}'
    schema = server.requests[0]["response_format"]["json_schema"]["schema"]
    assert schema["properties"]["worth"] == {"type": "number", "minimum": 0.0, "maximum": 10.0}
    for without in ({}, {"animal": None}):
        with pytest.raises(RewardError, match=r"\$animal") as caught:
            reward.score(PIXELS, PROMPTS, [{"animal": "x"}, without, without])
        assert caught.value.samples == (1,)
    assert len(server.requests) == 1, "nothing is asked if a question is incomplete"


def test_an_edit_is_judged_beside_its_source_images(server: ChatServer) -> None:
    reward = JudgeReward(settings_of(server, template="edit"))
    reward.score(PIXELS[:1, :1], PROMPTS[:1], [{"source_images": (torch.zeros(3, 7, 3), torch.ones(3, 2, 2))}])
    assert [image.shape for image in images_of(server.requests[0])] == [(7, 3, 3), (2, 2, 3), (6, 8, 3)]
    with pytest.raises(RewardError, match="source image") as caught:
        reward.score(PIXELS[:1], PROMPTS[:1], [{}])
    assert caught.value.samples == (0,)


def test_a_served_judge_opens_no_file_that_a_client_names(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "secret.png"
    Image.new("RGB", (5, 4)).save(secret)
    monkeypatch.setenv("DIGENRL_REWARD_TOKEN", TOKEN)
    with serving(JudgeReward(settings_of(server, template="edit"))) as url:
        client = build_reward(HttpSettings(url=url, retries=0))
        reasons = []
        for path in (secret, tmp_path / "absent.png"):
            with pytest.raises(RewardError, match="`source_image: image`") as caught:
                client.score(PIXELS[:1], PROMPTS[:1], [{"image": str(path)}])
            reasons.append(caught.value.reason)
        assert reasons[0] == reasons[1], "the answer does not depend on what the server's disk has"
        assert not server.requests
        sent = {"image": str(secret), "source_images": (torch.zeros(3, 7, 3),)}
        client.score(PIXELS[:1, :1], PROMPTS[:1], [sent])
    assert [image.shape for image in images_of(server.requests[0])] == [(7, 3, 3), (6, 8, 3)]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_shows_an_answer_in_its_own_format(server: ChatServer, name: str) -> None:
    template = judge_template(settings_of(server, template=name))
    assert set(template.placeholders) <= {"prompt", "text"}
    score_in(template.text.replace("Score: X", "Score: 3"), template.answer)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"template": "vidoe_quality"}, "'vidoe_quality'.*'video_quality'"),
        ({"template": "absent.txt"}, r"absent\.txt"),
        ({"template": "DIR/mine.txt"}, "answer: missing"),
        ({"template": "DIR/dollar.txt", "answer": {"field": "score"}}, r"dollar\.txt.*\$\$"),
        ({"answer": {}}, "answer: .*`field`.*`pattern`"),
        ({"answer": {"field": "a", "pattern": "(b)"}}, "answer: .*`field`"),
        ({"answer": {"pattern": "score"}}, "answer: .*one group"),
        ({"answer": {"pattern": "(score"}}, "answer: .*regular expression"),
        ({"answer": {"field": "a", "lowest": 5, "highest": 5}}, "answer: .*`lowest`"),
        ({"template": "unified_reward", "structured": True}, "structured: .*`pattern`"),
        ({"concurrency": 0}, "concurrency: .*0"),
        ({"url": "localhost:8000"}, "url: .*http://"),
        ({"url": "http://user:pass@host/v1"}, "token_env"),
        ({"model": None}, "model: "),
    ],
)
def test_wrong_settings_are_one_line_that_names_the_key(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    (tmp_path / "mine.txt").write_text("Rate $prompt")
    (tmp_path / "dollar.txt").write_text("Rate $ 5")
    content = {"name": "judge", "url": "http://host/v1", "model": "vlm", "template": "ocr", **change}
    content["template"] = content["template"].replace("DIR", str(tmp_path))
    with pytest.raises(ConfigError, match=f"'judge': .*{message}") as caught:
        settings = parse_reward(content)
        assert isinstance(settings, JudgeSettings)
        judge_template(settings)
    assert "\n" not in str(caught.value) and "pass" not in str(caught.value).replace("password", "")


def test_a_missing_token_is_an_error_that_names_the_variable(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DIGENRL_JUDGE_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="DIGENRL_JUDGE_TOKEN"):
        build_reward(settings_of(server))
