"""Suites that a new generator or mixer inherits."""
