class CrashNote:
    """A note for a file, empty at first; for the process that made it. Never blocks.

    Several notes of one process may have one file: each appends a line. A process has at most 16.
    """

    def __init__(self, path: bytes) -> None: ...
    def set(self, text: bytes) -> None:
        """A crash from now on appends the signal's number, a blank and this text to the file; b"": none."""

    def end(self) -> None:
        """Forgets the note. Idempotent."""
