"""`shmbridge gateway`: the Atropos HTTP API over a bridge, for environments and trainers that speak HTTP."""

import argparse
import json
import os

from shmbridge.config import check_lane_bytes, parse_port
from shmbridge.errors import BadArgument
from shmbridge.log_format import log_to_stderr, stamp_files
from shmbridge.parser import Parser, add_host_name, amount, bridge_name, size, whole
from shmbridge.program import refuse

HELP = (
    "serve the Atropos HTTP API over a bridge: remote environments post into it, trainers poll /batch from it"
)
EXAMPLES = """examples:
  shmbridge gateway --bridge run1                       on http://127.0.0.1:8000
  shmbridge gateway --bridge run1 --compat strict       the Atropos server's own numbers and order
  SHMBRIDGE_GATEWAY_TOKEN=... shmbridge gateway --bridge run1 --host 0.0.0.0

exit codes: 0 ended by a signal; 1 an error of shmbridge; 2 wrong arguments, or the address is taken"""
_TOKEN = "SHMBRIDGE_GATEWAY_TOKEN"


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `gateway`."""
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


def run(arguments: argparse.Namespace) -> int:
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
