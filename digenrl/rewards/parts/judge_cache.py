"""Answers of a judge on disk, one file each, so that the same question is not paid for twice."""

from __future__ import annotations

import json
import os
import threading
from hashlib import sha256
from pathlib import Path


class AnswerCache:
    """Keyed by the whole request: model, template, prompt, images and sampling options.

    Several processes may share a folder: files appear complete or not at all. A damaged file counts as absent.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, request: bytes) -> str | None:
        try:
            kept = json.loads(self._file(request).read_bytes())
        except (OSError, ValueError):
            return None
        answer = kept.get("answer") if isinstance(kept, dict) else None
        return answer if isinstance(answer, str) else None

    def put(self, request: bytes, answer: str) -> None:
        """Keeps an answer; an OSError means that the folder cannot be written."""
        file = self._file(request)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
        partial.write_text(json.dumps({"answer": answer}), encoding="utf-8")
        partial.replace(file)

    def _file(self, request: bytes) -> Path:
        name = sha256(request).hexdigest()
        return self._folder / name[:2] / f"{name}.json"
