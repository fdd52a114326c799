/* Notes that are written into files only if this process crashes: SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV.
 *
 * What a signal handler may do is little: it opens each note's file, appends one line, the signal's number and
 * the text, and lets the signal take its former course. A SIGKILL, a SIGTERM and an _exit write nothing; nor
 * does a child of fork.
 */
#ifndef SHMBRIDGE_CRASH_MARK_H
#define SHMBRIDGE_CRASH_MARK_H

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CRASH_SIGNALS = 5, CRASH_NOTES = 16 };

static const int crash_signals[CRASH_SIGNALS] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
static struct sigaction crash_before[CRASH_SIGNALS];
static volatile pid_t crash_process;
static volatile sig_atomic_t crash_written; /* a handler set later than ours leads back to ours */

/* The line before is freed one change later: a crash in another thread may be reading it. */
static struct crash_note {
    char *path; /* NULL: free */
    char *volatile line; /* "NN text\n"; NULL: none */
    char *former;
} crash_notes[CRASH_NOTES];

static void crash_write(char *path, char *line, int number) {
    const int how = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC;
    int file = open(path, how, 0600);
    if (file < 0 && errno == ENOENT) {
        for (char *at = path + 1; *at; at++)
            if (*at == '/') {
                *at = 0;
                mkdir(path, 0777);
                *at = '/';
            }
        file = open(path, how, 0600);
    }
    if (file < 0) return;
    line[0] = (char)('0' + number / 10);
    line[1] = (char)('0' + number % 10);
    for (size_t length = strlen(line); length;) {
        ssize_t written = write(file, line, length);
        if (written <= 0) break;
        line += written;
        length -= (size_t)written;
    }
    close(file);
}

static void crash_handler(int number) {
    int kept = errno;
    if (getpid() == crash_process && !crash_written) {
        crash_written = 1;
        for (int at = 0; at < CRASH_NOTES; at++) {
            char *line = crash_notes[at].line;
            if (crash_notes[at].path && line) crash_write(crash_notes[at].path, line, number);
        }
    }
    for (int at = 0; at < CRASH_SIGNALS; at++)
        if (crash_signals[at] == number) {
            struct sigaction before = crash_before[at];
            memset(&crash_before[at], 0, sizeof before); /* SIG_DFL, should the former one lead back here */
            sigaction(number, &before, NULL);
        }
    errno = kept;
    raise(number); /* delivered on return; a fault happens again */
}

static void crash_note_end(int at) {
    struct crash_note *note = &crash_notes[at];
    char *line = note->line, *path = note->path;
    note->line = NULL;
    note->path = NULL;
    free(line);
    free(note->former);
    free(path);
    note->former = NULL;
}

/* A note's number, or -1 without room or memory; this and the next two are for threads that hold the GIL. */
static int crash_note_begin(const char *path) {
    if (crash_process != getpid()) { /* the first note of this process; a child of fork forgets its parent's */
        for (int at = 0; at < CRASH_NOTES; at++) crash_note_end(at);
        struct sigaction mine;
        memset(&mine, 0, sizeof mine);
        mine.sa_handler = crash_handler;
        mine.sa_flags = SA_ONSTACK; /* if there is another: a stack may have overflowed */
        sigemptyset(&mine.sa_mask);
        for (int at = 0; at < CRASH_SIGNALS; at++) {
            struct sigaction before;
            if (sigaction(crash_signals[at], &mine, &before) == 0 && before.sa_handler != crash_handler)
                crash_before[at] = before;
        }
        crash_process = getpid();
    }
    for (int at = 0; at < CRASH_NOTES; at++)
        if (!crash_notes[at].path) return (crash_notes[at].path = strdup(path)) ? at : -1;
    return -1;
}

/* Replaces a note's text; an empty one writes nothing. 0, or -1 without memory. */
static int crash_note_set(int at, const char *text) {
    struct crash_note *note = &crash_notes[at];
    char *line = NULL;
    size_t length = strlen(text);
    if (length) {
        if (!(line = malloc(length + 5))) return -1;
        memcpy(line, "NN ", 3);
        memcpy(line + 3, text, length);
        memcpy(line + 3 + length, "\n", 2);
    }
    char *former = note->former;
    note->former = note->line;
    note->line = line;
    free(former);
    return 0;
}

#endif
