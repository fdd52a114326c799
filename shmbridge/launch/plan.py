"""What a launch runs: services in the order of their starts, each with command, health check and restarts.

Made from a config, saved as JSON, printed for people. A free port is chosen if the config asks for one.
"""

import difflib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from shmbridge.cli.base import Parser
from shmbridge.config import parse_size
from shmbridge.consumers import policy_server as options
from shmbridge.consumers.learner.config import flags as learner_flags
from shmbridge.errors import BadConfig
from shmbridge.launch.config import (
    Atropos,
    Config,
    Environment,
    Gateway,
    Learner,
    Options,
    PolicyServer,
    Restart,
    Trainer,
    Variables,
    Vllm,
    as_words,
    check_values,
    dotted_flags,
    flags,
    instances,
    option_flags,
)


class Check(Struct, kw_only=True):
    """When a service counts as up: `http` answers 200 at `url`, `hub` is a living consumer of the bridge,
    `alive` is `within_s` of life.

    For the first two, `within_s` is the deadline. `token` is the bearer token of the request, if one is
    needed.
    """

    kind: Literal["http", "hub", "alive"]
    within_s: float
    url: str = ""
    token: str = ""


class Service(Struct, kw_only=True):
    """One program.

    `env` is added to the launcher's own; if `restart` is None, its end is the end of the run, an orderly one
    if its status is 0 and it is the `hub`. `again` are words for its command from its second start on. `key`
    is its key in the config.
    """

    name: str
    role: Literal["server", "hub", "environment"]
    key: str
    command: list[str]
    check: Check
    stop_grace_s: float
    folder: str = ""
    env: dict[str, str] = {}
    restart: Restart | None = None
    again: list[str] = []


class Plan(Struct, kw_only=True):
    """A run: `stages` start one after the other, each when the one before is up, and stop in reverse
    order.
    """

    bridge: str
    run_dir: str
    stages: list[list[Service]]
    log_bytes: int = 64 << 20  # of each service
    notes: list[str] = []

    @property
    def services(self) -> list[Service]:
        """All services, in the order of their starts."""
        return [service for stage in self.stages for service in stage]

    def log(self, service: Service) -> Path:
        """Returns the file with the newest output of a service."""
        return Path(self.run_dir) / "logs" / f"{service.name}.log"

    def save(self, path: Path) -> None:
        """Writes the plan, readable by its owner only: commands may contain tokens."""
        write_private(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: Path) -> "Plan":
        """Returns a plan written by `save`."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


def write_private(path: Path, content: bytes) -> None:
    """Replaces a file by one that only this user can read."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(content)
    draft.replace(path)


def plan_of(config: Config, gateway_parser: Parser) -> Plan:
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
        stages.append([_server(config, server, port)])
    if config.learner:
        words.setdefault("model", config.learner.model)
        stages.append([_learner(config, config.learner, run_dir, notes)])
    if config.gateway:
        stages.append([_gateway(config, config.gateway, gateway_parser, notes)])
    if config.trainer.command is not None:
        stages.append([_trainer(config.trainer, config.trainer.command, words)])
    environments = [
        _environment(config, environment, f"environments[{place}]", name, words | {"index": str(index)})
        for place, environment in enumerate(config.environments)
        for index, name in enumerate(instances(environment))
    ]
    return Plan(
        bridge=config.bridge,
        run_dir=run_dir,
        stages=[*stages, environments] if environments else stages,
        log_bytes=parse_size(config.log_bytes),
        notes=notes,
    )


def _server(config: Config, server: PolicyServer | Vllm, port: int) -> Service:
    if isinstance(server, PolicyServer):
        name, command = "policy_server", _policy_server(config, server, port)
    else:
        name, command = "vllm", _vllm(config, server, port)
    url = f"http://{_reachable(server.host)}:{port}/health"
    return Service(
        name=name,
        role="server",
        key=name,
        command=command,
        env=_variables(server.env),
        check=Check(kind="http", url=url, within_s=server.ready_timeout),
        stop_grace_s=server.stop_grace,
    )


def _policy_server(config: Config, server: PolicyServer, port: int) -> list[str]:
    own = {"bridge": config.bridge, "model": server.model, "host": server.host, "port": port}
    argv = _checked_flags("policy_server.options", own, server.options, options.parser("shmbridge serve"))
    return [sys.executable, "-m", "shmbridge.consumers.policy_server", *argv]


def _vllm(config: Config, server: Vllm, port: int) -> list[str]:
    # Not resolved: a venv's interpreter is a link, and only through that link does it use the venv.
    python = str(Path(server.python).absolute()) if server.python else sys.executable
    argv = flags({"model": server.model, "host": server.host, "port": port})
    if server.follow:
        follower = {"shmbridge": {"bridge": config.bridge, "pause": server.pause}}
        argv += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
        argv += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
        argv += ["--additional-config", json.dumps(follower)]
    # The module, not the `vllm` script: that is missing where the environment is not activated.
    return [python, "-m", "vllm.entrypoints.openai.api_server", *argv, *server.args]


def _learner(config: Config, learner: Learner, run_dir: str, notes: list[str]) -> Service:
    own = {"bridge": config.bridge, "model": learner.model, "steps": learner.steps, "run-dir": run_dir}
    recipe, resume = config.trainer.atropos, [] if "resume" in learner.options else ["--resume"]
    argv = _checked_flags(
        "learner.options",
        own,
        learner.options,
        learner_flags.parser("shmbridge train"),
        of_recipe=resume + (recipe_flags(recipe) if recipe else []),
    )
    if "--resume" in argv:
        notes += _continued(run_dir, learner.steps)
    if recipe and recipe.api_url:
        notes.append(
            "trainer.atropos.api_url is not used: the learner is the hub of the bridge, there is no "
            "rollout server to ask"
        )
    return Service(
        name="learner",
        role="hub",
        key="learner",
        command=[sys.executable, "-m", "shmbridge.consumers.grpo", *argv],
        env=_variables(learner.env),
        check=Check(kind="hub", within_s=learner.ready_timeout),
        stop_grace_s=learner.stop_grace,
        restart=learner.restart,
        # From the newest checkpoint, or else with the weights that it had published: they are of this run.
        again=["--resume", "--from-bridge", "--no-from-scratch"],
    )


def _continued(run_dir: str, steps: int) -> list[str]:
    """Returns the note that an earlier launch's run goes on; raises BadConfig if that has done all steps."""
    folders = Path(run_dir, "checkpoints").glob("step-*")
    done = max((int(each.name[5:]) for each in folders if each.name[5:].isdecimal()), default=None)
    if done is None:
        return []
    if done >= steps:
        raise BadConfig(
            f"learner.steps: {run_dir} holds a run of {done} steps, and {steps} are asked for",
            hint="raise learner.steps to train it further, or set another run_dir and bridge for a new run",
        )
    return [
        f"{run_dir} holds a run up to step {done}, which goes on; another run_dir and bridge begin a new one"
    ]


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


def _gateway(config: Config, gateway: Gateway, parser: Parser, notes: list[str]) -> Service:
    host, port = gateway.host or "127.0.0.1", 8000 if gateway.port is None else gateway.port
    if atropos := config.trainer.atropos:
        if atropos.api_url:
            host, port = _address(atropos.api_url, gateway)
        notes.append(
            "of trainer.atropos the gateway takes api_url alone: the other keys are for the trainer that "
            "polls it"
        )
    port = port or _free_port()
    own = {"bridge": config.bridge, "host": host, "port": port, "compat": gateway.compat}
    argv = _checked_flags("gateway.options", own, gateway.options, parser, of_environment=("token",))
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


def _trainer(trainer: Trainer, command: list[str] | str, words: dict[str, str]) -> Service:
    program, *given = (
        [trainer.python, *as_words("trainer.command", command)]
        if trainer.python
        else as_words("trainer.command", command)
    )
    if "/" in program:
        program = str(Path(program).absolute())  # not resolved, see _vllm; it may run in another folder
    again = as_words("trainer.again", trainer.again)
    return Service(
        name="trainer",
        role="hub",
        key="trainer",
        command=[program, *(_filled(each, "trainer.command", words) for each in given)],
        folder=trainer.cwd,
        env=_variables(trainer.env),
        check=Check(kind="hub", within_s=trainer.ready_timeout),
        stop_grace_s=trainer.stop_grace,
        restart=trainer.restart,
        again=[_filled(each, "trainer.again", words) for each in again],
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
    given = args if isinstance(args, list) else dotted_flags(args)
    script = str(Path(environment.script).absolute())  # it may run in another folder
    lane = {"lane-bytes": environment.lane_bytes, "on-full": environment.on_full}
    own = {"bridge": config.bridge, **lane}
    command = [sys.executable, "-m", "shmbridge.producers.atropos", *flags(own), script, "serve"]
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


def _checked_flags(
    path: str,
    own: Mapping[str, object],
    options: Options,
    parser: Parser,
    *,
    of_recipe: Sequence[str] = (),
    of_environment: Sequence[str] = (),
) -> list[str]:
    """Returns the flags of a program: those with a key of their own in the config, those of the recipe, then
    `options`.

    Raises BadConfig if the program's parser would refuse one.
    """
    argv = [*flags(own), *of_recipe, *option_flags(path, options, parser, (*own, *of_environment))]
    check_values(path, argv, parser)
    return argv


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
    return {"PYTHONUNBUFFERED": "1"} | env


def _reachable(host: str) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"[{host}]" if ":" in host else host


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_json(plan: Plan) -> str:
    """Returns the plan for programs."""
    return msgspec.json.format(msgspec.json.encode(plan)).decode()


def as_text(plan: Plan) -> str:
    """Returns the plan for people: services in the order of their starts, each with a command for a shell."""
    lines = [f"bridge {plan.bridge}, run directory {plan.run_dir}", *(f"note: {note}" for note in plan.notes)]
    for place, stage in enumerate(plan.stages, 1):
        for service in stage:
            variables = [f"{name}={shlex.quote(value)}" for name, value in service.env.items()]
            folder = [f"cd {shlex.quote(service.folder)} &&"] if service.folder else []
            lines += [
                "",
                f"{place}. {service.name}: {_when_up(service.check)}; log {plan.log(service)}",
                "   " + " ".join([*folder, *variables, shlex.join(service.command)]),
            ]
    return "\n".join(lines)


def _when_up(check: Check) -> str:
    if check.kind == "alive":
        return f"started once it has lived for {check.within_s:g} s"
    what = f"{check.url} answers" if check.kind == "http" else "the bridge has a consumer"
    return f"up when {what}, within {check.within_s:g} s"
