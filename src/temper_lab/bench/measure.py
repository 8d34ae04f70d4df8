"""Times within one interleaved run, bytes saved for backward, and the check against `naive` that comes before both.

Other load on the machine affects all variants of an interleaved run alike.
"""

from __future__ import annotations

import gc
import itertools
import math
import platform
import statistics
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import temper
from temper_lab.bench.cases import Case, SiteLike
from temper_lab.console import Bar, duration

WARMUP = 2
# A run of at least this many seconds is steady enough alone.
LONG = 0.2

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """An action to time.

    Args:
        action: the forward and backward pass.
        leaves: tensors whose gradients are dropped between turns, outside the timing.
        repeats: the runs in one turn, of which the median counts; only one if it takes LONG.
    """

    action: Callable[[], object]
    leaves: Sequence[Tensor] = ()
    repeats: int = 1

    def turn(self) -> float:
        """Seconds."""
        seconds: list[float] = []
        while len(seconds) < self.repeats and sum(seconds) < LONG:
            start = time.perf_counter()
            self.action()
            seconds.append(time.perf_counter() - start)
            for leaf in self.leaves:
                leaf.grad = None
        return statistics.median(seconds)


def interleave(runs: Mapping[Name, Run], rounds: int, what: str) -> dict[Name, list[float]]:
    """The seconds of every run in every round; in each round all take a turn, in rotating order.

    Args:
        what: the label of the progress bar.
    """
    names = list(runs)
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    total = (WARMUP + rounds) * len(names)
    # A garbage collection would be charged to one variant.
    gc.disable()
    try:
        with Bar(what, total) as bar:
            begun, done = time.monotonic(), 0
            for index in range(WARMUP + rounds):
                # Rotates over the rounds, so that the order and the state of the caches vary.
                first = index * len(names) // (WARMUP + rounds)
                for name in names[first:] + names[:first]:
                    elapsed = runs[name].turn()
                    if index >= WARMUP:
                        seconds[name].append(elapsed)
                    done += 1
                    left = (time.monotonic() - begun) * (total - done) / done
                    phase = "warming up" if index < WARMUP else f"round {index - WARMUP + 1} of {rounds}"
                    bar.update(done, f"{phase}, {duration(left)} left")
                # The garbage of one round is in generation 0.
                gc.collect(0)
    finally:
        gc.enable()
    return seconds


def spread(values: Iterable[float]) -> dict[str, float]:
    """The median, the minimum and the quartiles."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    numbers = statistics.median(ordered), ordered[0], ordered[quarter], ordered[-1 - quarter]
    return dict(zip(("median", "min", "low", "high"), (round(number, 4) for number in numbers), strict=True))


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """The spread of times, in ms."""
    return spread(1000 * value for value in seconds)


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """The ratios, round by round."""
    return [value / base for value, base in zip(values, bases, strict=True)]


@contextmanager
def pinned(threads: int) -> Iterator[None]:
    """Sets the number of threads of torch, and thereby of the native kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cpu_name() -> str:
    """The name of the CPU according to the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, None) or platform.processor() or platform.machine()


# A buffer larger than any cache.
COPIED = 256 * 2**20
FLOAT = 4


def copy_run() -> Run:
    """Copies a buffer that no cache holds."""
    source, target = torch.ones(COPIED // FLOAT), torch.empty(COPIED // FLOAT)
    return Run(lambda: target.copy_(source))


def bandwidth(seconds: Sequence[float]) -> float:
    """The bytes per second of `copy_run`, counting reads and writes."""
    return 2 * COPIED / median(seconds)


def site_bytes(num_streams: int, width: int, tokens: int) -> int:
    """The least bytes that a site moves, forward and backward: 8 N D + 5 D floats per token.

    Forward it reads H and writes x, then reads H and y and writes H'; backward it reads the gradient, H and y and
    writes that of y, then reads the gradient, H and that of x and writes that of H.
    """
    return (8 * num_streams + 5) * width * tokens * FLOAT


# A site takes little time, so a turn is the median of a few runs.
SITE_REPEATS = 3


class Tensors:
    """Random inputs and gradients, shared by all runs of one shape."""

    def __init__(self) -> None:
        self._made: dict[tuple[tuple[int, ...], bool], Tensor] = {}

    def leaf(self, shape: tuple[int, ...]) -> Tensor:
        """A random tensor of this shape to differentiate with respect to."""
        return self._make(shape, True)

    def grad(self, shape: tuple[int, ...]) -> Tensor:
        """A random gradient for an output of this shape."""
        return self._make(shape, False)

    def _make(self, shape: tuple[int, ...], is_leaf: bool) -> Tensor:
        if (shape, is_leaf) not in self._made:
            self._made[shape, is_leaf] = torch.randn(shape, requires_grad=is_leaf)
        return self._made[shape, is_leaf]


def stack_run(case: Case, stack: nn.Module, streams: Tensor, grad: Tensor) -> Run:
    """A run of sites with their branches."""

    def action() -> None:
        with case.chosen():
            out = stack(streams)
        out.backward(grad)

    return Run(action, [streams, *stack.parameters()])


def site_run(case: Case, site: SiteLike, streams: Tensor, y: Tensor, grads: Sequence[Tensor]) -> Run:
    """A run of a single site.

    Args:
        y: a stand-in for the output of its branch.
        grads: the gradients of the branch input and of the next streams.
    """

    def action() -> None:
        with case.chosen():
            x, state = site.begin(streams)
            out = site.finish(state, y)
        torch.autograd.backward([x, out], grads)

    return Run(action, [streams, y, *site.parameters()], SITE_REPEATS)


def chain_run(case: Case, sites: Sequence[SiteLike], streams: Tensor, y: Tensor, grads: Sequence[Tensor]) -> Run:
    """A run of chained sites without branches.

    Args:
        y: a stand-in for the output of every branch.
        grads: the gradients of every branch input and of the last streams.
    """

    def action() -> None:
        with case.chosen():
            x, state = sites[0].begin(streams)
            inputs = [x]
            for site, following in itertools.pairwise(sites):
                x, state = site.finish_into(following, state, y)
                inputs.append(x)
            out = sites[-1].finish(state, y)
        torch.autograd.backward([*inputs, out], grads)

    return Run(action, [streams, y, *(parameter for site in sites for parameter in site.parameters())])


class _Held:
    """A saved tensor that dies with the graph that saved it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def kept_bytes(forward: Callable[[], object], own: Iterable[Tensor] = ()) -> int:
    """The bytes of distinct storages that are saved for the backward pass of the result of `forward`.

    Args:
        own: tensors that do not count, because they exist anyway.
    """
    held: weakref.WeakSet[_Held] = weakref.WeakSet()

    def pack(tensor: Tensor) -> _Held:
        entry = _Held(tensor.detach())
        held.add(entry)
        return entry

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda entry: entry.tensor):
        result = forward()
    # Reference cycles in the graph.
    gc.collect(1)
    storages = [entry.tensor.untyped_storage() for entry in held]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    for tensor in own:
        sizes.pop(tensor.untyped_storage().data_ptr(), None)
    # Keeps the graph alive until here.
    del result
    return sum(sizes.values())


def saved_bytes(case: Case, model: nn.Module, *inputs: Any) -> int:
    """The bytes that a model saves for the backward pass, without parameters and buffers."""
    with case.chosen():
        return kept_bytes(lambda: model(*inputs), [*model.parameters(), *model.buffers()])


# Not a multiple of a kernel's block, so that the last, partial block is tested too.
TOKENS = 37
# The tolerance relative to the largest entry. Float32 sums over N D entries and Sinkhorn's iterations leave an error of
# at most 1e-5, and a wrong formula is off by far more.
TOLERANCE = 1e-4
# The tolerance of a gate's gradient, a single sum over all tokens and entries with much cancellation.
TOLERANCE_OF_ONE = 1e-3


def check_site(case: Case, width: int) -> None:
    """Raises ValueError if the site differs from `naive`."""
    assert case.backend is not None
    site = case.site(width)
    assert isinstance(site, temper.HyperConnection)
    scatter(site)
    streams = torch.randn(TOKENS, case.num_streams, width, requires_grad=True)
    y = torch.randn(TOKENS, width, requires_grad=True)
    grads = torch.randn(TOKENS, width), torch.randn(TOKENS, width), torch.randn(TOKENS, case.num_streams, width)
    leaves = {"streams": streams, "y": y, **dict(site.named_parameters())}

    def run(name: str) -> dict[str, Tensor]:
        with temper.backend(name):
            # The site is chained to itself, so that every operation runs, with `begin` and `finish` at the ends.
            x, state = site.begin(streams)
            next_x, state = site.finish_into(site, state, y)
            out = site.finish(state, y)
        torch.autograd.backward([x, next_x, out], grads)
        results = {"x": x, "the next x": next_x, "the next streams": out}
        return {name: tensor.detach() for name, tensor in results.items()} | take_grads(leaves)

    compare(str(case), run(case.backend), run("naive"))


@torch.no_grad()
def scatter(site: temper.HyperConnection) -> None:
    """Sets random parameters with logits of size 1; at the initial values most gradients nearly vanish."""
    for parameter in site.norm.parameters():
        parameter.normal_(1.0, 0.1)
    for name in site.config.heads:
        head = getattr(site, name)
        for parameter in head.generator.parameters():
            parameter.normal_()
        size = head.generator.to_dense().norm() / math.sqrt(math.prod(head.generator.out_modes))
        head.gate.fill_(1 / size)
        head.bias.normal_()


def take_grads(leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Takes the gradients from the tensors."""
    grads = {}
    for name, leaf in leaves.items():
        if leaf.grad is not None:
            grads[f"the gradient of {name}"], leaf.grad = leaf.grad, None
    return grads


def compare(
    label: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = TOLERANCE
) -> None:
    """Raises ValueError unless all are the same within the tolerance."""
    if missing := expected.keys() ^ got.keys():
        raise ValueError(f"{label}: {min(missing)} is there only once; nothing is reported")
    for name, value in expected.items():
        largest = float(value.abs().max())
        error = float((got[name] - value).abs().max())
        allowed = tolerance if value.numel() > 1 else max(tolerance, TOLERANCE_OF_ONE)
        # Not written as "greater than", so that NaN fails too.
        if not error <= allowed * largest:
            share = error / largest if largest else math.inf
            raise ValueError(
                f"{label}: {name} is off by {share:.1e} of its largest entry (allowed: {allowed:.0e}); "
                "nothing is reported"
            )
