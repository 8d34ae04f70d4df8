"""Weights in other forms: of lower rank, of more streams, and of other people's modules."""

from temper.convert.factorize import factorize, relative_error
from temper.convert.foreign import export_foreign, load_foreign
from temper.convert.ranks import ranks_for
from temper.convert.upcycle import grow, upcycle

__all__ = ["export_foreign", "factorize", "grow", "load_foreign", "ranks_for", "relative_error", "upcycle"]
