"""Starts learner ranks as processes of their own, in a tenth of the time: imports everything once, then
forks.

    stdin:  {"start": {"argv": [...], "env": {...}, "out": path, "err": path}}   ->  stdout: pid
            with BREAKS="poison 22" or "abort 22" in env: see breaking_learner.py
            {"wait": pid} -> stdout: exit status, as Popen's
"""

import atexit
import json
import os
import sys
import traceback

import torch
from breaking_learner import break_at_micro_batches

from shmbridge.consumers import grpo

torch.set_num_threads(1)


def start(argv, env, out, err):
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        for descriptor, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), descriptor)
        os.environ.update(env)
        if breaks := os.environ.get("BREAKS", "").split():
            break_at_micro_batches(breaks[0], int(breaks[1]))
        status = grpo.main(argv)
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main():
    for line in sys.stdin:
        asked = json.loads(line)
        answer = (
            start(**asked["start"])
            if "start" in asked
            else os.waitstatus_to_exitcode(os.waitpid(asked["wait"], 0)[1])
        )
        print(answer, flush=True)


if __name__ == "__main__":
    main()
