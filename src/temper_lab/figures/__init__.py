"""Figures as files: PNG, SVG or PDF."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from temper_lab.io import atomic_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def check_target(path: Path) -> None:
    """Raises before any work is done for a file that could not be written in the end."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"cannot write a figure to {path}: expected a name that ends in {', '.join(FORMATS)}")
    if path.is_dir():
        raise ValueError(f"cannot write a figure to {path}: it is a folder")


def save(figure: Figure, path: Path) -> None:
    """Writes a figure under its name only when it is complete."""
    check_target(path)
    with atomic_file(path) as part:
        figure.savefig(part, dpi=160, bbox_inches="tight")
