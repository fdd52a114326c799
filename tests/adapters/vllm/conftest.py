"""The fixtures of all tests with torch."""

from tests.adapters.torch_fixtures import *  # noqa: F403
