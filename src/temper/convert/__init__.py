"""Weights of other models: other people's, in and out, and those of fewer streams."""

from temper.convert.foreign import export_foreign, load_foreign
from temper.convert.upcycle import grow, upcycle

__all__ = ["export_foreign", "grow", "load_foreign", "upcycle"]
