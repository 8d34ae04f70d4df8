"""Open families: a subclass registers itself under a name, and the name then works everywhere."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from typing import Any, ClassVar, Self


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for an unregistered name: the name, near misses and all registered names."""
    import difflib  # only an error needs it

    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def import_siblings(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, so that the classes in them register themselves."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


class Registered:
    """Base of a family; `class Circulant(Mixer, name="circulant")` is all it takes to join one."""

    family: ClassVar[str]
    name: ClassVar[str]
    members: ClassVar[dict[str, type[Any]]]

    def __init_subclass__(cls, *, name: str | None = None, family: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if family is not None:
            cls.family, cls.members = family, {}
        if name is not None:
            taken = cls.members.get(name)
            # Rerunning a notebook cell redefines a class; a different class under the same name is an error.
            if taken is not None and _where(taken) != _where(cls):
                raise ValueError(f"the {cls.family} name {name!r} already belongs to {_where(taken)}")
            cls.name = name
            cls.members[name] = cls

    @classmethod
    def named(cls, name: str) -> type[Self]:
        """The class registered under `name`."""
        if not isinstance(name, str) or name not in cls.members:
            raise unknown(cls.family, name, cls.members)
        return cls.members[name]


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
