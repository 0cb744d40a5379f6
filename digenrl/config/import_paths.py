"""Objects named by an import path, `package.module:NAME`: how users plug in their own code."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from importlib import import_module, invalidate_caches
from inspect import ismodule
from pathlib import Path
from sysconfig import get_paths
from traceback import extract_tb
from typing import Any

from digenrl.config.reading import ConfigError, nearest, one_line

INSTALLED = get_paths()["purelib"]  # the folder of installed packages


def has_module(folder: Path, path: str) -> bool:
    """Whether the top-level module or package of an import path is in a folder."""
    top = path.partition(":")[0].partition(".")[0]
    return (folder / f"{top}.py").is_file() or (folder / top).is_dir()


def add_to_python_path(folders: Iterable[Path]) -> None:
    """Makes modules in these folders importable. Installed modules of the same name take precedence."""
    for folder in folders:
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
            invalidate_caches()


def import_object(path: str, what: str, kind: str = "object") -> Any:
    """The object at an import path. Raises ConfigError if there is no such module or no such name in it.

    `what` is used in the message, as "reward"; `kind` is what the module should contain, as "function".
    """
    module_name, _, name = path.partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # code of the user's may raise anything, and a script may exit
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{what} '{path}': no module named '{error.name}'; put it into the current folder, or install it; "
                "a recipe also finds modules beside it, and in its python_path=[FOLDER]"
            ) from None
        frames = extract_tb(error.__traceback__)  # a syntax error names its line itself
        own = [frame for frame in frames if not frame.filename.startswith((INSTALLED, "<"))]
        last = (own or frames)[-1]
        where = "" if isinstance(error, SyntaxError) else f" in {last.filename}, line {last.lineno}"
        reason = f"{type(error).__name__}{where}: {one_line(error)}"
        raise ConfigError(f"{what} '{path}': {module_name} cannot be imported: {reason}") from error
    if not hasattr(module, name):
        known = [key for key, value in vars(module).items() if not key.startswith("_") and not ismodule(value)]
        where = f"{module_name} ({getattr(module, '__file__', None) or 'a folder'})"
        raise ConfigError(f"{what} '{path}': {where} has no {kind} '{name}'; {nearest(name, known)}")
    return getattr(module, name)
