"""The recorder lives in the telemetry room, where live runs use it too."""

from digenrl.telemetry.recorder import Recorder

__all__ = ["Recorder"]
