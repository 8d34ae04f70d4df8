"""A study as a page, figures and tables: everything is computed from its results.json."""

from temper_lab.report.page import Tab, page
from temper_lab.report.results import Run, Study, read
from temper_lab.report.write import Report, write_report

__all__ = ["Report", "Run", "Study", "Tab", "page", "read", "write_report"]
