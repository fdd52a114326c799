"""Notes that are written into files only if this process crashes: abort(), a fault, an illegal instruction."""

from posix.unistd cimport getpid

cdef extern from "crash_mark.h" nogil:
    int crash_note_begin(const char *path)
    int crash_note_set(int note, const char *text)
    void crash_note_end(int note)


cdef class CrashNote:
    """A note for a file, empty at first; for the process that made it. Never blocks.

    Several notes of one process may have one file: each appends a line. A process has at most 16.
    """

    cdef int note, process

    def __cinit__(self, path: bytes):
        self.note, self.process = crash_note_begin(path), getpid()

    def __dealloc__(self):
        self.end()

    def set(self, text: bytes):
        """A crash from now on appends the signal's number, a blank and this text to the file; b"": none."""
        if self.note >= 0 and self.process == getpid():
            crash_note_set(self.note, text)

    def end(self):
        """Forgets the note. Idempotent."""
        if self.note >= 0 and self.process == getpid():
            crash_note_end(self.note)
        self.note = -1
