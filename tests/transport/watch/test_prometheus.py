"""What Prometheus gets of a bridge: text of its grammar, each counter as stats() has it, few labels."""

import math
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest

from shmbridge.metrics import COUNTERS, LATENCY_BOUNDS_S, MOST_ENVIRONMENTS, OTHER
from shmbridge.segments import control_name
from shmbridge.testing import wait_until
from shmbridge.watch.exporter import Exporter, Sample, ScrapeServer, render

WAITING = """
import shmbridge
consumer = shmbridge.Consumer(bridge)
print("ready", flush=True)
consumer.get(30).release()
input()
"""
GROUP = {"tokens": [[1, 2, 3]], "scores": [0.5]}
NAME, LABEL = "[a-zA-Z_:][a-zA-Z0-9_:]*", "[a-zA-Z_][a-zA-Z0-9_]*"
SAMPLE = re.compile(rf'({NAME})(?:\{{((?:{LABEL}="(?:[^"\\\n]|\\["\\n])*"(?:,|(?=\}})))*)\}})? (\S+)')


def parsed(text: str) -> dict[str, dict[frozenset, float]]:
    """Returns {name: {labels: value}}. Fails where the text breaks the format, version 0.0.4."""
    assert text.endswith("\n")
    found: dict[str, dict[frozenset, float]] = {}
    kinds: dict[str, str] = {}
    family = ""
    for line in text.splitlines():
        if head := re.fullmatch(rf"# (HELP|TYPE) ({NAME}) (.+)", line):
            if head[1] == "TYPE":
                assert head[2] not in kinds, "a family in two places"
                kinds[head[2]], family = head[3], head[2]
                assert head[3] in ("counter", "gauge", "histogram")
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample, line
        name, labels, value = (
            sample[1],
            frozenset(re.findall(rf'({LABEL})="(.*?)(?<!\\)"', sample[2] or "")),
            sample[3],
        )
        parts = ("_bucket", "_sum", "_count") if kinds[family] == "histogram" else ("",)
        assert name in [family + part for part in parts], f"{name} under {family}"
        assert labels not in found.setdefault(name, {}), f"{name} twice with the same labels"
        found[name][labels] = float(value)
        if kinds[family] == "counter":
            assert name.endswith("_total")
            assert float(value) >= 0
    for family in (name for name, kind in kinds.items() if kind == "histogram"):
        assert_is_a_histogram(found, family)
    return found


def assert_is_a_histogram(found, family):
    series: dict[frozenset, list[tuple[float, float]]] = {}
    for labels, value in found[f"{family}_bucket"].items():
        [le] = [float(bound) for key, bound in labels if key == "le"]
        series.setdefault(frozenset(each for each in labels if each[0] != "le"), []).append((le, value))
    for labels, buckets in series.items():
        values = [value for _, value in sorted(buckets)]
        assert values == sorted(values), "buckets add up"
        assert sorted(buckets)[-1] == (math.inf, found[f"{family}_count"][labels])
        assert labels in found[f"{family}_sum"]


@pytest.fixture
def exporter(bridge):
    return Exporter(lambda: [bridge])


def scraped(exporter, more=()):
    return parsed(exporter.text(more))


def of(found, name, **labels):
    """The sum of the samples that have these labels."""
    return sum(
        value for have, value in found[f"shmbridge_{name}"].items() if labels.items() <= dict(have).items()
    )


def test_counters_are_those_of_stats(bridge, exporter, make_producer, make_consumer):
    consumer, math_env, code = make_consumer(), make_producer(env_name="math"), make_producer(env_name="code")
    consumer.publish_policy_version(7)
    for _ in range(4):
        math_env.put(GROUP, policy_version=5)
    code.put(GROUP, policy_version=6)
    with pytest.raises(ValueError, match="tokens have 2"):
        code.put({"tokens": [[1], [2]], "scores": [0.5]})
    for record in consumer.poll(3):
        record.release()
    found, stats = scraped(exporter), consumer.stats()
    for each in COUNTERS:
        if not (each.stats and each.words) or each.name in ("wait_batch_s",):
            continue
        name = each.prometheus.removeprefix("shmbridge_")
        assert of(found, name, bridge=bridge) == pytest.approx(stats[each.stats]), each.name
        if each.per == "reason":
            for key, value in stats.items():
                if key.startswith(each.stats + "{"):
                    assert of(found, name, reason=key.partition("{")[2].rstrip("}")) == value, key
    for name in ("held", "lane_bytes", "lanes_live", "lanes_dead"):
        assert of(found, name) == stats[name]
    assert (
        of(found, "records_total", environment="math"),
        of(found, "records_total", environment="code"),
    ) == (4, 1)
    assert (of(found, "lag_versions", environment="math"), of(found, "lag_versions", environment="code")) == (
        2,
        1,
    )
    assert of(found, "drops_total", reason="invalid", environment="code") == 1
    assert of(found, "latency_push_to_poll_seconds_count") == 3
    assert (of(found, "consumer_up"), of(found, "consumer_stopped"), of(found, "asking_seconds")) == (1, 0, 0)
    assert 0 < of(found, "mount_free_bytes") <= of(found, "mount_bytes")


def test_no_label_names_a_process(exporter, make_producer, make_consumer):
    make_consumer()
    producer = make_producer(env_name='math "1"\n\\')
    producer.put(GROUP)
    text = exporter.text()
    labels = {key for samples in parsed(text).values() for have in samples for key, _ in have}
    assert labels == {"bridge", "environment", "reason", "le"}
    assert producer.producer_id not in text
    assert re.search(r'environment="math__1___-[0-9a-f]{8}"', text)


def test_a_sum_over_lanes_never_falls(bridge, exporter, make_producer, make_consumer):
    """A lane that is removed takes its words along; an environment that was restarted goes on counting."""
    consumer, producer = make_consumer(), make_producer(env_name="math")
    for _ in range(3):
        producer.put(GROUP)
    assert of(scraped(exporter), "records_total") == 3
    for record in consumer.poll():
        record.release()
    producer.close()
    wait_until(lambda: not consumer.stats()["lanes_live"] and not consumer.stats()["lanes_dead"])
    assert of(scraped(exporter), "records_total", environment="math") == 3
    make_producer(env_name="math").put(GROUP)
    found = scraped(exporter)
    assert (of(found, "records_total"), of(found, "lanes_live")) == (4, 1)
    assert of(scraped(Exporter(lambda: [bridge])), "records_total") == 1  # one that came later


def test_many_environments_have_a_label_in_common(exporter, make_producer, make_consumer, monkeypatch):
    monkeypatch.setattr("shmbridge.watch.exporter.MOST_ENVIRONMENTS", 2)
    assert MOST_ENVIRONMENTS == 64
    make_consumer()
    for number in range(4):
        make_producer(env_name=f"env{number}").put(GROUP)
    for _ in range(2):  # the same label each time
        found = scraped(exporter)
        environments = {dict(labels)["environment"] for labels in found["shmbridge_records_total"]}
        assert environments == {"env0", "env1", OTHER}
        assert of(found, "records_total", environment=OTHER) == 2
        assert of(found, "lanes_live", environment=OTHER) == 2
        assert of(found, "environments_other") == 2


def test_the_series_of_an_exporter_are_bounded_however_many_environments_come_and_go(
    exporter, make_producer, make_consumer, monkeypatch
):
    monkeypatch.setattr("shmbridge.watch.exporter.MOST_ENVIRONMENTS", 4)
    consumer = make_consumer()
    for number in range(9):
        with make_producer(env_name=f"env{number}", lane_bytes="64K") as producer:
            producer.put(GROUP)
            consumer.get(5).release()
            scraped(exporter)
        consumer.poll()
    found = scraped(exporter)
    labels = {dict(labels)["environment"] for labels in found["shmbridge_records_total"]}
    assert len(labels) == 5
    assert of(found, "records_total") == 9
    assert of(found, "records_total", environment=OTHER) == 5


def test_a_segment_that_cannot_be_read_is_counted(bridge, exporter, make_producer):
    make_producer()
    assert of(scraped(exporter), "segments_unreadable") == 0
    with open(f"/dev/shm{control_name(bridge)}", "r+b") as file:
        file.seek(8)
        file.write(b"\x63")  # its layout version
    try:
        found = scraped(exporter)
        assert of(found, "segments_unreadable") == 1
        assert "shmbridge_consumer_up" not in found  # not known, so no alert that it is gone
    finally:
        with open(f"/dev/shm{control_name(bridge)}", "r+b") as file:
            file.seek(8)
            file.write(b"\x02")


def test_who_waits_is_counted(bridge, exporter, make_producer, make_consumer, child):
    waiting = child(WAITING)
    wait_until(lambda: of(scraped(exporter), "asking_seconds") > 0.05)
    during = of(scraped(exporter), "wait_batch_seconds_total")
    assert during > 0.05
    producer = make_producer(lane_bytes="64K")
    producer.put(GROUP)
    wait_until(lambda: of(scraped(exporter), "asking_seconds") == 0)
    after = of(scraped(exporter), "wait_batch_seconds_total")
    assert after >= during
    with pytest.raises(TimeoutError):
        while True:
            producer.put(GROUP, timeout_s=0.1)
    found = scraped(exporter)
    assert of(found, "wait_batch_seconds_total") == after
    assert of(found, "wait_producer_seconds_total") > 0.05
    assert of(found, "lane_fill_ratio") > 0.9
    os.kill(waiting.pid, signal.SIGSTOP)
    wait_until(lambda: of(scraped(exporter), "consumer_stopped") == 1)
    os.kill(waiting.pid, signal.SIGCONT)


def test_a_bridge_without_a_consumer(exporter, make_producer):
    make_producer(env_name="math").put(GROUP)
    found = scraped(exporter)
    assert (of(found, "consumer_up"), of(found, "held", environment="math")) == (0, 1)
    assert "shmbridge_batch_age_seconds" not in found


def test_more_samples_go_along(exporter, bridge):
    found = scraped(exporter, [Sample("shmbridge_gateway_posts_total", (("bridge", 'a"b\\c\nd'),), 2.5)])
    assert found["shmbridge_gateway_posts_total"] == {frozenset({("bridge", r"a\"b\\c\nd")}): 2.5}


def test_the_tables_names_are_of_prometheus_and_no_two_are_the_same():
    names = [each.prometheus for each in COUNTERS]
    assert len(set(names)) == len(names)
    assert all(re.fullmatch(r"shmbridge_[a-z_]+", name) for name in names)
    assert all(
        name.endswith("_total") == (each.kind == "counter")
        for name, each in zip(names, COUNTERS, strict=True)
    )
    assert not [name for name in names if name.endswith(("_s", "_ms", "_us", "_ns"))]
    parsed(
        render(
            Sample(name, (), 1.0)
            for name, each in zip(names, COUNTERS, strict=True)
            if each.kind != "histogram"
        )
    )


def test_a_scrape_over_http(bridge, exporter, make_producer):
    make_producer(env_name="math").put(GROUP)
    server = ScrapeServer(("127.0.0.1", 0), exporter)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            assert of(parsed(answer.read().decode()), "records_total", bridge=bridge) == 1
        with urllib.request.urlopen(f"{url}/healthz", timeout=10) as answer:
            assert (answer.status, answer.read()) == (200, b"ok\n")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{url}/other", timeout=10)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def command(*arguments):
    return [sys.executable, "-m", "shmbridge.cli", "inspect", *arguments]


def test_the_command_prints_once(bridge, make_producer):
    make_producer(env_name="math").put(GROUP)
    done = subprocess.run(command(bridge, "--prometheus"), capture_output=True, text=True, check=True)
    assert of(parsed(done.stdout), "records_total", environment="math") == 1
    gone = subprocess.run(command("not-there", "--prometheus"), capture_output=True, text=True, check=False)
    assert (gone.returncode, gone.stdout) == (3, "")


def test_the_command_serves_until_it_is_interrupted(bridge, make_producer):
    make_producer(env_name="math").put(GROUP)
    with subprocess.Popen(
        command(bridge, "--listen", "127.0.0.1:0"), stdout=subprocess.PIPE, text=True
    ) as serving:
        url = re.search(r"http://\S+", serving.stdout.readline())[0]
        with urllib.request.urlopen(url, timeout=10) as answer:
            assert of(parsed(answer.read().decode()), "records_total") == 1
        taken = subprocess.run(command("--listen", url[7:-8]), capture_output=True, text=True, check=False)
        assert taken.returncode == 1
        assert "cannot listen on 127.0.0.1" in taken.stderr
        serving.send_signal(signal.SIGINT)
        assert serving.wait(10) == 0


def test_bounds_are_those_of_the_layout():
    layout = os.path.dirname(__file__) + "/../../../shmbridge/_ext/c/layout.h"
    with open(layout) as text:
        source = text.read()
    [buckets] = re.findall(r"#define LATENCY_BUCKETS (\d+)u", source)
    assert int(buckets) == len(LATENCY_BOUNDS_S) + 1
    fields = set(re.findall(r"\b(\w+)(?:\[\w+\])?[,;]", source))
    assert not [word for each in COUNTERS for word in each.words.split() if word not in fields]
