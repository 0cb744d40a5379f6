"""The GenEval reward: tiny weights, and a real server as detector."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image
from tiny_rewards import save_clip, save_detector
from torch import Tensor
from torch.nn.functional import normalize
from transformers import CLIPModel, CLIPTokenizer, YolosForObjectDetection
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.yolos.image_processing_pil_yolos import YolosImageProcessorPil

from digenrl.config.rewards.geneval_tasks import COLORS
from digenrl.config.rewards.models import GenevalSettings
from digenrl.rewards.contract import RewardError
from digenrl.rewards.geneval import ColorNamer, GenevalReward, cropped
from digenrl.rewards.parts.detectors import LoadedDetector
from digenrl.rewards.parts.geneval_rules import Detection

SIZE = (40, 30)
TWO_CATS = {"tag": "two_object", "include": [{"class": "cat", "count": 2}]}
CAT_LEFT_OF_DOG = {
    "include": [{"class": "dog", "count": 1}, {"class": "cat", "count": 1, "position": ["left of", 0]}]
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("geneval")
    return {
        "model": str(save_clip(root / "clip")),
        "detector": str(save_detector(root / "yolos")),
        "device": "cpu",
    }


class DetectorServer(HTTPServer):
    """Replies with `reply`, or with the status alone."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply: Any = {}
        self.status = 200
        self.images: list[Image.Image] = []


class _Handler(BaseHTTPRequestHandler):
    server: DetectorServer

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.images = [Image.open(BytesIO(base64.b64decode(image))) for image in body["images"]]
        content = json.dumps(self.server.reply).encode()
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[DetectorServer]:
    running = DetectorServer()
    threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield running
    running.shutdown()
    running.server_close()


@pytest.fixture
def reward(server: DetectorServer, weights: dict[str, str]) -> GenevalReward:
    url = f"http://127.0.0.1:{server.server_port}/detect"
    return GenevalReward(GenevalSettings(**{**weights, "detector": url}))


def pixels(count: int = 1) -> Tensor:
    return torch.rand(count, 1, 3, SIZE[1], SIZE[0], generator=torch.Generator().manual_seed(0))


def seen(label: str, left: int = 0, score: float = 0.8, **more: Any) -> dict[str, Any]:
    return {"label": label, "score": score, "box": [left, 5, left + 8, 20], **more}


def test_a_served_detector_is_asked_about_every_image(server: DetectorServer, reward: GenevalReward) -> None:
    server.reply = {"detections": [[seen("cat"), seen("cat", 20)], [seen("dog", 25), seen("cat", 1)]]}
    batch = reward.score(pixels(2), ["", ""], [TWO_CATS, CAT_LEFT_OF_DOG])
    assert [image.size for image in server.images] == [SIZE] * 2
    assert batch.values == batch.parts["partial"] == batch.parts["strict"] == batch.parts["correct"] == (1.0, 1.0)
    server.reply = {"detections": [[seen("cat")], [seen("dog", 1), seen("cat", 25)]]}
    batch = reward.score(pixels(2), ["", ""], [TWO_CATS, CAT_LEFT_OF_DOG])
    assert batch.parts == {"correct": (0, 0), "strict": (0, 0), "partial": (0.5, 0.75)}


@pytest.mark.parametrize(
    ("reply", "status", "noun"),
    [
        ({"detections": []}, 200, "0 replies for 1"),
        ({"boxes": []}, 200, "detections"),
        ({"detections": [[{"label": "cat", "score": 2.0, "box": [0, 0, 1, 1]}]]}, 200, "score"),
        ({}, 404, "404"),
    ],
)
def test_a_reply_without_detections_is_an_error_and_no_score(
    server: DetectorServer, reward: GenevalReward, reply: Any, status: int, noun: str
) -> None:
    server.reply, server.status = reply, status
    with pytest.raises(RewardError, match=noun):
        reward.score(pixels(), [""], [TWO_CATS])


def test_metadata_of_other_prompts_is_an_error_that_names_the_sample(
    server: DetectorServer, reward: GenevalReward
) -> None:
    with pytest.raises(RewardError, match="include") as caught:
        reward.score(pixels(2), ["", ""], [TWO_CATS, {"text": "open"}])
    assert caught.value.samples == (1,)


def test_loaded_weights_give_the_boxes_of_their_own_library(weights: dict[str, str]) -> None:
    detector = LoadedDetector(GenevalSettings(**weights))
    assert detector.labels == {"cat", "dog", "computer keyboard"}
    image = Image.fromarray((pixels()[0, 0].permute(1, 2, 0) * 255).byte().numpy())
    found = detector.detect([image] * 3)
    model = YolosForObjectDetection.from_pretrained(weights["detector"]).eval()
    processor = YolosImageProcessorPil.from_pretrained(weights["detector"])
    with torch.no_grad():
        out = model(**processor(images=[image], return_tensors="pt"))
    scores, labels = out.logits[0].softmax(dim=-1)[:, :-1].max(dim=-1)  # the last class is "no object"
    x, y, width, height = (out.pred_boxes[0] * torch.tensor(SIZE * 2)).T
    boxes = torch.stack([x - width / 2, y - height / 2, x + width / 2, y + height / 2], dim=1)
    assert found[0] == found[2] and len(found[0]) == int((scores > 0.3).sum()) > 0
    for each, row in zip(found[0], torch.nonzero(scores > 0.3).flatten().tolist(), strict=True):
        assert each.label == ("cat", "dog", "computer keyboard")[int(labels[row])]
        assert each.confidence == pytest.approx(float(scores[row]), abs=1e-6)
        assert each.box == pytest.approx(boxes[row].tolist(), abs=1e-4)


def test_a_class_that_the_weights_do_not_know_is_an_error(weights: dict[str, str]) -> None:
    reward = GenevalReward(GenevalSettings(**weights))
    with pytest.raises(RewardError, match=r"'zebra'; known: cat, computer keyboard, dog"):
        reward.score(pixels(), [""], [{"include": [{"class": "zebra", "count": 1}]}])


def test_a_color_is_the_nearest_of_the_mean_captions(weights: dict[str, str]) -> None:
    image = Image.fromarray((pixels()[0, 0].permute(1, 2, 0) * 255).byte().numpy())
    objects = [Detection("cat", 0.9, (2.0, 3.0, 30.0, 25.0)), Detection("cat", 0.9, (10.0, 0.0, 15.0, 29.0))]
    model = CLIPModel.from_pretrained(weights["model"]).eval()
    tokenizer, processor = (
        kind.from_pretrained(weights["model"]) for kind in (CLIPTokenizer, CLIPImageProcessorPil)
    )
    expected = []
    for each in objects:
        images = processor(images=[cropped(image, each)], return_tensors="pt")["pixel_values"]
        similarity = []
        for color in COLORS:
            texts = [
                f"a photo of a {color} cat",
                f"a photo of a {color}-colored cat",
                f"a photo of a {color} object",
            ]
            tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=40, return_tensors="pt")
            with torch.no_grad():
                out = model(**tokens, pixel_values=images)
            mean = normalize(out.text_embeds, dim=-1).mean(dim=0)
            similarity.append(float(normalize(mean, dim=0) @ normalize(out.image_embeds[0], dim=0)))
        expected.append(COLORS[similarity.index(max(similarity))])
    assert ColorNamer(GenevalSettings(**weights))(image, "cat", objects) == expected


def test_outside_of_its_mask_an_object_is_gray() -> None:
    image, mask = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("L", (8, 8), 0)
    mask.paste(255, (2, 2, 5, 5))
    crop = cropped(image, Detection("cat", 0.9, (1.0, 1.0, 6.0, 6.0), mask))
    assert crop.size == (5, 5)
    assert (crop.getpixel((0, 0)), crop.getpixel((2, 2))) == ((0x99,) * 3, (255, 0, 0))
