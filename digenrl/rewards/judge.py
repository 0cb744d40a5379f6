"""Scores by a vision-language model behind an OpenAI-style chat server, one request per sample."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from torch import Tensor

from digenrl.config.rewards.judge import COST_PARTS, JudgeTemplate
from digenrl.config.rewards.table import JudgeSettings, judge_template
from digenrl.rewards.contract import SOURCE_IMAGES, Metadata, Reward, RewardBatch, RewardError, as_pil, as_uint8
from digenrl.rewards.parts.judge_answers import NoScoreError, Usage, answer_schema, read_reply, score_in
from digenrl.rewards.parts.judge_cache import AnswerCache
from digenrl.rewards.serving.http_client import backoff_s, describe_failure, make_client, retry_after_s
from digenrl.rewards.serving.http_messages import encode_png

_log = logging.getLogger(__name__)
REQUEST_TIMEOUT = 408  # the client error that may pass, besides 429


class _AttemptError(Exception):
    """A sample has no score. `retry` says whether asking again may help, and how long the server asks to wait."""

    def __init__(self, reason: str, retry: bool, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.retry, self.wait_s = retry, wait_s


@dataclass(slots=True)
class _Judged:
    """One sample: its score, or why there is none, and what it has cost, retries included."""

    score: float = 0.0
    failure: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    requests: int = 0
    cached: int = 0


class JudgeReward(Reward):
    """Asks for every sample, several at a time. Parts: the tokens and requests of each sample, see `COST_PARTS`.

    Retries what may pass. A sample without a score after that is an error, like any other failed reward.
    """

    def __init__(
        self, settings: JudgeSettings, token: str = "", sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__(settings.shown_as)
        self.settings, self.template = settings, judge_template(settings)
        self._sleep = sleep
        self._client = make_client(settings, token, connections=settings.concurrency)
        self._cache = None if settings.cache is None else AnswerCache(Path(settings.cache))
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="judge")

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        frames_BFCHW = as_uint8(pixels_BFCHW[:, :: self.settings.frame_stride])
        # All of them before the first is paid for.
        questions = [self._question(row, prompts[row], metadata[row]) for row in range(len(prompts))]
        judged = list(self._threads.map(self._judge, questions, frames_BFCHW))
        failed = tuple(row for row, one in enumerate(judged) if one.failure)
        if failed:
            raise RewardError(self.label, judged[failed[0]].failure, failed)
        parts = {name: tuple(float(getattr(one, name)) for one in judged) for name in COST_PARTS}
        return RewardBatch(tuple(one.score for one in judged), parts)

    def _question(self, row: int, prompt: str, metadata: Metadata) -> list[dict[str, Any]]:
        """The text, and the source image if there is one."""
        try:
            return question(self.template, prompt, metadata)
        except ValueError as error:
            raise RewardError(self.label, str(error), (row,)) from None

    def _judge(self, asked: Sequence[dict[str, Any]], frames_FCHW: Tensor) -> _Judged:
        """Asks about one sample until there is a score or no attempt is left. Runs in a thread."""
        request = self._request([*asked, *(_image_part(image) for image in as_pil(frames_FCHW))])
        judged, wait_s = _Judged(), 0.0
        if self._score_kept(request, judged):
            return judged
        for attempt in range(self.settings.retries + 1):
            if attempt:
                self._sleep(backoff_s(self.settings, attempt, wait_s))
            try:
                answer = self._ask(request, judged)
            except _AttemptError as error:
                judged.failure, wait_s = f"{error} (attempt {attempt + 1})", error.wait_s
                if not error.retry:
                    break
            else:
                judged.failure = ""
                self._keep(request, answer)
                break
        return judged

    def _request(self, content: Sequence[dict[str, Any]]) -> bytes:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": self.settings.max_tokens,
            "temperature": self.settings.temperature,
        }
        if self.settings.structured:
            body["response_format"] = answer_schema(self.template.answer)
        return json.dumps(body, sort_keys=True).encode()

    def _ask(self, request: bytes, judged: _Judged) -> str:
        """One attempt: the answer, whose score and cost are added to `judged`."""
        judged.requests += 1
        try:
            response = self._client.post(f"{self.settings.url}/chat/completions", content=request)
        except httpx.TransportError as error:
            why = describe_failure(self.settings.url, error)
            raise _AttemptError(f"{self.settings.url}: {why}", retry=True) from None
        if response.status_code != httpx.codes.OK:
            raise self._refused(response)
        try:
            reply = read_reply(response.content)
            usage = reply.usage or Usage()
            judged.prompt_tokens += usage.prompt_tokens or 0
            judged.completion_tokens += usage.completion_tokens or 0
            answer = reply.answer()
            judged.score = score_in(answer, self.template.answer)
        except NoScoreError as error:
            raise _AttemptError(str(error), retry=True) from None
        return answer

    def _refused(self, response: httpx.Response) -> _AttemptError:
        status = response.status_code
        may_pass = status >= 500 or status in (httpx.codes.TOO_MANY_REQUESTS, REQUEST_TIMEOUT)
        text = " ".join(response.text.split())[:200]
        return _AttemptError(f"{self.settings.url} answered {status}: {text}", may_pass, retry_after_s(response))

    def _score_kept(self, request: bytes, judged: _Judged) -> bool:
        """Whether the cache has the score. An answer that this recipe's format does not accept is asked again."""
        answer = None if self._cache is None else self._cache.get(request)
        if answer is None:
            return False
        try:
            judged.score = score_in(answer, self.template.answer)
        except NoScoreError:
            return False
        judged.cached = 1
        return True

    def _keep(self, request: bytes, answer: str) -> None:
        if self._cache is None:
            return
        try:
            self._cache.put(request, answer)
        except OSError as error:
            _log.warning("reward '%s': an answer was not kept in %s: %s", self.label, self.settings.cache, error)


def question(template: JudgeTemplate, prompt: str, metadata: Metadata) -> list[dict[str, Any]]:
    """The text and the source images for one sample; raises ValueError if its metadata lacks what they need.

    No file is opened here: on a server, the metadata are a client's.
    """
    parts: list[dict[str, Any]] = [{"type": "text", "text": template.question(prompt, metadata)}]
    if template.source_image is None:
        return parts
    if SOURCE_IMAGES not in metadata:
        raise ValueError(
            "has no source images, and a path in its metadata is not opened here; the client sends the images: "
            f"set `source_image: {template.source_image}` of the reward `http`, or `source_images` of the request"
        )
    return [*parts, *(_image_part(image) for image in as_pil(map(as_uint8, metadata[SOURCE_IMAGES])))]


def _image_part(image: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encode_png(image)}"}}


def build(settings: JudgeSettings) -> JudgeReward:
    """Creates the client; reads the template, and the token from the environment."""
    return JudgeReward(settings, settings.read_token())
