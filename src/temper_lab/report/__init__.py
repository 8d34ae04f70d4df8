"""A study as a page, figures and tables: everything is computed from its results.json."""
