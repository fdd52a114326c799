"""Every counter of a bridge: the words it is kept in, and its one name in stats(), metrics and Prometheus.

docs/reference/metrics.md explains each of them; tests hold the page and the readers to this table.
"""

from dataclasses import KW_ONLY, dataclass
from typing import Literal

# The bounds of the buckets of latency_counts in layout.h; the last bucket has none.
LATENCY_BOUNDS_S = tuple(float(1 << power) / 1e6 for power in range(29))


@dataclass(frozen=True, slots=True)
class Counter:
    """One counter, or one value of the moment (a gauge).

    Args:
        name: without prefix: the last part of its names.
        kind: what Prometheus calls it.
        per: what has a value each; reason: of an environment.
        help: its meaning in a few words.
        stats: key of Consumer.stats(); "" if only observers see it.
        words: of layout.h that an observer reads; "": the consumer's own, or not from a word.
    """

    name: str
    _: KW_ONLY
    kind: Literal["counter", "gauge", "histogram"]
    per: Literal["mount", "bridge", "environment", "reason"]
    help: str
    stats: str = ""
    words: str = ""

    @property
    def metric(self) -> str:
        """Its name in metrics.jsonl and W&B; "" if only observers see it."""
        return f"bridge/{self.name}" if self.stats else ""

    @property
    def prometheus(self) -> str:
        """Its name in Prometheus: base units in full, and `_total` at the end of every counter."""
        name = f"shmbridge_{self.name}"
        name = name.removesuffix("_s") + "_seconds" if name.endswith("_s") else name
        return f"{name}_total" if self.kind == "counter" and not name.endswith("_total") else name


COUNTERS = (
    Counter(
        "records_total",
        stats="records_total",
        kind="counter",
        per="environment",
        words="tail",
        help="records committed",
    ),
    Counter(
        "released_total",
        stats="released_total",
        kind="counter",
        per="environment",
        words="released_total discarded_total",
        help="records read and released",
    ),
    Counter(
        "tokens_total",
        stats="tokens_total",
        kind="counter",
        per="environment",
        words="tokens_total",
        help="tokens in those committed",
    ),
    Counter(
        "logprobs_unrecorded_total",
        stats="logprobs_unrecorded_total",
        kind="counter",
        per="environment",
        words="logprobs_unrecorded_total",
        help="log-probabilities in those committed that were not recorded",
    ),
    Counter(
        "bytes_total",
        stats="bytes_total",
        kind="counter",
        per="environment",
        words="bytes_total",
        help="bytes taken by those committed",
    ),
    Counter(
        "drops_total",
        stats="dropped_total",
        kind="counter",
        per="reason",
        words="dropped_total",
        help="records given up by producers before they were committed",
    ),
    Counter(
        "discards_total",
        stats="discarded_total",
        kind="counter",
        per="reason",
        words="discarded_total quarantined",
        help="records committed, and released unread",
    ),
    Counter(
        "episodes_lost_total",
        stats="episodes_lost_total",
        kind="counter",
        per="reason",
        words="episodes_lost_total",
        help="episodes that environments began, and that are in no record",
    ),
    Counter(
        "wait_producer_s",
        stats="producer_wait_s",
        kind="counter",
        per="environment",
        words="wait_ns_total",
        help="time producers waited for room in their lanes",
    ),
    Counter(
        "wait_batch_s",
        stats="batch_wait_s",
        kind="counter",
        per="bridge",
        words="batch_wait_ns asking_ns",
        help="time somebody waited for a batch or record of this consumer",
    ),
    Counter(
        "wait_tap_s",
        stats="tap_wait_s",
        kind="counter",
        per="bridge",
        words="tap_wait_ns",
        help="time a tap that records kept this consumer waiting",
    ),
    Counter(
        "wait_consumer_s",
        stats="wait_s",
        kind="counter",
        per="bridge",
        help="time this consumer slept for records",
    ),
    Counter(
        "batches_total",
        stats="batches_total",
        kind="counter",
        per="bridge",
        help="batches handed out by this consumer",
    ),
    Counter(
        "leases_dropped_total",
        stats="leases_dropped_total",
        kind="counter",
        per="bridge",
        help="records read, and let go without release",
    ),
    Counter(
        "late_wakes_total",
        stats="late_wakes_total",
        kind="counter",
        per="bridge",
        help="sleeps ended by a tick that found work",
    ),
    Counter(
        "groups_begun_total",
        stats="groups_begun_total",
        kind="counter",
        per="bridge",
        help="tickets granted to producers that asked to begin a group",
    ),
    Counter(
        "latency_push_to_poll_s",
        kind="histogram",
        per="bridge",
        words="latency_counts latency_ns_total",
        help="time from a record's commit until this consumer handed it out first",
    ),
    Counter(
        "held", stats="held", kind="gauge", per="environment", help="records committed and not yet released"
    ),
    Counter("lane_bytes", stats="lane_bytes", kind="gauge", per="environment", help="memory of all lanes"),
    Counter(
        "lanes_live", stats="lanes_live", kind="gauge", per="environment", help="lanes whose producer lives"
    ),
    Counter(
        "lanes_dead",
        stats="lanes_dead",
        kind="gauge",
        per="environment",
        help="lanes whose producer is gone, and that still hold records",
    ),
    Counter(
        "lanes_quarantined",
        stats="lanes_quarantined",
        kind="gauge",
        per="environment",
        words="quarantined",
        help="lanes in which garbage was found",
    ),
    Counter(
        "lanes_refused",
        stats="lanes_refused",
        kind="gauge",
        per="bridge",
        help="lanes of another layout, or of other columns",
    ),
    Counter(
        "queue_groups",
        stats="queue_groups",
        kind="gauge",
        per="bridge",
        help="groups committed and not yet in a batch",
    ),
    Counter("groups_running", stats="groups_running", kind="gauge", per="bridge", help="tickets held now"),
    Counter(
        "policy_version",
        stats="policy_version",
        kind="gauge",
        per="bridge",
        words="policy_version",
        help="newest published version",
    ),
    # What observers see, and a consumer's stats() do not.
    Counter(
        "lanes_stopped", kind="gauge", per="environment", help="lanes whose producer is stopped by a signal"
    ),
    Counter(
        "lanes_blocked",
        kind="gauge",
        per="environment",
        words="blocked_ns",
        help="lanes in which a put waits now for room, or for the end of a pause",
    ),
    Counter("lanes_unread", kind="gauge", per="environment", help="lanes that the consumer has no room for"),
    Counter(
        "lane_fill_ratio", kind="gauge", per="environment", help="fill of the fullest lane, by bytes or slots"
    ),
    Counter(
        "lease_drops_held",
        kind="gauge",
        per="environment",
        words="leases_dropped",
        help="records that keep their room: read, and let go without release",
    ),
    Counter(
        "newest_put_age_s", kind="gauge", per="environment", help="time since the newest record was committed"
    ),
    Counter(
        "oldest_held_age_s",
        kind="gauge",
        per="environment",
        help="time since the oldest held record was committed",
    ),
    Counter(
        "lag_versions",
        kind="gauge",
        per="environment",
        help="versions between the newest policy and the one that began the newest record, most of all lanes",
    ),
    Counter(
        "segments_unreadable",
        kind="gauge",
        per="bridge",
        help="segments of another layout, or with garbage, that cannot be read from here",
    ),
    Counter(
        "environments_other",
        kind="gauge",
        per="bridge",
        help="environments with lanes that share the label other, beyond the first 64",
    ),
    Counter("consumer_up", kind="gauge", per="bridge", help="1 while a consumer lives"),
    Counter("consumer_stopped", kind="gauge", per="bridge", help="1 while it is stopped by a signal"),
    Counter("paused", kind="gauge", per="bridge", words="paused", help="1 while producers are held back"),
    Counter("draining", kind="gauge", per="bridge", words="draining", help="1 once no new records are taken"),
    Counter(
        "asking_s",
        kind="gauge",
        per="bridge",
        words="asking_ns",
        help="how long somebody waits for a batch or record by now",
    ),
    Counter(
        "batch_age_s",
        kind="gauge",
        per="bridge",
        words="handed_ns",
        help="time since the consumer handed a batch out",
    ),
    Counter(
        "version_age_s",
        kind="gauge",
        per="bridge",
        words="published_ns",
        help="time since the newest version was published",
    ),
    Counter("mount_free_bytes", kind="gauge", per="mount", help="free memory of the mount"),
    Counter("mount_bytes", kind="gauge", per="mount", help="memory of the mount"),
)
