"""Reads the reply of an OpenAI-style chat server, and the score in its answer."""

from __future__ import annotations

import json
import math
import re
from typing import Any

from pydantic import BaseModel, ValidationError

from digenrl.config.reading import first_problem
from digenrl.config.rewards.judge import AnswerFormat

SHOWN = 120  # characters of an answer that an error shows


class NoScoreError(ValueError):
    """The reply has no score that may be used."""


class _Message(BaseModel):
    content: str | None = None
    refusal: str | None = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class Usage(BaseModel):
    """The tokens of a reply, as far as the server reports them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class Reply(BaseModel):
    """A chat completion."""

    choices: list[_Choice]
    usage: Usage | None = None

    def answer(self) -> str:
        """The text of the answer; raises NoScoreError for a refusal, and if it is cut off or empty."""
        if not self.choices:
            raise NoScoreError("the reply has no choices")
        message, reason = self.choices[0].message, self.choices[0].finish_reason
        if message.refusal or reason == "content_filter":
            raise NoScoreError(f"the model refused: {(message.refusal or reason or '')[:SHOWN]}")
        if reason == "length":
            raise NoScoreError("the answer is cut off; raise `max_tokens`")
        if not message.content:
            raise NoScoreError("the answer is empty")
        return message.content


def read_reply(body: bytes) -> Reply:
    """The reply of the server; raises NoScoreError if it is not a chat completion."""
    try:
        return Reply.model_validate_json(body)
    except ValidationError as error:
        raise NoScoreError(f"the reply is not a chat completion: {first_problem(error, 'the body')}") from None


def score_in(answer: str, form: AnswerFormat) -> float:
    """The score in an answer; raises NoScoreError if there is none, or if it is out of range."""
    number = _field(answer, form.field) if form.field is not None else _match(answer, form.pattern or "")
    if not math.isfinite(number) or not form.lowest <= number <= form.highest:
        raise NoScoreError(f"the score {number:g} is not from {form.lowest:g} to {form.highest:g}")
    return number


def answer_schema(form: AnswerFormat) -> dict[str, Any]:
    """`response_format` for servers that can enforce a JSON schema."""
    assert form.field is not None
    properties = {
        "reasoning": {"type": "string"},
        form.field: {"type": "number", "minimum": form.lowest, "maximum": form.highest},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "score", "strict": True, "schema": schema}}


def _field(answer: str, field: str) -> float:
    """The number under `field` in the last JSON object of the answer that has this key."""
    found = [one for one in _objects(answer) if field in one]
    if not found:
        raise NoScoreError(f"no JSON object with the key '{field}' in the answer {answer[:SHOWN]!r}")
    value = found[-1][field]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise NoScoreError(f"'{field}' must be a number, got {value!r}")
    try:
        return float(value)
    except OverflowError:
        raise NoScoreError(f"'{field}' is too large a number") from None


def _objects(answer: str) -> list[dict[str, Any]]:
    """All JSON objects in a text, outermost only."""
    decoder, found, at = json.JSONDecoder(), [], answer.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(answer, at)
            found.append(value)
        except ValueError:
            end = at + 1
        except RecursionError:  # nested without end
            break
        at = answer.find("{", end)
    return found


def _match(answer: str, pattern: str) -> float:
    """The number in the last match of the pattern."""
    found = re.findall(pattern, answer)
    if not found:
        raise NoScoreError(f"no match of `pattern` in the answer {answer[:SHOWN]!r}")
    try:
        return float(found[-1])
    except ValueError:
        raise NoScoreError(f"the pattern's group must be a number, got {found[-1]!r}") from None
