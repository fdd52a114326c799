"""The simulation of relays: nothing is lost in it that it does not say, and its answers move as they must."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shmbridge.bench.relay_simulation import Outcome, Setup, Simulation, main

SMALL = Setup(nodes=16, step_groups=16, seconds=1800.0, group_s=30.0, step_s=10.0)


def run(setup: Setup, seed: int = 1) -> tuple[Simulation, Outcome]:
    simulation = Simulation(setup, seed)
    return simulation, simulation.run()


@pytest.mark.parametrize("seed", range(5))
def test_every_group_is_in_exactly_one_count(seed):
    crowded = replace(SMALL, step_groups=8, step_s=20.0, lane=1 << 20, max_staleness=40)
    deadly = replace(crowded, node_mtbf_s=600.0, relay_mtbf_s=120.0, repair_s=60.0)
    simulation, outcome = run(deadly, seed)
    assert outcome.lost_with_nodes > 0
    assert outcome.held == simulation.held_groups() + simulation.in_training


def test_the_same_seed_gives_the_same_run():
    assert run(SMALL, 3)[1] == run(SMALL, 3)[1] != run(SMALL, 4)[1]


def test_relays_that_die_lose_nothing():
    simulation, outcome = run(replace(SMALL, relay_mtbf_s=60.0, node_mtbf_s=1e12))
    assert outcome.lost_with_nodes == 0
    assert outcome.held == simulation.held_groups() + simulation.in_training


def test_stragglers_do_not_delay_the_others():
    quick = run(replace(SMALL, stragglers=0.0, node_mtbf_s=1e12))[1]
    mixed = run(replace(SMALL, stragglers=0.25, slower=50.0, node_mtbf_s=1e12))[1]
    assert mixed.trained >= 0.6 * quick.trained  # a quarter of the nodes gives next to nothing
    assert mixed.fairness > 0.9


def test_a_destination_that_is_too_slow_is_shared_and_holds_environments_back():
    setup = replace(
        SMALL, put_bandwidth=1e6, source_lane=1 << 20, lane=1 << 20, group_s=5.0, step_s=1.0, step_groups=8
    )
    _, outcome = run(replace(setup, node_mtbf_s=1e12, relay_mtbf_s=1e12, max_staleness=10**9, stragglers=0.0))
    assert outcome.destination_busy > 0.95
    assert outcome.environments_blocked > 0.1
    assert outcome.fairness > 0.9


def test_the_page_shows_what_it_prints(capsys):
    page = (Path(__file__).parents[2] / "docs/how-to/several-nodes.md").read_text()
    (row,) = re.findall(r"^\| 16 nodes \| `(.+?)` \| ([\d,]+) \| ([\d,]+) \|", page, re.MULTILINE)
    assert main([*row[0].split(), "--json"]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert [int(each.replace(",", "")) for each in row[1:]] == [outcome["made"], outcome["trained"]]
