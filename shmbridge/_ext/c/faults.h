/* Labelled fail-points: FAULT(name) ends or stops the process there when a test armed that label. Compiled to
 * nothing unless SHMBRIDGE_FAULTS.
 *
 * A label is armed by SHMBRIDGE_FAULT=label[:skip[:signal]] in the environment: skip passes first, then
 * raise(signal), SIGKILL by default.
 */
#ifndef SHMBRIDGE_FAULTS_H
#define SHMBRIDGE_FAULTS_H

#ifdef SHMBRIDGE_FAULTS

#include <signal.h>
#include <stdlib.h>
#include <string.h>

static inline void fault_hit(const char *label) {
    static const char *armed = NULL;
    static long skip = 0;
    static int signal_number = SIGKILL, parsed = 0;
    if (!parsed) {
        parsed = 1;
        const char *wish = getenv("SHMBRIDGE_FAULT");
        if (wish) {
            char *copy = strdup(wish), *save = NULL;
            armed = strtok_r(copy, ":", &save);
            const char *field = strtok_r(NULL, ":", &save);
            if (field) skip = atol(field);
            field = strtok_r(NULL, ":", &save);
            if (field) signal_number = atoi(field);
        }
    }
    if (armed && strcmp(armed, label) == 0 && skip-- == 0) raise(signal_number);
}
#define FAULTS_COMPILED 1
#else
#define FAULTS_COMPILED 0
static inline void fault_hit(const char *label) { (void)label; }
#endif

#endif
