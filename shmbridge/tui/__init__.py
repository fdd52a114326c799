"""The live view, `shmbridge top`: the only room that imports Textual. It only reads."""

__all__ = ["top"]
