"""`temper compress`: a trained model with fewer routing parameters, what that costs, and how much of it comes back."""

from temper_lab.compress.run import compress
from temper_lab.compress.settings import Settings

__all__ = ["Settings", "compress"]
