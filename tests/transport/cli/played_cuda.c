/* A driver with two GPUs without memory, of which the second registers nothing.
 *
 * It checks what it is called with: 1 is an error. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define FIRST 40
#define CONTEXT 0x1234567800 /* an address that an int would cut */

static int current, registered;

int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGetCount(int *count) { return *count = 2, 0; }
int cuDeviceGet(int *device, int number) { return *device = FIRST + number, number > 1; }
int cuDeviceGetName(char *name, int size, int device) {
    return snprintf(name, size, "played %d", device - FIRST) < 0;
}
int cuDeviceGetAttribute(int *answer, int what, int device) {
    return *answer = 1, what != 113 || device < FIRST;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(CONTEXT + device), 0; }
int cuCtxSetCurrent(void *context) { return current = (intptr_t)context - CONTEXT, current < FIRST; }
int cuDevicePrimaryCtxRelease_v2(int device) { return device != current || registered; }
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
    if (current != FIRST) return 700;
    return (uintptr_t)at % 4096 || size % 4096 || flags != 1 || registered++;
}
int cuMemHostUnregister(void *at) { return --registered; }
