/* A small mutating driver for a fuzz target, where there is no libFuzzer: seeded, without feedback. Included
 * by the target, after it; the target counts records_read.
 *
 * main(SECONDS, SEED, seed files...): flips, boundary numbers, copies, splices and cuts of the seeds. What
 * ends the process is written to crash-SEED.bin; the same file as the only argument runs it again.
 */
#include <fcntl.h>
#include <time.h>
#include <unistd.h>

#define MOST_INPUT (1u << 16)

static uint8_t current[MOST_INPUT];
static size_t current_size;
static uint64_t random_state, executions;

void __sanitizer_set_death_callback(void (*callback)(void));

static uint64_t next_random(void) {
    random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
    return random_state;
}

static void keep_input(void) {
    char name[64];
    snprintf(name, sizeof name, "crash-%llu.bin", (unsigned long long)executions);
    int file = open(name, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (file >= 0 && write(file, current, current_size) >= 0)
        fprintf(stderr, "input of execution %llu: %s\n", (unsigned long long)executions, name);
}

static size_t read_file(const char *name, uint8_t *to) {
    FILE *file = fopen(name, "rb");
    size_t size = file ? fread(to, 1, MOST_INPUT, file) : 0;
    if (!file) perror(name), exit(2);
    fclose(file);
    return size;
}

static uint64_t boundary(void) {
    static const uint64_t values[] = {
        0, 1, 2, 3, 7, 8, 63, 64, 65, 127, 128, 255, 256, 4095, 4096, 65535, 65536, 1u << 30, 0x7fffffff,
        0x80000000, 0xfffffffe, 0xffffffff, 1ull << 32, 1ull << 62, 0x7fffffffffffffff, 1ull << 63, ~63ull,
        ~1ull, ~0ull,
    };
    return values[next_random() % (sizeof values / sizeof *values)];
}

static void mutate(const uint8_t *other, size_t other_size) {
    uint64_t width = 1u << (next_random() & 3), value = boundary();
    size_t at = current_size ? next_random() % current_size : 0, from, length;
    if (next_random() & 1) at &= ~(width - 1);
    if (next_random() % 4 == 0) at %= 512; /* recipe, patches and the first columns */
    if (at >= current_size) return;
    if (width > current_size - at) width = 1;
    switch (next_random() % 7) {
    case 0: current[at] ^= (uint8_t)(1u << (next_random() & 7)); break;
    case 1: current[at] = (uint8_t)next_random(); break;
    case 2: memcpy(current + at, &value, width); break;
    case 3:
        memcpy(&value, current + at, width), value += next_random() % 9 - 4;
        memcpy(current + at, &value, width);
        break;
    case 4: /* a piece from elsewhere */
    case 5:
        from = other_size ? next_random() % other_size : 0, length = next_random() % 128;
        if (length > other_size - from) length = other_size - from;
        if (length > current_size - at) length = current_size - at;
        memcpy(current + at, other + from, length);
        break;
    default:
        if (next_random() % 8 == 0) current_size = at + 1;
    }
}

int main(int count, char **arguments) {
    static uint8_t seeds[64][MOST_INPUT];
    static size_t sizes[64];
    int seed_count = 0;
    struct timespec began, now;
    double seconds = count > 2 ? atof(arguments[1]) : 0;
    __sanitizer_set_death_callback(keep_input);
    if (count == 2) {
        current_size = read_file(arguments[1], current);
        return LLVMFuzzerTestOneInput(current, current_size);
    }
    if (count < 4)
        return fprintf(stderr, "usage: %s SECONDS SEED FILES | %s FILE\n", arguments[0], arguments[0]), 2;
    random_state = strtoull(arguments[2], NULL, 10) * 2654435761u + 88172645463325252ull;
    for (int i = 3; i < count && seed_count < 64; i++, seed_count++) {
        sizes[seed_count] = read_file(arguments[i], seeds[seed_count]);
        memcpy(current, seeds[seed_count], current_size = sizes[seed_count]);
        LLVMFuzzerTestOneInput(current, current_size);
    }
    printf("%d seeds hold %llu good records\n", seed_count, (unsigned long long)records_read);
    clock_gettime(CLOCK_MONOTONIC, &began);
    while (seconds > 0) {
        for (int i = 0; i < 256; i++, executions++) {
            int one = (int)(next_random() % (uint64_t)seed_count),
                other = (int)(next_random() % (uint64_t)seed_count);
            memcpy(current, seeds[one], current_size = sizes[one]);
            for (uint64_t times = 1 + next_random() % 8; times; times--) mutate(seeds[other], sizes[other]);
            LLVMFuzzerTestOneInput(current, current_size);
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((double)(now.tv_sec - began.tv_sec) + (double)(now.tv_nsec - began.tv_nsec) / 1e9 > seconds)
            break;
    }
    printf("%llu executions, no finding\n", (unsigned long long)executions);
    return 0;
}
