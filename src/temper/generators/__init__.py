"""Generators: how W is stored. One file each; a new file in this folder registers itself."""

from temper.generators.base import Generator
from temper.registry import import_siblings

import_siblings(__name__, __path__)

__all__ = ["Generator"]
