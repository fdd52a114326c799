"""For observers: what a bridge is doing, read from outside, and what is wrong with it in words.

Observers only read: they hold no lock and block no process. The live view, `top`, alone imports Textual.
"""

__all__ = ["exporter", "long_wait", "observer", "snapshot", "text", "top"]
