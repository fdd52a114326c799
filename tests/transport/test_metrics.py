"""shmbridge.metrics: every value on batches made by hand, percentiles against numpy, and the page that
explains each name.
"""

import math
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

import shmbridge
from shmbridge.metrics import (
    COUNTERS,
    MOST_ENVIRONMENTS,
    OTHER,
    LatencyWindow,
    WaitingFor,
    batch_metrics,
    bridge_metrics,
    rollout_metrics,
    waiting_shares,
)

PAGE = Path(__file__).parents[2] / "docs/reference/metrics.md"


def test_metrics_of_one_environment():
    found = rollout_metrics(
        ["math"] * 4,
        [0, 0, 1, 1],
        [1.0, 0.0, 0.5, 0.5],
        advantages=[1.0, -1.0, 0.0, 4.0],
        response_lengths=[3, 5, 0, 4],
    )
    assert found == {
        "atropos/mean_score": 0.5,
        "atropos/math/mean_score": 0.5,
        "atropos/math/std_score": pytest.approx(np.std([1.0, 0.0, 0.5, 0.5])),
        "atropos/math/mean_advantage": 1.0,
        "atropos/math/std_advantage": pytest.approx(np.std([1.0, -1.0, 0.0, 4.0])),
        "atropos/num_environments": 1.0,
        "atropos/identical_score_rate": 0.5,
        "atropos/batch_groups": 2.0,
        "atropos/total_sequences": 4.0,
        "atropos/avg_response_length": 3.0,
        "atropos/empty_response_count": 1.0,
    }
    assert all(type(value) is float for value in found.values())


def test_metrics_of_three_environments_with_groups_of_any_number():
    found = rollout_metrics(
        ["a", "b", "c", "a", "b"],
        [900, 7, 7000, 900, 7],
        [1.0, 2.0, 5.0, 3.0, 2.0],
        advantages=[1.0, 0.0, np.nan, 3.0, 0.5],
    )
    assert (found["atropos/num_environments"], found["atropos/batch_groups"]) == (3.0, 3.0)
    assert [found[f"atropos/{each}/mean_score"] for each in "abc"] == [2.0, 2.0, 5.0]
    assert [found[f"atropos/{each}/mean_advantage"] for each in "ab"] == [2.0, 0.25]
    assert math.isnan(found["atropos/c/mean_advantage"])
    assert found["atropos/identical_score_rate"] == pytest.approx(2 / 3)  # b, and c, which is alone
    assert found["atropos/mean_score"] == 2.6


def test_scores_that_are_all_equal_although_their_mean_is_another_number():
    found = rollout_metrics(["a"] * 3, [3] * 3, [0.1] * 3)
    assert found["atropos/identical_score_rate"] == 1.0


def test_broken_scores_count_for_none():
    found = rollout_metrics(["a", "a", "a", "b", "b"], [0, 0, 0, 1, 1], [1.0, np.nan, 1.0, np.nan, np.inf])
    assert found["atropos/mean_score"] == found["atropos/a/mean_score"] == 1.0
    assert math.isnan(found["atropos/b/mean_score"])
    assert math.isnan(found["atropos/b/std_score"])
    assert found["atropos/identical_score_rate"] == 1.0  # of the one group that has scores
    assert found["atropos/total_sequences"] == 5.0


def test_metrics_without_scores_or_rows():
    nothing = rollout_metrics(["a"], [0], [np.nan])
    assert math.isnan(nothing["atropos/mean_score"])
    assert math.isnan(nothing["atropos/identical_score_rate"])
    empty = rollout_metrics([], [], [], advantages=[], response_lengths=[])
    assert (
        empty["atropos/num_environments"],
        empty["atropos/total_sequences"],
        empty["atropos/empty_response_count"],
    ) == (0.0, 0.0, 0.0)


def test_arguments_that_were_not_passed_have_no_metrics():
    names = set(rollout_metrics(["a"], [0], [1.0]))
    assert not [name for name in names if "advantage" in name or "response" in name]


def test_names_of_environments_stay_within_their_place_and_number():
    assert "atropos/a_b_c_d-8c51d8e6/mean_score" in rollout_metrics(["a/b{c d"], [0], [1.0])
    assert "atropos/unnamed/mean_score" in rollout_metrics([""], [0], [1.0])
    many = [f"env-{number}" for number in range(MOST_ENVIRONMENTS + 10)]
    found = rollout_metrics(many, range(len(many)), range(len(many)))
    # with the others', and that of all
    assert sum(name.endswith("/mean_score") for name in found) == MOST_ENVIRONMENTS + 2
    assert found[f"atropos/{OTHER}/mean_score"] == np.mean(range(MOST_ENVIRONMENTS, len(many)))
    assert found["atropos/num_environments"] == len(many)


@pytest.mark.parametrize(
    "names",
    [
        ("Mathe größer", "Mathe_größer", "Mathe\tgrößer"),
        ("\u0cb8\u0cbe", "\u0cb8\u0cbf", "\u0cb8"),  # they differ in a vowel sign, which is no letter
        ("org/env@1", "org/env@2", "org/env:1"),
        ("\N{SNOWMAN}", "\N{COMET}", "_"),
        ("", "unnamed"),
        ("", "_", " ", "  "),
        ("caf\N{LATIN SMALL LETTER E WITH ACUTE}", "cafe\N{COMBINING ACUTE ACCENT}", "cafe"),
    ],
)
def test_environments_of_different_names_are_never_one(names):
    found = rollout_metrics(names, range(len(names)), range(len(names)))
    assert found["atropos/num_environments"] == len(names)
    per_environment = {key: value for key, value in found.items() if key.count("/") == 2}
    assert {key.count("/") for key in found} == {1, 2}
    means = [value for key, value in per_environment.items() if key.endswith("/mean_score")]
    assert sorted(means) == list(range(len(names)))


def test_an_environment_that_is_called_other_is_not_the_others():
    names = [OTHER, *(f"env-{number}" for number in range(MOST_ENVIRONMENTS))]
    found = rollout_metrics(names, range(len(names)), [5.0] + [0.0] * MOST_ENVIRONMENTS)
    assert found[f"atropos/{OTHER}/mean_score"] == 0.0


@pytest.mark.parametrize("name", ["数学", "gsm8k", "Ünïcode-v1.2_x"])
def test_letters_of_any_script_stay(name):
    assert f"atropos/{name}/mean_score" in rollout_metrics([name], [0], [1.0])


@pytest.mark.parametrize(
    "wrong",
    [{"groups": [0]}, {"scores": [1.0, 2.0, 3.0]}, {"advantages": [1.0]}, {"response_lengths": [[1, 2]]}],
)
def test_arguments_that_disagree_are_refused(wrong):
    with pytest.raises(ValueError, match="one of each per row"):
        rollout_metrics(**{"env_names": ["a", "b"], "groups": [0, 0], "scores": [1.0, 2.0], **wrong})


@pytest.mark.parametrize("seed", range(5))
def test_percentiles_are_those_of_the_window(seed):
    random = np.random.default_rng(seed)
    size, count = int(random.integers(1, 300)), int(random.integers(1, 700))
    latencies = random.gamma(1.5, 2.0, count)
    window = LatencyWindow(size)
    for each in latencies:
        window.add(each)
    found, last = window.metrics(), latencies[-size:]
    for percent in (50, 95, 99):
        assert found[f"api_perf/latency_p{percent}_ms"] == pytest.approx(np.percentile(last, percent) * 1e3)
    assert found["api_perf/latency_mean_ms"] == pytest.approx(last.mean() * 1e3)
    assert found["api_perf/slow_requests"] == np.count_nonzero(last > 5.0)


def test_rates_count_what_came_after_the_oldest():
    window = LatencyWindow(window=4)
    for second, items in enumerate([8, 8, 2, 4, 6]):  # the first falls out
        window.add(0.1, items=items, failed=items == 2, ended_s=100.0 + second)
    found = window.metrics(now_s=105.0)
    assert found["api_perf/requests_per_sec"] == 3 / 4
    assert found["api_perf/items_per_sec"] == (2 + 4 + 6) / 4
    assert found["api_perf/error_rate"] == 1 / 4
    assert window.metrics(now_s=109.0)["api_perf/requests_per_sec"] == 3 / 8  # nothing came since


def test_compression_is_told_of_compressed_requests_only():
    window = LatencyWindow()
    window.add(1.0, raw_bytes=700)
    assert "api_perf/compression_ratio" not in window.metrics()
    window.add(1.0, raw_bytes=1000, wire_bytes=100)
    window.add(1.0, raw_bytes=500, wire_bytes=200)
    assert window.metrics()["api_perf/compression_ratio"] == 5.0


def test_a_window_of_nothing_and_of_one():
    assert LatencyWindow().metrics() == {}
    window = LatencyWindow(slow_s=0.5)
    window.add(-3.0, ended_s=9.0)
    found = window.metrics(now_s=9.0)
    assert (
        found["api_perf/latency_p99_ms"],
        found["api_perf/requests_per_sec"],
        found["api_perf/slow_requests"],
    ) == (0.0, 0.0, 0.0)
    for wrong in ({"window": 0}, {"slow_s": 0.0}, {"slow_s": float("nan")}):
        with pytest.raises(ValueError, match="above 0"):
            LatencyWindow(**wrong)


def test_staleness_and_the_wait_of_groups():
    found = batch_metrics([0, 1, 2, 3, 10], [1.0, 3.0])
    assert found == {
        "bridge/staleness_mean": 3.2,
        "bridge/staleness_p90": pytest.approx(np.percentile([0, 1, 2, 3, 10], 90)),
        "bridge/staleness_max": 10.0,
        "bridge/group_wait_s": 2.0,
    }
    assert batch_metrics([], [1.0])["bridge/staleness_max"] == 0.0


@pytest.fixture
def bridge():
    name = f"metrics-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    shmbridge.clean(name, dry_run=False)


@pytest.fixture
def stats(bridge):
    """Counters of a bridge with one record released, two held, one dropped."""
    with (
        shmbridge.Producer(bridge, env_name="math", lane_bytes="1M") as producer,
        shmbridge.Consumer(bridge) as consumer,
    ):
        for _ in range(3):
            producer.put({"tokens": [[1, 2, 3]], "score": [1.0]}, timeout_s=5.0)
        with pytest.raises(shmbridge.InvalidRecord):
            producer.put({"tokens": [[1, 2, 3]], "score": [1.0, 2.0]}, timeout_s=5.0)
        with consumer.get(timeout_s=5.0):
            pass
        yield consumer.stats()


def test_a_bridge_in_numbers(stats):
    found = bridge_metrics(stats)
    assert (found["bridge/records_total"], found["bridge/released_total"], found["bridge/held"]) == (
        3.0,
        1.0,
        2.0,
    )
    assert (found["bridge/tokens_total"], found["bridge/lanes_live"], found["bridge/lanes_dead"]) == (
        9.0,
        1.0,
        0.0,
    )
    assert found["bridge/drops_total"] == sum(
        value for name, value in found.items() if re.fullmatch(r"bridge/drops_[a-z]+_total", name)
    )
    assert found["bridge/drops_invalid_total"] == stats["dropped_total{invalid}"]
    assert found["bridge/discards_stale_total"] == 0.0
    assert found["bridge/lane_fill_frac"] == pytest.approx(stats["bytes_total"] / 3 * 2 / stats["lane_bytes"])
    assert all(type(value) is float for value in found.values())


def test_stats_that_are_unknown_or_missing_are_left_out():
    assert bridge_metrics({"something_new": 3.0, "wait_s": 2, "other_total{x}": 1}) == {
        "bridge/wait_consumer_s": 2.0
    }
    assert (
        bridge_metrics({"lane_bytes": 100, "records_total": 0, "bytes_total": 0, "held": 0})[
            "bridge/lane_fill_frac"
        ]
        == 0.0
    )
    assert bridge_metrics({"lane_bytes": 100, "records_total": 3}) == {
        "bridge/lane_bytes": 100.0,
        "bridge/records_total": 3.0,
    }


def documented(heading: str) -> set[str]:
    """Names in the first column of the table under a heading of the page."""
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE))


def test_the_page_names_what_is_there(stats):
    window = LatencyWindow()
    window.add(1.0, raw_bytes=10, wire_bytes=5)
    found = {
        **rollout_metrics(["math"], [0], [1.0], advantages=[0.0], response_lengths=[1]),
        **window.metrics(),
        **bridge_metrics({**stats, "tap_wait_s": 0.0}),
        **batch_metrics([1], [1.0]),
    }
    waiting_for = WaitingFor()
    found |= waiting_for.metrics(stats, 1.0) | waiting_for.metrics(stats, 2.0)
    generic = {
        re.sub(
            r"_(full|cancelled|invalid|timeout|stale|partial|resume|corrupt|failed|late|too_old)_total$",
            "_{reason}_total",
            name,
        )
        for name in found
    }
    assert {name.replace("/math/", "/{env_name}/") for name in generic} == documented(
        "Names that dashboards know"
    )


def test_the_page_has_the_table_of_prometheus():
    """One row per counter: its names, its type, its labels, its meaning, as the table in code has them."""
    section = PAGE.read_text().split("\n## Prometheus\n")[1].split("\n## ")[0]
    rows = {
        cells[0].strip("`"): cells[1:]
        for line in re.findall(r"^\| (`shmbridge_.*) \|$", section, re.MULTILINE)
        for cells in [[cell.strip() for cell in line.split("|")]]
    }
    labels = {"mount": "", "bridge": "bridge", "environment": "bridge, environment"}
    labels["reason"] = "bridge, environment, reason"
    assert rows.keys() == {each.prometheus for each in COUNTERS}
    for each in COUNTERS:
        kind, label, meaning, in_stats, in_metrics = rows[each.prometheus]
        assert (kind, label, meaning) == (each.kind, labels[each.per], each.help)
        assert in_stats.strip("`") == each.stats
        assert in_metrics.strip("`") == each.metric or each.kind == "histogram"
    own = {each.prometheus for each in COUNTERS if each.stats and not each.words and each.per == "bridge"}
    assert set(re.findall(r"`(shmbridge_\w+)`", section.split("observers do not see it")[1])) == own


def test_each_counter_of_the_table_is_in_stats(stats):
    assert {each.stats for each in COUNTERS} - {""} <= stats.keys()


def test_who_was_waited_for_in_the_time_between():
    waiting_for = WaitingFor()
    first = {"batch_wait_s": 100.0, "producer_wait_s": 50.0, "lanes_live": 4}
    assert waiting_for.metrics(first, 10.0) == {}
    then = {"batch_wait_s": 101.0, "producer_wait_s": 70.0, "lanes_live": 4}
    assert waiting_for.metrics(then, 20.0) == {
        "bridge/waiting_for_environments_frac": 0.1,
        "bridge/waiting_for_learner_frac": 0.5,
        "bridge/waiting_for_tap_frac": 0.0,
        "bridge/waiting_for": "learner",
    }
    assert waiting_for.metrics(then, 30.0)["bridge/waiting_for"] == "nobody"
    assert waiting_for.metrics(then | {"tap_wait_s": 3.0}, 40.0)["bridge/waiting_for"] == "tap"
    assert waiting_for.metrics(then | {"tap_wait_s": 3.0, "batch_wait_s": 110.0}, 50.0)[
        "bridge/waiting_for"
    ] == ("environments")


def test_shares_stay_shares():
    assert waiting_shares({}, {"batch_wait_s": 5.0, "producer_wait_s": 5.0}, 1.0) == {
        "environments": 1.0,
        "learner": 1.0,
        "tap": 0.0,
    }
    assert set(waiting_shares({"batch_wait_s": 5.0}, {}, 1.0).values()) == {0.0}  # of another consumer
    assert set(waiting_shares({}, {"batch_wait_s": 5.0}, 0.0).values()) == {0.0}


def test_every_reason_is_on_the_page(stats):
    page = PAGE.read_text()
    assert all(f"`{reason}`" in page for key in stats for reason in re.findall(r"\{(\w+)\}", key))


def test_the_module_needs_numpy_and_nothing_else():
    code = (
        "import sys, shmbridge.metrics as m; m.LatencyWindow(); print(sorted({'wandb', 'torch', 'zmq', "
        "'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
