"""Tests of one running server, which `conftest.py` starts once for all files here."""
