"""Numbers on a command line: what each of them may be, and the words for one that may not.

Knows argparse alone. Called by the files that add options.
"""

from __future__ import annotations

import argparse
import math


def positive(text: str) -> int:
    """Returns a whole number above 0."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def not_negative(text: str) -> int:
    """Returns a whole number, 0 or above."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def above_zero(text: str) -> float:
    """Returns a number above 0."""
    value = float(text)
    if not value > 0.0:
        raise argparse.ArgumentTypeError(f"{value} is not above 0")
    return value


def zero_or_above(text: str) -> float:
    """Returns a number, 0 or above."""
    value = float(text)
    if not value >= 0.0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def seconds(text: str) -> float:
    """Returns a time above 0 that every clock takes."""
    value = float(text)
    if not 0.0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{value} is not within 0 and 1000000")
    return value


def rate(text: str) -> float:
    """Returns a finite number, 0 or above."""
    value = zero_or_above(text)
    if math.isinf(value):
        raise argparse.ArgumentTypeError(f"{value} is not finite")
    return value


def finite(text: str) -> float:
    """Returns a finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{value} is not finite")
    return value


def seed(text: str) -> int:
    """Returns a whole number that every random generator takes, with the steps of a run added to it."""
    value = not_negative(text)
    if value >= 2**62:
        raise argparse.ArgumentTypeError(f"{value} is not below 2**62")
    return value


def share(text: str) -> float:
    """Returns a number from 0 to 1."""
    value = float(text)
    if not 0.0 <= value <= 1.0:
        raise argparse.ArgumentTypeError(f"{value} is not in 0 .. 1")
    return value
