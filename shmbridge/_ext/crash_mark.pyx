"""Marks in a file that this process crashed: abort(), a fault, an illegal instruction."""

cdef extern from "crash_mark.h" nogil:
    int crash_mark_begin(int file)
    void crash_mark_end(int file)


def begin(int file):
    """From now on a crash of this process writes its signal's number, one byte, to the open file.

    Returns whether there was room for one more. Never blocks.
    """
    return crash_mark_begin(file) == 0


def end(int file):
    """Forgets the file; close it after that. Idempotent."""
    crash_mark_end(file)
