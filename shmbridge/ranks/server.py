"""What Consumer.serve_ranks returns: how far the ranks have come. The work is done by dealer.py."""

from collections.abc import Callable

from shmbridge.ranks.dealer import ShareDealer
from shmbridge.record.groups import Group


class RankServer:
    """Batches are dealt out to learner ranks as long as this, or its consumer, is held. Any thread."""

    def __init__(self, dealer: ShareDealer, bridge: str, consumer: object) -> None:
        self._dealer, self._bridge, self._consumer = dealer, bridge, consumer

    def deal(self, groups: list[Group], failed: Callable[[list[Group]], None]) -> Callable[[], None]:
        """Deals a step out, for a feed: serve_ranks(groups=None). Never blocks; any thread.

        Returns what ends the step: from then on its groups are released, as soon as every rank is done with
        them.

        Args:
            groups: of the step, leased and unread; sharded ranks get none if there are too few.
            failed: is called with the groups of a share whose step a rank reports as failed, in a thread that
                answers messages: it must not wait for ranks.

        Raises BatchTooBig: more records than a message can name.
        """
        return self._dealer.deal(groups, failed)

    def drained(self) -> None:
        """Tells the ranks that `deal` has no further step for now. Never blocks; any thread."""
        self._dealer.drained()

    @property
    def world_size(self) -> int:
        """Ranks that are served."""
        return self._dealer.world_size

    @property
    def idle(self) -> bool:
        """Whether the bridge is drained and every share is done."""
        return self._dealer.idle

    def stats(self) -> dict[str, float]:
        """Returns counters, flat. Never blocks for long."""
        return self._dealer.stats()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Blocks until the bridge is drained and every share is done; then returns True.

        Returns False on timeout, or if no more can come: the consumer was closed, or a batch could not be
        formed (its log says why).

        Args:
            timeout_s: seconds; None: for ever.
        """
        return self._dealer.wait(timeout_s)

    def settled(self, timeout_s: float) -> bool:
        """Returns whether the ranks are done with all steps that a feed has ended. Blocks for living ones."""
        return self._dealer.settled(timeout_s)

    def __repr__(self) -> str:
        return f"<RankServer of {self._bridge!r}: {self._dealer.described()}>"
