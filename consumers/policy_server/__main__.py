"""The program of the policy server: loads the model, and serves it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

from shmbridge.cli.base import explain_missing

if __name__ == "__main__":
    explain_missing("policy_server", "learner")

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

import shmbridge
from shmbridge.cli.base import refuse, run_program
from shmbridge.consumers import pretrained
from shmbridge.consumers.policy_server import parse
from shmbridge.consumers.policy_server.api import PolicyApi
from shmbridge.consumers.policy_server.engine import PolicyEngine, WeightsFollower
from shmbridge.consumers.policy_server.sampler import PolicyModel
from shmbridge.consumers.policy_server.server import PolicyServer, serve
from shmbridge.httpd.door import listen
from shmbridge.weights import WeightsReader


def main(argv: list[str] | None = None) -> int:
    """Runs the server and returns its exit status."""
    options = parse(argv)
    torch.set_num_threads(options.threads)
    try:
        policy, api = _load(options)
        follower = WeightsFollower(WeightsReader(options.bridge), policy.model) if options.bridge else None
        engine = PolicyEngine(policy, follower, window_s=options.window_ms / 1e3, max_rows=options.max_rows)
        application = PolicyServer(engine, api, (options.host, *options.host_name))
        return asyncio.run(serve(engine, application, listen(options.host, options.port), api.model_name))
    except (OSError, ValueError, shmbridge.ShmBridgeError) as error:  # unknown model, port in use, no memory
        refuse("policy_server", error)
        return 1


def _load(options: argparse.Namespace) -> tuple[PolicyModel, PolicyApi]:
    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise shmbridge.BadArgument("--device cuda: torch sees no GPU here", hint="--device cpu")
    if not sys.stderr.isatty():
        disable_progress_bar()  # of loading: it clutters logs
    tokenizer: Any = pretrained.load(AutoTokenizer, options.model)
    model: Any = pretrained.load(AutoModelForCausalLM, options.model).to(getattr(torch, options.dtype))
    policy = PolicyModel(model.to(device), tokenizer, version=options.model_version, seed=options.seed)
    return policy, PolicyApi(tokenizer, options.model, policy.context, policy.vocab_size, options.max_rows)


if __name__ == "__main__":
    sys.exit(run_program("policy_server", main))
