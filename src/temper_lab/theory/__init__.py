"""The theory of `temper.theory` on a trained model and on real text."""

from temper_lab.theory.neighbours import neighbour, with_neighbours
from temper_lab.theory.study import study

__all__ = ["neighbour", "study", "with_neighbours"]
