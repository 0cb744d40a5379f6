"""A reward on a server: another machine, or a separate environment."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import httpx
from pydantic import ValidationError
from torch import Tensor

from digenrl.config.reading import ConfigError, first_problem
from digenrl.config.rewards.table import HttpSettings
from digenrl.rewards.contract import Metadata, Reward, RewardBatch, RewardError
from digenrl.rewards.serving.http_client import NoResponseError, make_client, post_with_retries, tls_mismatch
from digenrl.rewards.serving.http_messages import Refusal, ScoreReply, encode_request, requests_of

CHECK_TIMEOUT_S = 5.0
REFUSALS = {  # by status
    401: "refuses the token; set {token_env} to the one that the server has",
    403: "refuses the token; set {token_env} to the one that the server has",
    404: "has no /score; give the address that `digenrl reward serve` prints as `url`",
}


class HttpReward(Reward):
    """Sends samples to a server run by `digenrl reward serve`, or any that implements http_messages.py.

    Pixels are sent as 8-bit PNG, and only to the configured address: no proxy, no redirect.
    """

    def __init__(self, settings: HttpSettings, token: str, sleep: Callable[[float], None] = time.sleep) -> None:
        super().__init__(settings.shown_as)
        self.settings = settings
        self._sleep = sleep
        self._client = make_client(settings, token)

    def _score(self, pixels_BFCHW: Tensor, prompts: Sequence[str], metadata: Sequence[Metadata]) -> RewardBatch:
        sent_BFCHW = pixels_BFCHW[:, :: self.settings.frame_stride]
        replies = []
        for rows in requests_of(sent_BFCHW, metadata, self.settings.batch_size):
            replies.append(self._ask(encode_request(sent_BFCHW[rows], prompts[rows], metadata[rows]), rows))
        if any(reply.parts.keys() != replies[0].parts.keys() for reply in replies):
            raise RewardError(self.label, "the parts differ between the replies of the server")
        parts = {name: tuple(n for reply in replies for n in reply.parts[name]) for name in replies[0].parts}
        return RewardBatch(tuple(value for reply in replies for value in reply.values), parts)

    def _ask(self, body: bytes, rows: slice) -> ScoreReply:
        """The reply for these rows. The samples of a RewardError are positions in the batch."""
        try:
            response = post_with_retries(self._client, self.settings, "/score", body, self._sleep)
        except NoResponseError as error:
            raise self._failed(str(error), rows) from None
        if response.status_code != httpx.codes.OK:
            raise self._refused(response, rows)
        try:
            reply = ScoreReply.model_validate_json(response.content)
        except ValidationError as error:
            problem = first_problem(error, "the reply")
            raise self._failed(f"the reply of {self.settings.url} has no scores: {problem}", rows) from None
        for numbers in (reply.values, *reply.parts.values()):
            if len(numbers) != rows.stop - rows.start:
                raise self._failed(
                    f"{self.settings.url} returned {len(numbers)} scores for {rows.stop - rows.start} samples",
                    rows,
                )
        return reply

    def _refused(self, response: httpx.Response, rows: slice) -> RewardError:
        try:
            refusal = Refusal.model_validate_json(response.content)
        except ValidationError:
            refusal = Refusal(error=response.text[:200])
        count = rows.stop - rows.start
        named = [index for index in refusal.samples if 0 <= index < count]
        reason = f"{self.settings.url} answered {response.status_code}: {refusal.error}"
        if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
            reason += "; lower batch_size, or raise frame_stride"
        return self._failed(reason, rows, named or range(count))

    def _failed(self, reason: str, rows: slice, within: Sequence[int] | None = None) -> RewardError:
        indices = range(rows.stop - rows.start) if within is None else within
        return RewardError(self.label, reason, tuple(rows.start + index for index in indices))


def check_server(settings: HttpSettings) -> None:
    """Raises ConfigError if the server refuses this client, whatever it sends.

    It is asked to score no samples. One that does not respond may be started later.
    """
    why = ""
    with make_client(settings, settings.read_token()) as client:
        try:
            response = client.post(f"{settings.url}/score", content=b'{"samples": []}', timeout=CHECK_TIMEOUT_S)
            why = REFUSALS.get(response.status_code, "")
        except httpx.TransportError as error:
            why = tls_mismatch(settings.url, error)
    if why:
        what = why.format(token_env=settings.token_env)
        raise ConfigError(f"reward '{settings.shown_as}': the server at {settings.url} {what}")


def build(settings: HttpSettings) -> HttpReward:
    """Creates the client; the token must be in the environment."""
    return HttpReward(settings, settings.read_token())
