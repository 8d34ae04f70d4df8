"""The setting of a benchmark, the block pair and sites it times, and which combinations can run here."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import temper
from temper.ops import backend
from temper.ops.backend import BACKENDS
from temper.registry import unknown
from temper_lab.method import Method, parse_all

PARTS = ("pair", "growth", "step", "recompute", "sinkhorn")


@dataclass(frozen=True)
class Setting:
    """A benchmark to run.

    Args:
        methods: methods in the notation of `temper_lab.method.Method`.
        streams: the numbers of streams for everything but growth.
        growth: the numbers of streams for growth.
        width: the width of the block pair; the model of whole steps has a third of it.
        tokens: the tokens of the block pair; a whole step and Sinkhorn take twice as many.
        rounds: the rounds in which every variant takes a turn, after the warm-up; whole steps take half as many.
    """

    methods: tuple[str, ...] = ("temper-cp", "temper-tucker", "mhc", "kromhc")
    streams: tuple[int, ...] = (4, 8, 16)
    growth: tuple[int, ...] = (2, 4, 8, 16, 32)
    backends: tuple[str, ...] = ("cpu", "fused", "naive")
    width: int = 768
    tokens: int = 512
    rounds: int = 9
    threads: int = 1
    parts: tuple[str, ...] = PARTS

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                if not value:
                    raise ValueError(f"--{field.name} is empty; expected at least one")
                # Methods in the given order, without duplicates and in canonical form.
                words = map(str, parse_all(value)) if field.name == "methods" else value
                object.__setattr__(self, field.name, tuple(dict.fromkeys(words)))
        for name, known in (("backends", BACKENDS), ("parts", PARTS)):
            for value in getattr(self, name):
                if value not in known:
                    raise unknown(name.removesuffix("s"), value, known)
        if "residual" in self.methods:
            raise ValueError("--methods has residual, which everything is compared with anyway: leave it out")
        for name in ("streams", "growth"):
            if too_few := [n for n in getattr(self, name) if n < 2]:
                raise ValueError(f"--{name} has {too_few[0]}; expected numbers of streams >= 2")
        for name, least in (("width", 8), ("tokens", 4), ("rounds", 1), ("threads", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"--{name} is {getattr(self, name)}; expected at least {least}")

    def quick(self) -> Setting:
        """A setting that takes a minute: fewer tokens, rounds and numbers of streams; not for numbers to quote."""
        return replace(
            self,
            streams=self.streams[:1],
            growth=tuple(n for n in self.growth if n <= 8) or self.growth[:1],
            tokens=min(self.tokens, 128),
            rounds=min(self.rounds, 3),
        )


HEAD_DIM = 128


class Attention(nn.Module):
    """Causal attention with heads of 128 where the width allows it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.num_heads = next(n for n in range(max(1, width // HEAD_DIM), 0, -1) if width % n == 0)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(F.rms_norm(x, x.shape[-1:])).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in parts)
        return self.out(F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """D -> 4 D -> D with a squared ReLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(F.rms_norm(x, x.shape[-1:]))).square())


class SiteLike(Protocol):
    """The interface that sites of this package, of others and residual ones share; `state` is its own of each."""

    def begin(self, streams: Tensor, /) -> tuple[Tensor, Any]: ...

    def finish(self, state: Any, y: Tensor, /) -> Tensor: ...

    def finish_into(self, following: Any, state: Any, y: Tensor, /) -> tuple[Tensor, Any]: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...


class Residual(nn.Module):
    """The site that everything is compared with: x + f(x)."""

    def begin(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def finish_into(self, following: Residual, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return following.begin(x + y)


class Stack(nn.Module):
    """Chained sites around branches that take turns; two of each are a pair."""

    def __init__(self, branches: Iterable[nn.Module], sites: Iterable[AnySite]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)
        # A ModuleList does not know the class of its members.
        self.sites = cast("Sequence[SiteLike]", nn.ModuleList(sites))

    def forward(self, streams: Tensor) -> Tensor:
        x, state = self.sites[0].begin(streams)
        for index, site in enumerate(self.sites):
            y = self.branches[index % len(self.branches)](x)
            if index + 1 < len(self.sites):
                x, state = site.finish_into(self.sites[index + 1], state, y)
        return self.sites[-1].finish(state, y)

    def routed(self) -> list[temper.HyperConnection]:
        """The sites of this package."""
        return [site for site in self.sites if isinstance(site, temper.HyperConnection)]


def branches(width: int) -> list[nn.Module]:
    """Attention and MLP."""
    return [Attention(width), MLP(width)]


PEER_PACKAGE = "hyper-connections"
# Our names of the classes in PyPI's hyper-connections.
PEER_CLASSES = {"pypi-hc": "HyperConnections", "pypi-mhc": "ManifoldConstrainedHyperConnections"}


def find_peers() -> tuple[str | None, dict[str, type[nn.Module]]]:
    """The version of PyPI's hyper-connections, or None if it is not installed, and its classes by our names."""
    try:
        module = importlib.import_module(PEER_PACKAGE.replace("-", "_"))
        found = version(PEER_PACKAGE)
    except (ImportError, PackageNotFoundError):
        return None, {}
    return found, {name: getattr(module, cls) for name, cls in PEER_CLASSES.items() if hasattr(module, cls)}


class PeerSite(nn.Module):
    """A site of another package with our interface. Its streams are (B N, T, D)."""

    def __init__(self, name: str, num_streams: int, width: int, layer_index: int) -> None:
        super().__init__()
        self.site = find_peers()[1][name](num_streams, dim=width, layer_index=layer_index)

    def begin(self, streams: Tensor) -> tuple[Tensor, Any]:
        return self.site(streams)

    def finish(self, add: Any, y: Tensor, *, in_place: bool = False) -> Tensor:
        return add(y)

    def finish_into(self, following: PeerSite, add: Any, y: Tensor, *, in_place: bool = False) -> tuple[Tensor, Any]:
        return following.begin(self.finish(add, y))


AnySite = temper.HyperConnection | Residual | PeerSite

# Sites with more routing parameters than this are skipped as impractical.
LIMIT = 10_000_000


class Case(NamedTuple):
    """A method at a number of streams.

    Args:
        backend: the backend of `temper`; None for sites of other packages.
    """

    method: str
    num_streams: int
    backend: str | None

    def __str__(self) -> str:
        return f"{self.method}, N={self.num_streams}" + (f", {self.backend}" if self.backend else "")

    def fields(self) -> dict[str, Any]:
        """The first entries of a row."""
        return {"method": self.method, "streams": self.num_streams, "backend": self.backend}

    def site(self, width: int, layer_index: int = 0) -> AnySite:
        """Builds a site, an object with `begin` and `finish`."""
        if self == RESIDUAL:
            return Residual()
        if self.backend is None:
            return PeerSite(self.method, self.num_streams, width, layer_index)
        config = Method.parse(self.method).config(self.num_streams, width)
        return temper.HyperConnection(config, layer_index=layer_index)

    def shape(self, tokens: int, width: int) -> tuple[int, ...]:
        """The shape of the streams of one row of tokens."""
        return (self.num_streams, tokens, width) if self.backend is None else (1, tokens, self.num_streams, width)

    def chosen(self) -> AbstractContextManager[None]:
        """A context in which its sites run on its backend."""
        return nullcontext() if self.backend is None else temper.backend(self.backend)


# The baseline of all comparisons.
RESIDUAL = Case("residual", 1, None)


def sort_out(
    methods: tuple[str, ...], streams: tuple[int, ...], backends: tuple[str, ...], width: int
) -> tuple[list[Case], list[dict[str, Any]]]:
    """The cases that run, and the others with the reason; sites of other packages come last."""
    cases, skipped = [], []
    for method in methods:
        for n in streams:
            if reason := _refusal(method, n, width):
                skipped.append({"method": method, "streams": n, "backend": None, "reason": reason})
                continue
            for name in backends:
                case = Case(method, n, name)
                if reason := _fallback(case, width):
                    skipped.append({**case.fields(), "reason": reason})
                else:
                    cases.append(case)
    cases += [Case(name, n, None) for name in find_peers()[1] for n in streams]
    return cases, skipped


def _refusal(method: str, num_streams: int, width: int) -> str | None:
    try:
        config = Method.parse(method).config(num_streams, width)
    except ValueError as error:
        return str(error)
    count = temper.count_parameters(config)
    return f"{count:,} parameters in a site, more than {LIMIT:,}" if count > LIMIT else None


def _fallback(case: Case, width: int) -> str | None:
    """The backend that runs instead of the requested one, or None."""
    with torch.device("meta"):
        site = case.site(width)
    assert case.backend is not None
    ran = runs_on(case.backend, torch.empty(1, case.num_streams, width), site)
    return None if ran == case.backend else f"the backend {case.backend} leaves this to {ran}"


def runs_on(name: str, tensor: Tensor, part: Any) -> str:
    """The backend that runs a site or a mixer when this one is requested.

    Args:
        part: a site or a mixer.
    """
    spec, mixer = (part.site_spec(), part) if isinstance(part, temper.Mixer) else (part.spec, part.mixer)
    with temper.use_backend(name):
        return backend.choose(tensor, spec, mixer).name
