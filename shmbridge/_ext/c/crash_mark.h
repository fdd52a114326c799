/* Marks, in files that are open, that this very process ended by a fatal signal of its own making.
 *
 * What a signal handler may do is little: it writes one byte to each file and lets the signal take its former
 * course. A SIGKILL, a SIGTERM and an _exit leave no mark; a child of fork writes none.
 */
#ifndef SHMBRIDGE_CRASH_MARK_H
#define SHMBRIDGE_CRASH_MARK_H

#include <errno.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

enum { CRASH_SIGNALS = 5, CRASH_FILES = 16 };

static const int crash_signals[CRASH_SIGNALS] = {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV};
static struct sigaction crash_before[CRASH_SIGNALS];
static volatile sig_atomic_t crash_files[CRASH_FILES]; /* descriptor + 1; 0: free */
static volatile pid_t crash_process;

static void crash_handler(int number) {
    int kept = errno;
    unsigned char byte = (unsigned char)number;
    if (getpid() == crash_process)
        for (int at = 0; at < CRASH_FILES; at++)
            if (crash_files[at] && write(crash_files[at] - 1, &byte, 1) != 1) continue;
    for (int at = 0; at < CRASH_SIGNALS; at++)
        if (crash_signals[at] == number) sigaction(number, &crash_before[at], NULL);
    errno = kept;
    raise(number); /* delivered on return; a fault happens again */
}

/* 0, or -1 if there are as many files already; for a thread that holds the GIL. */
static int crash_mark_begin(int file) {
    if (crash_process != getpid()) { /* the first file of this process; a child of fork forgets its parent's */
        for (int at = 0; at < CRASH_FILES; at++) crash_files[at] = 0;
        struct sigaction mine;
        memset(&mine, 0, sizeof mine);
        mine.sa_handler = crash_handler;
        sigemptyset(&mine.sa_mask);
        for (int at = 0; at < CRASH_SIGNALS; at++) {
            struct sigaction before;
            if (sigaction(crash_signals[at], &mine, &before) == 0 && before.sa_handler != crash_handler)
                crash_before[at] = before;
        }
        crash_process = getpid();
    }
    for (int at = 0; at < CRASH_FILES; at++)
        if (!crash_files[at]) {
            crash_files[at] = file + 1;
            return 0;
        }
    return -1;
}

static void crash_mark_end(int file) {
    for (int at = 0; at < CRASH_FILES; at++)
        if (crash_files[at] == file + 1) crash_files[at] = 0;
}

#endif
