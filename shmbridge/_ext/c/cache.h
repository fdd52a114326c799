/* How large this machine's caches are. The kernel's word; libc's
 * is wrong by ten times on some processors. Knows nothing else. */
#ifndef SHMBRIDGE_CACHE_H
#define SHMBRIDGE_CACHE_H

#include <stdint.h>
#include <stdio.h>

/* Bytes of the first processor's data or unified cache of this level;
 * `otherwise` where the kernel does not say. */
static inline uint64_t cache_bytes(int level, uint64_t otherwise) {
    for (int index = 0; index < 8; index++) {
        char path[96], kind[32] = "";
        int found = 0, said = 0;
        unsigned long size = 0;
        const char *names[] = {"level", "type", "size"};
        for (int i = 0; i < 3; i++) {
            snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu0/cache/index%d/%s", index, names[i]);
            FILE *file = fopen(path, "re");
            if (!file) return otherwise;
            if (i == 0) said += fscanf(file, "%d", &found);
            else if (i == 1) said += fscanf(file, "%31s", kind);
            else said += fscanf(file, "%luK", &size);
            fclose(file);
        }
        if (said == 3 && found == level && kind[0] != 'I' && size > 0) return (uint64_t)size << 10;
    }
    return otherwise;
}

#endif
