"""Hyper-connections on somebody's own transformer, without touching its code.

A pre-norm block says `x = x + branch(norm(x))`. Inside a wrapped block x is a `Carrier`: adding to it
writes to the streams, anything else that is done with it is done to what the next site reads.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from temper.connection import HyperConnection, State
from temper.presets import preset as make_preset
from temper.recompute import recompute as make_recompute
from temper.registry import unknown
from temper.streams import expand_streams, reduce_streams

Selector = str | Callable[[str, nn.Module], bool]

# The name under which a block holds its sites.
SITES = "hyper_connections"


def _mean(streams: Tensor) -> Tensor:
    return streams.squeeze(-2) if streams.shape[-2] == 1 else streams.mean(-2)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": reduce_streams, "mean": _mean}


def wrap(
    module: nn.Module,
    selector: Selector,
    *,
    preset: str,
    num_streams: int,
    dim: int | None = None,
    sites: int = 2,
    reduce: str = "sum",
    recompute: bool = False,
    **overrides: Any,
) -> nn.Module:
    """Puts hyper-connections on every residual add of the selected blocks, in place.

        model = temper.wrap(model, "blocks.*", preset="temper-tucker", num_streams=4)

    The first block copies its input to N streams, the last one sums them again; every block in between
    hands its streams on. Existing parameters keep their names; each block gains a
    `hyper_connections` list, so wrap before you build the optimizer.

    Args:
        module: a model with pre-norm residual blocks that run in the order in which they are registered.
        selector: which submodules are the blocks: a pattern of names such as "layers.*" (`*` stands for
            one part of a dotted name), or a function of (name, module).
        preset: a name of `temper.PRESETS`, changed by `overrides` as in `temper.preset`.
        dim: the width; found from the norms of the first block if left out.
        sites: how many residual adds one block has.
        reduce: what becomes of the streams after the last block: their "sum" (the paper's), or their "mean", which
            `temper.convert.upcycle` needs and sets by itself.
        recompute: keep only some of the streams for the backward pass (`temper.recompute`).

    Returns:
        The same module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"wrap wants a module, got {type(module).__name__}")
    if isinstance(sites, bool) or not isinstance(sites, int) or sites < 1:
        raise ValueError(f"sites is {sites!r}; expected the number of residual adds in a block, at least 1")
    if reduce not in REDUCTIONS:
        raise unknown("reduce", reduce, REDUCTIONS)
    blocks = dict(_select(module, selector))
    for name, block in blocks.items():
        if hasattr(block, SITES):
            raise ValueError(f"{name} is wrapped already")
    dim = _width(blocks) if dim is None else dim
    config = make_preset(preset, num_streams=num_streams, dim=dim, **overrides)
    # Everything is built before anything is attached: an error leaves the model as it was.
    lists = [
        nn.ModuleList(HyperConnection(config, layer_index=index * sites + k) for k in range(sites))
        for index in range(len(blocks))
    ]
    for index, ((name, block), connections) in enumerate(zip(blocks.items(), lists, strict=True)):
        like = next(block.parameters(), None)
        if like is not None:
            connections.to(like.device)
        connections.train(block.training)
        setattr(block, SITES, connections)
        block.register_forward_pre_hook(_Enter(name, first=index == 0), with_kwargs=True)
        block.register_forward_hook(_Leave(name, reduce if index == len(blocks) - 1 else None))
    return make_recompute(module) if recompute else module


def reduce_by(module: nn.Module, reduce: str) -> None:
    """Changes how a wrapped model reduces its streams; without effect on a model that was not wrapped."""
    assert reduce in REDUCTIONS
    for block in module.modules():
        for hook in block._forward_hooks.values():
            if isinstance(hook, _Leave) and hook.reduce is not None:
                hook.reduce = reduce


class Carrier:
    """The residual x of a wrapped block: N streams that look like one tensor.

    Adding a tensor writes to the streams with the next site and gives the next carrier. Every other
    use, by a torch function or a tensor method, sees what that site reads.
    """

    def __init__(self, streams: Tensor, sites: tuple[HyperConnection, ...], block: str) -> None:
        self._streams, self._sites, self._block = streams, sites, block
        self._begun: tuple[Tensor, State] | None = None

    def _begin(self) -> tuple[Tensor, State]:
        if not self._sites:
            raise RuntimeError(
                f"{self._block} uses its residual after all its sites are written: it has more residual adds "
                "than `sites` says, or something between the blocks reads the streams"
            )
        if self._begun is None:
            self._begun = self._sites[0].begin(self._streams)
        return self._begun

    def _add(self, y: Tensor) -> Carrier:
        _, state = self._begin()
        return Carrier(self._sites[0].finish(state, y), self._sites[1:], self._block)

    @property
    def _read(self) -> Tensor:
        return self._begin()[0]

    def __add__(self, other: Any) -> Any:
        return self._add(other) if isinstance(other, Tensor) else self._read + _plain(other)

    add = __radd__ = __iadd__ = __add__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Not for the outside, and asked for while a copy is still empty.
            raise AttributeError(name)
        if name.endswith("_"):
            raise TypeError(f"{self._block} changes its residual in place ({name}); write it as x = x + y to wrap it")
        return getattr(self._read, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ADDS and not kwargs and len(args) == 2 and all(isinstance(arg, cls | Tensor) for arg in args):
            left, right = args
            if isinstance(left, cls) != isinstance(right, cls):
                return left._add(right) if isinstance(left, cls) else right._add(left)
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _delegate(name: str) -> Callable[..., Any]:
    def method(self: Carrier, *args: Any) -> Any:
        return getattr(self._read, name)(*map(_plain, args))

    return method


# Python looks operators up on the class, past __getattr__.
for _name in (
    *("__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__matmul__", "__rmatmul__"),
    *("__pow__", "__neg__", "__getitem__", "__len__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"),
):
    setattr(Carrier, _name, _delegate(_name))

_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)


def _plain(value: Any) -> Any:
    return value._read if isinstance(value, Carrier) else value


class _Enter:
    """Turns what a block is given into a carrier with the block's own sites."""

    def __init__(self, name: str, first: bool) -> None:
        self.name, self.first = name, first

    def __call__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # Most blocks take x first; some are called with names only.
        key = None if args else next(iter(kwargs), None)
        x = args[0] if args else kwargs.get(key) if key is not None else None
        sites = tuple(getattr(block, SITES))
        if self.first and isinstance(x, Tensor):
            streams = expand_streams(x, sites[0].config.num_streams)
        elif not self.first and isinstance(x, Carrier) and not x._sites:
            streams = x._streams
        else:
            raise TypeError(
                f"{self.name} was given {type(x).__name__} as its first argument; expected "
                + ("a tensor" if self.first else "the streams of the wrapped block before it")
                + ": blocks must run in the order in which they are registered, with nothing between them"
            )
        carrier = Carrier(streams, sites, self.name)
        return ((carrier, *args[1:]), kwargs) if key is None else (args, {**kwargs, key: carrier})


class _Leave:
    """Checks that every site of a block was used once, and reduces the streams after the last block."""

    def __init__(self, name: str, reduce: str | None) -> None:
        self.name, self.reduce = name, reduce

    def __call__(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        carrier = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(carrier, Carrier) or carrier._sites:
            unused = len(carrier._sites) if isinstance(carrier, Carrier) else 0
            raise TypeError(
                f"{self.name} does not end as a pre-norm block does: "
                + (
                    f"{unused} of its {len(getattr(block, SITES))} sites were not written; give wrap the number of "
                    "residual adds as `sites`"
                    if unused
                    else "its output is not x + branch(norm(x)). Post-norm blocks need HyperConnection by hand"
                )
            )
        if self.reduce is None:
            return output
        x = REDUCTIONS[self.reduce](carrier._streams)
        return type(output)([x, *output[1:]]) if isinstance(output, tuple | list) else x


def _select(module: nn.Module, selector: Selector) -> Iterator[tuple[str, nn.Module]]:
    """The selected blocks in order, checked: at least one, none inside another."""
    if callable(selector):
        chosen = [(name, child) for name, child in module.named_modules() if selector(name, child)]
        wanted = "the selector"
    elif isinstance(selector, str):
        chosen = [(name, child) for name, child in module.named_modules() if name and _matches(name, selector)]
        wanted = f"the pattern {selector!r}"
    else:
        raise TypeError(f"selector must be a pattern of names or a function, got {type(selector).__name__}")
    if not chosen:
        names = [name for name, _ in module.named_children()]
        raise ValueError(f"{wanted} selects nothing in {type(module).__name__}; its children are {names}")
    for outer, _ in chosen:
        for inner, _ in chosen:
            if inner.startswith(f"{outer}.") or (outer == "" and inner != ""):
                raise ValueError(f"{wanted} selects {inner!r} inside {outer!r}; select the blocks only")
    yield from chosen


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns))


def _width(blocks: dict[str, nn.Module]) -> int:
    """The width of the residual stream, from the norms of the first block."""
    name, block = next(iter(blocks.items()))
    # A block's own norms act on its residual; deeper ones may be those of a head.
    for children in (block.children(), block.modules()):
        widths = {
            child.weight.shape[0]
            for child in children
            if "norm" in type(child).__name__.lower() and isinstance(child.weight, Tensor) and child.weight.ndim == 1
        }
        if len(widths) == 1:
            return widths.pop()
    raise ValueError(f"the norms of {name!r} do not tell the width: give wrap dim=")
