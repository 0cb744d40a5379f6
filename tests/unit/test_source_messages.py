"""Source images in the messages of a reward server."""

from __future__ import annotations

import json

import pytest
import torch

from digenrl.rewards.serving.http_messages import Limits, MessageError, decode_request, encode_request

PIXELS = torch.rand(2, 1, 3, 4, 4)
SOURCES = (torch.randint(0, 256, (3, 5, 7)) / 255, torch.zeros(3, 2, 2))


def test_source_images_arrive_beside_their_sample() -> None:
    body = encode_request(PIXELS, ["a", "b"], [{"level": 1, "source_images": SOURCES}, {"level": 2}])
    _, prompts, (first, second) = decode_request(body, Limits())
    assert prompts == ["a", "b"] and first["level"] == 1 and second == {"level": 2}
    assert all(torch.equal(got, sent) for got, sent in zip(first["source_images"], SOURCES, strict=True))


def test_wrong_source_images_are_refused_by_their_place() -> None:
    sample = json.loads(encode_request(PIXELS[:1], ["a"], [{"source_images": SOURCES}]))["samples"][0]
    for images, limits, where in (
        ([sample["source_images"][0], "no image"], Limits(), r"samples\.0\.source_images\.1"),
        (sample["source_images"], Limits(sources_per_sample=1), "2 source images"),
        (sample["source_images"], Limits(pixels_per_frame=20), r"samples\.0\.source_images\.0"),
    ):
        body = json.dumps({"samples": [{**sample, "source_images": images}]}).encode()
        with pytest.raises(MessageError, match=where):
            decode_request(body, limits)


def test_source_images_in_metadata_are_refused() -> None:
    sample = json.loads(encode_request(PIXELS[:1], ["a"], [{}]))["samples"][0]
    body = json.dumps({"samples": [{**sample, "metadata": {"source_images": ["/etc/motd"]}}]}).encode()
    with pytest.raises(MessageError, match=r"samples\.0\.metadata\.source_images"):
        decode_request(body, Limits())
