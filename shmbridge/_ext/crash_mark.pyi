def begin(file: int) -> bool:
    """From now on a crash of this process writes its signal's number, one byte, to the open file.

    Returns whether there was room for one more. Never blocks.
    """

def end(file: int) -> None:
    """Forgets the file; close it after that. Idempotent."""
