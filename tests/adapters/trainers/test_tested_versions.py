"""A trainer outside the tested releases is named once, with the releases that were tested."""

from importlib.metadata import version

import pytest

from shmbridge.consumers.tested_versions import warn_if_untested


def test_a_release_in_the_range_is_not_mentioned(caplog):
    assert not warn_if_untested("numpy", "1.0", "99")
    assert not caplog.records


@pytest.mark.parametrize(("first", "before"), [("98", "99"), ("0.1", "0.2")])
def test_a_release_outside_is_named_with_the_range(caplog, first, before):
    assert warn_if_untested("numpy", first, before)
    assert all(each in caplog.text for each in ("numpy", version("numpy"), first, before))


def test_a_package_that_is_not_installed_is_named(caplog):
    assert warn_if_untested("no-such-package", "1", "2")
    assert "no-such-package is not installed" in caplog.text
