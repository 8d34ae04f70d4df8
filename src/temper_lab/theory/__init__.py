"""The theory of `temper.theory` on a trained model and on real text."""

from temper_lab.theory.neighbours import neighbour, parse_rank, with_neighbours
from temper_lab.theory.study import study

__all__ = ["neighbour", "parse_rank", "study", "with_neighbours"]
