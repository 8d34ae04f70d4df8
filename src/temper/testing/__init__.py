"""Suites that a new generator or mixer inherits; they need pytest.

class TestCirculant(MixerSuite):
    name = "circulant"

    def matrix(self, mixer, logits): ...   # the same answer, obtained another way
"""

from temper.testing.generators import GeneratorSuite
from temper.testing.mixers import MixerSuite

__all__ = ["GeneratorSuite", "MixerSuite"]
