"""Models with one stream made models with several, with the outputs that they had."""

from temper_lab.upcycle.ours import grow_gpt, upcycle_gpt
from temper_lab.upcycle.theirs import load, upcycle_hf

__all__ = ["grow_gpt", "load", "upcycle_gpt", "upcycle_hf"]
