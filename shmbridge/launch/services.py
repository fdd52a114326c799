"""Turns a config into a plan: the programs, their arguments and their order. Chooses a free port if asked
to.
"""

import argparse
import difflib
import json
import re
import socket
import sys
from pathlib import Path
from urllib.parse import urlsplit

from shmbridge.consumers.learner.config import flags as learner_flags
from shmbridge.consumers.policy_server_parts import options
from shmbridge.errors import BadConfig
from shmbridge.launch.config import (
    Atropos,
    Config,
    Environment,
    Gateway,
    Learner,
    PolicyServer,
    Scalar,
    Variables,
    Vllm,
    instances,
)
from shmbridge.launch.flags import check_options, check_values, dotted_flags, flags, word
from shmbridge.launch.plan import Check, Plan, Service


def plan(config: Config, gateway_parser: argparse.ArgumentParser) -> Plan:
    """Returns the services of a run; raises BadConfig for values that the programs' own parsers refuse.

    `gateway_parser`: the parser of `shmbridge gateway`.
    """
    run_dir = config.run_dir or f"runs/{config.bridge}"
    notes: list[str] = []
    words = {"bridge": config.bridge, "run_dir": str(Path(run_dir).absolute())}
    stages: list[list[Service]] = []
    if server := config.policy_server or config.vllm:
        port = server.port or _free_port()
        words |= {"policy_url": f"http://{_reachable(server.host)}:{port}/v1", "model": server.model}
        stages.append(
            [
                _policy_server(config, server, port)
                if isinstance(server, PolicyServer)
                else _vllm(config, server, port)
            ]
        )
    if config.learner:
        words.setdefault("model", config.learner.model)
        stages.append([_learner(config, config.learner, run_dir, notes)])
    if config.gateway:
        stages.append([_gateway(config, config.gateway, gateway_parser, notes)])
    environments = [
        _environment(config, environment, f"environments[{place}]", name, words | {"index": str(index)})
        for place, environment in enumerate(config.environments)
        for index, name in enumerate(instances(environment))
    ]
    return Plan(
        bridge=config.bridge,
        run_dir=run_dir,
        stages=[*stages, environments] if environments else stages,
        notes=notes,
    )


def _policy_server(config: Config, server: PolicyServer, port: int) -> Service:
    parser = options.parser()
    check_options("policy_server.options", server.options, parser, ("bridge", "model", "host", "port"))
    argv = [
        "--bridge",
        config.bridge,
        "--model",
        server.model,
        "--host",
        server.host,
        "--port",
        str(port),
        *flags(server.options),
    ]
    check_values("policy_server.options", argv, parser)
    return _server(
        "policy_server", server, port, [sys.executable, "-m", "shmbridge.consumers.policy_server", *argv]
    )


def _vllm(config: Config, server: Vllm, port: int) -> Service:
    # Not resolved: a venv's interpreter is a link, and only through that link does it use the venv.
    python = str(Path(server.python).absolute()) if server.python else sys.executable
    argv = ["--model", server.model, "--host", server.host, "--port", str(port)]
    if server.follow:
        argv += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
        argv += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
        argv += [
            "--additional-config",
            json.dumps({"shmbridge": {"bridge": config.bridge, "pause": server.pause}}),
        ]
    # The module, not the `vllm` script: that is missing where the environment is not activated.
    return _server(
        "vllm",
        server,
        port,
        [python, "-m", "vllm.entrypoints.openai.api_server", *argv, *map(word, server.args)],
    )


def _server(name: str, server: PolicyServer | Vllm, port: int, command: list[str]) -> Service:
    return Service(
        name=name,
        role="server",
        key=name,
        command=command,
        env=_variables(server.env),
        check=Check(
            kind="http", url=f"http://{_reachable(server.host)}:{port}/health", within_s=server.ready_timeout
        ),
        stop_grace_s=server.stop_grace,
    )


def _learner(config: Config, learner: Learner, run_dir: str, notes: list[str]) -> Service:
    parser = learner_flags.parser()
    check_options("learner.options", learner.options, parser, ("bridge", "model", "steps", "run-dir"))
    argv = [
        "--bridge",
        config.bridge,
        "--model",
        learner.model,
        "--steps",
        str(learner.steps),
        "--run-dir",
        run_dir,
    ]
    if atropos := config.trainer.atropos:
        argv += recipe_flags(atropos)
        if atropos.api_url:
            notes.append(
                "trainer.atropos.api_url is not used: the learner is the hub of the bridge, there is no "
                "rollout server to ask"
            )
    argv += flags(learner.options)
    check_values("learner.options", argv, parser)
    return Service(
        name="learner",
        role="hub",
        key="learner",
        command=[sys.executable, "-m", "shmbridge.consumers.grpo", *argv],
        env=_variables(learner.env),
        check=Check(kind="hub", within_s=learner.ready_timeout),
        stop_grace_s=learner.stop_grace,
    )


def recipe_flags(atropos: Atropos) -> list[str]:
    """Returns the recipe's given keys as flags of the learner."""
    words = [] if atropos.use_advantages else ["--no-use-advantages"]
    words += [] if atropos.fallback_to_grpo else ["--no-fallback-to-grpo"]
    limits = {
        "batch-timeout": atropos.timeout,
        "batch-attempts": atropos.retry_attempts,
        "batch-retry-delay": atropos.retry_delay,
        "max-wait-time": atropos.max_wait_time,
    }
    return words + flags({name: limit for name, limit in limits.items() if limit is not None})


def _gateway(config: Config, gateway: Gateway, parser: argparse.ArgumentParser, notes: list[str]) -> Service:
    host, port = gateway.host or "127.0.0.1", 8000 if gateway.port is None else gateway.port
    if atropos := config.trainer.atropos:
        if atropos.api_url:
            host, port = _address(atropos.api_url, gateway)
        notes.append(
            "of trainer.atropos the gateway takes api_url alone: the other keys are for the trainer that "
            "polls it"
        )
    port = port or _free_port()
    chosen: dict[str, Scalar] = {"bridge": config.bridge, "host": host, "port": port}
    if gateway.compat != "default":
        chosen["compat"] = gateway.compat
    check_options("gateway.options", gateway.options, parser, ("bridge", "host", "port", "compat", "token"))
    argv = flags(chosen | gateway.options)
    check_values("gateway.options", argv, parser)
    return Service(
        name="gateway",
        role="hub",
        key="gateway",
        command=[sys.executable, "-m", "shmbridge.cli", "gateway", *argv],
        # In the environment: command lines are public.
        env=_variables(gateway.env) | ({"SHMBRIDGE_GATEWAY_TOKEN": gateway.token} if gateway.token else {}),
        check=Check(
            kind="http",
            url=f"http://{_reachable(host)}:{port}/status",
            within_s=gateway.ready_timeout,
            token=gateway.token,
        ),
        stop_grace_s=gateway.stop_grace,
    )


def _address(api_url: str, gateway: Gateway) -> tuple[str, int]:
    """Returns the host and port that the recipe's trainer will ask, which are the gateway's."""
    try:
        parts = urlsplit(api_url)
        host, port = parts.hostname or "", parts.port or 80
    except ValueError:
        host, port = "", 0
    if not host or parts.scheme != "http":
        raise BadConfig(
            f"trainer.atropos.api_url: {api_url!r} is not http://HOST:PORT",
            hint="write http://localhost:8000",
        )
    host = "127.0.0.1" if host == "localhost" else host
    if gateway.host not in ("", host) or gateway.port not in (None, port):
        raise BadConfig(
            f"trainer.atropos.api_url says {host}:{port}, the gateway's own keys say otherwise",
            hint="give the address once",
        )
    return host, port


def _environment(
    config: Config, environment: Environment, key: str, name: str, words: dict[str, str]
) -> Service:
    args = environment.args
    given = [word(each) for each in args] if isinstance(args, list) else dotted_flags(args)
    script = str(Path(environment.script).absolute())  # it may run in another folder
    lane = ["--lane-bytes", str(environment.lane_bytes), "--on-full", environment.on_full]
    command = [
        sys.executable,
        "-m",
        "shmbridge.producers.atropos",
        "--bridge",
        config.bridge,
        *lane,
        script,
        "serve",
    ]
    return Service(
        name=name,
        role="environment",
        key=key,
        command=[*command, *(_filled(each, f"{key}.args", words) for each in given)],
        folder=environment.cwd,
        env=_variables(environment.env),
        check=Check(kind="alive", within_s=environment.settle),
        stop_grace_s=environment.stop_grace,
        restart=environment.restart,
    )


def _filled(text: str, path: str, words: dict[str, str]) -> str:
    """Returns the text with `{policy_url}`, `{model}` ... replaced; other words in braces, perhaps of a
    prompt, stay.
    """

    def value(found: re.Match[str]) -> str:
        name = found[1]
        if name in words:
            return words[name]
        if name in ("policy_url", "model"):
            raise BadConfig(
                f"{path}: {found[0]} stands for nothing here", hint="it needs policy_server: or vllm:"
            )
        if close := difflib.get_close_matches(name, [*words, "policy_url"], n=1, cutoff=0.8):
            raise BadConfig(
                f"{path}: {found[0]}: did you mean {{{close[0]}}}?",
                hint="docs/how-to/launch.md lists these words",
            )
        return found[0]

    return re.sub(r"\{(\w+)\}", value, text)


def _variables(env: Variables) -> dict[str, str]:
    return {"PYTHONUNBUFFERED": "1"} | {name: str(value) for name, value in env.items()}


def _reachable(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
