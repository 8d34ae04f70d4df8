"""Mixers: from logits to the mixing matrix. One file each; a new file in this folder registers itself."""

from temper.mixers.base import Mixer
from temper.registry import import_siblings

import_siblings(__name__, __path__)

__all__ = ["Mixer"]
