"""Checks that run with `make docs`: every public name is documented, so that the API reference has no empty entry."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

PUBLIC = ("temper", "temper.convert", "temper.theory", "temper.testing")


def on_pre_build(config: Any) -> None:
    """Fails the build if a public name has no docstring of its own."""
    sys.path.insert(0, str(Path(config.config_file_path).parent / "src"))
    if missing := [name for module in PUBLIC for name in undocumented(module)]:
        raise PluginError(f"these public names have no docstring: {', '.join(missing)}")


def undocumented(module_name: str) -> list[str]:
    """The names in a module's `__all__`, and the public methods of its classes, that have no docstring."""
    module = importlib.import_module(module_name)
    missing = []
    for name in module.__all__:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        members = {f"{name}.{key}": item for key, item in vars(value).items() if _is_public_method(key, item)}
        for label, item in {name: value, **members}.items():
            if not inspect.getdoc(item):
                missing.append(f"{module_name}.{label}")
    return missing


def _is_public_method(name: str, value: Any) -> bool:
    return not name.startswith(("_", "test_")) and (inspect.isfunction(value) or isinstance(value, property))
