"""Which tokens run together: every prompt once, common beginnings once, equal lengths side by side.

A causal model says the same about a token whatever comes after it. So a prompt that begins another needs no pass of its
own, and what all prompts of an item begin with is read once and remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from temper_lab.eval.core.kinds import Row, common_prefix

Ids = tuple[int, ...]


@dataclass(frozen=True)
class Unit:
    """Prompts that begin alike; `shared` tokens of that are worth reading once."""

    inputs: list[Ids]
    shared: int = 0

    @property
    def longest(self) -> int:
        return max(map(len, self.inputs))


@dataclass(frozen=True)
class Batch:
    """Units that run together. All are cut at the same place, so that what is remembered needs no padding."""

    units: list[Unit]

    @property
    def shared(self) -> int:
        return min(unit.shared for unit in self.units)

    @property
    def num_rows(self) -> int:
        return sum(len(unit.inputs) for unit in self.units)

    @property
    def num_tokens(self) -> int:
        """How many tokens are computed, padding included."""
        tail = max(unit.longest for unit in self.units) - self.shared
        return (len(self.units) if self.shared else 0) * self.shared + self.num_rows * tail

    @property
    def size(self) -> int:
        """How many tokens lie in memory: what is remembered is copied for every row."""
        return self.num_rows * max(unit.longest for unit in self.units)

    def inputs(self) -> Iterator[Ids]:
        for unit in self.units:
            yield from unit.inputs


def leaves(rows: Sequence[Row]) -> list[Ids]:
    """The inputs to compute for some rows: their tokens but the last, without those that only begin another."""
    inputs = sorted({row.ids[:-1] for row in rows})
    # In this order, whatever begins another stands right before one that it begins.
    return [ids for ids, after in zip(inputs, [*inputs[1:], ()], strict=True) if after[: len(ids)] != ids]


def units(inputs: list[Ids], rows: Sequence[Row], *, can_share: bool, pass_cost: int) -> list[Unit]:
    """The leaves of an item's rows as one unit that shares its beginning, or as several if that would not pay."""
    if can_share and len(inputs) > 1:
        # The token before a span predicts its first, so it is not in the shared part.
        shared = min(common_prefix(inputs), *(row.start - 1 for row in rows))
        whole = Batch([Unit(inputs, shared)])
        if shared and whole.num_tokens + pass_cost < sum(map(len, inputs)):
            return whole.units
    return [Unit([ids]) for ids in inputs]


def batches(items: Sequence[Unit], *, max_tokens: int, pass_cost: int) -> list[Batch]:
    """Units in batches: another one joins as long as padding costs less than a pass of its own."""
    made: list[Batch] = []
    for unit in sorted(items, key=lambda unit: (unit.shared, unit.longest)):
        alone = Batch([unit])
        if made:
            joined = Batch([*made[-1].units, unit])
            saves = joined.num_tokens <= made[-1].num_tokens + alone.num_tokens + pass_cost
            if saves and joined.size <= max_tokens:
                made[-1] = joined
                continue
        made.append(alone)
    return made
