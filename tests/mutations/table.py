"""Each guarantee, the line broken on purpose, and the test that must go red. docs/explanation/crash-model.md shows the same table.

A mutation is text that stands exactly once in its file. Knows sources and tests; `run.py` breaks and tests.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutation:
    """`before` becomes `after` in `path`; at least one test of `tests` must fail then."""

    name: str
    guarantee: int  # of README.md, 1 to 8
    breaks: str
    path: str
    before: str
    after: str
    tests: str


WRITE, READ, RING, INDEX = (f"shmbridge/_ext/{name}" for name in ("lane_write.h", "lane_read.h", "ring.pyx", "index.h"))
WEIGHTS, HEADER = "shmbridge/_ext/versions.pyx", "shmbridge/_ext/header.pyx"

MUTATIONS = (
    # 1: nothing committed is lost, duplicated or torn
    Mutation(
        "tail-before-ring", 1, "the commit point comes before the ring entry", WRITE,
        "    writer->ring[sequence & mask] = index;\n", "    store_seq64(&header->tail, sequence + 1);\n    writer->ring[sequence & mask] = index;\n",
        "tests/crash/test_producer_killed.py",
    ),
    Mutation(
        "claims-without-numbers", 1, "whoever gives a claim back gives back whichever is open", RING,
        "        if self._writer.claimed >= 0 and self._writer.claim_number == number and", "        if self._writer.claimed >= 0 and",
        "tests/unit/test_claim.py",
    ),
    Mutation(
        "id-without-incarnation", 2, "a restarted environment's records have the keys of its first life", "shmbridge/producer.py",
        """        self._producer_id = f"{given.decode(errors='ignore')}-{self.lane_name.rpartition('.')[2]}"\n""",
        """        self._producer_id = given.decode(errors='ignore')\n""",
        "tests/unit/test_producer.py",
    ),
    Mutation(
        "generation-kept", 1, "a slot's generation does not rise when it is used", WRITE,
        "++own->generation", "own->generation", "tests/unit/test_ring.py",
    ),
    Mutation(
        "released-under-a-view", 1, "release() ends the lease although a view of it lives", RING,
        "        self._released = True\n        if self._exports == 0:\n            self._end()\n\n    def discard", "        self._released = True\n        self._end()\n\n    def discard",
        "tests/conformance",
    ),
    Mutation(
        "column-keeps-nothing", 1, "a column that somebody looks at does not hold its record", "shmbridge/_ext/record.pyx",
        "        return array_over(view_of(self), dtype,", "        return array_over(self.index, dtype,", "tests/unit/test_record.py",
    ),
    Mutation(
        "memory-given-twice", 1, "memory of an array that lives is given to another", "shmbridge/_ext/blocks.pyx",
        "        self._remove(best)\n        return True", "        return True", "tests/unit/test_blocks.py",
    ),
    Mutation(
        "row-read-past-its-end", 1, "a row longer than its tokens is not left out where a batch is gathered", "shmbridge/_ext/gather.h",
        "taken = present[row] ? tokens : 0;", "taken = row < entries ? lengths[row] : 0;", "tests/hostile/test_fuzz_harness.py",
    ),
    Mutation(
        "rows-not-compared", 1, "a row that was trained with other values than were put is not noticed", "consumers/learner/row_checks.py",
        "            elif check_of(column, np.ascontiguousarray(values[column])) != stored:", "            elif False:",
        "tests/learner/test_row_checks.py",
    ),
    Mutation(
        "row-check-knows-no-column", 1, "values have one check in whatever column they stand", "shmbridge/_ext/row_check.h",
        "return checksum_of((const uint8_t *)column, strlen(column));", "return strlen(column) != 0;", "tests/unit/test_row_checks.py",
    ),
    Mutation(
        "checks-unbounded", 7, "a record's checks may lie outside of it", INDEX,
        "        if (entry->checks_at &&\n            index_span(", "        if (0 &&\n            index_span(",
        "tests/hostile/test_lane_bytes.py -k directory_entries",
    ),
    Mutation(
        "extent-forgotten", 1, "an aborted claim's slot is lost", WRITE,
        "    writer->free_slots[writer->free_slot_count++] = (uint32_t)writer->claimed;\n    writer->claimed = -1;",
        "    writer->claimed = -1;", "tests/conformance",
    ),
    Mutation(
        "torn-tensor-kept", 1, "the next writer takes a tensor that a killed one has half written for one that did not change", "shmbridge/weights_writer.py",
        "                found.touch(slot, row)\n                if", "                if", "tests/crash/test_weights_killed.py",
    ),
    Mutation(
        "rank-not-missed", 1, "a version is published without the part of a killed rank", "shmbridge/weights_writer.py",
        "                self._require_whole(version)\n", "", "tests/crash/test_weights_killed.py",
    ),
    Mutation(
        "slot-shared-with-a-rank", 1, "a writer begins while a rank of an earlier filling still writes into the slot", "shmbridge/weights_writer.py",
        "        self._hold(Byte.PARTS, timeout_s,", "        found = (Byte.PARTS, timeout_s,", "tests/crash/test_weights_killed.py",
    ),
    Mutation(
        "copy-not-looked-at-again", 1, "weights are copied while their slot is filled again, and handed out", "shmbridge/weights_reader.py",
        "            if found.held_throughout(latest[1], latest[0]):\n", "            if found is not None:\n", "tests/unit/test_weights.py",
    ),
    Mutation(
        "version-before-its-slot", 1, "the weights' newest version is named before its slot says that it is whole", WEIGHTS,
        "        store_release64(&self._header.slot_version[slot], version + 1)  # SYNC(weights-slot)\n        fault_hit(b\"weights.slot_whole\")\n",
        "        store_seq64(&self._header.latest, <uint64_t>(version + 1) * WEIGHTS_SLOTS + slot)\n        fault_hit(b\"weights.slot_whole\")\n"
        "        store_release64(&self._header.slot_version[slot], version + 1)\n",
        "tests/crash/test_weights_killed.py",
    ),
    Mutation(
        "slot-still-named", 1, "a slot of the weights that is being filled says that it holds its old version", WEIGHTS,
        "        store_seq64(&self._header.slot_version[slot], 0)  # SYNC(weights-slot)\n", "",
        "tests/unit/test_weights.py",
    ),
    Mutation(
        "filled-under-a-lease", 1, "the writer fills a slot of the weights that a reader holds", "shmbridge/weights_writer.py",
        "        self._hold(Byte.FIRST_SLOT + slot, timeout_s,", "        _ = (Byte.FIRST_SLOT + slot, timeout_s,", "tests/unit/test_weights.py",
    ),
    Mutation(
        "lease-not-looked-at-again", 1, "a lease of the weights is of the slot that was newest, whatever is in it by then", "shmbridge/weights_reader.py",
        " and found.holds(slot, version):\n            return found", ":\n            return found", "tests/unit/test_weights.py",
    ),
    Mutation(
        "part-after-its-filling", 1, "a rank writes with the ticket of a filling that is over", "shmbridge/weights_part.py",
        "if not found.lets_in(wanted.filling) or not liveness", "if not liveness", "tests/unit/test_weights_parts.py",
    ),
    Mutation(
        "part-of-a-dead-writer", 1, "a rank writes into the filling of a dead writer", "shmbridge/weights_part.py",
        " or not liveness.is_locked(found.mapping.fd, Byte.WRITER):", ":", "tests/crash/test_weights_killed.py",
    ),
    Mutation(
        "ticket-comes-again", 1, "a filling of the weights has the number of an earlier one", WEIGHTS,
        "(word // 2 // WEIGHTS_SLOTS + 1)", "(word // 2 // WEIGHTS_SLOTS)", "tests/unit/test_weights_parts.py",
    ),
    Mutation(
        "written-kept", 1, "what ranks wrote in an earlier filling counts for the next", WEIGHTS,
        "            store_release64(self._words + i, 0)  # SYNC(weights-written)\n", "            pass\n", "tests/unit/test_weights_parts.py",
    ),
    Mutation(
        "two-writers-of-weights", 1, "a second writer of the weights takes a living one's segment", "shmbridge/weights_writer.py",
        "        if not liveness.lock_after(lambda: Versions(mapping).writer_pid, mapping.fd, Byte.WRITER):", "        if False:", "tests/unit/test_weights.py",
    ),
    Mutation(
        "stamps-of-another-segment", 1, "what changed since a version of another segment is said by its number", "shmbridge/weights_reader.py",
        "        if not self._comparable_from <= version <= self.version or", "        if", "tests/unit/test_weights_changed.py",
    ),
    Mutation(
        "floor-not-raised", 1, "a segment of weights is replaced and its last version forgotten", "shmbridge/weights_floor.py",
        "                keep(control, Versions(mapping), bridge)\n", "                pass\n", "tests/unit/test_weights_floor.py",
    ),
    Mutation(
        "floor-raised-late", 1, "a segment of weights is gone before its last version is noted", "shmbridge/weights_floor.py",
        "            if mapping is not None:\n                keep(", "            segment.unlink(file.fd, name)\n            if mapping is not None:\n                keep(",
        "tests/unit/test_weights_floor.py",
    ),
    Mutation(
        "floor-of-remains-forgotten", 1, "the last version of a segment of weights whose table is garbage is forgotten", "shmbridge/weights_writer.py",
        "        weights_floor.keep(self._control, found, self.bridge)\n", "", "tests/hostile/test_weights_bytes.py",
    ),
    Mutation(
        "floor-not-asked-again", 1, "a writer of weights that was overtaken while it made its segment goes below", "shmbridge/weights_writer.py",
        "        weights_floor.require_above(version, self.last_version)\n        self._wrote_here", "        self._wrote_here",
        "tests/unit/test_weights_floor.py",
    ),
    Mutation(
        "floor-lowered", 1, "the highest version of weights is forgotten for a lower one", HEADER,
        "        if load_acquire64(&self.words().weights_floor) < <uint64_t>version + 1:", "        if True:", "tests/unit/test_weights_floor.py",
    ),
    Mutation(
        "data-mapped-writable", 1, "a consumer can write into committed records", "shmbridge/lanes.py",
        "        mapping.protect(reader.data_at)\n", "", "tests/unit/test_views_read_only.py",
    ),
    Mutation(
        "lane-read-by-two", 1, "two hubs read one lane once its bridge's name was removed", "shmbridge/lanes.py",
        "        while not liveness.lock_exclusive(mapping.fd, Byte.READER):", "        while False:", "tests/unit/test_names_removed.py",
    ),
    # 2: a consumer's death loses nothing
    Mutation(
        "head-not-stored", 2, "a record is handed out before head says so", READ,
        "    if (sequence >= load_relaxed64(&reader->header->head)) store_release64", "    if (0) store_release64",
        "tests/crash/test_hub_killed.py",
    ),
    Mutation(
        "backlog-ignored", 2, "a new hub takes only what is committed from now on", READ,
        "        if (sequence < tail) reader->backlog", "        if (0) reader->backlog", "tests/crash/test_hub_killed.py",
    ),
    Mutation(
        "backlog-unordered", 2, "redelivery does not follow the order of commit", READ,
        "    return (a < b) - (a > b);", "    return (a > b) - (a < b);", "tests/crash/test_hub_killed.py",
    ),
    Mutation(
        "everything-marked", 2, "what was never handed out is marked redelivered", READ,
        "    return found->again || (found->from_backlog && sequence < reader->first_head);", "    return found->from_backlog;", "tests/crash/test_hub_killed.py",
    ),
    Mutation(
        "dropped-is-released", 2, "a lease that the garbage collector ends is released", RING,
        "        if not self._ended and not self._released:", "        if False:", "tests/unit/test_released_by_word.py",
    ),
    Mutation(
        "dropped-is-lost", 2, "a record that nobody looked at does not come again", RING,
        "        lane_put_back(&self._reader, lease.sequence, lease.slot, lease.redelivered)", "        pass",
        "tests/unit/test_released_by_word.py",
    ),
    Mutation(
        "rank-release-not-put-off", 2, "a new hub gives room away that an old rank looks at", RING,
        "        if self.ranks_before and lease.redelivered:", "        if False:", "tests/crash/test_rank_killed.py",
    ),
    Mutation(
        "rank-lets-go-of-its-epoch", 2, "a rank says it has let go of an old hub's memory while it looks at it", "shmbridge/rank.py",
        "self._epochs - {self._epoch, *(manifest.epoch for manifest, _ in self._open)}", "self._epochs - {self._epoch}",
        "tests/crash/test_rank_killed.py",
    ),
    Mutation(
        "rank-late-done-honoured", 2, "a dead rank's message ends a lease under its successor's eyes", "shmbridge/shares.py",
        "            if rank in share.readers and share.issued.get(rank) == member:", "            if rank in share.readers:",
        "tests/ranks/test_shares.py",
    ),
    Mutation(
        "share-of-the-dead-taken-for-read", 2, "a share that no rank has read is released with its last reader's death", "shmbridge/shares.py",
        "            share.readers.discard(dead)\n", "            share.readers.discard(dead)\n            share.read = True\n",
        "tests/ranks/test_shares.py",
    ),
    Mutation(
        "owed-close-forgotten", 2, "a close() in a signal handler is not done by the call that it interrupts", "shmbridge/closing.py",
        "            owner.close_if_owed()\n", "            pass\n", "tests/unit/test_close_in_handler.py",
    ),
    Mutation(
        "counts-left-half-way", 2, "a scheduler's counts stay as an exception in the middle of a change left them", "shmbridge/batching.py",
        "            self._complete.recount()\n", "", "tests/unit/test_forming_interrupted.py",
    ),
    Mutation(
        "first-checkpoint-forgotten", 2, "a second resume trains again what the first checkpoint held", "consumers/learner/consumed.py",
        "may_come_again(self._in_checkpoint, self._mounts), mount_id()", "dict[str, set[int]](), mount_id()", "tests/learner/test_consumed.py",
    ),
    Mutation(
        "loaded-state-forgotten", 2, "a second resume of a data set hands out again what the first state held", "consumers/dataset_position.py",
        "in (had | self._held).items()", "in self._held.items()", "tests/learner/test_dataset.py -k resumes",
    ),
    Mutation(
        "mounts-not-compared", 2, "a checkpoint forgets what it holds of lanes on another machine, as if they were gone", "consumers/lane_records.py",
        "if here and mounts.get(producer) == here)", "if here)", "tests/learner/test_consumed.py",
    ),
    Mutation(
        "unreadable-taken-for-released", 2, "a checkpoint forgets what it holds of a lane that cannot be read", "shmbridge/inventory.py",
        "    except (OSError, ShmBridgeError, header.LaneCorrupt):\n        return None\n",
        "    except (OSError, ShmBridgeError, header.LaneCorrupt):\n        return set()\n", "tests/learner/test_consumed.py",
    ),
    # 3: nobody waits for a dead process
    Mutation(
        "death-not-told", 3, "the watcher does not ring when a producer dies", "shmbridge/lanes.py",
        "            lane.dead = True\n            self._control.ring()", "            lane.dead = True", "tests/crash/test_producer_killed.py",
    ),
    Mutation(
        "death-guessed", 3, "a process is taken for dead although its lock is held", "shmbridge/deathwatch.py",
        "dead = not liveness.is_locked(lane.fd, Byte.PRODUCER)", "dead = True", "tests/crash/test_stopped.py",
    ),
    Mutation(
        "follower-not-woken", 3, "a new version of the weights does not wake who waits for it", WEIGHTS,
        "        ring_bell(&self._header.bell)\n", "", "tests/unit/test_weights.py",
    ),
    Mutation(
        "looked-at-is-living", 3, "a dead process whose memory maps somebody reads counts as living", "shmbridge/liveness.py",
        "not _has_ended(pid) or", "True or", "tests/crash/test_watched.py",
    ),
    # 4: nothing leaks, nothing live is touched
    Mutation(
        "live-lane-swept", 4, "a lane is removed without its lock", "shmbridge/participation.py",
        '            return False, "its producer is alive", 0', "            pass", "tests/crash/test_alive_or_dead.py tests/unit/test_inventory.py",
    ),
    Mutation(
        "held-lane-swept", 4, "a dead lane goes although it holds records", "shmbridge/participation.py",
        "        if held and not with_records:", "        if False:", "tests/crash tests/unit/test_inventory.py",
    ),
    Mutation(
        "child-keeps-lock", 4, "a forked child keeps its dead parent's lane locked", "shmbridge/_ext/mapping.pyx",
        "    if fork_watch(fd) != 0:", "    if False:", "tests/crash/test_alive_or_dead.py",
    ),
    # 5: nothing is dropped silently
    Mutation(
        "release-uncounted", 5, "a release is not counted where it happens", READ,
        "    store_relaxed64(&header->released_total, count);\n    if", "    if", "tests/unit/test_released_count.py",
    ),
    Mutation(
        "loss-taken-for-a-release", 5, "a new hub makes its count what the slots show", READ,
        "    if (count != load_relaxed64(&header->released_total) + 1 || index >= reader->shape.slot_count) return;",
        "    count = load_relaxed64(&header->released_total) + 1;", "tests/unit/test_released_count.py",
    ),
    Mutation(
        "discard-uncounted", 5, "a discarded record is not counted", RING,
        "        if reason < DISCARD_REASONS:", "        if False:", "tests/unit/test_batching.py tests/unit/test_consumer.py",
    ),
    Mutation(
        "drop-uncounted", 5, "a dropped record is not counted", RING,
        "        if reason < DROP_REASONS and self._lane.alive():", "        if False:", "tests/unit/test_producer.py",
    ),
    Mutation(
        "uneven-row-shifted", 5, "values of a row with another length than its tokens are taken for those of its first tokens", "shmbridge/_ext/gather.h",
        "        present[row] &= !is_uneven;\n", "", "tests/unit/test_batch.py",
    ),
    Mutation(
        "misfit-mask-ignored", 5, "a row whose mask does not fit its tokens counts as one without a mask, so other tokens train",
        "consumers/learner/left_out.py", "        without |= uneven.get(name, False)\n", "        pass\n", "tests/learner/test_left_out.py",
    ),
    # 6: backpressure is real
    Mutation(
        "producer-not-woken", 6, "a release does not wake the producer that waits for room", READ,
        "    if (load_seq32(&reader->header->space_waiting)) {", "    if (0) {", "tests/unit/test_ring.py tests/unit/test_producer.py tests/sanitize",
    ),
    Mutation(
        "hub-not-woken", 6, "a commit does not wake the hub that waits", WRITE,
        "    if (load_seq32(&writer->hub->hub_sleeping)) {", "    if (0) {", "tests/unit/test_consumer.py tests/sanitize",
    ),
    Mutation(
        "memory-not-reserved", 6, "pages are not reserved: too little memory is a SIGBUS", "shmbridge/segment.py",
        "os.posix_fallocate(fd, at, step)", "os.ftruncate(fd, size)", "tests/limits",
    ),
    Mutation(
        "cgroup-not-asked", 6, "the memory cgroup's limit is not looked at", "shmbridge/segment.py",
        "        if size - at + min(size, _LEFT_ALONE_BYTES) > room:", "        if False:", "tests/limits",
    ),
    Mutation(
        "descriptors-not-raised", 6, "a hub lives with as few descriptors as one peer can use up", "shmbridge/lanes.py",
        "        limits.raise_descriptors()\n", "", "tests/hostile/test_control_messages.py",
    ),
    Mutation(
        "stuck-not-said", 6, "a batch that can never be filled is waited for", "shmbridge/batching.py",
        "        if stuck is None:\n            return\n", "        return\n", "tests/unit/test_batching.py tests/limits/test_sizing.py",
    ),
    # 7: strangers are refused, garbage stays in its lane
    Mutation(
        "version-not-compared", 7, "a lane of another layout version is read", "shmbridge/_ext/shape.h",
        "    if (version != LAYOUT_VERSION)", "    if (0)", "tests/unit/test_ring.py",
    ),
    Mutation(
        "types-not-compared", 7, "a column of another type is taken", "shmbridge/schema.py",
        "            if peer is not None and not peer.same_type(column):", "            if False:", "tests/unit/test_schema.py tests/unit/test_consumer.py",
    ),
    Mutation(
        "span-unchecked", 7, "a column may lie outside its record", INDEX,
        "    if (at < begin || at > end || size > end - at)", "    if (0)", "tests/hostile tests/unit/test_ring.py",
    ),
    Mutation(
        "garbage-ends-the-look", 7, "one lane of garbage keeps the others from being read", "shmbridge/_ext/turns.pyx",
        "                self.remove(reader)\n                continue", "                self.remove(reader)\n                return None",
        "tests/unit/test_turns.py tests/unit/test_consumer.py",
    ),
    Mutation(
        "header-believed-at-quarantine", 7, "what a quarantined lane loses is counted where its overwritten header says", "shmbridge/adopted_lane.py",
        "self.reader.undelivered - self.held", "header.undelivered(self.reader.lane) - self.held", "tests/hostile/test_lane_bytes.py",
    ),
    Mutation(
        "quarantine-counted-twice", 7, "a hub that adopts a quarantined lane counts again what the one before counted", "shmbridge/_ext/ring.pyx",
        "max(count, self.quarantined, 1)", "count + self.quarantined", "tests/crash/test_quarantine.py tests/unit/test_quarantine.py",
    ),
    # 8: owner-only
    Mutation(
        "mode-open", 8, "segments can be read by others", "shmbridge/segment.py", "mode=0o600", "mode=0o666", "tests/limits/test_owner.py",
    ),
)
