"""Evaluation hooks that make rank 0 fail in or after its next checkpoint: killed, or with a full disk."""

import errno
import os
import signal
import time

from shmbridge.consumers.feed import Feed
from shmbridge.consumers.learner import checkpoint


def killed(step, model, tokenizer):
    def save_file(*args):
        time.sleep(0.5)  # time for the other ranks to release, which they must not
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK", "0") == "0":
        checkpoint.save_file = save_file
    return {}


def saved(step, model, tokenizer):
    if os.environ.get("RANK", "0") == "0":
        Feed.checkpointed = lambda feed: os.kill(os.getpid(), signal.SIGKILL)
    return {}


def released(step, model, tokenizer):
    release = Feed.checkpointed

    def and_killed(feed):
        release(feed)
        os.kill(os.getpid(), signal.SIGKILL)

    if os.environ.get("RANK", "0") == "0":
        Feed.checkpointed = and_killed
    return {}


def full(step, model, tokenizer):
    def save_file(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint.save_file = save_file
    return {}
