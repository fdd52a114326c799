"""Records kept in files that datasets, polars and duckdb open, and read back bit by bit.

A recorder writes parts into a folder, as a tap of a hub or from an observer. docs/reference/archive.md has
the columns.
"""

__all__ = ["folder", "recorder", "set_aside"]
