"""Names of devices: auto, cpu, cuda, or one of several as cuda:1."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

_NAME = re.compile(r"cpu|cuda(:(0|[1-9][0-9]{0,3}))?")


def check_device(name: str) -> str:
    """Raises ValueError for a name that is not a device; returns the name."""
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"unknown device '{name}'; known: cpu, cuda, or one of several as cuda:1")
    return name


def _check_device_or_auto(name: str) -> str:
    return name if name == "auto" else check_device(name)


Device = Annotated[str, AfterValidator(check_device)]
DeviceOrAuto = Annotated[str, AfterValidator(_check_device_or_auto)]
