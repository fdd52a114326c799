"""Seeds for fuzz_lane.c and fuzz_writer.c: `python seeds.py FOLDER`; the former are real lanes with records
of every kind, in compact form.

Knows the recipe of fuzz_lane.c. The lanes are the packer's own bytes; only the slot table is shortened.
"""

import os
import sys
from pathlib import Path
from typing import Any

import shmbridge

sys.path.insert(0, str(Path(__file__).parent))
from places import COLUMN_BYTES, HEADER, PAGE, SLOT_BYTES, LaneBytes, pack
from victim import rich

SLOTS_LOG2 = 3
GROWING = 1  # records of the last group, committed while the lane is read
BEFORE_OPEN, OPENED, ADOPTED, FOUND, COPIED = range(5)


def groups() -> dict[str, list[dict[str, Any]]]:
    """Name of the seed -> what is put."""
    many = {
        "tokens": [[1] * 5] * 8,
        "loss_mask": [[1] * 5] * 8,
        "advantages": [[0.5] * 5] * 8,
        "score": [1.0] * 8,
    }
    return {
        "rich": [rich(1), rich(2)],
        "tokens": [{"tokens": [[1, 2, 3]]} for _ in range(6)],
        "many": [many, many, {"tokens": [[]]}],
        "text": [{"tokens": [[1]], "instance_id": ["a" * 300], "routed_experts": [b"\0" * 70]}],
        "maps": [{"tokens": [[1], [2]], "reward_components": [{"a": 1.0, "bb": 2.0}, {"ccc": 3.0}]}],
        "lists": [
            {
                "tokens": [[1, 2]],
                "distill_token_ids": [[[1, 2, 3], []]],
                "distill_logprobs": [[[0.1, 0.2], [0.3]]],
            }
        ],
        "uneven": [
            {"tokens": [[1, 2], [3]], "masks": [[1], [2, 3, 4]], "step_rewards": [[1.0]], "score": [1.0]},
            {
                "tokens": [[1]],
                "distill_token_ids": [[[1]], [[2, 3]]],
                "score": [1.0, 2.0],
                "advantages": [[], [1.0]],
            },
        ],
        "nulls": [
            {
                "tokens": [[1], [2]],
                "score": [None, 1.0],
                "advantages": [None, [1.0]],
                "images": None,
                "ref_logprobs": [],
            }
        ],
    }


def compact(memory: bytes, records: int, released: int = 0, patches: bytes = b"") -> bytes:
    """One input of the fuzzer: the lane's first `records` records, `released` of them released."""
    lane = LaneBytes(memory, records)
    slots, ring, words, slot_count = b"", b"", b"", 1 << SLOTS_LOG2
    for number in range(slot_count):
        at, _ = lane.place(f"slot.{number}.generation") if number < records else (0, 0)
        slots += memory[at : at + SLOT_BYTES] if number < records else bytes(SLOT_BYTES)
        ring += pack("I", number)
        words += pack("Q", 1 if number < released else 0)
    end = max(memory_end(memory, lane, number) for number in range(records))
    data = memory[lane.data_at : end]
    head = pack(
        "BBBBHHQQ",
        SLOTS_LOG2,
        lane.column_count,
        len(patches) // 16,
        0,
        -(-len(data) // 64),
        0,
        records,
        released,
    )
    return (
        head + patches + memory[PAGE : PAGE + lane.column_count * COLUMN_BYTES] + ring + slots + words + data
    )


def memory_end(memory: bytes, lane: LaneBytes, record: int) -> int:
    at, width = lane.place(f"slot.{record}.extent_at")
    begin, size = (int.from_bytes(memory[each : each + width], "little") for each in (at, at + 8))
    return lane.data_at + begin + size


def patch(
    moment: int, round_: int, at: int, value: int, *, width_log2: int = 3, relative: bool = False
) -> bytes:
    return pack("BBBBIQ", moment, round_, width_log2, relative, at, value)


def step(what: int, *, which: int = 0, width_log2: int = 3, at: int = 0, value: int = 0) -> bytes:
    """One step of fuzz_writer.c."""
    return pack("BBBBIQ", what, which, width_log2, 0, at, value)


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, puts in groups().items():
        bridge = f"seeds-{os.getpid()}"
        with shmbridge.Producer(bridge, lane_bytes="64K", on_full="raise") as producer:
            for group in puts:
                producer.put(group, foreign=name == "uneven")
            memory = Path(f"/dev/shm{producer.lane_name}").read_bytes()
        shmbridge.clean(bridge, dry_run=False)
        (folder / f"lane-{name}").write_bytes(compact(memory, len(puts)))
        (folder / f"lane-{name}-released").write_bytes(compact(memory, len(puts), released=len(puts) - 1))
    grows = [patch(BEFORE_OPEN, 0, 0x200, 0), patch(ADOPTED, 0, 0x200, len(puts))]
    assert len(puts) == GROWING
    for field in (
        "slot_count",
        "column_count",
        "ring_at",
        "slots_at",
        "released_at",
        "data_at",
        "data_bytes",
        "segment_bytes",
    ):
        at, width = HEADER[field]
        lies = [patch(BEFORE_OPEN, 0, at, value, width_log2=2 if width == 4 else 3) for value in (0, 1 << 20)]
        for number, lie in enumerate(lies):
            (folder / f"lane-header-{field}-{number}").write_bytes(compact(memory, len(puts), patches=lie))
    # adopted empty, then all records are committed
    (folder / "lane-grows").write_bytes(compact(memory, len(puts), patches=b"".join(grows)))
    life = [
        *[step(0, value=100), step(2)] * 6,
        *(step(4, which=slot) for slot in range(8)),
        step(5),
        step(6),
        *[step(1, value=900), step(2)] * 3,
    ]
    (folder / "writer-life").write_bytes(b"".join(life))
    (folder / "writer-abort").write_bytes(
        b"".join([*[step(0, value=4000), step(3)] * 4, *life, step(6, which=1), step(5)])
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
