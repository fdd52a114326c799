"""The learner's configuration: the flags of earlier releases, files that are written and read back, and
mistakes that are named.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta

from shmbridge.consumers.learner.config.checks import OtherRun, changes_on_resume
from shmbridge.consumers.learner.config.flags import (
    CONFIG_FILE,
    BadConfigFile,
    parse,
    parser,
    read_config,
    write_config,
)
from shmbridge.consumers.learner.config.options import ON_RESUME, OPTIONS, LearnerConfig, OnResume, Option
from shmbridge.consumers.learner.train.starting_point import agreed_start
from shmbridge.consumers.learner.world import ALONE

NEEDED = ["--bridge", "b", "--model", "m", "--steps", "9"]
# those of the release before configuration files
FLAGS = json.loads((Path(__file__).parent / "flags.json").read_text())


@pytest.fixture
def write(tmp_path):
    """Return a function that writes a file and returns its path."""

    def write(text: str) -> str:
        (tmp_path / "run.yaml").write_text(text)
        return str(tmp_path / "run.yaml")

    return write


@pytest.fixture
def refused(capsys):
    """Return a function from a command line to the one line that it is refused with."""

    def refused(*argv: str) -> str:
        with pytest.raises(SystemExit) as ended:
            parse(argv)
        assert ended.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        program = "python -m shmbridge.consumers.grpo"
        return line.removeprefix(f"{program}: error: ").removesuffix(f" -> {program} --help")

    return refused


def test_flags_of_earlier_releases_have_their_defaults_and_their_choices():
    actions, found = parser()._option_string_actions, {}
    for flag in FLAGS:
        action = actions[flag]
        option = OPTIONS[action.dest]
        assert option.flag == flag
        default = [] if option.shape == "mapping" else option.default
        found[flag] = {
            "default": None if default is dataclasses.MISSING else default,
            "choices": list(action.choices) if action.choices else None,
            "values": 1 if action.nargs is None else action.nargs,
            "repeats": type(action).__name__ == "_AppendAction",
        }
    assert json.loads(json.dumps(found)) == FLAGS


def test_every_option_has_one_name_one_flag_and_help():
    assert len(OPTIONS) == len(FLAGS)
    said = " ".join(parser().format_help().split())
    for option in OPTIONS.values():
        assert option.flag in said
        assert option.help


def test_every_option_has_its_place_in_the_table_of_resumes():
    """A new option is put there: free, reported or refused."""
    assert set(ON_RESUME) == set(OPTIONS)
    assert set(ON_RESUME.values()) == set(get_args(OnResume))


@pytest.mark.parametrize("name", OPTIONS)
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_another_value_of_an_option_is_free_reported_or_refused(name, data):
    option = OPTIONS[name]
    before, now = (
        LearnerConfig.of(
            {"bridge": "b", "model": "m", "steps": 9, name: option.whole(data.draw(values(option)))}
        )
        for _ in range(2)
    )
    earlier = {each: before.value(each) for each in OPTIONS}
    differs = before.value(name) != now.value(name)
    if ON_RESUME[name] == "refused" and differs:
        with pytest.raises(OtherRun, match=f"--{name.replace('_', '-')} "):
            changes_on_resume(earlier, now)
        return
    changed = changes_on_resume(earlier, now)
    assert len(changed) == (ON_RESUME[name] == "reported" and differs)
    assert all(each.startswith(f"--{name.replace('_', '-')} ") for each in changed)
    assert changes_on_resume({}, now) == []  # an option that the earlier release did not have


# --- files ------------------------------------------------------------------------------------------------


def values(option: Option) -> st.SearchStrategy[object]:
    """Returns a strategy for an option's values."""
    if option.name in ("stop_when", "stop_no_better"):
        return st.sampled_from(
            ["reward_mean>=0.95", "loss < 1e-3"] if option.name == "stop_when" else ["eval/x:max", "loss:min"]
        )
    if option.shape == "switch":
        return st.booleans()
    if option.shape == "choice":
        return st.sampled_from(get_args(option.item))
    number, *rest = get_args(option.item) or (option.item,)
    if option.name == "bridge":
        item = st.from_regex("[A-Za-z0-9_-]{1,48}", fullmatch=True)
    elif number is str:
        item = st.text(st.characters(exclude_categories=[])).map(
            lambda text: f"http://{text}" if option.name == "engine" else text
        )
    else:
        meta = rest[0] if rest else Meta()
        whole = (meta.ge or 0, (meta.lt or 2**70) - 1)
        low, high = (meta.ge if meta.gt is None else meta.gt), (meta.le if meta.lt is None else meta.lt)
        real = st.floats(
            low, high, exclude_min=meta.gt is not None, exclude_max=meta.lt is not None, allow_nan=not rest
        )
        item = st.integers(*whole) if number is int else real
    shapes = {
        "list": st.lists(item).map(tuple),
        "pair": st.tuples(item, item),
        "mapping": st.dictionaries(st.text(), item),
    }
    return shapes.get(option.shape, item)


CONFIGS = st.fixed_dictionaries(
    {name: values(option) for name, option in OPTIONS.items() if option.default is dataclasses.MISSING},
    optional={
        name: values(option) for name, option in OPTIONS.items() if option.default is not dataclasses.MISSING
    },
)


def same(one: LearnerConfig, other: LearnerConfig) -> bool:
    """Equal, where not a number is equal to itself."""
    return repr(one) == repr(other)


@given(CONFIGS)
@settings(max_examples=60, deadline=None)
def test_configuration_is_the_same_after_it_was_written_and_read(tmp_path_factory, given):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    config = LearnerConfig.of(given)
    write_config(config, path)
    assert same(LearnerConfig.of(read_config(path)), config)


def test_file_alone_is_enough_and_flags_win_over_it(write):
    path = write(
        """
        run: {bridge: a, model: m, steps: 9}
        optimizer: {lr: 1e-3, warmup: 5, schedule_option: {power: 2}}
        weights: {engine: [http://a, http://b], no_weights: true}
        advantages: {use_advantages: false}
        checkpoints: {resume: true}
        adapters:
        """
    )
    names = ["bridge", "lr", "warmup", "schedule_option", "engine", "no_weights", "use_advantages"]
    names += ["resume", "run_dir"]
    config = parse(["--config", path])
    engines = ("http://a", "http://b")
    expected = ["a", 1e-3, 5, {"power": 2.0}, engines, True, False, True, None]
    assert [config.value(name) for name in names] == expected
    assert config.run_dir == Path("runs/a")
    flags = "--bridge b --lr 1 --engine http://c --schedule-option end=0 --run-dir here"
    switches = "--weights --use-advantages --no-resume"
    config = parse([*flags.split(), *switches.split(), "--config", path])
    expected = ["b", 1.0, 5, {"end": 0.0}, ("http://c",), False, True, False, "here"]
    assert [config.value(name) for name in names] == expected
    assert config.run_dir == Path("here")


def test_a_written_file_is_the_old_one_or_the_new_one(tmp_path, monkeypatch):
    path = tmp_path / CONFIG_FILE
    config = parse(NEEDED)
    write_config(config, path)
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(OSError, match="No space"):
        write_config(parse([*NEEDED, "--lr", "1"]), path)
    assert LearnerConfig.of(read_config(path)) == config


def test_run_directory_has_the_whole_configuration(tmp_path):
    config = parse(
        [*NEEDED, "--run-dir", str(tmp_path / "run"), "--lr", "1e-4", "--stop-when", "reward_mean>=0.5"]
    )
    assert agreed_start(config, ALONE).checkpoint is None
    assert parse(["--config", str(tmp_path / "run" / "config.yaml")]) == config


# tests/transport/launch/test_config.py has what is no YAML, or no value of YAML.
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer: {learning_rat: 1}", "optimizer.learning_rat: did you mean optimizer.lr?"),
        ("batch: {lr: 1}", "batch.lr: did you mean optimizer.lr?"),
        ("optimiser: {lr: 1}", "optimiser: did you mean optimizer?"),
        ("xyzzy: 1", "xyzzy is not known; known are run, checkpoints, batch,"),
        ("ranks: {xyzzy: 1}", "ranks.xyzzy is not known; known are parallel, process_group_timeout"),
        ("optimizer: 5", "optimizer: 5 is not a mapping of options"),
        ("optimizer: {lr: fast}", "optimizer.lr: 'fast' is not a finite number, 0 or above"),
        ("optimizer: {lr: .inf}", "optimizer.lr: .inf is not a finite number, 0 or above"),
        ("batch: {groups: }", "batch.groups: null is not a whole number above 0"),
        ("checkpoints: {resume: 1}", "checkpoints.resume: 1 is not true or false"),
        ("compute: {device: gpu}", "compute.device: 'gpu' is not one of auto, cpu, cuda"),
        ("objective: {mask_ratio: [0.5, -1]}", "objective.mask_ratio: [0.5, -1] is not a list of two, each"),
        ("optimizer: {schedule_option: {power: high}}", "{'power': 'high'} is not a mapping"),
        ("weights: {engine: [somewhere]}", "weights.engine: 'somewhere' is not an address such as"),
        ("early_stop: {stop_when: reward_mean}", "early_stop.stop_when: 'reward_mean' is not such as"),
        ("run: {bridge: 0123}", "run.bridge: 0123 is not a text"),
        ("batch: [1", "is not YAML: "),
        ("- 1", "it holds a list, not sections such as run: and optimizer:"),
        ("", "it holds None, not sections"),
    ],
)
def test_mistake_in_a_file_is_named(write, refused, text, said):
    path = write(text)
    line = refused(*NEEDED, "--config", path)
    assert line.startswith(path)
    assert said in line


def test_every_mistake_of_a_file_is_named_at_once(write):
    with pytest.raises(
        BadConfigFile,
        match=r"batch.groups: 0 is not .*; optimizer.lr: 'x' is not .*; bach: did you mean batch?",
    ):
        read_config(Path(write("batch: {groups: 0}\noptimizer: {lr: x}\nbach: {}")))


def test_file_that_is_not_there_is_named(refused, tmp_path):
    assert (
        refused(*NEEDED, "--config", str(tmp_path / "no.yaml"))
        == f"{tmp_path / 'no.yaml'}: No such file or directory -> give the path of a YAML file"
    )


# --- flags ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("--learing-rate 1", "unknown flag --learing-rate -> did you mean --lr?"),
        ("--group_size=8", "unknown flag --group_size -> did you mean --group-size?"),
        ("--no-use-advantags", "unknown flag --no-use-advantags -> did you mean --no-use-advantages?"),
        ("--lr fast", "--lr: 'fast' is not a finite number, 0 or above"),
        ("--lr -1", "--lr: -1.0 is not a finite number, 0 or above"),
        ("--groups 0", "--groups: 0 is not a whole number above 0"),
        ("--engine here", "--engine: 'here' is not an address such as http://127.0.0.1:8000"),
        ("--stop-when x", "--stop-when: 'x' is not such as reward_mean>=0.95"),
        (
            "--schedule-option power=high",
            "--schedule-option: 'power=high' is not NAME=X, where X is a finite number",
        ),
    ],
)
def test_mistake_on_the_command_line_is_one_line(refused, argv, said):
    assert refused(*NEEDED, *argv.split()) == said


def test_a_missing_option_is_named(refused):
    assert refused("--model", "m").startswith("missing: --bridge, --steps (as flags, or in the file")


@given(CONFIGS)
@settings(max_examples=50, deadline=None)
def test_flags_say_the_same_as_a_file(given):
    argv = []
    for name, value in given.items():
        option = OPTIONS[name]
        if option.shape == "switch":
            argv += [option.flag] if value != option.default else []
        elif option.shape == "mapping":
            continue  # names may hold "="
        elif option.shape == "pair":
            if any(part < 0 or math.isnan(part) for part in value):
                continue  # argparse takes -1e-3 for a flag
            argv += [option.flag, *map(str, value)]
        elif option.shape == "list":
            if name == "engine":
                argv += [f"{option.flag}={text}" for text in value]
            elif value:
                argv.append(f"{option.flag}={','.join(value)}")
        else:
            argv.append(f"{option.flag}={value}")
    left_out = {"schedule_option", "clip_advantages", "mask_ratio", "mask_ratio_sequence", "lora_targets"}
    found, wanted = parse(argv), LearnerConfig.of(given)
    for name in OPTIONS.keys() - left_out:
        assert repr(found.value(name)) == repr(wanted.value(name)), name
