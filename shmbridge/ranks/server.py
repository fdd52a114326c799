"""What Consumer.serve_ranks returns: how far the ranks have come. The work is done by dealer.py."""

from shmbridge.ranks.dealer import ShareDealer


class RankServer:
    """Batches are dealt out to learner ranks as long as this, or its consumer, is held. Any thread."""

    def __init__(self, dealer: ShareDealer, bridge: str, consumer: object) -> None:
        self._dealer, self._bridge, self._consumer = dealer, bridge, consumer

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

    def __repr__(self) -> str:
        return f"<RankServer of {self._bridge!r}: {self._dealer.described()}>"
