"""Feeds verl from a bridge. Any import of it imports verl first, whose plugins then load the modules here."""

import verl  # noqa: F401
