"""The state a hub publishes to its whole bridge: run, policy version, pause, drain; and whom it lets begin.

A few shared words. Used by all parts of the consumer. Any thread; never blocks.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmbridge._ext import header
from shmbridge._ext.lane import Waits
from shmbridge.config import Run, check_count, check_run_id, check_version
from shmbridge.control import messages
from shmbridge.errors import BadArgument, Closed, shown
from shmbridge.segments import MOST_TICKETS, Closing, pid_namespace

if TYPE_CHECKING:
    from shmbridge.hub.hub import Hub

_MOST = 1 << 31
PROMISE_NS = 1_000_000_000  # how long a granted ticket is reserved for a producer that does not show it
_FULL_FOR_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class OffPolicyLimit:
    """At most (max_off_policy_steps + 1) * groups_per_step groups are generated, waiting, or trained with."""

    max_off_policy_steps: int
    groups_per_step: int

    def groups(self, unpublished: int = 0) -> int:
        """Returns that number, less the steps by which the weights in training are ahead of the published."""
        return (self.max_off_policy_steps + 1 - unpublished) * self.groups_per_step


def limit_of(
    max_off_policy_steps: int | None, groups_per_step: int | None, policy: str
) -> OffPolicyLimit | None:
    """Returns the limit a consumer is to keep, or None. Raises BadArgument if it cannot be kept."""
    if max_off_policy_steps is None:
        if groups_per_step is not None:
            raise BadArgument(
                f"groups_per_step={shown(groups_per_step)} is for max_off_policy_steps, and that is None",
                hint="max_off_policy_steps=2, or leave groups_per_step out",
            )
        return None
    steps = check_count("max_off_policy_steps", max_off_policy_steps, 0, _MOST)
    if groups_per_step is None:
        raise BadArgument(
            f"max_off_policy_steps={steps} without groups_per_step, the groups of a batch",
            hint="groups_per_step=8, as batches(groups=8)",
        )
    groups_per_step = check_count("groups_per_step", groups_per_step, 1, _MOST)
    if policy != "oldest":
        raise BadArgument(
            f"policy={shown(policy)} lets newer groups overtake older ones, and max_off_policy_steps={steps}",
            hint='policy="oldest"',
        )
    return OffPolicyLimit(steps, groups_per_step)


@dataclass(slots=True)
class Promises:
    """Granted tickets that their lanes do not show yet: per lane, how many it will hold, and until when."""

    _by_lane: dict[str, tuple[int, int]] = field(default_factory=dict)

    def promise(self, lane: str, tickets: int, now_ns: int) -> None:
        """Counts `tickets` of the lane as held for PROMISE_NS."""
        self._by_lane[lane] = tickets, now_ns + PROMISE_NS

    def void(self, lane: str) -> None:
        """Voids the lane's promise: its producer asks again, so it will not use a late answer."""
        self._by_lane.pop(lane, None)

    def running(self, held: Mapping[str, int], now_ns: int) -> int:
        """Returns the number of groups being generated: per lane max(tickets held, tickets promised).

        Drops redeemed and expired promises.
        """
        self._by_lane = {
            lane: (tickets, until_ns)
            for lane, (tickets, until_ns) in self._by_lane.items()
            if now_ns < until_ns and lane in held and held[lane] < tickets
        }
        return sum(max(tickets, self._by_lane.get(lane, (0, 0))[0]) for lane, tickets in held.items())


class Admission:
    """Admits groups. `committed` counts committed groups whose step is not over; None while they move."""

    def __init__(self, hub: "Hub") -> None:
        self._state, self._lanes, self._committed = hub.state, hub.lanes, hub.former.committed
        self._promises, self._begun = Promises(), 0
        # (deadline_ns, steps): the answer stays "full" until then, unless another step ends.
        self._full = 0, -1

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """Returns whether a producer may begin one more group; None: not yet."""
        if not 0 <= request.running < MOST_TICKETS:
            said = f"a lane holds 0 to {MOST_TICKETS} tickets, so none more than {request.running}"
            return messages.Refused(messages.BAD_VALUE, said, "say how many it holds")
        # Read the clock first: a promise expired before this instant is already redeemed or never will be.
        now_ns = time.monotonic_ns()
        if self._state.paused:
            return None
        if self._state.limit is not None:
            if request.lane in self._lanes.refused:
                said = f"lane {request.lane} is refused by this consumer, which reads nothing of it"
                return messages.Refused(messages.BAD_VALUE, said, "see the consumer's log")
            self._promises.void(request.lane)
            steps = self._state.steps_ended
            # Reuse one count for all waiting producers.
            if request.wait and now_ns < self._full[0] and steps == self._full[1]:
                return None
            # Count tickets before committed groups: a group is committed before its ticket ends.
            held = self._lanes.tickets()
            running, committed = self._promises.running(held, now_ns), self._committed()
            # groups are being moved; or the lane is not adopted yet
            if committed is None or request.lane not in held:
                return None
            # After the count, so that a step that has just ended is included.
            most = self._state.limit.groups(self._state.unpublished)
            if running + committed >= most:
                self._full = now_ns + _FULL_FOR_NS, steps
                return None if request.wait else messages.Full(most, running, committed)
            self._promises.promise(request.lane, request.running + 1, now_ns)
        self._begun += 1
        header.fault(b"hub.ticket_promised")
        until_ns = now_ns + PROMISE_NS
        # Read the version last: it is no older than the count.
        return messages.MayBegin(self._state.hub_epoch, self._state.policy_version, until_ns)

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat. Any thread."""
        limit = self._state.limit
        return {
            **({} if limit is None else {"groups_limit": limit.groups(self._state.unpublished)}),
            "groups_running": sum(self._lanes.tickets().values()),
            "groups_begun_total": self._begun,
        }


_MOST_NOTED = (1 << 62) - 1


class HubState:
    """The control segment's words, until close(), and the announced run."""

    hub_epoch: int

    def __init__(
        self,
        bridge: str,
        words: header.Control,
        closing: Closing,
        run: Run | None,
        limit: OffPolicyLimit | None,
    ) -> None:
        self.bridge, self.limit = bridge, limit
        self._words: header.Control | None = words
        self._closing, self._publishing = closing, closing.lock()
        self._announced: tuple[Run | None, int] = run, 0  # and the steps of the runs before it
        self._training_version = -1
        self._waits = Waits(words)
        self.steps_ended = 0

    # -- whether it is open

    @property
    def words(self) -> header.Control:
        """The control segment's words. Raises Closed."""
        words = self._words  # read once: a signal handler may close at any line
        if words is None or words.mapping.forked:
            self.check_process()
            raise Closed(
                f"the consumer of bridge {self.bridge!r} is closed", hint=f"Consumer({self.bridge!r})"
            )
        return words

    @property
    def words_gone(self) -> bool:
        """Whether the words are gone, as they are at the end of close()."""
        return self._words is None

    def let_words_go(self) -> None:
        """Drops the words, so that the mapping, and with it the hub's lock, ends with the last view."""
        self._waits.words = None
        self._words = None

    def check_process(self) -> header.Control | None:
        """Returns the words, None once they are gone.

        Raises Closed in a child of fork, where a lock may be held by a thread that does not exist.
        """
        words = self._words
        if words is not None and words.mapping.forked:
            raise Closed(f"the consumer of bridge {self.bridge!r} belongs to the process before fork")
        return words

    def check_open(self) -> None:
        """Raises Closed if the consumer is closed, or belongs to the process before fork."""
        if self.check_process() is None or self._closing.closed:
            raise Closed(
                f"the consumer of bridge {self.bridge!r} is closed", hint=f"Consumer({self.bridge!r})"
            )

    @contextlib.contextmanager
    def until_closed(self) -> Iterator[None]:
        """Ends the enclosed iteration without an error when the consumer is closed, by any thread."""
        try:
            yield
        except Closed:
            if not self._closing.closed:
                raise

    @property
    def control_fd(self) -> int:
        """The descriptor that carries the locks of hub and ranks."""
        return int(self.words.mapping.fd)

    def begin_epoch(self, columns: bytes) -> None:
        """Makes this process the hub that every participant sees."""
        self.hub_epoch = self.words.begin_epoch(os.getpid(), pid_namespace(), columns)

    # -- the run

    @property
    def run(self) -> Run | None:
        """The announced training run."""
        return self._announced[0]

    def announce(self, run: Run | None, steps: int) -> None:
        """Announces a run that begins after `steps` steps in all."""
        self._announced = run, steps
        self.words.next_run()

    def current_step(self, steps: int) -> int:
        """Returns the run's step after `steps` steps in all."""
        run, steps_before = self._announced
        return (run.starting_step if run else 0) + steps - steps_before

    # -- versions

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""
        return int(self.words.policy_version)

    @property
    def training_version(self) -> int:
        """The version of the weights in training; staleness is counted from it."""
        return max(self._training_version, self.policy_version)

    @property
    def unpublished(self) -> int:
        """Steps by which the weights in training are ahead of the published ones."""
        return max(self._training_version - self.policy_version, 0)

    def publish(self, version: int, run_id: str | None = None, same_as: int | None = None) -> None:
        """See Consumer.publish_policy_version."""
        version = check_version("version", version)
        run = None if run_id is None else check_run_id(run_id)
        repeated = -1 if same_as is None else check_version("same_as", same_as)
        with self._publishing:  # the control plane's thread publishes, too
            if version < self.policy_version:
                raise BadArgument(
                    f"policy version {version} is before {self.policy_version}: "
                    "versions of one bridge only rise",
                    hint=f"count on from {self.policy_version}, or use another bridge for a run from 0",
                )
            if run is not None:
                self.words.begin_run(run, version, repeated)
            self.words.policy_version = version

    def end_run(self) -> None:
        """See Consumer.end_run."""
        self.words.end_run()

    def note_training_version(self, version: int) -> None:
        """See Consumer.note_training_version."""
        version = check_version("version", version)
        ahead = version - self.policy_version
        if version < self.training_version:
            raise BadArgument(
                f"version {version} is before {self.training_version}, which is in training: "
                "versions of one bridge only rise",
                hint=f"count on from {self.training_version}",
            )
        if self.limit is not None and ahead > self.limit.max_off_policy_steps:
            raise BadArgument(
                f"version {version} in training is {ahead} steps ahead of the published "
                f"{self.policy_version}, and max_off_policy_steps={self.limit.max_off_policy_steps}: "
                "no group could begin",
                hint=f"publish_policy_version({version}) first",
            )
        self._training_version = version

    # -- for observers

    def asking(self, *, for_record: bool = False) -> contextlib.AbstractContextManager[None]:
        """While the block runs, observers see that this consumer waits for a batch, or for the next record.

        A block inside another one is part of that wait.
        """
        return self._waits.open(for_record=for_record)

    def note_asking(self, waits: bool) -> None:
        """Shows observers that somebody begins to wait for a batch or record, or no longer does."""
        if (words := self._words) is not None and not words.mapping.forked:
            words.note_asking(waits)

    def note_most_stale(self, max_staleness: int | None) -> None:
        """Shows observers the staleness limit of the batches that are asked for; None: there is none."""
        if (words := self._words) is not None and not words.mapping.forked:
            words.note_most_stale(-1 if max_staleness is None else min(max_staleness, _MOST_NOTED))

    def note_batch(self, size: int, by_rows: bool, there: int, in_part: int) -> None:
        """Shows observers what the batch that is waited for wants and has; a size of 0: no batch is.

        Args:
            size: its groups, or rows.
            by_rows: whether `size` and `there` count rows.
            there: what is there of it.
            in_part: groups of which some fragments have come.
        """
        if (words := self._words) is not None and not words.mapping.forked:
            words.note_batch(size, by_rows, there, in_part)

    def waits(self) -> dict[str, float]:
        """Returns, in seconds since this hub began, how long somebody waited for a batch, also now, and for a
        tap. Never blocks; any thread.
        """
        words = self.words
        asking_ns = words.asking_ns
        under_way_ns = time.monotonic_ns() - asking_ns if asking_ns else 0
        return {
            "batch_wait_s": (words.batch_wait_ns + under_way_ns) / 1e9,
            "tap_wait_s": words.tap_wait_ns / 1e9,
        }

    def note_handed(self) -> None:
        """Shows observers that a batch is handed out now."""
        if (words := self._words) is not None and not words.mapping.forked:
            words.note_handed()

    # -- pause and drain

    @property
    def paused(self) -> bool:
        """Whether producers are held back."""
        return bool(self.words.paused)

    @paused.setter
    def paused(self, paused: bool) -> None:
        self.words.paused = paused

    @property
    def draining(self) -> bool:
        """Whether the bridge takes no new records."""
        return bool(self.words.draining)

    def drain(self) -> None:
        """Stops taking new records."""
        self.words.draining = True

    def ring(self) -> None:
        """Wakes the threads that wait for a record."""
        self.words.ring()

    def say_finished(self) -> None:
        """Marks the bridge as drained and read by every learner rank; ranks see it after this hub's end."""
        self.words.finish()
