"""The YAML file: every mistake is named by its path, with the nearest known name; a correct file becomes the
commands one would type.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shmbridge.cli.base import Parser
from shmbridge.config import read_yaml
from shmbridge.consumers.learner.config import flags
from shmbridge.consumers.learner.config.options import OPTIONS
from shmbridge.errors import BadConfig
from shmbridge.launch import config
from shmbridge.launch import plan as plans
from shmbridge.launch.config import Restart

ROOT = Path(__file__).parents[3]
SCRIPT = str(ROOT / "examples" / "larger_digit_env.py")

RIGHT = """
bridge: run1
policy_server: {model: tiny, port: 9004}
learner: {model: tiny, steps: 10}
environments: [{script: SCRIPT}]
"""


def parsed(text):
    return config.parse(read_yaml(text.replace("SCRIPT", SCRIPT)))


def env(more):
    """The right file with more keys for its environment."""
    return RIGHT.replace("script: SCRIPT", f"script: SCRIPT, {more}")


def learner(more):
    return RIGHT.replace("steps: 10", f"steps: 10, {more}")


def server(more):
    return RIGHT.replace("port: 9004", f"port: 9004, {more}")


def vllm(keys):
    """The right file with vLLM in place of the policy server."""
    return RIGHT.replace("policy_server: {model: tiny, port: 9004}", f"vllm: {keys}")


def planned(text):
    gateway = Parser("shmbridge gateway", description="")
    for flag in ("--bridge", "--host", "--port", "--compat", "--token", "--lane-bytes"):
        gateway.add_argument(flag)
    gateway.add_argument("--env-timeout", type=float)
    return plans.plan_of(parsed(text), gateway)


def wrong(text, reason=BadConfig):
    with pytest.raises(reason) as caught:
        planned(text)
    return str(caught.value)


def command(plan, name):
    return next(" ".join(service.command[1:]) for service in plan.services if service.name == name)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bridge: run1\nlerner: {}", "lerner: did you mean learner?"),
        (RIGHT + "trainer: {total_epochs: 3}", "trainer.total_epochs is not known; known are again, atropos"),
        (env("restart: {max_delays: 3}"), "environments[0].restart.max_delays: did you mean max_delay?"),
        (learner("options: {max_stalenes: 3}"), "learner.options.max_stalenes: did you mean max_staleness?"),
        (learner("options: {learning_rate: 3}"), "learner.options.learning_rate: did you mean lr?"),
        (env("args: {a: '{polcy_url}'}"), "environments[0].args: {polcy_url}: did you mean {policy_url}?"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest_match(text, said):
    assert said in wrong(text)


def test_all_unknown_keys_are_named_at_once():
    said = wrong(
        RIGHT.replace("steps: 10", "stepz: 10")
        + "trainer: {atropos: {time_out: 1, retry_atempts: 3}}\nalgorithm: {}"
    )
    for each in ("learner.stepz", "trainer.atropos.time_out", "trainer.atropos.retry_atempts", "algorithm"):
        assert each in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RIGHT.replace("steps: 10", "steps: 0"), "learner.steps: 0 is not a whole number, at least 1 -> "),
        (
            RIGHT + "trainer: {atropos: {timeout: -1}}",
            "trainer.atropos.timeout: -1 is not a number, above 0 -> ",
        ),
        (env("on_full: wait"), "environments[0].on_full: 'wait' is none of block, raise, drop -> "),
        (env("lane_bytes: 0"), "environments[0].lane_bytes: 0 is below 1 B"),
        (
            learner("ready_timeout: .inf"),
            "learner.ready_timeout: .inf is not a number, at most 1000000000 -> ",
        ),
        (learner("env: {A=B: c}"), "learner.env: 'A=B' cannot name a variable"),
        (learner("options: {lr: fast}"), "learner.options.lr: 'fast' is not a finite number, 0 or above"),
        (learner("options: {device: gpu}"), "learner.options.device: 'gpu' is none of "),
        (learner("options: {model: x}"), "learner.options.model is set by a key of its own"),
    ],
)
def test_a_wrong_value_is_named_by_path_and_by_what_is_expected(text, said):
    assert said in wrong(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bridge: run1\nlearner: {model: tiny}", "learner.steps is missing"),
        ("bridge: run1", "one hub, and no learner, gateway or trainer.command is given -> "),
        (RIGHT + "gateway: {}", "one hub, and learner and gateway are given -> "),
        (RIGHT + "vllm: {model: tiny}", "policy_server and vllm are both given"),
        (RIGHT.replace("run1", "run/1"), "bridge: bridge name 'run/1' is not 1 to 48"),
        (RIGHT.replace("SCRIPT", "nowhere.py"), "environments[0].script: there is no file nowhere.py"),
        (env("cwd: /no/where"), "environments[0].cwd: there is no folder /no/where"),
        (env("name: learner"), "environments[0].name: learner is taken"),
        (env("name: ../x"), "environments[0].name: '../x' is not"),
        (
            RIGHT.replace("policy_server: {model: tiny, port: 9004}", "").replace(
                "script: SCRIPT", "script: SCRIPT, args: ['{policy_url}']"
            ),
            "environments[0].args: {policy_url} stands for nothing here",
        ),
        ("- a\n- b", "the file holds a list and no keys"),
    ],
)
def test_a_missing_or_contradictory_key_is_named(text, said):
    assert said in wrong(text)


# --- text as the file has it ------------------------------------------------------------------------------

AS_WRITTEN = {
    "A": "007", "B": "23:59:59", "C": "3.140", "D": "1_000_000", "E": "0x1F", "F": "2026-01-02", "G": "no",
    "H": "True", "I": "1e-6", "J": "-0", "K": "+.50", "L": "0b11", "M": "9" * 5000, "N": ".inf",
}  # fmt: skip
TEXTS = list(AS_WRITTEN.values())
MAPPING = ", ".join(f"{name}: {text}" for name, text in AS_WRITTEN.items())
LIST = ", ".join(TEXTS)


def last_words(plan, place):
    return plan.services[place].command[-len(TEXTS) :]


def test_variables_and_arguments_are_text_as_the_file_has_it():
    variables = planned(learner(f"env: {{{MAPPING}}}")).services[1].env
    assert {name: variables[name] for name in AS_WRITTEN} == AS_WRITTEN
    flagged = [f"--{name}={text}" for name, text in AS_WRITTEN.items()]
    assert last_words(planned(env(f"args: {{{MAPPING}}}")), 2) == flagged
    assert last_words(planned(env(f"args: [{LIST}]")), 2) == TEXTS
    assert last_words(planned(vllm(f"{{model: Q, args: [{LIST}]}}")), 0) == TEXTS


def test_options_are_text_as_the_file_has_it():
    plan = planned(learner("options: {wandb_name: 010, wandb_group: off, seed: 0017, lr: 5_0e-7}"))
    assert " --wandb-name 010 --wandb-group off --seed 0017 --lr 5_0e-7" in command(plan, "learner")


def test_numbers_mean_what_they_look_like_and_switches_take_every_word_of_yaml():
    config = parsed(learner("stop_grace: 1e1, ready_timeout: 010"))
    assert (config.learner.stop_grace, config.learner.ready_timeout) == (10.0, 10.0)
    said = command(planned(learner("options: {resume: on, use_advantages: no}")), "learner")
    assert said.endswith(" --resume --no-use-advantages")


def steps(text):
    return RIGHT.replace("steps: 10", f"steps: {text}")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (RIGHT.replace("run1", "010"), "bridge: 010 is not text -> write it in quotes"),
        (server("host: 2.50"), "policy_server.host: 2.50 is not text -> write it in quotes"),
        (steps("1:30"), "learner.steps: 1:30 is not a whole number -> "),
        (steps("8" * 6000), f"learner.steps: {'8' * 40}... is not a whole number -> "),
        (steps("8" * 30), "is not a whole number, at most 1000000000000 -> "),
        (learner(f"options: {{groups: {'8' * 6000}}}"), "learner.options.groups: '8888888"),
        (learner("env: {TOKEN: null}"), "learner.env.TOKEN has no value: write '' for an empty text"),
        (env("env: {TOKEN: [a]}"), "environments[0].env.TOKEN is a list, and not a text or number"),
        (env("args: {a: {b: c}}"), "environments[0].args.a is a dict, and not a text or number"),
    ],
    ids=str,
)
def test_an_error_has_the_text_of_the_file_and_names_the_key(text, said):
    found = wrong(text)
    assert said in found
    assert len(found) < 300


# --- hostile files ----------------------------------------------------------------------------------------

TENFOLD = "".join(f"x{n + 1}: &x{n + 1} [{', '.join([f'*x{n}'] * 10)}]\n" for n in range(12))
ALIASES = (
    "[&y0 [a, a, a, a, a, a, a, a, a, a]"
    + "".join(f", &y{n + 1} [{', '.join([f'*y{n}'] * 10)}]" for n in range(12))
    + "]"
)
HOSTILE = {
    "deep lists": (
        RIGHT + "run_dir: " + "[" * 6000 + "]" * 6000,
        "it is not YAML: line 6, column 59: nested deeper than 50 levels",
    ),
    "half a character": (RIGHT + 'run_dir: "\\ud834"', "line 6: the character '\\ud834' in run_dir"),
    "in a key": (learner('env: {"\\udfff": x}'), "the character '\\udfff' in a key in learner.env"),
    "itself": (learner("env: &e {A: *e}"), "line 4: learner.env.A contains itself"),
    "ten to the twelfth": (RIGHT + "x0: &x0 [a]\n" + TENFOLD, "x12 is not known"),
    "ten to the twelfth under a known key": (RIGHT + f"run_dir: {ALIASES}", "run_dir: [['a', 'a'"),
    "and among what is handed on": (env(f"args: {ALIASES}"), "environments[0].args[12] is a list"),
    "a list that says it is a mapping": (
        RIGHT + "trainer: !!map [a, b]",
        "it is not YAML: line 6, column 10: expected a mapping, but found a sequence",
    ),
    "many mistakes": (
        RIGHT + "".join(f"k{n}: 1\n" for n in range(2000)),
        "trainer, vllm; and 1,980 more -> correct the names",
    ),
    "a long run_dir": (RIGHT + f"run_dir: {'d' * 300}/x", "run_dir: File name too long -> set another"),
    "a list as a key": (RIGHT + "trainer: {? [a] : b}", "line 6: a key in trainer is not text"),
    "a call": (steps("!!python/object/apply:os.getpid []"), "it is not YAML: line 4"),
    "many processes": (
        env("count: 2000000000"),
        "environments[0].count: 2000000000 is not a whole number, at most 1024 -> ",
    ),
    "many in all": (
        RIGHT.replace("script: SCRIPT", "script: SCRIPT, count: 600}, {script: SCRIPT, name: b, count: 600"),
        "environments: they are 1,200 processes -> give 1,024 at most",
    ),
    "a file to run in": (RIGHT + "run_dir: SCRIPT", "larger_digit_env.py is not a folder -> set another"),
    "little logs": (RIGHT + "log_bytes: 63K", "log_bytes: 63K is below 64 KiB -> log_bytes: 64M"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_one_error_with_its_place(tmp_path, case):
    text, said = HOSTILE[case]
    path = tmp_path / "run.yaml"
    path.write_text(text.replace("SCRIPT", SCRIPT))
    with pytest.raises(BadConfig) as caught:
        config.load(path)
    assert said in str(caught.value)


# --- options of another shape than one value --------------------------------------------------------------

OTHER_SHAPES = {name: each for name, each in OPTIONS.items() if each.shape not in ("value", "choice")}


def written(option):
    """Each way to write a value of the option in a launch file, and that value."""
    if option.shape == "switch":
        return [(word, word in ("true", "yes")) for word in ("true", "yes", "false", "no")]
    kind = (get_args(option.item) or (option.item,))[0]
    one, two = ("http://a", "http://b") if kind is str else ("0.50", "2e1")
    values = kind(one), kind(two)
    if option.shape == "mapping":
        both = {"power": values[0], "min_lr": values[1]}
        ways = (f"{{power: {one}, min_lr: {two}}}", f"[power={one}, min_lr={two}]")
        return [*((each, both) for each in ways), (f"power={one}", {"power": values[0]})]
    ways = [f"[{one}, {two}]"]
    if option.shape == "pair":
        ways += [f"{one} {two}", f'"{one}, {two}"', f'"{one},{two}"']
    elif "," in option.metavar:
        ways += [f'"{one},{two}"']
    else:
        return [(ways[0], values), (one, values[:1])]
    return [(each, values) for each in ways]


def test_every_shape_of_options_is_in_the_table():
    assert {each.shape for each in OTHER_SHAPES.values()} == {"switch", "list", "pair", "mapping"}
    assert len(OTHER_SHAPES) > 15


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_an_option_of_any_shape_is_what_the_file_says(name):
    for text, value in written(OPTIONS[name]):
        argv = planned(learner(f"options: {{{name}: {text}}}")).services[1].command[3:]
        assert flags.parse(argv).value(name) == value, f"{name}: {text}"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("mask_ratio: [0.5]", "it takes a list of 2 values, not a list"),
        ("mask_ratio_sequence: {low: 0.5, high: 2}", "it takes a list of 2 values, not a dict"),
        ("clip_advantages: [low, 5]", "'low' is not a number"),
        ("groups: {a: 1}", "it takes one value, not a dict"),
        ("schedule_option: [power]", "'power' is not NAME=X"),
        ("use_advantage_weighting: true", "did you mean loss?"),
    ],
)
def test_an_option_with_a_value_of_another_shape_is_named(option, said):
    assert f"learner.options.{option.split(':')[0]}: {said}" in wrong(learner(f"options: {{{option}}}"))


def test_negative_bounds_and_null_options():
    for bounds in ("-5.0 -1e-3", "-1_0 .5", "-.5e1 5."):
        option = f"clip_advantages: [{bounds.replace(' ', ', ')}], mask_ratio: null"
        said = command(planned(learner(f"options: {{{option}}}")), "learner")
        assert said.endswith(f" --clip-advantages {bounds}")


# --- what becomes of it -----------------------------------------------------------------------------------


def test_order_and_health_checks_with_the_recipes_deadlines():
    plan = planned(RIGHT)
    assert [[service.name for service in stage] for stage in plan.stages] == [
        ["policy_server"],
        ["learner"],
        ["larger_digit_env"],
    ]
    server, learner, env = (service.check for service in plan.services)
    assert (server.kind, server.url, server.within_s) == ("http", "http://127.0.0.1:9004/health", 60.0)
    assert learner.kind == "hub"
    assert (env.kind, env.within_s) == ("alive", 2.0)
    assert [service.restart is not None for service in plan.services] == [False, True, True]
    assert plan.run_dir == "runs/run1"


def test_the_recipes_keys_become_the_learners_flags():
    said = command(
        planned(
            RIGHT
            + """
trainer:
  atropos: {timeout: 45, use_advantages: false, fallback_to_grpo: false, retry_attempts: 4,
    retry_delay: 0.25, max_wait_time: 90}
"""
        ),
        "learner",
    )
    assert said.endswith(
        "--no-use-advantages --no-fallback-to-grpo --batch-timeout 45.0 --batch-attempts 4 "
        "--batch-retry-delay 0.25 --max-wait-time 90.0"
    )


def test_only_given_keys_of_the_recipe_limit_the_wait_and_its_url_is_not_used():
    plan = planned(RIGHT + "trainer: {atropos: {api_url: http://localhost:9001, timeout: 30}}")
    said = command(plan, "learner")
    assert said.endswith("--batch-timeout 30.0")
    assert "advantages" not in said
    assert "fallback" not in said
    assert "9001" not in said
    assert "api_url is not used" in plan.notes[0]


def test_options_become_flags():
    text = learner("options: {max_staleness: 4, resume: true, gradient-checkpointing: false, lr: 1e-6}")
    plan = planned(text.replace("port: 9004", "port: 9004, options: {dtype: bfloat16}"))
    given = "--bridge run1 --model tiny --steps 10 --run-dir runs/run1 --max-staleness 4 --resume"
    given += " --no-gradient-checkpointing --lr 1e-6"
    assert command(plan, "learner") == f"-m shmbridge.consumers.grpo {given}"
    assert command(plan, "policy_server").endswith("--port 9004 --dtype bfloat16")


def test_a_learner_resumes_its_own_run_directory_unless_the_file_has_a_word_on_that():
    assert "--resume" in command(planned(RIGHT), "learner")
    assert "--resume" not in command(planned(learner("options: {resume: false}")), "learner")


@pytest.mark.parametrize("options", ["", "options: {from_scratch: true}"])
def test_a_killed_learner_comes_again_with_its_checkpoint_or_the_weights_of_its_bridge(options):
    (service,) = (each for each in planned(learner(options)).services if each.name == "learner")
    assert service.restart == Restart()
    found = flags.parse([*service.command[3:], *service.again]).checkpoints
    assert (found.resume, found.from_bridge, found.from_scratch) == (True, True, False)


def test_the_next_launch_goes_on_and_a_finished_run_is_no_run_to_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoints = tmp_path / "runs/run1/checkpoints"
    for name in ("step-00000004", "step-00000009", ".writing-step-00000012", "step-x"):
        (checkpoints / name).mkdir(parents=True)
    text = RIGHT.replace("script: SCRIPT", f"script: {__file__}")
    (note,) = planned(text).notes
    assert (
        note
        == "runs/run1 holds a run up to step 9, which goes on; another run_dir and bridge begin a new one"
    )
    assert planned(learner("options: {resume: false}")).notes == []
    (checkpoints / "step-00000010").mkdir()
    with pytest.raises(
        BadConfig, match=r"learner.steps: runs/run1 holds a run of 10 steps, and 10 are asked"
    ):
        planned(text)


def test_an_address_of_ipv6_is_asked_as_urls_have_it():
    plan = planned(server("host: '::'"))
    assert plan.services[0].check.url == "http://[::1]:9004/health"


def test_environments_get_their_flags_and_what_stands_in_braces():
    plan = planned(
        RIGHT.replace(
            "script: SCRIPT",
            """script: SCRIPT, name: digits, count: 2, lane_bytes: 8M, cwd: /tmp,
        env: {HF_HUB_OFFLINE: 1},
        args: {env.group_size: 8, env.use_wandb: false, openai.base_url: '{policy_url}',
        env.tokenizer_name: '{model}', env.seed: '{index}', env.prompt: 'Answer {question}'}""",
        )
    )
    assert [service.name for service in plan.stages[-1]] == ["digits-0", "digits-1"]
    first, second = plan.stages[-1]
    given = "--bridge run1 --lane-bytes 8M --on-full block"
    assert " ".join(first.command[1:]) == (
        f"-m shmbridge.producers.atropos {given} {SCRIPT} serve --env.group_size=8 --env.use_wandb=false "
        "--openai.base_url=http://127.0.0.1:9004/v1 --env.tokenizer_name=tiny --env.seed=0 "
        "--env.prompt=Answer {question}"
    )
    assert "--env.seed=1" in second.command
    assert first.folder == "/tmp"
    assert first.env["HF_HUB_OFFLINE"] == "1"


def test_vllm_follows_the_bridge_instead_of_the_policy_server():
    service = planned(vllm("{model: Qwen/Q, args: [--gpu-memory-utilization, 0.8]}")).services[0]
    assert " ".join(service.command[1:]) == (
        "-m vllm.entrypoints.openai.api_server --model Qwen/Q --host 127.0.0.1 --port 8001 "
        '--weight-transfer-config {"backend": "shmbridge"} '
        "--middleware shmbridge.consumers.vllm.middleware.ShmBridge "
        '--additional-config {"shmbridge": {"bridge": "run1", "pause": "keep"}} --gpu-memory-utilization 0.8'
    )
    assert (service.check.url, service.check.within_s) == ("http://127.0.0.1:8001/health", 600.0)


def test_vllm_of_another_environment_and_one_that_does_not_follow(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    command = planned(vllm("{model: Q, python: bin/python, pause: abort}")).services[0].command
    assert command[0] == str(python), "the link is what makes it another environment's"
    assert '{"shmbridge": {"bridge": "run1", "pause": "abort"}}' in command
    command = (
        planned(vllm("{model: Q, follow: false, args: [--additional-config, '{}']}")).services[0].command
    )
    assert command[-2:] == ["--additional-config", "{}"]
    assert "--middleware" not in command


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{model: Q, python: nowhere/python}", "vllm.python: there is no file nowhere/python"),
        (
            "{model: Q, args: ['--additional_config={}']}",
            "vllm.args: --additional-config is set by vllm.follow",
        ),
        ("{model: Q, pause: later}", "vllm.pause"),
    ],
)
def test_vllm_that_could_not_follow_is_refused(keys, said):
    assert said in wrong(vllm(keys))


GATEWAY = RIGHT.replace("learner: {model: tiny, steps: 10}", "gateway: {compat: strict, token: secret}")


def test_a_gateway_instead_of_the_learner():
    plan = planned(GATEWAY)
    gateway = plan.services[1]
    assert command(plan, "gateway") == (
        "-m shmbridge.cli gateway --bridge run1 --host 127.0.0.1 --port 8000 --compat strict"
    )
    assert gateway.check.token == "secret"
    # not on a command line, which all users can read
    assert gateway.env["SHMBRIDGE_GATEWAY_TOKEN"] == "secret"
    assert (gateway.role, gateway.check.url, gateway.check.within_s) == (
        "hub",
        "http://127.0.0.1:8000/status",
        30.0,
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("env_timeouts: 3", "gateway.options.env_timeouts: did you mean env_timeout?"),
        ("token: x", "gateway.options.token is set by a key of its own"),
    ],
)
def test_the_gateways_options_are_checked(options, said):
    assert said in wrong(GATEWAY.replace("compat", f"options: {{{options}}}, compat"))


TRAINER = RIGHT.replace("learner: {model: tiny, steps: 10}", "trainer: {command: KEYS}")


def trainer(keys):
    return TRAINER.replace("{command: KEYS}", keys)


def test_a_trainer_of_another_project_instead_of_the_learner(tmp_path, monkeypatch):
    """Its words are split as a shell does, then placeholders are filled: a folder may have a space."""
    monkeypatch.chdir(tmp_path)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    keys = """{python: bin/python, command: "-m mine --bridge={bridge} 'two words' --out {run_dir} {other}",
      again: [--resume, "{bridge}", 010], env: {A: 1}, cwd: bin, restart: {when: always}}"""
    plan = planned(trainer(keys).replace("bridge: run1", "bridge: run1\nrun_dir: a b"))
    assert [[service.name for service in stage] for stage in plan.stages] == [
        ["policy_server"],
        ["trainer"],
        ["larger_digit_env"],
    ]
    service = plan.services[1]
    out = str(tmp_path / "a b")
    words = ["-m", "mine", "--bridge=run1", "two words", "--out", out, "{other}"]
    assert service.command == [str(python), *words]
    assert service.again == ["--resume", "run1", "010"]
    assert (service.role, service.folder, service.env["A"]) == ("hub", "bin", "1")
    assert (service.check.kind, service.check.within_s, service.stop_grace_s) == ("hub", 600.0, 60.0)
    assert service.restart == Restart(when="always")


def test_the_first_word_of_a_trainer_without_python_is_its_program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "train"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    assert planned(trainer("{command: [./train, a b], cwd: /}")).services[1].command == [str(program), "a b"]
    assert planned(trainer("{command: sh -c true}")).services[1].command == ["sh", "-c", "true"]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("{command: no-such-program x}", "trainer.command: there is no program no-such-program -> give its"),
        ('{command: "a \'b"}', "trainer.command: No closing quotation -> close the quote"),
        ("{command: [sh, [a]]}", "trainer.command[1] is a list, and not a text or number"),
        ("{command: {a: b}}", "trainer.command: {'a': 'b'} is not text or a list"),
        ("{command: 'sh {polcy_url}'}", "trainer.command: {polcy_url}: did you mean {policy_url}?"),
        ("{command: sh, atropos: {timeout: 3}}", "trainer.atropos is given beside trainer.command"),
    ],
)
def test_a_wrong_trainer_is_named_by_its_key(keys, said):
    assert said in wrong(trainer(keys))


def test_the_recipes_url_is_where_the_gateway_listens():
    plan = planned(GATEWAY + "trainer: {atropos: {api_url: http://localhost:9001}}")
    assert "--host 127.0.0.1 --port 9001" in command(plan, "gateway")
    assert "of trainer.atropos the gateway takes api_url alone" in plan.notes[0]


@pytest.mark.parametrize(
    "url", ["localhost:9001", "https://localhost:9001", "http://localhost:port", "http://"]
)
def test_an_url_that_is_none(url):
    assert "is not http://HOST:PORT" in wrong(GATEWAY + f"trainer: {{atropos: {{api_url: '{url}'}}}}")


def test_port_0_is_a_free_one_that_everybody_is_told():
    plan = planned(
        RIGHT.replace("9004", "0").replace("script: SCRIPT", "script: SCRIPT, args: ['{policy_url}']")
    )
    port = plan.services[0].check.url.split(":")[2].split("/")[0]
    assert int(port) > 0
    assert f"--port {port}" in command(plan, "policy_server")
    assert plan.services[-1].command[-1] == f"http://127.0.0.1:{port}/v1"


# --- the command ------------------------------------------------------------------------------------------


def shmbridge(*words, cwd):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-m", "shmbridge.cli", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        env=environment,
    )


def test_a_dry_run_prints_the_plan_and_starts_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text(RIGHT.replace("SCRIPT", SCRIPT))
    done = shmbridge("launch", "run.yaml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0
    places = [
        done.stdout.index(each)
        for each in ("1. policy_server: up when", "2. learner: up when", "3. larger_digit_env: started once")
    ]
    assert places == sorted(places)
    assert "-m shmbridge.consumers.grpo --bridge run1 --model tiny --steps 10" in done.stdout
    as_json = shmbridge("launch", "run.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert [stage[0]["name"] for stage in json.loads(as_json.stdout)["stages"]] == [
        "policy_server",
        "learner",
        "larger_digit_env",
    ]
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: [", "run.yaml: it is not YAML: line 1, column 5: "),
        (None, "run.yaml: No such file"),
        (
            "bridge: run1\nlearner:\n  model: m\n  steps: 3\n  steps: 400",
            "learner.steps is given twice, in lines 4 and 5",
        ),
    ],
)
def test_a_wrong_file_is_status_2_and_one_line(tmp_path, text, said):
    if text is not None:
        (tmp_path / "run.yaml").write_text(text)
    done = shmbridge("launch", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert "[SB601]" in done.stderr


def test_the_error_without_pyyaml_says_what_to_install(tmp_path):
    (tmp_path / "yaml.py").write_text("raise ImportError('no yaml here')")
    (tmp_path / "run.yaml").write_text(RIGHT)
    done = shmbridge("launch", "run.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "pip install 'shmbridge[launch]'" in done.stderr
    assert "Traceback" not in done.stderr


def python(code, cwd):
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ).stdout


def test_the_command_line_imports_none_of_it_until_it_is_used(tmp_path):
    loaded = json.loads(
        python("import sys, json, shmbridge.cli; print(json.dumps(list(sys.modules)))", tmp_path)
    )
    assert not [
        name
        for name in loaded
        if name == "yaml" or name.startswith(("shmbridge.launch", "shmbridge.consumers"))
    ]


def test_checking_a_file_needs_no_torch(tmp_path):
    (tmp_path / "run.yaml").write_text(RIGHT.replace("SCRIPT", SCRIPT))
    code = (
        "import sys; from shmbridge.cli import main; main(['launch', 'run.yaml', '--dry-run']); "
        "print('torch' in sys.modules)"
    )
    assert python(code, tmp_path).splitlines()[-1] == "False"
