"""Kill fuzz: real processes on one bridge, killed and stopped at random moments, and a referee that knows
what must still be true.

    python tests/faults/stress/kill_fuzz.py --seconds 600 --seed 1 --producers 16

Prints one line; exit status 1 if anything was lost, duplicated without a mark, torn, out of order, miscounted
or left behind, with the details needed to find it. The schedule of who is killed and when comes from the
seed; where the victim is by then does not.
"""

import argparse
import json
import logging
import os
import signal
import sys

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # one thread, or it could not fork

from fuzz.director import Director

import shmbridge


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default 60)")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--producers", type=int, default=16, help="1 to 64, default 16")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the line")
    parser.add_argument(
        "--plant", action="store_true", help="release two records without a count: that must be found"
    )
    return parser.parse_args()


def main() -> int:
    wanted = options()
    seed = int.from_bytes(os.urandom(3)) if wanted.seed is None else wanted.seed
    logging.basicConfig(level=logging.ERROR, format="%(process)d %(name)s: %(message)s")
    # it says that it waits, which this fuzz makes it do
    logging.getLogger("shmbridge.producer").setLevel(logging.CRITICAL)
    about = f"seed {seed}, {wanted.producers} producers, {wanted.seconds:.0f} s, {shmbridge.__file__}"
    print(f"kill fuzz: {about}", file=sys.stderr, flush=True)
    bridge = f"kill-fuzz-{os.getpid()}-{seed}"[:48]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without cleaning up
    director = Director(bridge, seed, wanted.seconds, wanted.producers, plant=wanted.plant)
    try:
        tally = director.run()
    except (TimeoutError, RuntimeError) as stuck:
        tally = director.tally
        tally.counts["failed"] += 1
        print(f"failed: {stuck}", flush=True)
    finally:
        left = shmbridge.clean(bridge, dry_run=False)
        if left.removed:
            print(f"removed what was left: {', '.join(left.removed)}", file=sys.stderr)
    print(json.dumps(tally.as_dict()) if wanted.json else tally.line(), flush=True)
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
