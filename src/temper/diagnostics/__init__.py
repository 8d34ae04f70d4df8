"""What the routing does while a network runs."""

from temper.diagnostics.observe import Observation, SiteReport, TokenReport, observe

__all__ = ["Observation", "SiteReport", "TokenReport", "observe"]
