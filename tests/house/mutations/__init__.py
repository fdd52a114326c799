"""Planted errors, each of which breaks a guarantee, and the tests that must find them."""
