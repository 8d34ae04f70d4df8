"""Conversion of weights: to lower rank, to more streams, and from and to other implementations."""

from temper.convert.compress import Compressed, HeadReport, compress
from temper.convert.factorize import factorize, relative_error
from temper.convert.foreign import export_foreign, load_foreign
from temper.convert.moments import Moment, moments
from temper.convert.ranks import ranks_for
from temper.convert.sensitivity import sensitivities
from temper.convert.upcycle import grow, upcycle

__all__ = [
    "Compressed",
    "HeadReport",
    "Moment",
    "compress",
    "export_foreign",
    "factorize",
    "grow",
    "load_foreign",
    "moments",
    "ranks_for",
    "relative_error",
    "sensitivities",
    "upcycle",
]
