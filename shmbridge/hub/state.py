"""The state a hub publishes to its whole bridge: run, policy version, pause, drain. A few shared words.

Used by all parts of the consumer. Any thread; never blocks.
"""

import contextlib
import os
import time
from collections.abc import Iterator

from shmbridge._ext import header
from shmbridge._ext.lane import Waits
from shmbridge.config import Run, check_run_id, check_version
from shmbridge.errors import BadArgument, Closed
from shmbridge.hub.admission import OffPolicyLimit
from shmbridge.segments import Closing, pid_namespace

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
