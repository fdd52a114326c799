/* The limit: what two processes can move through shared memory when nothing but the bytes is done.
 *
 * Slots of one record in a lane of the given size; one memcpy in, a flag, one read of every byte (sum of 8-byte words), the flag back. No
 * sleeping, no bookkeeping, no validation. `twin RECORD_BYTES LANE_BYTES SECONDS SOURCES CPU_IN CPU_OUT` prints one line:
 * records, seconds, CPU seconds of the writer, checksum.
 */
#define _GNU_SOURCE
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
    _Alignas(128) _Atomic uint32_t full;
} flag;

typedef struct {
    _Alignas(128) _Atomic int stop;
    _Alignas(128) double writer_cpu_s; /* of the measured part */
    uint64_t records;
    double seconds;
    uint64_t checksum;
} result;

static double now(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (cpu >= 0) sched_setaffinity(0, sizeof set, &set);
}

static void relax(unsigned *spins) {
    if (++*spins % 20000 == 0) sched_yield();
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void *shared(size_t bytes) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (at == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return at;
}

int main(int argc, char **argv) {
    if (argc != 7) return fputs("twin RECORD_BYTES LANE_BYTES SECONDS SOURCES CPU_IN CPU_OUT\n", stderr), 2;
    const size_t record = strtoull(argv[1], NULL, 0) & ~(size_t)7, lane = strtoull(argv[2], NULL, 0);
    const double seconds = atof(argv[3]);
    const unsigned sources = (unsigned)atoi(argv[4]);
    const size_t slots = lane / record;
    if (slots < 2 || sources < 1) return fputs("the lane holds fewer than two records\n", stderr), 2;
    uint8_t *data = shared(slots * record);
    flag *flags = shared(slots * sizeof(flag));
    result *out = shared(sizeof(result));

    const pid_t writer = fork();
    if (writer == 0) {
        pin(atoi(argv[5]));
        uint8_t *source = malloc(sources * record);
        for (size_t i = 0; i < sources * record; i++) source[i] = (uint8_t)(i * 2654435761u >> 13);
        double began = 0;
        for (uint64_t n = 0;; n++) {
            const size_t slot = n % slots;
            unsigned spins = 0;
            while (atomic_load_explicit(&flags[slot].full, memory_order_acquire)) {
                if (atomic_load_explicit(&out->stop, memory_order_relaxed)) goto done;
                relax(&spins);
            }
            if (n == 2 * slots) began = now(CLOCK_PROCESS_CPUTIME_ID);
            memcpy(data + slot * record, source + (n % sources) * record, record);
            atomic_store_explicit(&flags[slot].full, 1, memory_order_release);
        }
    done:
        out->writer_cpu_s = now(CLOCK_PROCESS_CPUTIME_ID) - began;
        _exit(0);
    }

    pin(atoi(argv[6]));
    uint64_t sum = 0, n = 0;
    double began = 0, end = 0;
    for (;; n++) {
        const size_t slot = n % slots;
        unsigned spins = 0;
        while (!atomic_load_explicit(&flags[slot].full, memory_order_acquire)) relax(&spins);
        const uint64_t *words = (const uint64_t *)(data + slot * record);
        for (size_t i = 0; i < record / 8; i++) sum += words[i];
        atomic_store_explicit(&flags[slot].full, 0, memory_order_release);
        if (n + 1 == 2 * slots) began = now(CLOCK_MONOTONIC); /* the first two rounds warm pages and caches */
        if (n + 1 > 2 * slots && (end = now(CLOCK_MONOTONIC)) - began >= seconds) break;
    }
    out->records = n + 1 - 2 * slots;
    out->seconds = end - began;
    out->checksum = sum;
    /* The writer stops when its slot is full: leave it one round without a reader. */
    atomic_store(&out->stop, 1);
    waitpid(writer, NULL, 0);
    printf("%llu %.9f %.9f %llu\n", (unsigned long long)out->records, out->seconds, out->writer_cpu_s, (unsigned long long)out->checksum);
    return 0;
}
