"""The off-policy limit: the most groups under way, so that training is at most N steps off-policy.

Pure counting. docs/explanation/staleness.md has the rule, its proof, and its assumptions.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shmbridge.config import check_count
from shmbridge.errors import BadArgument
from shmbridge.shown import shown

_MOST = 1 << 31
PROMISE_NS = 1_000_000_000  # how long a granted ticket is reserved for a producer that does not show it


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
