"""What `temper compress` is asked for, checked before anything is read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from temper.generators import Generator
from temper.generators.base import Rank

# The forms that have ranks and a decomposition; a new generator joins by its name.
FORMS = tuple(sorted(name for name, form in Generator.members.items() if form.ranked))


@dataclass(frozen=True)
class Settings:
    """How to compress, what to measure, what to write. Exactly one of rank, error and params is given.

    Args:
        model: a model folder, the folder of a run, or a Hugging Face folder of a DeepSeek-V4.
        out: a new folder.
        calibrate: the corpus whose training text decides what matters; None for the weights alone.
        corpus: what bits per byte are measured on; by default that of `calibrate`, or that of the run.
        plain: the decompositions of `Generator.from_dense` instead of the best fit.
    """

    model: Path
    out: Path
    to: str
    rank: Rank = None
    error: float | None = None
    params: int | None = None
    calibrate: str | None = None
    calibrate_tokens: int = 16_384
    corpus: str | None = None
    val_fraction: float | None = None
    batches: int = 50
    rows: int = 8
    context: int | None = None
    finetune: int = 0
    finetune_all: bool = False
    plain: bool = False
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        if self.to not in FORMS:
            raise ValueError(f"--to is {self.to!r}; expected {', '.join(FORMS)}")
        given = [f"--{name}" for name in ("rank", "error", "params") if getattr(self, name) is not None]
        if len(given) != 1:
            got = f"{' and '.join(given)} together" if given else "none of them"
            raise ValueError(f"expected one of --rank, --error and --params, got {got}")
        if self.error is not None and not 0 <= self.error < math.inf:
            raise ValueError(f"--error is {self.error}; expected a relative error >= 0, such as 0.1")
        if self.params is not None and self.params < 1:
            raise ValueError(f"--params is {self.params}; expected the number of parameters of all sites together")
        for name in ("calibrate_tokens", "batches", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; expected at least 1")
        if self.finetune < 0:
            raise ValueError(f"--finetune is {self.finetune}; expected a number of steps")
        if self.finetune_all and not self.finetune:
            raise ValueError("--finetune-all says what --finetune STEPS trains, and there are no steps")
        if self.plain and self.calibrate is not None:
            raise ValueError("--plain is the decomposition of the weights alone; leave out --calibrate")
        if self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir())):
            raise ValueError(f"{self.out} is not empty; expected a new folder for the compressed model")
