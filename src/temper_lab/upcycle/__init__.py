"""Models with one stream made models with several, with the outputs that they had."""

from temper_lab.upcycle.ours import grow_gpt, upcycle_gpt
from temper_lab.upcycle.theirs import attach, load, upcycle_hf

__all__ = ["attach", "grow_gpt", "load", "upcycle_gpt", "upcycle_hf"]
