"""Objects named by an import path, `package.module:NAME`: how users plug in their own code."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from digenrl.config.reading import ConfigError, nearest


def import_object(path: str, what: str, kind: str = "object") -> Any:
    """The object at an import path. Raises ConfigError if there is no such module or no such name in it.

    `what` is used in the message, as "reward"; `kind` is what the module should contain, as "function".
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise ConfigError(
            f"{what} '{path}': no module named '{error.name}'; is it on PYTHONPATH or installed?"
        ) from None
    if not hasattr(module, name):
        known = [key for key in vars(module) if not key.startswith("_")]
        raise ConfigError(f"{what} '{path}': {module_name} has no {kind} '{name}'; {nearest(name, known)}")
    return getattr(module, name)
