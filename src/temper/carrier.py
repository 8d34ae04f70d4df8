"""The residual x inside a wrapped block: a carrier of streams from the block's input to its output.

A pre-norm block says `x = x + branch(norm(x))`. Adding to a carrier writes to the streams; any other operation
acts on the input that the next site reads. A carrier lives inside one block only. Blocks exchange plain
tensors (..., N, D), so FSDP, checkpointing and hooks see what they expect.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from temper.config import RouterConfig
from temper.connection import HyperConnection, State, is_plain
from temper.streams import expand_streams, reduce_streams

if TYPE_CHECKING:
    from temper.trial import Trial

# The name under which a block holds its sites.
SITES = "hyper_connections"


def _mean(streams: Tensor) -> Tensor:
    return streams.squeeze(-2) if streams.shape[-2] == 1 else streams.mean(-2)


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {"sum": reduce_streams, "mean": _mean}


class WrapError(ValueError, RuntimeError):
    """The error for a model that `wrap` cannot wrap as requested."""


class Site(HyperConnection):
    """A site of a wrapped block. Calling it runs `begin`, so that call hooks (FSDP, offloading) fire."""

    def forward(self, streams: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.begin(streams)


class Sites(nn.Module):
    """The sites of one block by number.

    Unlike a `ModuleList` it can be called, which begins one site; FSDP and PEFT's `modules_to_save` need that.
    """

    def __init__(self, sites: Sequence[Site]) -> None:
        super().__init__()
        for index, site in enumerate(sites):
            self.add_module(str(index), site)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.children())

    def __getitem__(self, index: int) -> nn.Module:
        return list(self.children())[index]

    def forward(self, streams: Tensor, index: int) -> tuple[Tensor, State]:
        begun: tuple[Tensor, State] = getattr(self, str(index))(streams)
        return begun

    def finish(self, state: State, y: Tensor, index: int) -> Tensor:
        site = getattr(self, str(index))
        result: Tensor = site.finish(state, y)
        return result


# The running trial, to which blocks and carriers report.
_trial: Trial | None = None


def set_trial(trial: Trial | None) -> None:
    global _trial
    _trial = trial


class Carrier:
    """The residual x of a wrapped block: N streams that look like one tensor.

    Adding a tensor writes to the streams with the next site and gives the next carrier. Operations that keep the
    values (`contiguous`, `clone`, a dropout that drops nothing) or only cast them return a carrier. Every other torch
    function or tensor method acts on the input that the next site reads.

    Args:
        index: the number of the next site.
        begun: the state of that site after `begin`, shared by all casts of this carrier.
        uses: the names of the operations applied to x, for error messages.
    """

    def __init__(
        self,
        streams: Tensor,
        sites: Sites,
        block: str,
        index: int,
        count: int,
        uses: list[str],
        *,
        begun: list[tuple[Tensor, State]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._streams, self._sites, self._block = streams, sites, block
        self._index, self._count, self._uses = index, count, uses
        self._begun = [] if begun is None else begun
        self._dtype = streams.dtype if dtype is None else dtype
        self._x: Tensor | None = None

    @property
    def _left(self) -> int:
        """The number of sites not yet written."""
        return self._count - self._index

    def _begin(self) -> tuple[Tensor, State]:
        if not self._left:
            raise WrapError(
                f"{self._block} uses its residual ({', '.join(self._uses[-2:]) or 'x + y'}) after all of its "
                f"{self._count} sites are written: it has more residual adds than `sites` says, or does something else "
                "to x at its end, as post-norm blocks do"
            )
        if not self._begun:
            self._begun.append(self._sites(self._streams, self._index))
            if _trial is not None:
                _trial.saw_read(self._begun[0][0])
        return self._begun[0]

    def _add(self, y: Tensor) -> Carrier:
        self._uses.append("add")
        if self._dtype == self._streams.dtype:
            _, state = self._begin()
        else:
            # The block casts its residual: the streams take the new dtype from here on.
            self._begin()
            _, state = self._sites(self._streams.to(self._dtype), self._index)
        begun = self._finish_into_next(state, y)
        streams = self._sites.finish(state, y, self._index) if begun is None else begun[1].streams
        parts = (self._sites, self._block, self._index + 1, self._count, self._uses)
        return Carrier(streams, *parts, begun=None if begun is None else [begun])

    def _finish_into_next(self, state: State, y: Tensor) -> tuple[Tensor, State] | None:
        """Finishes this site and begins the next in one pass; None where they must be separate calls.

        The next site is then not called, so nothing may depend on its call; a trial follows x from call to call.
        """
        sites = self._sites
        if self._left < 2 or _trial is not None or not is_plain(sites, Sites):
            return None
        site, following = (sites._modules[str(index)] for index in (self._index, self._index + 1))
        if not isinstance(site, Site) or not isinstance(following, Site) or not is_plain(following, Site):
            return None
        return site.finish_into(following, state, y) if following.can_follow(state) else None

    def _cast(self, dtype: torch.dtype) -> Carrier:
        if dtype == self._dtype:
            return self
        self._uses.append(f"to({dtype})")
        parts = (self._streams, self._sites, self._block, self._index, self._count, self._uses)
        return Carrier(*parts, begun=self._begun, dtype=dtype)

    @property
    def _read(self) -> Tensor:
        if self._x is None:
            self._x = self._begin()[0].to(self._dtype)
        return self._x

    def __add__(self, other: Any) -> Any:
        return self._add(other) if isinstance(other, Tensor) else self._read + _plain(other)

    __radd__ = __iadd__ = __add__

    def add(self, other: Any, *, alpha: float = 1) -> Any:
        return self + (other if alpha == 1 or not isinstance(other, Tensor) else alpha * other)

    # Properties of x that do not require reading it.
    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._streams.device

    @property
    def shape(self) -> torch.Size:
        return self._streams.shape[:-2] + self._streams.shape[-1:]

    @property
    def ndim(self) -> int:
        return self._streams.ndim - 1

    @property
    def requires_grad(self) -> bool:
        return self._streams.requires_grad

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    # Operations that keep the values or only cast them.
    def contiguous(self, **_: Any) -> Carrier:
        return self

    clone = contiguous

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype, device = kwargs.get("dtype"), kwargs.get("device")
        for value in (*args, kwargs.get("other")):
            if isinstance(value, Tensor | Carrier):
                dtype, device = value.dtype, value.device
            elif isinstance(value, torch.dtype):
                dtype = value
            elif isinstance(value, str | torch.device):
                device = value
        if device is not None and not _is_at(self.device, torch.device(device)):
            self._uses.append(f"to({device})")
            return self._read.to(*map(_plain, args), **tree_map(_plain, kwargs))
        return self if dtype is None else self._cast(dtype)

    def type_as(self, other: Any) -> Carrier:
        return self._cast(other.dtype)

    def float(self) -> Carrier:
        return self._cast(torch.float32)

    def double(self) -> Carrier:
        return self._cast(torch.float64)

    def half(self) -> Carrier:
        return self._cast(torch.float16)

    def bfloat16(self) -> Carrier:
        return self._cast(torch.bfloat16)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            # Private names do not reach the tensor; copying also looks them up while the copy is still empty.
            raise AttributeError(name)
        if name.endswith("_"):
            raise WrapError(f"{self._block} changes its residual in place ({name}); write it as x = x + y to wrap it")
        self._uses.append(name)
        return getattr(self._read, name)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ADDS and len(args) == 2 and all(isinstance(arg, cls | Tensor) for arg in args):
            left, right = args
            alpha = kwargs.get("alpha", 1)
            if isinstance(left, cls) and isinstance(right, Tensor) and kwargs.keys() <= {"alpha"}:
                return left.add(right, alpha=alpha)
            if isinstance(right, cls) and isinstance(left, Tensor) and alpha == 1 and kwargs.keys() <= {"alpha"}:
                return right._add(left)
        if args and isinstance(args[0], cls):
            if func is torch.clone:
                return args[0]
            if func in _DROPOUTS and _drops_nothing(*args[1:], **kwargs):
                return args[0]
        for value in (*args, *kwargs.values()):
            if isinstance(value, cls):
                value._uses.append(getattr(func, "__name__", str(func)))
        return func(*tree_map(_plain, args), **tree_map(_plain, kwargs))


def _delegate(self: Carrier, name: str, *args: Any) -> Any:
    self._uses.append(name.strip("_"))
    return getattr(self._read, name)(*map(_plain, args))


# Python looks operators up on the class, past __getattr__.
for _name in (
    *("__mul__", "__rmul__", "__sub__", "__rsub__", "__truediv__", "__rtruediv__", "__matmul__", "__rmatmul__"),
    *("__pow__", "__neg__", "__getitem__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__"),
):
    setattr(Carrier, _name, functools.partialmethod(_delegate, _name))
Carrier.__len__ = lambda self: self.shape[0]  # type: ignore[attr-defined]

_ADDS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__)
_DROPOUTS = (F.dropout, F.dropout1d, F.dropout2d, F.alpha_dropout, F.feature_alpha_dropout, torch.dropout)


def _drops_nothing(p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> bool:
    """Whether a dropout with these arguments drops nothing; torch.dropout renames one argument."""
    return p == 0 or not (training and train)


def _is_at(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and wanted.index in (None, device.index)


def _plain(value: Any) -> Any:
    return value._read if isinstance(value, Carrier) else value


@dataclass
class Place:
    """The position of a wrapped block in its stack, and the conversions at its input and output.

    Args:
        name: the block's name.
        count: the number of its sites.
        first: whether the block receives x itself instead of the streams of the previous block.
        reduce: how the last block turns the streams into x; None for any other block.
        any_layout: whether x may have more dimensions than batch, tokens and features.
        argument: the name of x where blocks are called with names only.
    """

    name: str
    count: int
    first: bool
    reduce: str | None
    any_layout: bool
    argument: str | None

    def enter(
        self, sites: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], list[str]]:
        """The block's arguments with x replaced by a carrier, and the list that records the uses of x."""
        # Most blocks take x first; some are called with names only.
        key = None if args else self.argument if self.argument in kwargs else next(iter(kwargs), None)
        x = args[0] if args else kwargs.get(key) if key is not None else None
        if _trial is not None:
            _trial.enter(self.name, x)
        uses: list[str] = []
        carrier = Carrier(self._streams(x, _config(sites)), sites, self.name, 0, self.count, uses)
        return ((carrier, *args[1:]), kwargs, uses) if key is None else (args, {**kwargs, key: carrier}, uses)

    def _streams(self, x: Any, config: RouterConfig) -> Tensor:
        num_streams, dim = config.num_streams, config.dim
        if not isinstance(x, Tensor):
            raise WrapError(
                f"{self.name} was given {type(x).__name__} as its first argument; expected a tensor, the residual x"
            )
        shape = tuple(x.shape)
        plain = self.first or num_streams == 1
        if not plain and (x.ndim < 2 or shape[-2:] != (num_streams, dim)):
            raise WrapError(
                f"{self.name} was given a tensor of shape {shape}; expected the streams (..., {num_streams}, {dim}) of "
                "the wrapped block before it: blocks must run in the order in which they are registered, with nothing "
                "between them"
            )
        if plain and (x.ndim < 1 or shape[-1] != dim):
            raise WrapError(
                f"{self.name} was given x of shape {shape}, whose last dimension is not the width {dim}. Features have "
                "to come last; channels-first networks (convolutions) need HyperConnection by hand, around a permute"
            )
        if plain and x.ndim > 3 and not self.any_layout:
            raise WrapError(
                f"{self.name} was given x of shape {shape}: with more than three dimensions it may be channels-first "
                f"(images), and nothing tells which dimension has the features. Give wrap dim={dim} if it is the last"
            )
        return x.unsqueeze(-2) if num_streams == 1 else expand_streams(x, num_streams) if self.first else x

    def leave(self, output: Any, uses: list[str]) -> Any:
        """The block's output with the carrier replaced by its streams, or by x after the last block."""
        in_tuple = isinstance(output, tuple | list) and len(output) > 0
        carrier = output[0] if in_tuple else output
        if not isinstance(carrier, Carrier):
            reason = _lost(uses) if _trial is None else _trial.lost(carrier)
            raise WrapError(f"{self.name} does not end as a pre-norm block does: {reason}")
        if carrier._left:
            raise WrapError(
                f"{self.name} does not end as a pre-norm block does: {carrier._left} of its {self.count} sites were "
                "not written; give wrap the number of residual adds as `sites`"
            )
        streams = carrier._streams.to(carrier._dtype)
        # One stream is the plain residual, between blocks too.
        handed = streams.squeeze(-2) if streams.shape[-2] == 1 else streams
        if self.reduce is not None:
            handed = REDUCTIONS[self.reduce](streams)
        if _trial is not None:
            _trial.leave(self.name, handed)
        if not in_tuple:
            return handed
        rest = [handed, *output[1:]]
        return type(output)(*rest) if hasattr(output, "_fields") else type(output)(rest)


class Block:
    """The mixin of a wrapped block: its forward pass runs between the conversions of its place.

    A class rather than a pair of hooks, so that all hooks, registered before or after, see plain tensors.
    """

    plain: type[Any]
    temper_place: Place

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created on demand, so no module defines it by name.
        return _new_block, (type(self).plain,), self.__dict__


_classes: dict[type[Any], type[Any]] = {}


def block_class(plain: type[Any]) -> Any:
    """The class of a wrapped block; it keeps the name of the block's own class, which other code looks up."""
    if plain not in _classes:

        @functools.wraps(plain.forward)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            place = self.temper_place
            args, kwargs, uses = place.enter(getattr(self, SITES), args, kwargs)
            return place.leave(plain.forward(self, *args, **kwargs), uses)

        namespace = {"plain": plain, "forward": forward, "__module__": plain.__module__, "__doc__": plain.__doc__}
        _classes[plain] = type(plain.__name__, (Block, plain), namespace | {"__qualname__": plain.__qualname__})
    return _classes[plain]


def _new_block(plain: type[Any]) -> Any:
    cls = block_class(plain)
    return cls.__new__(cls)


def _lost(uses: list[str]) -> str:
    return (
        "its output is not x + branch(norm(x)). Something other than an addition was done to the residual on its way, "
        f"one of these: {', '.join(dict.fromkeys(uses)) or 'nothing was done with x'}. Blocks that norm the sum "
        "(post-norm), scale it or gate it need HyperConnection by hand. temper.unwrap(model) takes the streams off"
    )


def _config(sites: Any) -> RouterConfig:
    """The configuration of a block's sites, which all have the same width and number of streams."""
    config: RouterConfig = next(site for site in sites.modules() if isinstance(site, Site)).config
    return config
