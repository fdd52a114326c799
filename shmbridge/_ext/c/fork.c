#include "fork.h"

#include <pthread.h>
#include <unistd.h>

#define SHM_MAX_WATCHED 4096

static pthread_mutex_t table_lock = PTHREAD_MUTEX_INITIALIZER;
static int table[SHM_MAX_WATCHED];
static int used;
static unsigned generation, forks;

static void before_fork(void) { pthread_mutex_lock(&table_lock); }

static void in_parent(void) {
    forks++;
    pthread_mutex_unlock(&table_lock);
}

static void in_child(void) {
    for (int i = 0; i < used; i++) close(table[i]);
    used = 0;
    generation++;
    pthread_mutex_unlock(&table_lock);
}

__attribute__((constructor)) static void install(void) { pthread_atfork(before_fork, in_parent, in_child); }

int fork_watch(int fd) {
    int status = -1;
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < used; i++)
        if (table[i] == fd) status = 0;
    if (status != 0 && used < SHM_MAX_WATCHED) {
        table[used++] = fd;
        status = 0;
    }
    pthread_mutex_unlock(&table_lock);
    return status;
}

void fork_unwatch(int fd) {
    pthread_mutex_lock(&table_lock);
    for (int i = 0; i < used; i++) {
        if (table[i] == fd) {
            table[i] = table[--used];
            break;
        }
    }
    pthread_mutex_unlock(&table_lock);
}

unsigned fork_generation(void) { return generation; }
const unsigned *fork_generation_at(void) { return &generation; }

unsigned fork_count(void) {
    pthread_mutex_lock(&table_lock);
    unsigned count = forks;
    pthread_mutex_unlock(&table_lock);
    return count;
}
