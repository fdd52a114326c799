"""Feeds verl from a bridge. Whichever module of it is imported first, verl comes before: its plugins load all."""

import verl  # noqa: F401
