"""The page's configuration is one that verl takes, and its tables name every key."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from shmbridge.consumers.verl.settings import Settings

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs/how-to/verl.md").read_text()


def test_the_block_on_the_page_is_a_configuration_of_verls():
    from hydra import compose, initialize_config_module

    from shmbridge.consumers.verl.settings import form_of

    block, _launch_file = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, OmegaConf.create(block))
    assert Settings.of(config).bridge == "run1"
    form = form_of(config)
    assert (form.per_token, form.logprobs, form.temperature) == (True, True, 1.0)


def test_the_page_and_the_example_set_the_same_keys():
    block, _launch_file = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    page, example = OmegaConf.create(block), OmegaConf.load(ROOT / "examples/verl_grpo.yaml")
    example = OmegaConf.merge(example, {"trainer": {"atropos": {"bridge": "run1"}}})
    page_keys, example_keys = flat(page), flat(example)
    assert {key: example_keys.get(key) for key in page_keys} == page_keys


def flat(config: object, prefix: str = "") -> dict[str, object]:
    if not OmegaConf.is_dict(config):
        return {prefix[:-1]: config}
    return {key: value for name in config for key, value in flat(config[name], f"{prefix}{name}.").items()}


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(Settings)])
def test_every_key_has_its_row(key):
    table = PAGE.split("## The keys of the recipes")[1]
    assert re.search(rf"^\|[^|]*`{key}`", table, re.MULTILINE), key
