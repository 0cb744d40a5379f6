"""Object detectors: weights that transformers can load, or a server."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Sequence
from http.client import OK
from io import BytesIO
from typing import Annotated, Protocol

import torch
from PIL import Image
from pydantic import Field, ValidationError
from transformers import AutoImageProcessor, AutoModelForObjectDetection

from digenrl.config.reading import Frozen, first_problem
from digenrl.config.rewards.models import GenevalSettings
from digenrl.config.rewards.table import ServerSettings
from digenrl.rewards.parts.geneval_rules import LEAST_CONFIDENCE, Detection
from digenrl.rewards.parts.weights import load_pretrained, load_whole_model, pick_device

# Names of COCO's classes in other label sets -> in GenEval's.
ALIASES = {
    "aeroplane": "airplane",
    "diningtable": "dining table",
    "keyboard": "computer keyboard",
    "motorbike": "motorcycle",
    "mouse": "computer mouse",
    "pottedplant": "potted plant",
    "remote": "tv remote",
    "sofa": "couch",
    "tvmonitor": "tv",
}


class DetectorError(RuntimeError):
    """There are no detections."""


class Detector(Protocol):
    """Finds objects. `labels` are the classes that it knows; None if this is not known."""

    labels: frozenset[str] | None

    def detect(self, images: Sequence[Image.Image]) -> list[list[Detection]]:
        """The objects of each image; raises DetectorError."""


class LoadedDetector:
    """A model for object detection, without masks."""

    def __init__(self, settings: GenevalSettings) -> None:
        self._device, self._batch_size = pick_device(settings.device), settings.batch_size
        dtype = getattr(torch, settings.dtype)
        self._processor = load_pretrained(AutoImageProcessor.from_pretrained, settings.detector, backend="pil")
        model = load_whole_model(AutoModelForObjectDetection.from_pretrained, settings.detector, dtype=dtype)
        self._model = model.to(self._device).eval().requires_grad_(False)
        self._names = {index: ALIASES.get(name, name) for index, name in model.config.id2label.items()}
        self.labels: frozenset[str] | None = frozenset(self._names.values())

    @torch.inference_mode()
    def detect(self, images: Sequence[Image.Image]) -> list[list[Detection]]:
        found: list[list[Detection]] = []
        for start in range(0, len(images), self._batch_size):
            batch = list(images[start : start + self._batch_size])
            inputs = self._processor(images=batch, return_tensors="pt").to(self._device, self._model.dtype)
            results = self._processor.post_process_object_detection(
                self._model(**inputs),
                threshold=LEAST_CONFIDENCE,
                target_sizes=[(image.height, image.width) for image in batch],
            )
            found += [self._detections(result) for result in results]
        return found

    def _detections(self, result: dict[str, torch.Tensor]) -> list[Detection]:
        rows = zip(result["labels"].tolist(), result["scores"].tolist(), result["boxes"].tolist(), strict=True)
        return [Detection(self._names[label], score, tuple(box)) for label, score, box in rows]


class DetectionMessage(Frozen):
    """One object in a server's reply; the mask is a PNG in base64."""

    label: str
    confidence: float = Field(alias="score", ge=0, le=1)
    box: tuple[float, float, float, float]
    mask: str | None = None


class DetectorReply(Frozen):
    """A server's reply: the objects of every image."""

    detections: tuple[Annotated[tuple[DetectionMessage, ...], Field(max_length=1000)], ...]


class ServedDetector:
    """`POST URL` with `{"images": [PNG in base64, ...]}`."""

    labels: frozenset[str] | None = None

    def __init__(self, settings: GenevalSettings) -> None:
        from digenrl.rewards.serving.http_client import make_client

        self._server = ServerSettings(name="geneval", url=settings.detector, token_env=settings.token_env)
        self._client = make_client(self._server, self._server.read_token())

    def detect(self, images: Sequence[Image.Image]) -> list[list[Detection]]:
        from digenrl.rewards.serving.http_client import NoResponseError, post_with_retries
        from digenrl.rewards.serving.http_messages import encode_png

        request = json.dumps({"images": [encode_png(image) for image in images]}).encode()
        try:
            response = post_with_retries(self._client, self._server, "", request, time.sleep)
            if response.status_code != OK:
                raise DetectorError(f"{self._server.url} answered {response.status_code}: {response.text[:200]}")
            reply = DetectorReply.model_validate_json(response.content)
        except NoResponseError as error:
            raise DetectorError(str(error)) from None
        except ValidationError as error:
            problem = first_problem(error, "the reply")
            raise DetectorError(f"{self._server.url}: not a reply of detections: {problem}") from None
        if len(reply.detections) != len(images):
            raise DetectorError(f"{self._server.url}: {len(reply.detections)} replies for {len(images)} images")
        return [
            [_detection(one, image) for one in found]
            for found, image in zip(reply.detections, images, strict=True)
        ]


def _detection(message: DetectionMessage, image: Image.Image) -> Detection:
    mask = None
    if message.mask is not None:
        mask = Image.open(BytesIO(base64.b64decode(message.mask))).convert("L")
        if mask.size != image.size:
            raise DetectorError(
                f"a mask has {mask.width} x {mask.height} pixels, its image {image.width} x {image.height}"
            )
    return Detection(ALIASES.get(message.label, message.label), message.confidence, message.box, mask)


def find_detector(settings: GenevalSettings) -> Detector:
    """The detector of the settings: a server if it is a URL, otherwise weights."""
    if settings.detector.startswith(("http://", "https://")):
        return ServedDetector(settings)
    return LoadedDetector(settings)
