"""Feeds verl from a bridge."""
