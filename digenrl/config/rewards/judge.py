"""How a vision-language model is asked to judge samples: templates, and the form of its answer. Needs no torch.

A template is a text with placeholders: `$prompt`, `$text` (the text that the image should show) and `$KEY` for any
other key of the prompt's metadata. `$$` is a dollar sign. The images follow the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from pydantic import model_validator

from digenrl.config.limits import Text
from digenrl.config.reading import ConfigError, Frozen, nearest
from digenrl.config.rewards.base import SOURCE_IMAGES
from digenrl.config.rewards.quoted_text import quoted

# Parts of the reward that count its cost and say nothing about the samples.
COST_PARTS = ("prompt_tokens", "completion_tokens", "requests", "cached")


class AnswerFormat(Frozen):
    """Where the score is in the answer: in a field of a JSON object, or in the first group of a pattern."""

    field: Text | None = None
    pattern: Text | None = None
    lowest: float = 0.0
    highest: float = 10.0

    @model_validator(mode="after")
    def _says_where_the_score_is(self) -> AnswerFormat:
        if (self.field is None) == (self.pattern is None):
            raise ValueError("expected either `field`, a key of a JSON object, or `pattern`, a regular expression")
        if self.lowest >= self.highest:
            raise ValueError(f"`lowest` must be below `highest`, got {self.lowest:g} and {self.highest:g}")
        if self.pattern is not None:
            try:
                groups = re.compile(self.pattern).groups
            except re.error as error:
                raise ValueError(f"`pattern` is not a regular expression: {error}") from None
            if groups != 1:
                raise ValueError(f"`pattern` needs one group, around the number, got {groups}")
        return self


@dataclass(frozen=True, slots=True)
class JudgeTemplate:
    """What the judge is asked. With `source_image`, source images are sent before the sample.

    Of a prompt without any, the trainer reads the image file that its metadata names under this key.
    """

    text: str
    answer: AnswerFormat
    source_image: str | None = None

    @property
    def placeholders(self) -> tuple[str, ...]:
        return tuple(Template(self.text).get_identifiers())

    def question(self, prompt: str, metadata: Mapping[str, Any]) -> str:
        """The text for a sample; raises ValueError if its prompt lacks a value."""
        given = {key: value for key, value in metadata.items() if key != SOURCE_IMAGES and value is not None}
        texts = {key: str(value) for key, value in given.items()}
        values = {"text": quoted(prompt), **texts, "prompt": prompt}
        missing = [name for name in self.placeholders if not values.get(name)]
        if missing:
            known = ", ".join(values)
            raise ValueError(
                f"the template needs ${missing[0]}, which the prompt's metadata lacks; known: {known}"
            )
        return Template(self.text).substitute(values)


_IN_JSON = 'First write one or two sentences of reasoning. Then end with a JSON object such as {"score": 6.5}.'

TEMPLATES: dict[str, JudgeTemplate] = {
    "unified_reward": JudgeTemplate(
        "An image was generated from this caption: $prompt\n\n"
        "Rate the image. Consider two things: how completely it shows objects, attributes and relations of the "
        "caption, and how good it looks, that is sharpness, composition and the absence of artifacts. State "
        "briefly what you see. The last line has the form `Final Score: X`, with a number from 1 (poor) to 5 "
        "(excellent) for X.",
        AnswerFormat(pattern=r"(?i)final score:\**\s*(-?[0-9]+(?:\.[0-9]+)?)", lowest=1, highest=5),
    ),
    "edit": JudgeTemplate(
        "The first image is the source, the image after it is the result of this editing instruction: $prompt\n\n"
        "Rate the edit from 0 to 10. 10: the instruction is carried out completely, everything that it does not "
        "mention is unchanged, and the result looks natural. 5: carried out in part, or with unwanted changes. 0: "
        f"not carried out, or the source is no longer recognizable. {_IN_JSON}",
        AnswerFormat(field="score"),
        source_image="image",
    ),
    "ocr": JudgeTemplate(
        "The image should show exactly this text: $text\n\n"
        "Read all text in the image letter by letter, and compare. Rate the text from 0 to 10: 10 if every letter "
        "is there, in order and clearly legible; 5 if half of the letters are wrong, missing or added; 0 if there "
        f"is no legible text. Do not rate anything else. {_IN_JSON}",
        AnswerFormat(field="score"),
    ),
    "video_quality": JudgeTemplate(
        "The images are frames of one video, in order. It was generated from this description: $prompt\n\n"
        "Rate the video from 0 to 10. Consider the quality of single frames, whether objects keep their identity "
        "and shape from frame to frame, whether the motion is plausible and as described, and whether the content "
        f"agrees with the description. {_IN_JSON}",
        AnswerFormat(field="score"),
    ),
}


def read_template(given: str, answer: AnswerFormat | None, source_image: str | None) -> JudgeTemplate:
    """The template of this name, or in this text file, with settings that replace its own; or ConfigError."""
    named = TEMPLATES.get(given)
    if named is not None:
        return JudgeTemplate(named.text, answer or named.answer, source_image or named.source_image)
    path = Path(given)
    if not path.suffix and not path.is_file():
        known = nearest(given, list(TEMPLATES))
        raise ConfigError(f"template: unknown template '{given}'; {known}; or give a text file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise ConfigError(f"template: {given} cannot be read: {reason}") from None
    if answer is None:
        raise ConfigError("answer: missing; a template from a file needs it, for example answer={field: score}")
    if not Template(text).is_valid():
        raise ConfigError(f"template: {given} has a `$` without a name; write $$ for a dollar sign")
    return JudgeTemplate(text, answer, source_image)
