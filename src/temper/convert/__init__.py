"""Other people's weights in and out."""

from temper.convert.foreign import export_foreign, load_foreign

__all__ = ["export_foreign", "load_foreign"]
