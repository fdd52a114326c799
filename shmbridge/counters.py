"""Every counter of a bridge: the words it is kept in, and its one name in stats(), metrics and Prometheus.

docs/reference/metrics.md explains each of them; tests hold the page and the readers to this table.
"""

from typing import Literal, NamedTuple

# The bounds of the buckets of latency_counts in layout.h; the last bucket has none.
LATENCY_BOUNDS_S = tuple(float(1 << power) / 1e6 for power in range(29))


class Counter(NamedTuple):
    """One counter, or one value of the moment (a gauge)."""

    name: str  # without prefix: the last part of its names
    stats: str  # key of Consumer.stats(); "" if only observers see it
    kind: Literal["counter", "gauge", "histogram"]
    per: Literal[
        "mount", "bridge", "environment", "reason"
    ]  # what has a value each; reason: of an environment
    words: str  # of layout.h that an observer reads; "": the consumer's own, or not from a word
    help: str

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
    Counter("records_total", "records_total", "counter", "environment", "tail", "records committed"),
    Counter(
        "released_total",
        "released_total",
        "counter",
        "environment",
        "released_total discarded_total",
        "records read and released",
    ),
    Counter(
        "tokens_total", "tokens_total", "counter", "environment", "tokens_total", "tokens in those committed"
    ),
    Counter(
        "bytes_total",
        "bytes_total",
        "counter",
        "environment",
        "bytes_total",
        "bytes taken by those committed",
    ),
    Counter(
        "drops_total",
        "dropped_total",
        "counter",
        "reason",
        "dropped_total",
        "records given up by producers before they were committed",
    ),
    Counter(
        "discards_total",
        "discarded_total",
        "counter",
        "reason",
        "discarded_total quarantined",
        "records committed, and released unread",
    ),
    Counter(
        "wait_producer_s",
        "producer_wait_s",
        "counter",
        "environment",
        "wait_ns_total",
        "time producers waited for room in their lanes",
    ),
    Counter(
        "wait_batch_s",
        "batch_wait_s",
        "counter",
        "bridge",
        "batch_wait_ns asking_ns",
        "time somebody waited for a batch or record of this consumer",
    ),
    Counter(
        "wait_tap_s",
        "tap_wait_s",
        "counter",
        "bridge",
        "tap_wait_ns",
        "time a tap that records kept this consumer waiting",
    ),
    Counter("wait_consumer_s", "wait_s", "counter", "bridge", "", "time this consumer slept for records"),
    Counter("batches_total", "batches_total", "counter", "bridge", "", "batches handed out by this consumer"),
    Counter(
        "leases_dropped_total",
        "leases_dropped_total",
        "counter",
        "bridge",
        "",
        "records read, and let go without release",
    ),
    Counter(
        "late_wakes_total",
        "late_wakes_total",
        "counter",
        "bridge",
        "",
        "sleeps ended by a tick that found work",
    ),
    Counter(
        "groups_begun_total",
        "groups_begun_total",
        "counter",
        "bridge",
        "",
        "tickets granted to producers that asked to begin a group",
    ),
    Counter(
        "latency_push_to_poll_s",
        "",
        "histogram",
        "bridge",
        "latency_counts latency_ns_total",
        "time from a record's commit until this consumer handed it out first",
    ),
    Counter("held", "held", "gauge", "environment", "", "records committed and not yet released"),
    Counter("lane_bytes", "lane_bytes", "gauge", "environment", "", "memory of all lanes"),
    Counter("lanes_live", "lanes_live", "gauge", "environment", "", "lanes whose producer lives"),
    Counter(
        "lanes_dead",
        "lanes_dead",
        "gauge",
        "environment",
        "",
        "lanes whose producer is gone, and that still hold records",
    ),
    Counter(
        "lanes_quarantined",
        "lanes_quarantined",
        "gauge",
        "environment",
        "quarantined",
        "lanes in which garbage was found",
    ),
    Counter(
        "lanes_refused",
        "lanes_refused",
        "gauge",
        "bridge",
        "",
        "lanes of another layout, or of other columns",
    ),
    Counter("queue_groups", "queue_groups", "gauge", "bridge", "", "groups committed and not yet in a batch"),
    Counter("groups_running", "groups_running", "gauge", "bridge", "", "tickets held now"),
    Counter(
        "policy_version", "policy_version", "gauge", "bridge", "policy_version", "newest published version"
    ),
    # What observers see, and a consumer's stats() do not.
    Counter("lanes_stopped", "", "gauge", "environment", "", "lanes whose producer is stopped by a signal"),
    Counter(
        "lanes_blocked",
        "",
        "gauge",
        "environment",
        "blocked_ns",
        "lanes in which a put waits now for room, or for the end of a pause",
    ),
    Counter("lanes_unread", "", "gauge", "environment", "", "lanes that the consumer has no room for"),
    Counter("lane_fill_ratio", "", "gauge", "environment", "", "fill of the fullest lane, by bytes or slots"),
    Counter(
        "lease_drops_held",
        "",
        "gauge",
        "environment",
        "leases_dropped",
        "records that keep their room: read, and let go without release",
    ),
    Counter("newest_put_age_s", "", "gauge", "environment", "", "time since the newest record was committed"),
    Counter(
        "oldest_held_age_s", "", "gauge", "environment", "", "time since the oldest held record was committed"
    ),
    Counter(
        "lag_versions",
        "",
        "gauge",
        "environment",
        "",
        "versions between the newest policy and the one that began the newest record, most of all lanes",
    ),
    Counter("consumer_up", "", "gauge", "bridge", "", "1 while a consumer lives"),
    Counter("consumer_stopped", "", "gauge", "bridge", "", "1 while it is stopped by a signal"),
    Counter("paused", "", "gauge", "bridge", "paused", "1 while producers are held back"),
    Counter("draining", "", "gauge", "bridge", "draining", "1 once no new records are taken"),
    Counter(
        "asking_s", "", "gauge", "bridge", "asking_ns", "how long somebody waits for a batch or record by now"
    ),
    Counter("batch_age_s", "", "gauge", "bridge", "handed_ns", "time since the consumer handed a batch out"),
    Counter(
        "version_age_s", "", "gauge", "bridge", "published_ns", "time since the newest version was published"
    ),
    Counter("mount_free_bytes", "", "gauge", "mount", "", "free memory of the mount"),
    Counter("mount_bytes", "", "gauge", "mount", "", "memory of the mount"),
)
