"""The fixtures of all tests with torch."""

from tests.adapters.torch_fixtures import *  # noqa: F403
from tests.adapters.torch_fixtures import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]
