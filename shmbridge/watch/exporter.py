"""What observers see of bridges, as Prometheus text, and its HTTP server: `/metrics`, `/healthz`.

Names are those of `shmbridge.metrics`.

A value is labelled by bridge and environment, never by a pid or a producer: a restart makes no new series.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from http import HTTPStatus
from itertools import accumulate
from typing import NamedTuple

from shmbridge.httpd.door import Bounds, Site
from shmbridge.httpd.threads import Handler, ThreadServer
from shmbridge.metrics import COUNTERS, LATENCY_BOUNDS_S, MOST_ENVIRONMENTS, OTHER, environment_label
from shmbridge.segments import lane_names
from shmbridge.watch.snapshot import BridgeLook, ConsumerLook, LaneLook, State, look

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]
_NAMES = {each.name: each.prometheus for each in COUNTERS}
_FAMILIES = {each.prometheus: (each.kind, each.help) for each in COUNTERS}
_BOUNDS = Bounds(connections=64, head_s=5.0, body_bytes=0, body_pause_s=5.0)
_TEXT = "text/plain; charset=utf-8"


class Sample(NamedTuple):
    """One value. `part` is the end of the name of a histogram's part."""

    name: str
    labels: Labels
    value: float
    part: str = ""


class Exporter:
    """Looks at bridges. Remembers the counters of removed lanes, so that no sum over lanes falls.

    One thread at a time. A look blocks no other process.

    Args:
        bridges: returns the names of the bridges to look at.
    """

    def __init__(self, bridges: Callable[[], Iterable[str]]) -> None:
        self._bridges = bridges
        self._memory: dict[str, _Memory] = {}

    def text(self, more: Iterable[Sample] = ()) -> str:
        """Returns one look at every bridge as Prometheus text, with `more` samples. Never blocks."""
        looks = [now for name in sorted(self._bridges()) if (now := look(name)) is not None]
        self._memory = {now.name: self._memory.get(now.name) or _Memory() for now in looks}
        samples = [sample for now in looks for sample in self._memory[now.name].samples(now)]
        for now in looks[:1]:
            samples += [
                Sample(_NAMES["mount_free_bytes"], (), now.mount_free),
                Sample(_NAMES["mount_bytes"], (), now.mount_bytes),
            ]
        return render([*samples, *more])


class _Memory:
    """The labels of one bridge's environments, and the counters of its lanes."""

    def __init__(self) -> None:
        self._labels: set[str] = set()
        self._lanes: dict[str, dict[tuple[str, Labels], float]] = {}
        self._gone: dict[tuple[str, Labels], float] = {}

    def samples(self, now: BridgeLook) -> Iterator[Sample]:
        """Yields the samples of the bridge and of its environments."""
        bridge = ("bridge", now.name)
        yield from _of_bridge(now, (bridge,))
        environments: dict[str, list[LaneLook]] = {}
        others: set[str] = set()
        for lane in now.lanes:
            if (label := self._label(lane.env_name)) == OTHER:
                others.add(lane.env_name)
            environments.setdefault(label, []).append(lane)
            self._lanes[lane.name] = dict(_counters(lane, (bridge, ("environment", label))))
        yield Sample(_NAMES["environments_other"], (bridge,), len(others))
        for name in self._lanes.keys() - set(lane_names(now.name)):
            _add(self._gone, self._lanes.pop(name))
        totals = dict(self._gone)
        for counters in self._lanes.values():
            _add(totals, counters)
        yield from (Sample(name, labels, total) for (name, labels), total in totals.items())
        unread = {lane.name for lane in now.waiting}
        for label, lanes in environments.items():
            for name, value in _gauges(now, lanes, unread):
                if value is not None:
                    yield Sample(_NAMES[name], (bridge, ("environment", label)), value)

    def _label(self, env_name: str) -> str:
        """Returns the same label for an environment each time; OTHER beyond the first so many."""
        label = environment_label(env_name)
        if label not in self._labels and len(self._labels) < MOST_ENVIRONMENTS:
            self._labels.add(label)
        return label if label in self._labels else OTHER


def render(samples: Iterable[Sample]) -> str:
    """Returns the text format, version 0.0.4: each name once, with its samples."""
    by_name: dict[str, list[Sample]] = {}
    for sample in samples:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, of_it in by_name.items():
        kind, about = _FAMILIES.get(name, ("counter" if name.endswith("_total") else "gauge", ""))
        lines += [f"# HELP {name} {about}"] if about else []
        lines.append(f"# TYPE {name} {kind}")
        for _, labels, value, part in of_it:
            inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
            lines.append(f"{name}{part}{{{inside}}} {value!r}" if inside else f"{name}{part} {value!r}")
    return "\n".join(lines) + "\n"


def _of_bridge(now: BridgeLook, labels: Labels) -> Iterator[Sample]:
    consumer = now.consumer
    values: dict[str, float | None] = {
        "consumer_up": int(consumer is not None) if now.is_consumer_known else None,
        "policy_version": now.policy_version,
        "version_age_s": now.published_age_s,
        "segments_unreadable": len(now.unreadable),
    }
    if consumer is not None:
        values |= {
            "consumer_stopped": int(consumer.state is State.STOPPED),
            "paused": int(consumer.paused),
            "draining": int(consumer.draining),
            "asking_s": consumer.asking_s or 0.0,
            "batch_age_s": consumer.handed_age_s,
            "wait_batch_s": consumer.batch_wait_s,
            "wait_tap_s": consumer.tap_wait_s,
        }
        yield from _latency(consumer, labels)
    yield from (Sample(_NAMES[name], labels, value) for name, value in values.items() if value is not None)


def _latency(consumer: ConsumerLook, labels: Labels) -> Iterator[Sample]:
    """The parts of a histogram: buckets that add up, the sum, the count."""
    name, total = _NAMES["latency_push_to_poll_s"], sum(consumer.latency_counts)
    bounds = [*(repr(bound) for bound in LATENCY_BOUNDS_S), "+Inf"]
    for bound, count in zip(bounds, accumulate(consumer.latency_counts), strict=True):
        yield Sample(name, (*labels, ("le", bound)), count, "_bucket")
    yield Sample(name, labels, consumer.latency_s, "_sum")
    yield Sample(name, labels, total, "_count")


def _counters(lane: LaneLook, labels: Labels) -> Iterator[tuple[tuple[str, Labels], float]]:
    for name, value in (
        ("records_total", lane.records),
        ("released_total", lane.released),
        ("tokens_total", lane.tokens),
        ("logprobs_unrecorded_total", lane.logprobs_unrecorded),
        ("bytes_total", lane.bytes),
        ("wait_producer_s", lane.wait_s),
    ):
        yield (_NAMES[name], labels), value
    for name, reasons in (
        ("drops_total", lane.dropped),
        ("discards_total", lane.discarded),
        ("episodes_lost_total", lane.episodes_lost),
    ):
        for reason, count in reasons.items():
            yield (_NAMES[name], (*labels, ("reason", reason))), count


def _gauges(now: BridgeLook, lanes: list[LaneLook], unread: set[str]) -> Iterator[tuple[str, float | None]]:
    living = [lane for lane in lanes if lane.state is not State.DEAD]
    yield "held", sum(lane.held for lane in lanes)
    yield "lease_drops_held", sum(lane.leases_dropped for lane in lanes)
    yield "lane_bytes", sum(lane.segment_bytes for lane in lanes)
    yield "lane_fill_ratio", max(lane.fill for lane in lanes)
    yield "lanes_live", len(living)
    yield "lanes_dead", len(lanes) - len(living)
    yield "lanes_stopped", sum(lane.state is State.STOPPED for lane in lanes)
    yield "lanes_quarantined", sum(lane.quarantined for lane in lanes)
    yield "lanes_blocked", sum(lane.blocked_s is not None for lane in lanes)
    yield "lanes_unread", sum(lane.name in unread for lane in lanes)
    yield (
        "newest_put_age_s",
        min((age for lane in lanes if (age := lane.newest_age_s) is not None), default=None),
    )
    yield (
        "oldest_held_age_s",
        max((age for lane in lanes if (age := lane.oldest_age_s) is not None), default=None),
    )
    yield "lag_versions", max((lag for lane in living if (lag := now.lag(lane)) is not None), default=None)


def _add(sums: dict[tuple[str, Labels], float], counters: dict[tuple[str, Labels], float]) -> None:
    for key, value in counters.items():
        sums[key] = sums.get(key, 0) + value


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


class _Handler(Handler):
    """One request."""

    server: "ScrapeServer"

    def do_GET(self) -> None:
        """Answers; the name is the one that http.server calls."""
        self.server.site.check(self.header)
        with self.received():  # refuses a body
            path = self.path.partition("?")[0]
            if path == "/metrics":
                self._metrics()
            elif path == "/healthz":
                self.answer(HTTPStatus.OK, b"ok\n", _TEXT)
            else:
                self.answer(HTTPStatus.NOT_FOUND, b"/metrics or /healthz\n", _TEXT)

    do_HEAD = do_GET

    def _metrics(self) -> None:
        try:
            text = self.server.text()
        except Exception as wrong:  # the next scrape may succeed; this one answers why it failed
            reason = f"{type(wrong).__name__}: {wrong}\n".encode()
            self.answer(HTTPStatus.INTERNAL_SERVER_ERROR, reason, _TEXT)
        else:
            self.answer(HTTPStatus.OK, text.encode(), CONTENT_TYPE)


class ScrapeServer(ThreadServer):
    """Answers scrapes until `shutdown`. `serve_forever` blocks; looks are made one at a time.

    Args:
        address: host and port to listen on; port 0 for any. The host may be of IPv4 or IPv6, or a name.
        exporter: for this server alone.
        host_names: names with a dot under which clients reach it, besides the machine's own.
        bounds: of its clients.

    Raises:
        OSError: the address is taken, or not this machine's.
    """

    def __init__(
        self,
        address: tuple[str, int],
        exporter: Exporter,
        host_names: Sequence[str] = (),
        bounds: Bounds = _BOUNDS,
    ) -> None:
        super().__init__(address, _Handler, bounds)
        self.site = Site((address[0], *host_names), "shmbridge inspect --listen ... --host-name {name}")
        self._exporter, self._looking = exporter, threading.Lock()

    def text(self) -> str:
        """Returns a look as Prometheus text. Waits while another is made."""
        with self._looking:
            return self._exporter.text()
