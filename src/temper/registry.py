"""Open families: a subclass registers itself under a name, and the name then works everywhere."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from reprlib import Repr
from typing import Any, ClassVar, Self, TypeGuard

import torch
from torch.overrides import TorchFunctionMode

# Values in messages may be of any size.
_short = Repr()
_short.maxstring = _short.maxother = 80
_short.maxlevel = 3


def unknown(kind: str, name: object, known: Iterable[str]) -> ValueError:
    """The error for an unregistered name: the name, near misses and all registered names."""
    import difflib  # only an error needs it

    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def is_int(value: object) -> TypeGuard[int]:
    """Whether a value is a whole number, which True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_int(name: str, value: object, least: int = 0, most: int | None = None, expected: str = "") -> int:
    """`value` if it is a whole number within limits, else a ValueError that names it.

    Args:
        expected: the words for the values that are allowed, if the limits do not say it all.
    """
    if is_int(value) and least <= value and (most is None or value <= most):
        return value
    limits = f">= {least}" + (f" and <= {most:,}" if most is not None else "")
    raise ValueError(f"{name} is {_short.repr(value)}; expected {expected or f'a whole number {limits}'}")


# In-place draws, by the names of their methods and of the functions of torch.nn.init that lead to them.
DRAWS = {"normal_", "uniform_", "random_", "bernoulli_", "exponential_", "cauchy_", "geometric_", "log_normal_"}
DRAWS |= {"trunc_normal_", "orthogonal_", "kaiming_normal_", "kaiming_uniform_", "xavier_normal_", "xavier_uniform_"}


class _Undrawn(TorchFunctionMode):
    """Skips in-place draws on the meta device: they change nothing, and the first one imports torch._dynamo."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in DRAWS and args and args[0].is_meta:
            return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def without_memory() -> Iterator[None]:
    """Builds modules on the meta device and draws nothing."""
    with torch.device("meta"), _Undrawn():
        yield


def import_siblings(package: str, path: Iterable[str]) -> None:
    """Imports every module of a package, so that the classes in them register themselves."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


class UnknownPartError(ValueError):
    """The error for a generator, mixer or other part that nobody registered.

    Args:
        advice: the end of the message of every such error, set by a program that knows how parts are added to it.
    """

    advice: ClassVar[str] = ""


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
            raise UnknownPartError(f"{unknown(cls.family, name, cls.members)}{UnknownPartError.advice}")
        return cls.members[name]


def lacking(part: Registered | type[Registered], method: str) -> NotImplementedError:
    """The error for a method that a new part needs and lacks: which class, which method, and where it is explained."""
    kind = part if isinstance(part, type) else type(part)
    return NotImplementedError(f"{_where(kind)} lacks `{method}`; docs/adding-a-{kind.family}.md explains it")


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
