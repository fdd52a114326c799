"""`shmbridge replay`: puts a recorded folder into a bridge again; `python -m shmbridge.producers.replay`."""

import argparse
from importlib import import_module

from shmbridge.parser import Parser

HELP = "put a recorded folder into a bridge again, bit by bit, in the recorded order"
EXAMPLES = """examples:
  shmbridge replay runs/run1/records --bridge run2                 at the recorded pace
  shmbridge replay runs/run1/records --bridge run2 --speed 2.0     twice as fast
  shmbridge replay runs/run1/records --bridge run2 --speed max     as fast as the learner takes

One producer for each recorded one. With several it waits for the hub between lanes, so that the hub hands out
in the recorded order; --any-order does not.

exit codes: 0 all is put; 1 no archive, or a wait was longer than --timeout; 130 Ctrl-C"""


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `replay`."""
    import_module("shmbridge.producers.replay").prepare_parser(parser)


def run(arguments: argparse.Namespace) -> int:
    """Replays the folder."""
    done: int = import_module("shmbridge.producers.replay").run(arguments, "shmbridge replay")
    return done
