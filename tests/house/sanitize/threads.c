/* The C core of a lane with threads in place of processes, for sanitizers:
 * whatever is delivered is compared byte for byte, and counted.
 *
 *   threads [--seconds 3] [--seed 1] [--producers 3] [--slots 4] [--data 4096] [--hold 6] [--releasers 2]
 *           [--deaths 1] [--patience-ms 10000]
 *
 * Runs rounds until the time is over. In a round every producer thread writes lanes, one after another (it
 * dies at random fail-points, and goes on with a new lane); one hub thread at a time takes, and hands leases
 * to releasing threads that end them out of order. The hub and its releasers die at random fail-points too;
 * the next hub thread adopts what they left.
 *
 * Producers share nothing with the hub's side but the lanes and the control segment: no lock, no flag of this
 * harness orders them, or the order that the core must provide would come from here. The hub's own threads do
 * share a queue, as threads of one process do; hub follows hub by join and create, which stands for the lock
 * that the kernel hands over. The ledger (what was handed out, what was released) is kept by the hub's side
 * alone.
 *
 * Exit status: 0 all well; 1 a record is wrong, missing, or there twice;
 * 3 a wake-up was lost; 66 ThreadSanitizer.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "hub_wait.h"
#include "lane_read.h"
#include "lane_write.h"

#define INDEX_BYTES 128u /* one directory entry and one line of lengths */
#ifndef RECORDS
#define RECORDS 60u      /* of one producer thread, in one round */
#endif
#define MOST_PRODUCERS 16u
#define MOST_HELD 64u
#define MOST_RELEASERS 8u
#define LANES_EACH 8u    /* lives of a producer thread in one round; the last one does not die */

static struct {
    uint64_t seconds, seed, producers, slots, data, hold, releasers, patience_ms, deaths;
} want = {
    .seconds = 3, .seed = 1, .producers = 3, .slots = 4, .data = 4096,
    .hold = 6, .releasers = 2, .patience_ms = 10000, .deaths = 1,
};

#define CHECK(condition, ...) \
    do { \
        if (!(condition)) { \
            fprintf(stderr, "threads.c:%d: not (%s): ", __LINE__, #condition); \
            fprintf(stderr, __VA_ARGS__); \
            fputc('\n', stderr); \
            _exit(1); \
        } \
    } while (0)

typedef struct {
    uint8_t *base;
    lane_geometry geometry;
    uint64_t committed; /* by its producer's own count; read after the producer was joined */
    /* The hub's side: */
    lane_reader reader;
    int open;
    uint64_t cursor;            /* the next record comes at or after this */
    uint8_t handed[RECORDS + 1], released[RECORDS + 1];
} lane;

typedef struct {
    lane *of;
    uint64_t generation;
    slot body;
    uint32_t index;
} lease;

/* A thread that can die at a fail-point: a producer, which is a process of its own,
 * or one of the hub's threads, which die together. */
typedef struct {
    uint64_t random;
    uint64_t steps_left; /* fail-points until its death; 0: it lives */
    jmp_buf grave;
    const char *died_at;
    shm_u32 *dying; /* its process dies; NULL: it is alone in it. Relaxed, orders nothing */
    lease at_hand;  /* of the hub's threads: the lease being handed out or released */
} actor;

/* The hub's process. */
typedef struct {
    actor self;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    lease held[MOST_HELD];
    uint32_t held_count, busy;
    shm_u32 dying;
    int done;
} hub;

typedef struct {
    actor self;
    hub *of;
} releaser;

static control_header *control;
static lane *lanes;
static uint32_t lane_count;
static shm_u32 finished; /* all producers have ended */
static struct {
    uint64_t rounds, records, aborts, again, hubs, lives, waits, sleeps;
} total; /* added up by main after joins */

static _Thread_local actor *self;

static uint32_t load_relaxed32(shm_u32 *word) { return atomic_load_explicit(word, memory_order_relaxed); }

static uint64_t mix(uint64_t value) {
    value = (value ^ (value >> 31)) * 0x7fb5d329728ea185ull;
    value = (value ^ (value >> 27)) * 0x81dadef4bc2dd44dull;
    return value ^ (value >> 33);
}

static uint64_t draw(void) { return mix(self->random += 0x9e3779b97f4a7c15ull); }

void disturb(void) {
#ifdef CALM
    return;
#endif
    uint64_t luck = draw() % 64;
    if (luck < 6) sched_yield();
    else if (luck == 6) nanosleep(&(struct timespec){0, (long)(draw() % 60000)}, NULL);
}

#ifndef CALM
void fault_hit(const char *label) {
    int dies = self->dying && load_relaxed32(self->dying);
    if (dies || (self->steps_left && --self->steps_left == 0)) {
        self->died_at = label;
        longjmp(self->grave, 1);
    }
    disturb();
}
#endif

int patient_wait(shm_u32 *word, uint32_t seen) {
    int64_t until = monotonic_ns() + (int64_t)want.patience_ms * 1000000;
    while (monotonic_ns() < until) {
        int status = (futex_wait)(word, seen, self->dying ? 50000000 : (int64_t)want.patience_ms * 1000000);
        if (status != ETIMEDOUT) return status;
        if (self->dying && load_relaxed32(self->dying)) return EINTR;
    }
    fprintf(stderr, "threads.c: a wake-up was lost: %s slept %" PRIu64 " ms\n",
            self->dying ? "the hub" : "a producer", want.patience_ms);
    _exit(3);
}

/* What record `sequence` of a lane is: follows from its numbers,
 * so that nothing need be told to the reader. */
typedef struct {
    uint64_t key, tokens;
    struct {
        directory_entry entry;
        uint32_t lengths[ALIGNMENT / sizeof(uint32_t)];
    } index;
} plan;

_Static_assert(sizeof(((plan *)NULL)->index) == INDEX_BYTES, "index");

static plan plan_of(const lane *of, uint64_t sequence) {
    plan made = {.key = mix(want.seed * 1000003 + total.rounds * 1009 + (uint64_t)(of - lanes) * 7919 +
                            sequence * 104729)};
    uint64_t most = (of->geometry.data_bytes - INDEX_BYTES) / 4, size = made.key >> 8;
    uint32_t rows = 1 + (made.key >> 4) % 4;
    made.tokens = made.key % 16 == 0 ? most : size % (most / (made.key % 4 == 0 ? 2 : 16) + 1);
    made.index.entry = (directory_entry){
        .kind = KIND_LIST, .tag = TAG_VALUES, .entries = rows, .lengths_at = 1, .values_at = 2};
    made.index.entry.values_bytes = made.tokens * 4;
    for (uint32_t i = 0; i < rows; i++)
        made.index.lengths[i] = (uint32_t)(made.tokens / rows + (i ? 0 : made.tokens % rows));
    return made;
}

static uint32_t token(uint64_t key, uint64_t i) {
    return (uint32_t)((key + i) * 0x9e3779b97f4a7c15ull >> 29);
}

/* Producer */

static void format_lane(lane *of) { /* as header.pyx does */
    lane_header *header = (lane_header *)of->base;
    column_def *column = (column_def *)(of->base + PAGE);
    header->layout_version = LAYOUT_VERSION;
    header->slot_count = of->geometry.slot_count, header->column_count = 1;
    header->ring_at = of->geometry.ring_at, header->slots_at = of->geometry.slots_at;
    header->released_at = of->geometry.released_at;
    header->data_at = of->geometry.data_at, header->data_bytes = of->geometry.data_bytes;
    header->segment_bytes = of->geometry.segment_bytes;
    strcpy(column->name, "tokens");
    column->kind = KIND_LIST, column->item_bytes = 4;
    disturb();
    store_release64(&header->magic, LANE_MAGIC); /* SYNC(lane-ready) */
    disturb();
    ring_bell(&control->arrivals);
    ring_bell(&control->doorbell);
}

static void write_record(lane_writer *writer, const plan *made) {
    uint8_t *extent = writer->data + writer->claim_at;
    uint32_t *values = (uint32_t *)(extent + INDEX_BYTES);
    memcpy(extent, &made->index, INDEX_BYTES);
    for (uint64_t i = 0; i < made->tokens; i++) {
        values[i] = token(made->key, i);
        if (i % 64 == 63) disturb();
    }
}

typedef struct {
    actor self;
    uint32_t number;
    uint64_t done, aborts, lives, waits;
    lane_writer writer;
} producer;

/* One life: writes one lane until all records are written, or until it dies. */
static void produce(producer *me, lane *of) {
    lane_writer *writer = &me->writer;
    CHECK(lane_writer_open(writer, of->base, &of->geometry, control) == 0, "no memory");
    format_lane(of);
    while (me->done < RECORDS) {
        plan made = plan_of(of, writer->tail);
        slot stamp = {.min_policy_version = 1, .max_policy_version = 2, .env_id = -1, .columns = 1};
        stamp.t_created_ns = (int64_t)made.key, stamp.tokens = made.tokens, stamp.index_bytes = INDEX_BYTES;
        stamp.rows = made.index.entry.entries, stamp.group_size = (int32_t)stamp.rows;
        while (!lane_claim(writer, INDEX_BYTES + made.tokens * 4))
            me->waits++, lane_note_outstanding(writer), lane_wait_space(writer, INT64_MAX);
        write_record(writer, &made);
        if (draw() % 8 == 0) {
            memset(writer->data + writer->claim_at, 0xee, writer->claim_bytes);
            lane_abort(writer), me->aborts++;
            continue;
        }
        CHECK(lane_commit(writer, &stamp) == of->committed, "sequence");
        of->committed++, me->done++;
    }
}

static void *producer_main(void *argument) {
    producer *me = argument;
    self = &me->self;
    for (; me->done < RECORDS; me->lives++) {
        lane *volatile of = &lanes[me->number * LANES_EACH + me->lives];
        me->self.steps_left = want.deaths && me->lives + 1 < LANES_EACH ? 1 + draw() % (RECORDS * 10) : 0;
        if (setjmp(me->self.grave) == 0) {
            produce(me, of);
        } else {
            int last = !strcmp(me->self.died_at, "producer.committed") ||
                       !strcmp(me->self.died_at, "producer.woken_hub");
            of->committed += last, me->done += last;
        }
        me->self.steps_left = 0;
        CHECK(load_relaxed64(&me->writer.header->tail) == of->committed, "tail is not what was committed");
        lane_writer_close(&me->writer);
        ring_bell(&control->doorbell); /* the watcher: a producer has ended */
    }
    return NULL;
}

/* Hub */

static void check_record(const lease *of) {
    const slot *body = &of->body;
    plan made = plan_of(of->of, body->sequence);
    const uint32_t *values = (const uint32_t *)(of->of->reader.data + body->extent_at + INDEX_BYTES);
    CHECK(body->tokens == made.tokens && body->rows == made.index.entry.entries &&
              body->t_created_ns == (int64_t)made.key,
          "stamp of record %" PRIu64, body->sequence);
    for (uint64_t i = 0; i < made.tokens; i++)
        CHECK(values[i] == token(made.key, i),
              "record %" PRIu64 " of lane %ld: token %" PRIu64 " of %" PRIu64 " is %#x", body->sequence,
              (long)(of->of - lanes), i, made.tokens, values[i]);
}

static void end_lease(const lease *ending) {
    uint8_t *released = &ending->of->released[ending->body.sequence];
    self->at_hand = *ending;
    check_record(ending);
    CHECK(!*released, "record %" PRIu64 " released twice", ending->body.sequence);
    lane_release(&ending->of->reader, ending->index, ending->generation);
    *released = 1;
}

/* What a thread that died had done by then. */
static void into_ledger(const actor *dead) {
    const lease *last = &dead->at_hand;
    if (!strcmp(dead->died_at, "hub.marked")) last->of->handed[last->body.sequence] = 1;
    if (!strcmp(dead->died_at, "hub.released")) last->of->released[last->body.sequence] = 1;
}

static void hub_dies(hub *me) {
    pthread_mutex_lock(&me->lock);
    atomic_store_explicit(&me->dying, 1, memory_order_relaxed);
    pthread_cond_broadcast(&me->changed);
    pthread_mutex_unlock(&me->lock);
}

/* One thread of the hub's process that ends leases, in any order. */
static void *releaser_main(void *argument) {
    releaser *me = argument;
    hub *of = me->of;
    self = &me->self;
    if (setjmp(me->self.grave)) {
        into_ledger(&me->self);
        hub_dies(of);
        return NULL;
    }
    pthread_mutex_lock(&of->lock);
    while (!load_relaxed32(&of->dying)) {
        if (of->held_count == 0) {
            pthread_cond_wait(&of->changed, &of->lock);
            continue;
        }
        uint32_t at = (uint32_t)(draw() % of->held_count);
        lease ending = of->held[at];
        of->held[at] = of->held[--of->held_count], of->busy++;
        pthread_mutex_unlock(&of->lock);
        disturb();
        end_lease(&ending);
        pthread_mutex_lock(&of->lock);
        of->busy--;
        pthread_cond_broadcast(&of->changed);
    }
    pthread_mutex_unlock(&of->lock);
    return NULL;
}

/* Leaves a lease to the releasers, once they hold fewer than they may. */
static void give_away(hub *me, const lease *given) {
    pthread_mutex_lock(&me->lock);
    while (me->held_count + me->busy >= want.hold && !load_relaxed32(&me->dying))
        pthread_cond_wait(&me->changed, &me->lock);
    me->held[me->held_count++] = *given;
    pthread_cond_broadcast(&me->changed);
    pthread_mutex_unlock(&me->lock);
}

/* Takes one record of a lane, if there is one, as lane_reader.pxi does. */
static int hub_takes(hub *me, lane *from) {
    complaint why;
    lane_found found;
    uint8_t index[INDEX_BYTES];
    int there = lane_next(&from->reader, &found, &why), redelivered;
    CHECK(there >= 0, "lane %ld: %s", (long)(from - lanes), why.text);
    if (!there) return 0;
    uint64_t sequence = found.body.sequence;
    plan expected = plan_of(from, sequence);
    CHECK(found.body.index_bytes == INDEX_BYTES, "index of %u bytes", found.body.index_bytes);
    memcpy(index, from->reader.data + found.body.extent_at, INDEX_BYTES);
    CHECK(!memcmp(index, &expected.index, INDEX_BYTES), "lane %ld: the index of record %" PRIu64,
          (long)(from - lanes), sequence);
    while (from->cursor < RECORDS && from->released[from->cursor]) from->cursor++;
    CHECK(sequence == from->cursor, "lane %ld: record %" PRIu64 " comes where %" PRIu64 " should",
          (long)(from - lanes), sequence, from->cursor);
    from->cursor++;
    lease given = {.of = from, .generation = found.generation, .body = found.body, .index = found.index};
    self->at_hand = given;
    redelivered = lane_hand_out(&from->reader, &found);
    CHECK(redelivered == from->handed[sequence],
          "lane %ld: record %" PRIu64 " redelivered: %d, handed out before: %d", (long)(from - lanes),
          sequence, redelivered, from->handed[sequence]);
    from->handed[sequence] = 1;
    total.again += (uint64_t)redelivered;
    if (draw() % 4) give_away(me, &given);
    else end_lease(&given);
    return 1;
}

static void look_for_lanes(void) {
    complaint why;
    for (lane *each = lanes; each < lanes + lane_count; each++) {
        if (each->open || lane_reader_open(&each->reader, each->base, each->geometry.segment_bytes, &why))
            continue;
        each->open = 1, each->cursor = 0;
        CHECK(each->reader.columns[0].kind == KIND_LIST && !strcmp(each->reader.columns[0].name, "tokens"),
              "a column table half written");
        CHECK(lane_adopt(&each->reader, &why) == 0, "lane %ld: %s", (long)(each - lanes), why.text);
        ring_bell(&each->reader.header->space_bell);
    }
}

/* Takes until its process dies, or until all producers have ended and everything is released: 1. */
static int hub_lives(hub *me) {
    shm_u64 *tails[MOST_PRODUCERS * LANES_EACH];
    uint64_t next[MOST_PRODUCERS * LANES_EACH];
    int64_t spin_ns = SHORTEST_SPIN_NS;
    int late;
    store_seq32(&control->hub_sleeping, 0);
    while (!load_relaxed32(&me->dying)) {
        hub_watch watch = {.tails = tails, .next = next};
        watch.arrivals = load_seq32(&control->arrivals), watch.heard = load_seq32(&control->doorbell);
        uint32_t over = load_seq32(&finished), taken = 0;
        look_for_lanes();
        for (lane *each = lanes; each < lanes + lane_count; each++) {
            if (!each->open) continue;
            for (int i = 0; i < 3 && !load_relaxed32(&me->dying) && hub_takes(me, each); i++) taken++;
            if (lane_waiting(&each->reader)) taken++;
            tails[watch.count] = &each->reader.header->tail, next[watch.count++] = each->reader.next;
        }
        if (taken) continue;
        if (over) break;
        if (draw() % 2 && hub_spin(&watch, control, 20000, &spin_ns)) continue;
        total.sleeps++;
        hub_sleep(&watch, control, INT64_MAX, &late);
    }
    pthread_mutex_lock(&me->lock);
    while (me->held_count + me->busy && !load_relaxed32(&me->dying))
        pthread_cond_wait(&me->changed, &me->lock);
    pthread_mutex_unlock(&me->lock);
    return !load_relaxed32(&me->dying);
}

static void *hub_main(void *argument) {
    hub *me = argument;
    releaser helpers[MOST_RELEASERS];
    pthread_t threads[MOST_RELEASERS];
    self = &me->self;
    for (uint32_t i = 0; i < want.releasers; i++) {
        helpers[i] = (releaser){.of = me, .self = {.random = draw(), .dying = &me->dying}};
        helpers[i].self.steps_left = me->self.steps_left && draw() % 4 == 0 ? 1 + draw() % 100 : 0;
        pthread_create(&threads[i], NULL, releaser_main, &helpers[i]);
    }
    if (setjmp(me->self.grave) == 0) me->done = hub_lives(me);
    else into_ledger(&me->self);
    hub_dies(me);
    for (uint32_t i = 0; i < want.releasers; i++) pthread_join(threads[i], NULL);
    for (lane *each = lanes; each < lanes + lane_count; each++) {
        if (each->open) lane_reader_close(&each->reader);
        each->open = 0;
    }
    return NULL;
}

/* One hub after another, until everything is released. */
static void *hubs_main(void *argument) {
    actor *me = argument;
    self = me;
    for (int done = 0; !done;) {
        hub now = {.lock = PTHREAD_MUTEX_INITIALIZER, .changed = PTHREAD_COND_INITIALIZER};
        pthread_t thread;
        now.self.random = draw(), now.self.dying = &now.dying;
        now.self.steps_left = want.deaths && draw() % 8 ? 1 + draw() % 300 : 0;
        pthread_create(&thread, NULL, hub_main, &now);
        pthread_join(thread, NULL);
        done = now.done, total.hubs++;
    }
    return NULL;
}

/* Rounds */

static uint8_t *fresh(uint64_t size) {
    uint8_t *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED, "mmap of %" PRIu64 " bytes", size);
    return at;
}

/* Everything committed was handed out and released, and the words say so. */
static void check_lane(const lane *of) {
    const lane_header *header = (const lane_header *)of->base;
    const slot *slots = (const slot *)(of->base + of->geometry.slots_at);
    const shm_u64 *released = (const shm_u64 *)(of->base + of->geometry.released_at);
    uint64_t generations = 0;
    CHECK(load_relaxed64(&header->tail) == of->committed && load_relaxed64(&header->head) == of->committed,
          "lane %ld: tail, head", (long)(of - lanes));
    for (uint64_t i = 0; i <= RECORDS; i++)
        CHECK(of->handed[i] == (i < of->committed) && of->released[i] == (i < of->committed),
              "lane %ld: record %" PRIu64 " of %" PRIu64 ": %d, %d", (long)(of - lanes), i, of->committed,
              of->handed[i], of->released[i]);
    for (uint32_t i = 0; i < of->geometry.slot_count; i++) {
        uint64_t generation = load_relaxed64(&slots[i].generation);
        int unreleased = generation != load_relaxed64(&released[i]);
        /* Its producer may have died after it stored a generation and before tail:
         * that record never existed. */
        CHECK(!unreleased || slots[i].sequence == of->committed, "lane %ld: slot %u is un-released",
              (long)(of - lanes), i);
        generations += generation - (uint64_t)unreleased;
    }
    CHECK(generations == of->committed, "lane %ld: %" PRIu64 " generations", (long)(of - lanes), generations);
    total.records += of->committed;
}

static void run_round(void) {
    static producer producers[MOST_PRODUCERS];
    pthread_t threads[MOST_PRODUCERS], hubs;
    uint64_t seed = mix(want.seed * 7919 + total.rounds);
    actor first = {.random = seed};
    lane_geometry geometry = geometry_of(want.data, (uint32_t)want.slots);
    geometry.column_count = 1;
    control = (control_header *)fresh(CONTROL_BYTES);
    for (uint32_t i = 0; i < lane_count; i++)
        lanes[i] = (lane){.base = fresh(geometry.segment_bytes), .geometry = geometry};
    store_seq32(&finished, 0);
    pthread_create(&hubs, NULL, hubs_main, &first);
    for (uint32_t i = 0; i < want.producers; i++) {
        producers[i] = (producer){.number = i, .self = {.random = mix(seed + i + 1)}};
        pthread_create(&threads[i], NULL, producer_main, &producers[i]);
    }
    for (uint32_t i = 0; i < want.producers; i++) {
        pthread_join(threads[i], NULL);
        total.aborts += producers[i].aborts, total.lives += producers[i].lives;
        total.waits += producers[i].waits;
    }
    store_seq32(&finished, 1);
    ring_bell(&control->arrivals); /* the hub reads it again before it sleeps */
    ring_bell(&control->doorbell);
    pthread_join(hubs, NULL);
    for (uint32_t i = 0; i < lane_count; i++) {
        check_lane(&lanes[i]);
        munmap(lanes[i].base, geometry.segment_bytes);
    }
    munmap(control, CONTROL_BYTES);
    total.rounds++;
}

static void read_arguments(int count, char **words) {
    struct {
        const char *name;
        uint64_t *value, least, most;
    } known[] = {
        {"--seconds", &want.seconds, 0, 1 << 20},        {"--seed", &want.seed, 0, UINT64_MAX},
        {"--producers", &want.producers, 1, MOST_PRODUCERS}, {"--slots", &want.slots, 1, 1 << 10},
        {"--data", &want.data, 1024, 1 << 24},           {"--hold", &want.hold, 1, MOST_HELD - 1},
        {"--releasers", &want.releasers, 1, MOST_RELEASERS}, {"--patience-ms", &want.patience_ms, 1, 1 << 20},
        {"--deaths", &want.deaths, 0, 1},
    };
    for (int i = 1; i < count; i += 2) {
        int found = 0;
        for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
            if (i + 1 == count || strcmp(words[i], known[k].name)) continue;
            *known[k].value = strtoull(words[i + 1], NULL, 10), found = 1;
            CHECK(*known[k].value >= known[k].least && *known[k].value <= known[k].most, "%s %s", words[i],
                  words[i + 1]);
        }
        CHECK(found, "%s: see the top of threads.c", words[i]);
    }
    CHECK((want.slots & (want.slots - 1)) == 0, "--slots is a power of two");
}

int main(int count, char **words) {
    read_arguments(count, words);
    lane_count = (uint32_t)want.producers * LANES_EACH;
    lanes = calloc(lane_count, sizeof(lane));
    int64_t until = monotonic_ns() + (int64_t)want.seconds * 1000000000;
    do run_round();
    while (monotonic_ns() < until);
    printf("%" PRIu64 " rounds, %" PRIu64 " records, %" PRIu64 " again, %" PRIu64 " aborts, %" PRIu64
           " producers' lives, %" PRIu64 " hubs, %" PRIu64 " waits for room, %" PRIu64 " sleeps of the hub\n",
           total.rounds, total.records, total.again, total.aborts, total.lives, total.hubs, total.waits,
           total.sleeps);
    free(lanes);
    return 0;
}
