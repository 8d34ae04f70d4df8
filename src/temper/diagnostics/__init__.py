"""What the routing does while a network runs."""

from temper.diagnostics.observe import Observation, SiteReport, observe

__all__ = ["Observation", "SiteReport", "observe"]
