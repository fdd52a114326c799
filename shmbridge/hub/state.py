"""What the hub says to a whole bridge, and what its control plane sees of it: run, policy version, pause,
drain, queues.

All of it is a few shared words, safe from any thread. Knows nothing of taking records: that is consumer.py,
which is a Hub.
"""

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from shmbridge._ext import header
from shmbridge._ext.wait import HubWait
from shmbridge.admission.limit import PROMISE_NS, Limit, Promises
from shmbridge.atropos.env_status import EnvShare
from shmbridge.batching.former import BatchAssembly
from shmbridge.config import Run, check_run
from shmbridge.control import messages
from shmbridge.errors import Closed
from shmbridge.hub.lanes import LaneSet
from shmbridge.segments import locks
from shmbridge.segments.closing import is_mine, then_close
from shmbridge.segments.one_process import OneProcess
from shmbridge.segments.placement import MemoryUse

if TYPE_CHECKING:
    from shmbridge.control.server import ControlServer
    from shmbridge.ranks.server import RankServer

_FULL_FOR_NS = 10_000_000


class Hub(OneProcess):
    """Base of Consumer; environments.HubView says what the control plane's thread calls. Never blocks."""

    hub_epoch: int
    _closed: bool
    _final: dict[str, float]
    _lanes: LaneSet
    _memory: MemoryUse
    _sleep: HubWait | None
    _batching: BatchAssembly
    # serves from its construction on: its thread comes before this is set
    _server: "ControlServer | None" = None

    def __init__(self, bridge: str, run: Run | None, control: header.Control, limit: Limit | None) -> None:
        self.bridge = bridge
        self._announced: tuple[Run | None, int] = run, 0  # and the steps of runs before it
        self._batches_formed = 0
        self._publishing = threading.RLock()
        # held by the closer; a signal handler in between sees that it does
        self._one_closer = threading.RLock()
        # close() comes before or after what needs all of this, never between
        self._closing = threading.RLock()
        self._control_words: header.Control | None = control
        self._ranks: RankServer | None = None
        self._limit, self._promises, self._begun = limit, Promises(), 0
        self._training_version = -1
        # until when nothing is counted again, unless more steps than so many have ended
        self._steps_ended, self._full = 0, (0, -1)

    @property
    def _control(self) -> header.Control:
        """The control segment's words, which end with close()."""
        if (words := self._words_here()) is None:
            raise Closed(f"the consumer of bridge {self.bridge!r} is closed")
        return words

    def _words_here(self) -> header.Control | None:
        """`_control`, None once this is closed."""
        words = self._control_words
        if words is not None and words.mapping.forked:
            raise Closed(f"the consumer of bridge {self.bridge!r} belongs to the process before fork")
        return words

    @property
    def _lock_is_mine(self) -> bool:
        """Whether this thread holds a lock that close() may wait for; asked in a signal handler."""
        parts = (self._batching, self._lanes, self._server, self._ranks)
        return (
            is_mine(self._publishing)
            or is_mine(self._closing)
            or any(part is not None and part.lock_is_mine for part in parts)
        )

    def close_if_owed(self) -> None:
        """Does what a close() in a signal handler has put off."""
        raise NotImplementedError

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """An iteration ends where it finds this closed, by whatever thread."""
        try:
            yield
        except Closed:
            if not self._closed:
                raise

    @property
    def run(self) -> Run | None:
        """The announced training run."""
        return self._announced[0]

    @property
    def current_step(self) -> int:
        """`run.starting_step` plus the batches handed out since; under policy "atropos" the batches formed,
        as upstream.
        """
        run, steps_before = self._announced
        return (run.starting_step if run else 0) + self._batching.steps(self._batches_formed) - steps_before

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""
        return int(self._control.policy_version)

    @property
    def training_version(self) -> int:
        """The version of the weights in training, from which staleness is counted: `policy_version`, unless a
        later one was noted.
        """
        return max(self._training_version, self.policy_version)

    @property
    def paused(self) -> bool:
        """Whether producers are held back."""
        return bool(self._control.paused)

    @property
    def draining(self) -> bool:
        """Whether the bridge takes no new records."""
        return bool(self._control.draining)

    def announce_run(self, run: Run) -> None:
        """Announces (or replaces) the training run; environments that wait for one go on."""
        self._announced = check_run(run), self._batching.steps(self._batches_formed)
        self._control.next_run()

    @then_close
    def publish_policy_version(self, version: int) -> None:
        """Tells every producer, by one store, which policy version is current.

        Never goes backwards: ValueError.
        """
        if not 0 <= version < 1 << 62:
            raise ValueError(f"policy version {version} is not within 0 and 2**62")
        with self._publishing:  # the control plane's thread does, too
            if version < self.policy_version:
                raise ValueError(
                    f"policy version {version} is before {self.policy_version}: versions of one bridge only "
                    "rise"
                )
            self._control.policy_version = version
        self.end_step()  # after the store: what begins now begins under this version

    def note_training_version(self, version: int) -> None:
        """Says which version the weights in training have, though nothing samples with them: of a learner
        that does not publish each step.

        Groups go on beginning under `policy_version`, the fewer the further that is behind, and must be able
        to: ValueError if it is further behind than `max_off_policy_steps`. Never goes backwards: ValueError.
        """
        ahead = version - self.policy_version
        if version < self.training_version:
            raise ValueError(
                f"version {version} is before {self.training_version}, which is in training: versions of "
                "one bridge only rise"
            )
        if self._limit is not None and ahead > self._limit.max_off_policy_steps:
            raise ValueError(
                f"version {version} in training is {ahead} steps ahead of the published "
                f"{self.policy_version}, and max_off_policy_steps={self._limit.max_off_policy_steps}: no "
                f"group could begin; publish_policy_version({version}) first"
            )
        self._training_version = version

    @then_close
    def end_step(self) -> None:
        """What was handed out is trained with: there may be room for groups that wait to begin."""
        if self._limit is not None and not self._closed:
            self._batching.end_step()
            self._steps_ended += 1
            self.look_again()

    def pause(self) -> None:
        """Holds producers back: their `put` waits. Records already committed still come."""
        self._control.paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._control.paused = False
        self._lanes.ring_all()

    def drain(self) -> None:
        """Takes no new records: `put` raises BridgeDraining, iteration ends when nothing is left."""
        self._control.draining = True
        self._lanes.ring_all()
        self._control.ring()

    def say_finished(self) -> None:
        """The bridge is drained and every learner rank is done: they hear of it also when this hub is gone.

        For ranks/server.py.
        """
        self._control.finish()

    def hint_when_empty(self) -> str:
        """What to do where nothing comes; for ConsumerEmpty."""
        if self.run is None and self._lanes.live:
            return (
                "this consumer has announced no run, and Atropos environments wait for one: "
                f"Consumer(run=shmbridge.Run(batch_size=...)); else see shmbridge inspect {self.bridge}"
            )
        return f"are environments running on this bridge? shmbridge inspect {self.bridge}"

    def look_again(self) -> None:
        """There may be an answer for who waits for one; for ranks/server.py."""
        if self._server is not None:
            self._server.look_again()

    @property
    def control_fd(self) -> int:
        """Descriptor whose locks say who is who; for ranks/server.py."""
        return int(self._control.mapping.fd)

    def count_batch(self, batches: int = 1) -> None:
        """A batch was formed, or, with -1, undone before anybody read it; for batching/former.py and the
        gateway.
        """
        self._batches_formed += batches

    @then_close
    def stats(self) -> dict[str, float]:
        """Counters of the bridge, flat: produced = released + held + discarded, from the lanes' own words.

        Never blocks; any thread.
        """
        self._words_here()  # in a child of fork a thread that is not there may hold the lock for ever
        with self._closing:
            return self._final if self._closed else self._count()

    def _count(self) -> dict[str, float]:
        total = self._lanes.counters()
        assert self._sleep is not None  # that goes with close()
        reasons = {key: value for key, value in sorted(total.items()) if "{" in key}
        return {
            **{key: total[key] for key in ("records_total", "released_total", "held", "put_off")},
            **{key: total[key] for key in ("tokens_total", "bytes_total", "lane_bytes")},
            **self._memory.of(lane.reader.lane for lane in self._lanes),
            **{key: total[key] for key in ("leases_dropped_total", "leases_returned_total")},
            **reasons,
            "dropped_total": sum(value for key, value in reasons.items() if key.startswith("dropped")),
            "discarded_total": sum(value for key, value in reasons.items() if key.startswith("discarded")),
            "producer_wait_s": total["producer_wait_ns"] / 1e9,
            "wait_s": self._sleep.wait_ns / 1e9,
            "late_wakes_total": total["late_wakes_total"] + self._sleep.late_wakes,
            "lanes_live": self._lanes.live,
            "lanes_dead": len(self._lanes) - self._lanes.live,
            "lanes_quarantined": sum(lane.corrupt for lane in self._lanes),
            "lanes_refused": len(self._lanes.refused),
            "lanes_waiting": int(self._lanes.some_wait),
            "queue_groups": self.queue_groups(),
            **self._queue_groups_by_env(),
            "batches_total": self._batches_formed,
            **self._batching.stats(),
            "policy_version": self.policy_version,
            **self._capacity_stats(),
            **(self._ranks.stats() if self._ranks else {}),
        }

    def queue_groups(self, producer_id: str | None = None) -> int:
        """Groups committed and not yet in a batch, of one producer or all; a fragment not yet read counts as
        one.
        """
        waiting = sum(lane.waiting for lane in self._lanes if producer_id in (None, lane.producer_id))
        return waiting + self._batching.queued(producer_id)

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Of each: what producer_live and queue_groups say, by one walk of the lanes for all of them."""
        waiting, live = Counter[str](), set()
        for lane in self._lanes:
            waiting[lane.producer_id] += lane.waiting
            if not lane.dead:
                live.add(lane.producer_id)
        return {each: (each in live, waiting[each] + self._batching.queued(each)) for each in producer_ids}

    def _queue_groups_by_env(self) -> dict[str, float]:
        shares = self.env_shares()
        return {
            f"queue_groups{{{shares[each].name}}}": groups
            for each, (_, groups) in self.look_at_producers(shares).items()
        }

    def env_shares(self) -> Mapping[str, EnvShare]:
        """What the registered environments ask for, by producer id; an immutable snapshot."""
        return self._server.shares if self._server is not None else {}

    def producer_live(self, producer_id: str) -> bool:
        """Whether a living producer's lane is attached under this id."""
        return any(lane.producer_id == producer_id and not lane.dead for lane in self._lanes)

    def next_share(
        self, request: messages.NextShare
    ) -> messages.Manifest | messages.NoMoreShares | messages.Refused | None:
        """A learner rank's next share; None while there is none, or serve_ranks has not been called."""
        return None if self._ranks is None else self._ranks.next_share(request)

    def shares_done(self, request: messages.SharesDone) -> messages.Ack | messages.Refused:
        """A learner rank is done with shares."""
        if self._ranks is not None:
            return self._ranks.shares_done(request)
        said = f"the consumer of bridge {self.bridge!r} hands out no shares"
        return messages.Refused(messages.NO_RANKS, said, "call Consumer.serve_ranks in it")

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """Whether a producer may begin one group more; None: not yet. For the control plane's thread."""
        if not 0 <= request.running < locks.MOST_TICKETS:
            said = f"a lane holds 0 to {locks.MOST_TICKETS} tickets, so none more than {request.running}"
            return messages.Refused(messages.BAD_VALUE, said, "say how many it holds")
        now_ns = time.monotonic_ns()  # first: a promise that is over by now was kept by now, or never will be
        if self.paused:
            return None
        if self._limit is not None:
            if request.lane in self._lanes.refused:
                said = f"lane {request.lane} is refused by this consumer, which reads nothing of it"
                return messages.Refused(messages.BAD_VALUE, said, "see the consumer's log")
            self._promises.void(request.lane)
            steps = self._steps_ended
            # others wait too: one count is for all
            if request.wait and now_ns < self._full[0] and steps == self._full[1]:
                return None
            # before what is committed: a group is committed before its ticket ends
            held = self._lanes.tickets()
            running, committed = self._promises.running(held, now_ns), self._batching.committed()
            if committed is None or request.lane not in held:  # they are being moved; it is not adopted yet
                return None
            # after the count: a step that ended meanwhile is known
            if running + committed >= (most := self._most_groups(self._limit)):
                self._full = now_ns + _FULL_FOR_NS, steps
                return None if request.wait else messages.Full(most, running, committed)
            self._promises.promise(request.lane, request.running + 1, now_ns)
        self._begun += 1
        header.fault(b"hub.ticket_promised")
        until_ns = now_ns + PROMISE_NS
        # the version last: it is no older than the count
        return messages.MayBegin(self.hub_epoch, self.policy_version, until_ns)

    def _most_groups(self, limit: Limit) -> int:
        """How many may be under way now."""
        return limit.groups(max(self._training_version - self.policy_version, 0))

    def _capacity_stats(self) -> dict[str, float]:
        limit = {} if self._limit is None else {"groups_limit": self._most_groups(self._limit)}
        return {
            **limit,
            "groups_running": sum(self._lanes.tickets().values()),
            "groups_begun_total": self._begun,
        }
