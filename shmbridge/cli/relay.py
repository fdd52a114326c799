"""`shmbridge relay`: the bridge over more than one node, by actors of Ray."""

import argparse
import contextlib
import functools
import json
import logging
import signal
import sys
import time
from typing import Any, TextIO

from shmbridge.log_format import log_to_stderr
from shmbridge.parser import Parser, bridge_name, size

HELP = "bring the records of environments on other nodes to the learner's node, over a Ray cluster"
EXAMPLES = """examples:
  shmbridge relay --bridge run1                        on the learner's node; environment nodes have a label:
      ray start --address=HOST:6379 --labels shmbridge=environments
  shmbridge relay --bridge run1 --all-other-nodes      every other node of the cluster has environments
  shmbridge relay --bridge run1 --max-staleness 4      staler groups are not sent
  shmbridge relay --bridge run1 --stop                 end the relays; records stay where they are

Relays are actors that outlive this command, which adds one for each node that comes. A bridge has one name
on all nodes; for nodes that share a host or its memory, the labels shmbridge-name and shmbridge-suffix tell
their names and bridges apart.

exit codes: 0 ended by a signal, or done (--once, --stop); 1 an error of shmbridge; 2 wrong arguments"""

_LOOK_S = 1.0


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `relay`."""
    parser.add_argument(
        "--bridge", required=True, type=bridge_name, metavar="NAME", help="name of the bridge"
    )
    parser.add_argument("--engine", choices=("ray",), default="ray", help="what carries it (%(default)s)")
    parser.add_argument(
        "--address", default="auto", metavar="HOST:PORT", help="of the Ray cluster (that of this machine)"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--label",
        default="shmbridge=environments",
        metavar="KEY=VALUE",
        help="of nodes with environments (%(default)s)",
    )
    which.add_argument(
        "--all-other-nodes", action="store_true", help="every node but the learner's has environments"
    )
    parser.add_argument(
        "--learner-label", metavar="KEY=VALUE", help="of the learner's node; default: where this runs"
    )
    parser.add_argument(
        "--lane-bytes",
        type=size,
        default="16M",
        metavar="SIZE",
        help="memory on the learner's node for each environment elsewhere (%(default)s)",
    )
    parser.add_argument(
        "--in-flight",
        type=size,
        default="64M",
        metavar="SIZE",
        help="most bytes on their way at a time, over all nodes (%(default)s)",
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        metavar="N",
        help="groups that are more versions behind are discarded before they are sent",
    )
    parser.add_argument(
        "--no-weights", action="store_true", help="do not bring the learner's weights to the other nodes"
    )
    parser.add_argument("--once", action="store_true", help="place the relays and end")
    parser.add_argument("--stop", action="store_true", help="end the relays of the bridge")


def run(arguments: argparse.Namespace) -> int:
    """Keeps relays running until a signal ends it."""
    from shmbridge.extras import require

    require("ray")
    from shmbridge.relay.ray import place
    from shmbridge.relay.ray.actors import Options

    log_to_stderr("relay")
    logging.getLogger("ray").setLevel(logging.ERROR)
    say = functools.partial(_say_json if arguments.json else _say, sys.stdout)
    # What Ray prints of its workers is not ours.
    with contextlib.redirect_stdout(sys.stderr), place.joined(arguments.address, or_start=not arguments.stop):
        if arguments.stop:
            for name in place.stop(arguments.bridge):
                say("stopped", actor=name)
            return 0
        plan = place.Plan(
            arguments.bridge,
            None if arguments.all_other_nodes else place.label(arguments.label),
            None if arguments.learner_label is None else place.label(arguments.learner_label),
            Options(
                lane_bytes=arguments.lane_bytes,
                in_flight_bytes=arguments.in_flight,
                max_staleness=arguments.max_staleness,
                weights=not arguments.no_weights,
            ),
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray's own handler prints its stack
        with contextlib.suppress(KeyboardInterrupt):
            _keep(place.Placement(plan), say, once=arguments.once, whole=arguments.json)
        return 0


def _keep(placement: Any, say: Any, *, once: bool, whole: bool) -> None:
    """Puts relays where they are missing, until a signal; with `once`, once."""
    while True:
        for node, what in placement.reconcile():
            say("placed", node=node, what=what)
        if once:
            return
        _tell_of(placement, say, whole)
        time.sleep(_LOOK_S)


def _tell_of(placement: Any, say: Any, whole: bool) -> None:
    """Says what has changed; with `whole`, all that is known."""
    import msgspec

    said = placement.report()
    if said is None:
        return
    for gone in placement.new_gone(said):
        say("gone", **msgspec.structs.asdict(gone))
    if whole:
        say("report", **msgspec.to_builtins(said))


def _say(out: TextIO, event: str, **about: Any) -> None:
    if event == "gone":
        text = (
            f"node {about['node']} is gone: {about['never_relayed']} records of {about['lanes']} lanes were "
            f"never relayed, by its last word {about['heard_s']:.1f} s before"
        )
    elif event == "placed":
        text = f"node {about['node']}: {about['what']}"
    else:
        text = f"{event}: {about['actor']}"
    print(text, file=out, flush=True)


def _say_json(out: TextIO, event: str, **about: Any) -> None:
    print(json.dumps({"event": event, **about}), file=out, flush=True)
