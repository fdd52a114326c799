/* A writer and a reader on one thread, in a time that only moves when the writer looks at the clock.
 *
 *   pace BYTES PUTS PUT_NS PERIOD_NS BATCH
 *
 * The writer puts PUTS records of BYTES, each of which takes it PUT_NS. The reader releases the oldest one every
 * PERIOD_NS (0: never), or all of them after every BATCH puts (0: never). Prints how often the writer waited to keep
 * pace, how long in all and at most at a time, and the most bytes that were un-released during the last half.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static int at_the_clock(clockid_t clock, struct timespec *now);
#define clock_gettime at_the_clock
#include "lane_write.h"

#define SLOTS 4096u
#define LOOK_NS 100

static int64_t now_ns = 1000000000, period_ns, next_release_ns;
static lane_writer writer;
static uint64_t committed, released;

/* As the hub does, in the order of commit. */
static void release_oldest(void) {
    uint32_t index = writer.ring[released++ & (SLOTS - 1)];
    store_seq64(&writer.released[index], load_acquire64(&writer.slots[index].generation));
}

static void pass(int64_t ns) {
    now_ns += ns;
    for (; period_ns && next_release_ns <= now_ns; next_release_ns += period_ns)
        if (released < committed) release_oldest();
}

static int at_the_clock(clockid_t clock, struct timespec *now) {
    (void)clock;
    pass(LOOK_NS);
    *now = (struct timespec){now_ns / 1000000000, now_ns % 1000000000};
    return 0;
}

int main(int count, char **given) {
    uint64_t bytes = strtoull(given[1], NULL, 0), puts = strtoull(given[2], NULL, 0), most_bytes = 0, waits = 0;
    int64_t put_ns = atoll(given[3]), batch = atoll(given[5]), waited_ns = 0, longest_ns = 0;
    lane_geometry geometry = geometry_of(256ull << 20, SLOTS);
    control_header *hub = aligned_alloc(PAGE, sizeof *hub);
    uint8_t *base = aligned_alloc(PAGE, geometry.segment_bytes); /* of the data area no byte is touched */
    slot stamp = {.rows = 1};
    (void)count;
    period_ns = atoll(given[4]), next_release_ns = now_ns + period_ns;
    memset(base, 0, geometry.data_at), memset(hub, 0, sizeof *hub);
    if (lane_writer_open(&writer, base, &geometry, hub)) return 1;
    writer.window = 4 << 20, writer.shared_cache = 32 << 20; /* whatever machine this is */
    for (uint64_t put = 0; put < puts; put++) {
        int64_t began = now_ns, took;
        lane_keep_pace(&writer, bytes);
        took = now_ns - began;
        waits += took > 0, waited_ns += took;
        if (took > longest_ns) longest_ns = took;
        if (!lane_claim(&writer, bytes)) break; /* the lane is full */
        pass(put_ns);
        lane_commit(&writer, &stamp);
        committed++;
        if (put >= puts / 2 && (committed - released) * bytes > most_bytes)
            most_bytes = (committed - released) * bytes;
        if (batch && (put + 1) % (uint64_t)batch == 0)
            while (released < committed) release_oldest();
    }
    printf("{\"puts\": %llu, \"waits\": %llu, \"waited_ns\": %lld, \"longest_ns\": %lld, \"most_bytes\": %llu}\n",
           (unsigned long long)committed, (unsigned long long)waits, (long long)waited_ns, (long long)longest_ns,
           (unsigned long long)most_bytes);
    return 0;
}
