"""The hub of a bridge: its lanes, groups, batches, ranks and admission; hub.py owns them all."""

__all__ = ["admission", "batches", "counts", "former", "hub", "ranks", "request", "tap"]
