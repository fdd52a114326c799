"""An inference server for environments that follows the learner's weights over a bridge, without files or
restarts.

    python -m shmbridge.consumers.policy_server --bridge run1 --model ./tiny --port 9004

It serves the endpoints that Atropos' server classes use: `/v1/chat/completions`, `/v1/completions`,
`/v1/models`, `/health` and token-in token-out `/generate` (server_type "vllm", the ManagedServer). The train
client of verifiers and others ask vLLM's own token route, `/inference/v1/generate`. Every
response carries the policy version that it was sampled under, as `weight_version` and in the header
`X-Policy-Version`. `/generate` also gives it per token (`weight_versions`, as vLLM does); all tokens have the
same version, since batches are static. New weights are loaded from the bridge's weights segment between two
batches. Without a segment, or after the learner's death, the server continues with the weights it has.

Meant for tests, demos and small models: one thread, static batches, no streaming. For large models use vLLM
with the same weights (`shmbridge.consumers.vllm`).

This module has the program's flags, and imports no torch.
"""

from __future__ import annotations

import argparse

from shmbridge.cli.base import Parser, add_host_name, amount, bridge_name, whole
from shmbridge.config import parse_port

_EXAMPLES = """\
examples:
  # serve a local folder, follow the learner of bridge "demo"
  %(prog)s --bridge demo --model ./tiny

  # any free port (it is printed), a GPU, a wider collecting window
  %(prog)s --bridge run1 --model Qwen/Qwen2.5-0.5B-Instruct --port 0 \\
      --device cuda --dtype bfloat16 --window-ms 20

exit status: 1 refused to start, or the engine failed; 130 or 143 stopped by SIGINT or SIGTERM.
"""


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Returns the options of a command line; None: this process's. Exits the process on an error."""
    return parser().parse_args(argv)


def parser(prog: str = "python -m shmbridge.consumers.policy_server") -> Parser:
    """Returns the parser of the policy server."""
    root = Parser(
        prog,
        description="Serve a causal language model to environments; it follows the learner of a bridge.",
        examples=_EXAMPLES,
    )
    root.add_json_log()
    root.add_argument(
        "--bridge", type=bridge_name, metavar="NAME", help="bridge to take new weights from [none]"
    )
    root.add_argument("--model", required=True, metavar="DIR_OR_ID", help="model folder or Hugging Face id")
    root.add_argument(
        "--model-version", type=whole(0), default=0, help="version of the weights in --model [0]"
    )
    root.add_argument("--host", default="127.0.0.1", help="address to bind [127.0.0.1]")
    root.add_argument("--port", type=parse_port, default=9004, help="port to bind; 0 takes a free one [9004]")
    add_host_name(root, "host name with a dot under which clients reach it")
    root.add_argument(
        "--window-ms", type=amount, default=10.0, help="how long a request waits for others [10]"
    )
    root.add_argument("--max-rows", type=whole(1), default=256, help="answers sampled in one batch [256]")
    root.add_argument("--seed", type=whole(0), default=0, help="of requests that bring none [0]")
    root.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="[auto: cuda if any]")
    root.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="[float32]")
    root.add_argument("--threads", type=whole(1), default=1, help="CPU threads of the sampler [1]")
    return root
