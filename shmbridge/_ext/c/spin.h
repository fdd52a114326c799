/* How long to look before sleeping: the longer, the more often looking has paid.
 * One spin_ns for each waiter, private to it. */
#ifndef SHMBRIDGE_SPIN_H
#define SHMBRIDGE_SPIN_H

#include <stdint.h>

#define LONGEST_SPIN_NS 50000
#define SHORTEST_SPIN_NS 500

static inline void spin_learn(int64_t *spin_ns, int was_worth_it) {
    *spin_ns = was_worth_it ? *spin_ns * 2 : *spin_ns / 2;
    if (*spin_ns > LONGEST_SPIN_NS) *spin_ns = LONGEST_SPIN_NS;
    if (*spin_ns < SHORTEST_SPIN_NS) *spin_ns = SHORTEST_SPIN_NS;
}

#endif
