"""What all suites share: the machine in every JSON file, and `measured`, which times a plan in turn with the limit for the same bytes.

`--quick` gives fewer and shorter rounds. Run the suites with `make bench`.
"""

import pytest

from shmbridge.bench import baselines, machine
from shmbridge.bench.figures import figures
from shmbridge.bench.session import Session, limit_of


def pytest_addoption(parser):
    parser.addoption("--quick", action="store_true", help="fewer and shorter rounds: a look, not figures to print")


def pytest_benchmark_update_machine_info(config, machine_info):
    machine_info.update(machine.about())


def pytest_benchmark_update_commit_info(config, commit_info):
    commit_info.update(machine.revision())


@pytest.fixture(scope="session")
def quick(request) -> bool:
    return request.config.getoption("--quick")


@pytest.fixture
def measured(benchmark, quick):
    """`measured(plan)`: rounds of the plan, each after a round of its limit; figures in extra_info. Skips what is not installed."""

    def run(plan, *, count=None, rounds=None, filled_first=False):
        if absent := baselines.missing(plan.contender):
            pytest.skip(f"{plan.contender}: not installed: {absent}")
        seconds, rounds = (0.1, 3) if quick else (0.4, 5) if rounds is None else (0.4, rounds)
        done, of_limit = [], []
        with Session(limit_of(plan)) as limit, Session(plan) as session:
            limit_count = limit.warm(seconds / 2)
            if count is None:
                count = session.warm(seconds)
            else:
                session.round(count, filled_first=filled_first)
            benchmark.pedantic(
                lambda: done.append(session.round(count, filled_first=filled_first)),
                setup=lambda: of_limit.append(limit.round(limit_count)),
                rounds=rounds,
            )
        benchmark.extra_info.update(figures(plan, done, of_limit))
        return benchmark.extra_info

    return run
