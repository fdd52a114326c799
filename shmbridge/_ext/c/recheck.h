/* Copying from a slot without its lock: what must stand between
 * the word that is looked at and the bytes, on either side.
 *
 * The writer takes the slot's version away, then writes bytes; a copier copies bytes, then looks whether the
 * version is still there. Neither an acquire nor a release access keeps those two apart, a fence does. Knows
 * no words.
 */
#ifndef SHMBRIDGE_RECHECK_H
#define SHMBRIDGE_RECHECK_H

#include <stdatomic.h>

/* Writer: no byte that follows, not even one past the cache, is seen before what was stored above. */
static inline void bytes_follow(void) { atomic_thread_fence(memory_order_seq_cst); }

/* Copier: every byte above was read before what is loaded below. */
static inline void bytes_were_read(void) { atomic_thread_fence(memory_order_acquire); }

#endif
