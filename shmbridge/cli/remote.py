"""`shmbridge gateway` and `shmbridge relay`: a bridge over HTTP, and over the nodes of a Ray cluster."""

import argparse
import contextlib
import functools
import json
import logging
import os
import signal
import sys
import time
from typing import Any, TextIO

from shmbridge.cli.base import Command, Parser, add_host_name, amount, bridge_name, refuse, size, whole
from shmbridge.cli.log import log_to_stderr, stamp_files
from shmbridge.config import check_lane_bytes, parse_port
from shmbridge.errors import BadArgument

_TOKEN = "SHMBRIDGE_GATEWAY_TOKEN"


def _gateway_arguments(parser: Parser) -> None:
    parser.add_argument(
        "--bridge", required=True, type=bridge_name, metavar="NAME", help="name of the bridge"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind to (default: %(default)s)")
    parser.add_argument(
        "--port", type=parse_port, default=8000, help="port to bind to; 0: a free one (default: %(default)s)"
    )
    parser.add_argument(
        "--compat",
        choices=("default", "strict"),
        default="default",
        help="strict: the Atropos server's numbers and order",
    )
    parser.add_argument(
        "--policy", choices=("fair", "atropos"), default="fair", help="how batches are formed in default mode"
    )
    parser.add_argument(
        "--split",
        choices=("train", "eval", "both"),
        default="train",
        help="groups that /batch serves; others are released and counted (default: %(default)s)",
    )
    parser.add_argument(
        "--token", type=_token, help="bearer token of every request; safer as SHMBRIDGE_GATEWAY_TOKEN"
    )
    add_host_name(parser, "host name with a dot under which clients reach the gateway")
    parser.add_argument(
        "--lane-bytes",
        type=size,
        default="64M",
        metavar="SIZE",
        help="memory of each remote environment's lane (default: %(default)s)",
    )
    parser.add_argument(
        "--lanes", type=whole(1), default=256, help="most lanes to take from at once (default: %(default)s)"
    )
    parser.add_argument(
        "--max-body",
        type=size,
        default="256M",
        metavar="SIZE",
        help="largest body, gunzipped (default: %(default)s)",
    )
    parser.add_argument(
        "--held-bytes",
        type=size,
        default="512M",
        metavar="SIZE",
        help="most memory for posts that wait for room (default: %(default)s)",
    )
    parser.add_argument(
        "--post-deadline", type=amount, default=240.0, metavar="S", help="longest wait of a post for room"
    )
    parser.add_argument(
        "--record", metavar="DIR", help="write every record into Parquet files there before it is handed out"
    )
    parser.add_argument(
        "--env-timeout",
        type=amount,
        default=60.0,
        metavar="S",
        help="silence after which an environment loses its weight and lane, until its next request",
    )


def _gateway(arguments: argparse.Namespace) -> int:
    """Serves until a signal ends it; prints the address on standard output."""
    from shmbridge.archive.recorder import Recorder
    from shmbridge.consumers.gateway import serve
    from shmbridge.consumers.gateway.limits import GatewayOptions
    from shmbridge.httpd.door import listen
    from shmbridge.sizing import SMALLEST_LANE

    if not arguments.json:
        stamp_files("gateway")
    log_to_stderr("gateway")
    try:
        options = GatewayOptions(
            bridge=arguments.bridge,
            compat=arguments.compat,
            policy=arguments.policy,
            split=None if arguments.split == "both" else arguments.split,
            lane_bytes=check_lane_bytes(arguments.lane_bytes, SMALLEST_LANE),
            lanes=arguments.lanes,
            token=arguments.token or _token_of_surroundings(),
            host_names=(arguments.host, *arguments.host_name),
            max_body_bytes=arguments.max_body,
            held_bytes=arguments.held_bytes,
            post_deadline_s=arguments.post_deadline,
            env_timeout_s=arguments.env_timeout,
            record=arguments.record,
        )
        if arguments.record:
            Recorder(arguments.record).close()  # says now what would end the first batch
        listener = listen(arguments.host, arguments.port)
    except BadArgument as wrong:
        refuse("shmbridge gateway", wrong)
        return 2
    except OSError as wrong:
        refuse("shmbridge gateway", wrong)
        return 2
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"

    def ready() -> None:
        print(
            json.dumps({"url": url, "pid": os.getpid()})
            if arguments.json
            else f"bridge {options.bridge} is served on {url}",
            flush=True,
        )

    serve(options, listener, ready)
    return 0


def _token(text: str) -> str:
    token = text.strip()
    if not (token.isascii() and token.isprintable() and token):
        raise argparse.ArgumentTypeError("a token is of letters, digits and signs of ASCII, at least one")
    return token


def _token_of_surroundings() -> str:
    """Returns the token of SHMBRIDGE_GATEWAY_TOKEN, "" if it is not set. Raises BadArgument."""
    if not (given := os.environ.get(_TOKEN, "")):
        return ""
    try:
        return _token(given)
    except argparse.ArgumentTypeError as wrong:
        raise BadArgument(f"{_TOKEN}: {wrong}", hint=f"unset {_TOKEN}, or give it one") from None


GATEWAY = Command(
    "serve the Atropos HTTP API over a bridge: environments post into it, trainers poll /batch from it",
    """examples:
  shmbridge gateway --bridge run1                       on http://127.0.0.1:8000
  shmbridge gateway --bridge run1 --compat strict       the Atropos server's own numbers and order
  SHMBRIDGE_GATEWAY_TOKEN=... shmbridge gateway --bridge run1 --host 0.0.0.0

exit codes: 0 ended by a signal; 1 an error of shmbridge; 2 wrong arguments, or the address is taken""",
    _gateway_arguments,
    _gateway,
)


_LOOK_S = 1.0


def _relay_arguments(parser: Parser) -> None:
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


def _relay(arguments: argparse.Namespace) -> int:
    """Keeps relays running until a signal ends it."""
    from shmbridge.cli.base import require

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


RELAY = Command(
    "bring the records of environments on other nodes to the learner's node, over a Ray cluster",
    """examples:
  shmbridge relay --bridge run1                        on the learner's node; environment nodes have a label:
      ray start --address=HOST:6379 --labels shmbridge=environments
  shmbridge relay --bridge run1 --all-other-nodes      every other node of the cluster has environments
  shmbridge relay --bridge run1 --max-staleness 4      staler groups are not sent
  shmbridge relay --bridge run1 --stop                 end the relays; records stay where they are

Relays are actors that outlive this command, which adds one for each node that comes. A bridge has one name
on all nodes; for nodes that share a host or its memory, the labels shmbridge-name and shmbridge-suffix tell
their names and bridges apart.

exit codes: 0 ended by a signal, or done (--once, --stop); 1 an error of shmbridge; 2 wrong arguments""",
    _relay_arguments,
    _relay,
)
