"""Times within one interleaved run: what else the machine does hits all variants alike."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from temper_lab.progress import Bar, duration

WARMUP = 2
# Seconds in which a single run is steady enough.
LONG = 0.2

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True)
class Run:
    """Something to time.

    Args:
        action: forward and backward.
        leaves: whose gradients are dropped between turns, while the clock stands.
        repeats: how often it runs in one turn, of which the median counts; once if that is LONG.
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
    """Seconds of every run in every round; in each round all take a turn, in an order that rotates.

    Args:
        what: words for the bar.
    """
    names, seconds = list(runs), {name: [] for name in runs}
    total = (WARMUP + rounds) * len(names)
    # Collecting garbage takes time when it likes, which would be somebody's turn.
    gc.disable()
    try:
        with Bar(what, total) as bar:
            begun, done = time.monotonic(), 0
            for index in range(WARMUP + rounds):
                # Over all rounds once around: who is first, and what is in the caches, changes.
                first = index * len(names) // (WARMUP + rounds)
                for name in names[first:] + names[:first]:
                    elapsed = runs[name].turn()
                    if index >= WARMUP:
                        seconds[name].append(elapsed)
                    done += 1
                    left = (time.monotonic() - begun) * (total - done) / done
                    phase = "warming up" if index < WARMUP else f"round {index - WARMUP + 1} of {rounds}"
                    bar.update(done, f"{phase}, {duration(left)} left")
                # What a round left behind is young.
                gc.collect(0)
    finally:
        gc.enable()
    return seconds


def spread(values: Iterable[float]) -> dict[str, float]:
    """The median, the least, and the middle half."""
    ordered = sorted(values)
    quarter = len(ordered) // 4
    numbers = statistics.median(ordered), ordered[0], ordered[quarter], ordered[-1 - quarter]
    return dict(zip(("median", "min", "low", "high"), (round(number, 4) for number in numbers), strict=True))


def milliseconds(seconds: Iterable[float]) -> dict[str, float]:
    """The spread of times, in ms."""
    return spread(1000 * value for value in seconds)


def ratios(values: Sequence[float], bases: Sequence[float]) -> list[float]:
    """Round by round: only what ran side by side is compared."""
    return [value / base for value, base in zip(values, bases, strict=True)]
