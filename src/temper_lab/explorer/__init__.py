"""The routing explorer: how streams are read, mixed and written, for every token of a text and every site."""

from temper_lab.explorer.tab import Subject, build, tab
from temper_lab.explorer.trace import Trace, trace

__all__ = ["Subject", "Trace", "build", "tab", "trace"]
