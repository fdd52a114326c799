"""Flips single bits of recordings, and compares whatever is read with what was recorded.

    python tests/faults/hostile/flipped_bits.py --flips 1000 --seed 1

Each flip is refused, with the file and the place, or all that is read equals the original to the bit. Half of
the places are anywhere in the file, half in its first and last 16 KiB, where heads, footers and seals are.
Exit status 1 for anything else.
"""

import argparse
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
import shmbridge
from shmbridge.archive import folder as parts
from tests.faults.hostile import recordings

_ENDS = 16 << 10
# A place in the file, a part of it, or the column that cannot be.
_PLACE = re.compile(r"bytes? \d+|its seal|column|checksums|magic|revision|footer|archive of this build")


def places(size: int, count: int, seed: int) -> list[tuple[int, int]]:
    """Bytes of a file and the bit to flip in each."""
    mixed = random.Random(seed)
    found = []
    for number in range(count):
        ends = min(_ENDS, size // 2)
        at = mixed.randrange(size) if number % 2 else mixed.randrange(-ends, ends) % size
        found.append((at, mixed.randrange(8)))
    return found


def outcome(path: Path, wanted: object) -> str:
    """What reading a part ends in; "equal" or "refused" if that is as it must be."""
    try:
        found = recordings.contents(path.parent)
        keys = parts.keys_of(path.parent).counts()
    except shmbridge.ArchiveUnreadable as wrong:
        if str(path) not in str(wrong):
            return f"without its file: {wrong}"
        return (
            "refused" if _PLACE.search(str(wrong).replace(str(path), "")) else f"refused, no place: {wrong}"
        )
    except BaseException as wrong:
        return f"{type(wrong).__name__}: {wrong}"
    return "equal" if found == wanted and sum(keys.values()) == len(found) else "CHANGED"


def flip(path: Path, count: int, seed: int) -> Counter[str]:
    """Flips so many bits of a part, one at a time; the outcomes."""
    good = path.read_bytes()
    wanted = recordings.contents(path.parent)

    def job(at: int, bit: int) -> Callable[[], str]:
        def run() -> str:
            bad = bytearray(good)
            bad[at] ^= 1 << bit
            path.write_bytes(bad)
            said = outcome(path, wanted)
            return said if said in ("equal", "refused") else f"byte {at}, bit {bit}: {said}"

        return run

    try:
        return Counter(recordings.survived([job(at, bit) for at, bit in places(len(good), count, seed)]))
    finally:
        path.write_bytes(good)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=1000, help="of each format")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--format", choices=recordings.KINDS, action="append")
    arguments = parser.parse_args()
    bridge, found_wrong = f"flips-{os.getpid()}", False
    with tempfile.TemporaryDirectory() as folder:
        try:
            made = recordings.make(Path(folder), bridge)
        finally:
            shmbridge.clean(bridge, dry_run=False)
        for kind in arguments.format or recordings.KINDS:
            size, outcomes = made[kind].stat().st_size, flip(made[kind], arguments.flips, arguments.seed)
            refused, equal = outcomes.pop("refused", 0), outcomes.pop("equal", 0)
            print(
                f"{kind:8} {size:7} bytes, {arguments.flips} flips: {refused} refused with the place, "
                f"{equal} equal, {outcomes.total()} wrong",
                flush=True,
            )
            for said in outcomes:
                print(f"  {said}")
            found_wrong |= bool(outcomes)
    return int(found_wrong)


if __name__ == "__main__":
    sys.exit(main())
