/* What a fork must not carry over: segment descriptors (they would keep
 * a dead parent's lock) and the belief that a mapping is there.
 *
 * Knows descriptors only. The child handler runs before any Python code of the child: it closes every watched
 * descriptor and moves fork_generation on; handles compare it with the value of their birth before they touch
 * a shared word.
 */
#ifndef SHMBRIDGE_FORK_H
#define SHMBRIDGE_FORK_H

/* Begins to watch a descriptor, once. 0, or -1 when the table of SHM_MAX_WATCHED is full. */
int fork_watch(int fd);
void fork_unwatch(int fd);
/* Moves on in every child of fork; a plain int, written only while the child has one thread. */
unsigned fork_generation(void);
/* Where it is: for those who compare it with every record. */
const unsigned *fork_generation_at(void);
/* Forks of this process so far. If it moved between opening a descriptor and watching it,
 * a child may have that one unwatched. */
unsigned fork_count(void);

#endif
