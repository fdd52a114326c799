/* The verbs' users as separate functions, to inspect their compiled code:
 * aarch64.py. Never run. */
#include "hub_wait.h"
#include "lane_read.h"
#include "lane_write.h"

#define WHOLE __attribute__((flatten)) /* with everything it calls */

WHOLE uint64_t commit(lane_writer *writer, const slot *stamp) { return lane_commit(writer, stamp); }
WHOLE int is_released(const lane_writer *writer, uint32_t index) { return lane_is_released(writer, index); }
WHOLE int64_t wait_space(lane_writer *writer, int64_t timeout_ns) {
    lane_note_outstanding(writer);
    return lane_wait_space(writer, timeout_ns);
}
WHOLE void release(lane_reader *reader, uint32_t index, uint64_t generation) {
    lane_release(reader, index, generation);
}
WHOLE int adopt(lane_reader *reader, complaint *why) { return lane_adopt(reader, why); }
WHOLE int look(const lane_reader *reader, uint32_t index, uint64_t sequence, lane_found *found,
               complaint *why) {
    return lane_look(reader, index, sequence, found, why);
}
WHOLE int next(const lane_reader *reader, lane_found *found, complaint *why) {
    return lane_next(reader, found, why);
}
WHOLE int hand_out(lane_reader *reader, const lane_found *found) { return lane_hand_out(reader, found); }
WHOLE int sleeps(const hub_watch *watch, control_header *control, int *late) {
    return hub_sleep(watch, control, 1, late);
}
WHOLE int arms(const hub_watch *watch, control_header *control, uint32_t *seen) {
    return hub_arm(watch, control, seen);
}
