/* Forced into the harness before the core (-include): fail-points that disturb and kill threads,
 * and sleeps without a tick.
 *
 * Takes the place of faults.h, so that every labelled step of the protocol may yield, pause, or be its
 * thread's last; with -DCALM nothing is between a store and the load after it, as in a real build. futex_wait
 * becomes patient_wait: without ticks a lost wake-up is a hang, which the harness reports. The core itself is
 * compiled as it is.
 */
#ifndef SHMBRIDGE_FAULTS_H
#define SHMBRIDGE_FAULTS_H

#include "futex.h"

#define FAULTS_COMPILED 1
void disturb(void); /* may yield or pause */
#ifdef CALM
static inline void fault_hit(const char *label) { (void)label; }
#else
void fault_hit(const char *label);
#endif

int patient_wait(shm_u32 *word, uint32_t seen);
#define futex_wait(word, seen, timeout_ns) ((void)(timeout_ns), patient_wait(word, seen))

#endif
