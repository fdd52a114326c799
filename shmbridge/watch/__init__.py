"""For observers: what a bridge is doing, read from outside, and what is wrong with it in words.

Observers only read: they hold no lock and delay nobody.
"""

__all__ = [
    "cells",
    "decode",
    "diagnosis",
    "document",
    "long_wait",
    "observer",
    "output",
    "processes",
    "prometheus",
    "record_lines",
    "rows",
    "scrape",
    "snapshot",
    "spare_cpu",
    "text",
]
