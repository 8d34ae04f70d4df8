"""What is measured, and at which sizes."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import temper
from temper.ops.backend import BACKENDS
from temper.registry import unknown

PARTS = ("pair", "growth", "step", "recompute", "sinkhorn")


@dataclass(frozen=True)
class Setting:
    """A benchmark to run.

    Args:
        streams: the numbers of streams for everything but growth.
        growth: the numbers of streams for growth.
        width: of the block pair; the model of whole steps has a third of it.
        tokens: of the block pair; a whole step and Sinkhorn take twice as many.
        rounds: in which every variant takes one turn, after those that warm up; whole steps take half as many.
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
                # In the order given, each once.
                object.__setattr__(self, field.name, tuple(dict.fromkeys(value)))
        for name, known in (("methods", temper.PRESETS), ("backends", BACKENDS), ("parts", PARTS)):
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
        """The same within a minute: fewer tokens, rounds and numbers of streams, and no number to quote."""
        return replace(
            self,
            streams=self.streams[:1],
            growth=tuple(n for n in self.growth if n <= 8) or self.growth[:1],
            tokens=min(self.tokens, 128),
            rounds=min(self.rounds, 3),
        )
