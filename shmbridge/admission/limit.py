"""The capacity rule: how many groups may be under way at a time, so that what is trained is at most so many
steps off-policy.

Pure counting: knows neither locks nor lanes nor messages. docs/explanation/staleness.md has the rule, its
proof, and what it assumes. Called by hub/promises.py and batching/former.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

PROMISE_NS = 1_000_000_000  # how long a granted ticket is kept for a producer that does not show it


@dataclass(frozen=True, slots=True)
class OffPolicyLimit:
    """At most (max_off_policy_steps + 1) * groups_per_step groups are under way: being generated, waiting, or
    being trained with.
    """

    max_off_policy_steps: int
    groups_per_step: int

    def groups(self, unpublished: int = 0) -> int:
        """That many, with weights in training that are so many steps ahead of the published ones: those steps
        are used up.
        """
        return (self.max_off_policy_steps + 1 - unpublished) * self.groups_per_step


def limit_of(
    max_off_policy_steps: int | None, groups_per_step: int | None, policy: str
) -> OffPolicyLimit | None:
    """The limit a consumer is asked to keep; None for none. Raises ValueError if it cannot be kept."""
    if max_off_policy_steps is None:
        if groups_per_step is not None:
            raise ValueError(
                f"groups_per_step={groups_per_step} is for max_off_policy_steps, and that is None"
            )
        return None
    if groups_per_step is None or groups_per_step < 1 or max_off_policy_steps < 0:
        raise ValueError(
            f"max_off_policy_steps={max_off_policy_steps}, groups_per_step={groups_per_step}: at least 0, "
            "and at least 1: of a batch"
        )
    if policy != "oldest":
        raise ValueError(
            f"policy={policy!r} lets newer groups overtake older ones: max_off_policy_steps needs "
            'policy="oldest"'
        )
    return OffPolicyLimit(max_off_policy_steps, groups_per_step)


@dataclass(slots=True)
class Promises:
    """Tickets that were granted and that their lanes do not show yet: per lane, how many it will hold, and
    until when that is believed.
    """

    _by_lane: dict[str, tuple[int, int]] = field(default_factory=dict)

    def promise(self, lane: str, tickets: int, now_ns: int) -> None:
        """Counts `tickets` of the lane as held for PROMISE_NS."""
        self._by_lane[lane] = tickets, now_ns + PROMISE_NS

    def void(self, lane: str) -> None:
        """The lane's producer asks again: it has no answer, and will not use one that is still on its way."""
        self._by_lane.pop(lane, None)

    def running(self, held: Mapping[str, int], now_ns: int) -> int:
        """Groups being generated: what lanes hold, or are promised if that is more.

        A promise that was kept, or is over, is forgotten.
        """
        self._by_lane = {
            lane: (tickets, until_ns)
            for lane, (tickets, until_ns) in self._by_lane.items()
            if now_ns < until_ns and lane in held and held[lane] < tickets
        }
        return sum(max(tickets, self._by_lane.get(lane, (0, 0))[0]) for lane, tickets in held.items())
