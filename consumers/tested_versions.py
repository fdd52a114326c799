"""Says so when a trainer is outside the releases that its adapter was tested with. Knows no trainer."""

from __future__ import annotations

import logging
import re
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger(__name__)


def warn_if_untested(package: str, first: str, before: str) -> bool:
    """Logs a warning if a package is outside the tested releases, and returns whether it is. Never blocks.

    Args:
        package: its name on the package index.
        first: the oldest tested release, such as "1.16".
        before: the first release that is not tested any more.
    """
    try:
        found = version(package)
    except PackageNotFoundError:
        log.warning("%s is not installed as a package; its adapter was tested with %s", package, first)
        return True
    outside = not _numbers(first) <= _numbers(found) < _numbers(before)
    if outside:
        log.warning(
            "%s %s is outside the releases this adapter was tested with, %s up to but not %s -> install one "
            "of these if something fails",
            package,
            found,
            first,
            before,
        )
    return outside


def _numbers(release: str) -> tuple[int, ...]:
    """Returns the leading numbers of a release: (1, 16, 0) of "1.16.0rc1"."""
    leading = re.match(r"\d+(?:\.\d+)*", release)
    return tuple(map(int, leading[0].split("."))) if leading else ()
