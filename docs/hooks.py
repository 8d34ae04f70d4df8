"""Hooks of `make docs`: every public name has a docstring and an entry, and the gallery's pages are made afresh."""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

PUBLIC = ("temper", "temper.convert", "temper.theory", "temper.testing")


def on_pre_build(config: Any) -> None:
    """Fails the build if a public name has no docstring or no entry in the API reference."""
    root = Path(config.config_file_path).parent
    sys.path.insert(0, str(root / "src"))
    if missing := [name for module in PUBLIC for name in undocumented(module)]:
        raise PluginError(f"these public names have no docstring: {', '.join(missing)}")
    if missing := [name for module in PUBLIC for name in unlisted(module, root / "docs" / "api")]:
        raise PluginError(f"these public names have no entry in docs/api: {', '.join(missing)}")


def on_post_build(config: Any) -> None:
    """Puts the report of our study and the explorer of a small model into the site, for the gallery to embed."""
    root = Path(config.config_file_path).parent
    cache, gallery = root / "build" / "gallery", Path(config.site_dir) / "gallery"
    study = root / "docs" / "results" / "study-cpu.json"
    if _is_older(cache / "report" / "report.html", study):
        _temper(root, "report", study, "--out", cache / "report")
    if not (cache / "explorer.html").exists():
        shutil.rmtree(cache / "cpu-smoke", ignore_errors=True)
        _temper(root, "train", "--recipe", "cpu-smoke", "--out", cache / "cpu-smoke")
        _temper(root, "inspect", "--run", cache / "cpu-smoke", "--out", cache / "explorer.html")
    for page in (cache / "report" / "report.html", cache / "explorer.html"):
        shutil.copy(page, gallery / page.name)


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


def unlisted(module_name: str, folder: Path) -> list[str]:
    """The names in a module's `__all__` that no page of the API reference has."""
    module = importlib.import_module(module_name)
    listed = set()
    for page in folder.glob("*.md"):
        for target, options in re.findall(r"^::: ([\w.]+)\n((?: +.*\n)*)", page.read_text() + "\n", re.MULTILINE):
            # `temper.wrap.wrap` is the function that is public as `temper.wrap`, in the module of that name.
            target = re.sub(r"\.(\w+)\.\1$", r".\1", target)
            listed |= {target, *(f"{target}.{name}" for name in re.findall(r"^ +- (\w+)$", options, re.MULTILINE))}
            # A module without a choice of members has all of them.
            if target == module_name and "members:" not in options:
                return []
    names = [name for name in module.__all__ if not inspect.ismodule(getattr(module, name))]
    # An alias needs no entry of its own.
    shown = [getattr(module, name) for name in names if f"{module_name}.{name}" in listed]
    return [f"{module_name}.{name}" for name in names if not any(getattr(module, name) is value for value in shown)]


def _is_public_method(name: str, value: Any) -> bool:
    return not name.startswith(("_", "test_")) and (inspect.isfunction(value) or isinstance(value, property))


def _is_older(path: Path, than: Path) -> bool:
    return not path.exists() or path.stat().st_mtime < than.stat().st_mtime


def _temper(root: Path, *arguments: Any) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "temper_lab", *map(str, arguments)], capture_output=True, text=True, cwd=root / "src"
    )
    if done.returncode:
        raise PluginError(f"temper {arguments[0]} failed: {done.stderr.strip()}")
