"""Generators and mixers of other packages: modules that `--import` names, and the entry-point group `temper.parts`.

Nothing that a run or a model folder holds is ever imported. A folder records the modules that its parts come from, and
whoever reads it without them is told which `--import` is missing.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from temper.gates import Gates
from temper.generators import Generator
from temper.mixers import Mixer
from temper.registry import UnknownPartError

GROUP = "temper.parts"
MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")

# The modules that the user has named to this process.
_named: list[str] = []


@contextmanager
def imported(names: Sequence[str]) -> Iterator[None]:
    """Imports the modules that a user names and those of installed packages; an unknown part then says what to do."""
    _named[:] = dict.fromkeys(names)
    for name in _named:
        _import(name)
    for point in entry_points(group=GROUP):
        try:
            point.load()
        # Somebody else's package, which this command may not need.
        except Exception as error:
            print(f"warning: the entry point {point.name} of {GROUP} failed: {_words(error)}", file=sys.stderr)
    with _advised("parts of your own package need --import MODULE"):
        yield


def named() -> list[str]:
    """The modules that the user has named, which another process needs to have the same parts."""
    return [*_named]


def words() -> list[str]:
    """The same as options of a command."""
    return [word for name in _named for word in ("--import", name)]


def modules_of(values: Any) -> list[str]:
    """The modules of other packages whose parts are named somewhere in plain values."""
    found: set[str] = set()
    if isinstance(values, Mapping):
        found.update(name for value in values.values() for name in modules_of(value))
    elif isinstance(values, list | tuple):
        found.update(name for value in values for name in modules_of(value))
    elif isinstance(values, str):
        parts = (family.members.get(values) for family in (Generator, Mixer, Gates))
        modules = {part.__module__ for part in parts if part is not None}
        found = {name for name in modules if name.partition(".")[0] != "temper"}
    return sorted(found)


@contextmanager
def recorded(modules: Any) -> Iterator[None]:
    """Names the modules that a folder has recorded in the error about an unknown part.

    Args:
        modules: as the file has them; what is no name of a module is not repeated.
    """
    known = [name for name in modules if isinstance(name, str)] if isinstance(modules, list) else []
    options = " ".join(f"--import {name}" for name in known if MODULE.fullmatch(name) and len(name) <= 100)
    with _advised(f"it was built with {options}") if options else nullcontext():
        yield


def _import(name: str) -> None:
    if not MODULE.fullmatch(name):
        raise ValueError(f"--import is {name!r}; expected the name of a module, such as my_parts or my_parts.mixers")
    # The folder one works in, for this import alone: a console script does not have it on its path.
    here = str(Path.cwd())
    sys.path.append(here)
    try:
        importlib.import_module(name)
    # A script without a main guard may exit.
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name and f"{name}.".startswith(f"{error.name}."):
            raise ValueError(f"--import: there is no module {name!r}, installed or in {here}") from error
        raise ValueError(f"--import {name} failed: {_words(error)}") from error
    finally:
        sys.path.remove(here)


@contextmanager
def _advised(advice: str) -> Iterator[None]:
    """Appends the advice to errors about unknown parts, also where the option parser reports them."""
    before, UnknownPartError.advice = UnknownPartError.advice, f" ({advice})"
    try:
        yield
    finally:
        UnknownPartError.advice = before


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
