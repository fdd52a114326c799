"""Shared by all suites: the machine in every JSON file, what pytest-benchmark is given, and `measured`, which
times a plan in turn with the limit for the same bytes.

What pytest-benchmark shows, stores and compares is the time of one operation, such as a group, however many
of them a round has: see `per_operation`. Its table has tokens/s beside the names. `--quick` gives fewer and
shorter rounds, and leaves out what carries the mark `full`. Run the suites with `make bench`.
"""

import json

import pytest

from shmbridge.bench import baselines, machine
from shmbridge.bench.figures import measure

THIS_RUN = pytest.StashKey[dict]()
TIMES = "seconds of one operation"
TOKENS = "tokens_per_operation"  # of extra_info


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="fewer and shorter rounds: a look, not figures to print"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out of --quick")
    config.stash[THIS_RUN] = machine.this_run()  # the load before anything is measured


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_benchmark_update_machine_info(machine_info):
    machine_info.update(machine.about())


def pytest_benchmark_update_commit_info(config, commit_info):
    commit_info.update(config.stash[THIS_RUN])


def pytest_benchmark_update_json(config, output_json):
    """Adds what the times are, and the list of plans that could not be measured."""
    output_json["times"] = TIMES
    output_json["quick"] = config.getoption("--quick")
    output_json["not_installed"] = {
        name: absent for name in baselines.PEERS if (absent := baselines.missing(name))
    }


@pytest.hookimpl(tryfirst=True)
def pytest_benchmark_compare_machine_info(benchmarksession, machine_info, compared_benchmark):
    """Refuses a file whose times are of whole rounds; names in one line what differs between two machines."""
    if compared_benchmark.get("times") != TIMES:
        raise pytest.UsageError("what is compared with has the times of whole rounds: save it again")
    ours, theirs = json.loads(json.dumps(machine_info)), compared_benchmark["machine_info"]
    if differ := [key for key in ours if ours[key] != theirs.get(key)]:
        benchmarksession.logger.warning(f"not the same machine or software: {', '.join(differ)} differ")
        # The plugin's own warning prints both machines in full, and fails if the storage is elsewhere.
        compared_benchmark["machine_info"] = machine_info


@pytest.hookimpl(wrapper=True)
def pytest_benchmark_group_stats():
    """Adds tokens/s to the names in the table; rows that do the same work have a table of their own."""
    shown = []
    for group, rows in (yield):
        by_work = {}
        for row in rows:
            by_work.setdefault(row["extra_info"].get(TOKENS), []).append(row)
        several = len(by_work) < len(rows)
        shown += [
            (f"{group}, {tokens:,} tokens" if several and len(by_work) > 1 and tokens else group, alike)
            for tokens, alike in (by_work.items() if several else [(None, rows)])
        ]
        width = max(len(row["name"]) for row in rows)
        for row in rows:
            if tokens := row["extra_info"].get(TOKENS):
                rate = tokens / row["median"]
                row["name"] = f"{row['name']:{width}} {_short(rate):>7} tokens/s"
    return shown


def _short(rate: float) -> str:
    """Returns 1234567.0 as "1.23 M"."""
    unit, name = next(((unit, name) for unit, name in ((1e6, "M"), (1e3, "k")) if rate >= unit), (1, " "))
    return f"{rate / unit:.{0 if rate >= 100 * unit else 1 if rate >= 10 * unit else 2}f} {name}"


@pytest.fixture(scope="session")
def quick(request) -> bool:
    return request.config.getoption("--quick")


@pytest.fixture
def per_operation(benchmark):
    """`per_operation(seconds=None, operations=1, tokens=None)`, called after the timed call.

    Gives pytest-benchmark what one operation took in each round, and how many operations a round had. Without
    `seconds` the rounds' own time is divided. A round has as many operations as fit into a given time, so its
    own length says nothing about speed.
    """

    def note(seconds=None, *, operations=1, tokens=None):
        if tokens:
            benchmark.extra_info[TOKENS] = tokens
        if benchmark.stats:  # none under --benchmark-disable
            rounds = benchmark.stats.stats.data
            rounds[:] = seconds or [each / operations for each in rounds]
            benchmark.stats.iterations = operations

    return note


@pytest.fixture
def measured(benchmark, per_operation, quick):
    """`measured(plan)`: rounds of the plan, each after a round of its limit; the figures go to extra_info.

    Skips what is not installed.
    """

    def run(plan, *, count=None, rounds=None, filled_first=False):
        if absent := baselines.missing(plan.contender):
            pytest.skip(f"{plan.contender} is not installed: {absent}")
        figures = measure(
            plan,
            seconds=0.1 if quick else 0.4,
            rounds=rounds or (3 if quick else 5),
            count=count,
            filled_first=filled_first,
            repeat=lambda timed, before, rounds: benchmark.pedantic(timed, setup=before, rounds=rounds),
        )
        benchmark.extra_info.update(figures)
        per_operation(
            figures["seconds_per_group"], operations=figures["groups_per_round"], tokens=plan.shape.tokens
        )
        return figures

    return run
