"""Imports point one way, for type checkers too: each room has one place, and opens what it lists."""

import ast
from collections import Counter
from pathlib import Path

import pytest
from import_graph import graph, imports, modules

ROOT = Path(__file__).parents[3]
MOST_ROOMS, MOST_ARROWS, MOST_FILES = 24, 120, 12  # of the transport, between its rooms, in any room

# Rooms of each folder, lowest first. A room imports only from lines above its own.
ORDER = {
    "shmbridge": """
        _ext errors
        config metrics schema
        sizing segments httpd
        record control weights
        batch put watch
        hub producer
        consumer
        __init__
        testing archive relay
        cli
        launch
        __main__
    """,
    "consumers": """
        advantages engines evaluations gateway pinned
        device_batch losses pretrained
        trajectories
        feed
        dataset learner policy_server
        grpo weight_sync
        __init__ vllm
        atropos_trainer record_factories roll skyrl transfer_queue trl
        miles verl
    """,
    "consumers/learner": """
        __init__
        config stopping world
        data
        model
        checkpoint
        report
        train
    """,
    "producers": """
        __init__
        env_server nemo_gym replay rollout
        env_process rewards
        atropos
        gem openenv skyrl_gym verifiers
    """,
}
# Base classes with a single subclass of ours that are complete by themselves.
ONE_SUBCLASS = {
    "Action": "argparse's",
    "BatchColumns": "a table of names and types, held to the schema; a Batch gathers",
    "RecordColumns": "a table of names and types, held to the schema; a Record leases",
    "BoundedConnection": "the policy server's connections; the gateway's prove delivery besides",
    "LargerDigitEnv": "a whole environment; the other one asks other questions",
    "Parallel": "one process; both ways of many share a base of their own",
    "PublishingActorWorker": "ROLL's actor beside ShmAgenticPipeline, as it is; the other one trains besides",
    "ThreadServer": "environments of SkyRL-Gym are served by it as it is; scrapes ask an exporter besides",
    "Gateway": "the gateway; the strict one has the original's answers in its place",
    "Refusals": "the gateway's; the strict one answers a broken gzip body as the original",
    "Taker": "the gateway's queue; the strict gateway has the original's in its place",
    "World": "one process, whose collectives return its own values; TorchWorld is one rank of many",
}


def lines_of(order: str) -> dict[str, int]:
    """Room -> its line."""
    rows = [line.split() for line in order.strip().splitlines()]
    rooms = [room for row in rows for room in row]
    assert len(rooms) == len(set(rooms)), "a room stands in two places"
    return {room: number for number, row in enumerate(rows) for room in row}


@pytest.mark.parametrize("folder", ORDER)
def test_imports_point_down(folder):
    line = lines_of(ORDER[folder])
    arrows = graph(ROOT, folder).arrows
    assert set(arrows) == set(line), "a room without a place, or a place without a room"
    up = [f"{room} imports {low}" for room in arrows for low in arrows[room] if line[low] >= line[room]]
    assert not up


def test_the_plan_keeps_its_size():
    """Few rooms of few files: where a thing stands is found by its name."""
    transport = graph(ROOT, "shmbridge")
    assert len(transport.arrows) <= MOST_ROOMS
    assert transport.count <= MOST_ARROWS
    files = [
        path
        for name, path in modules(ROOT).items()
        if path.name != "__init__.py" and not name.startswith("shmbridge.bench")
    ]
    crowded = {room for room, count in Counter(path.parent for path in files).items() if count > MOST_FILES}
    assert not crowded


def folders() -> list[str]:
    """Every folder that holds modules, as import_graph names it."""
    return sorted(
        {
            str(path.parent.relative_to(ROOT))
            for name, path in modules(ROOT).items()
            if not name.startswith("shmbridge.bench")
        }
    )


@pytest.mark.parametrize("folder", folders())
def test_modules_form_no_circle(folder):
    """The parts of a hub name it, for type checkers alone: it makes them, and they hold it."""
    assert not graph(ROOT, folder, for_types=folder != "shmbridge/hub").circles()


def opened(init: Path) -> set[str]:
    """Returns the names that a room gives: those of `__all__`, and those imported as themselves."""
    names = set()
    for node in ast.parse(init.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.ImportFrom):
            names |= {each.name for each in node.names if each.asname == each.name}
    return names


def test_a_room_opens_what_it_lists():
    """Other rooms import no other module of it, and the modules that it lists exist."""
    there = modules(ROOT)
    rooms = {name: path for name, path in there.items() if path.name == "__init__.py" and name.count(".")}
    rooms = {name: opened(path) for name, path in rooms.items() if is_a_room(name)}
    wrong, used = [], set()
    for name, path in there.items():
        for imported, _, _ in imports(name, path):
            room = next((each for each in rooms if imported.startswith(each + ".")), None)
            if room is None or name == room or name.startswith(room + "."):
                continue
            thing = imported.removeprefix(room + ".").split(".")[0]
            used.add((room, thing))
            if thing not in rooms[room]:
                wrong.append(f"{name} imports {imported}, which {room} does not list")
    assert not wrong
    modules_listed = {
        (room, thing) for room, listed in rooms.items() for thing in listed if f"{room}.{thing}" in there
    }
    assert not modules_listed - used, "listed, and imported by nobody outside"


def is_a_room(name: str) -> bool:
    """Whether it is a room of the transport. `_ext` is open to all of the transport only."""
    parts = name.split(".")
    closed = ("_ext", "cli", "testing", "consumers", "producers", "bench")
    return len(parts) == 2 and parts[1] not in closed


def test_no_class_is_cut_in_two():
    """A base class of ours with a single subclass of ours is one class in two files."""
    bases: dict[str, list[str]] = {}
    kinds: dict[str, set[str]] = {}
    for name, path in modules(ROOT).items():
        if path.suffix != ".py" or name.startswith("shmbridge.bench"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                above = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                kinds.setdefault(node.name, set()).update(above)
                for base in above:
                    bases.setdefault(base, []).append(node.name)
    errors = {"Exception", "ShmBridgeError", "ValueError", "TimeoutError", "RuntimeError", "OSError"}
    halves = [
        f"{base} <- {subclasses[0]}"
        for base, subclasses in bases.items()
        if base in kinds
        and len(subclasses) == 1
        and base not in ONE_SUBCLASS
        and not kinds[base] & {"Protocol", "ABC", *errors}
        and not base.endswith(("Error", "Refused"))
    ]
    assert not halves
    assert all(len(bases.get(base, ())) == 1 for base in ONE_SUBCLASS), "not so any more"
