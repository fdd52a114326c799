"""Shared by all suites: the machine in every JSON file, and `measured`, which times a plan in turn with the
limit for the same bytes.

`--quick` gives fewer and shorter rounds, and leaves out what carries the mark `full`. Run the suites with
`make bench`.
"""

import pytest

from shmbridge.bench import baselines, machine
from shmbridge.bench.figures import measure


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="fewer and shorter rounds: a look, not figures to print"
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out of --quick")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        left_out = [item for item in items if item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.update(machine.about())


def pytest_benchmark_update_commit_info(config, commit_info):
    commit_info.update(machine.revision())


def pytest_benchmark_update_json(config, benchmarks, output_json):
    """Adds the list of plans that could not be measured to the results."""
    output_json["quick"] = config.getoption("--quick")
    output_json["not_installed"] = {
        name: absent for name in baselines.PEERS if (absent := baselines.missing(name))
    }


@pytest.fixture(scope="session")
def quick(request) -> bool:
    return request.config.getoption("--quick")


@pytest.fixture
def measured(benchmark, quick):
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
        return figures

    return run
