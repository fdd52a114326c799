"""ROLL's own agentic pipeline over upstream's gsm8k_server.py, unedited: 100 episodes in groups of 4.

Needs SHMBRIDGE_ROLL_CHECKOUT and SHMBRIDGE_ATROPOS_CHECKOUT. `play_on_cpu.py` says what runs and what is
replaced: vLLM's strategy, by one that says answers that are written there.
"""

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.environments.byte_tokenizer import byte_tokenizer
from tests.environments.gem.upstream import SCRIPTS, Played, gsm8k, own_scores, write_data
from tests.trainers.roll.conftest import HERE

ROOT, STEPS, GROUP, GROUPS, LONGEST = HERE.parents[2], 5, 4, 5, 2048


@pytest.fixture
def scripts() -> Path:
    """The folder of upstream's environments."""
    named = os.environ.get("SHMBRIDGE_ATROPOS_CHECKOUT")
    if not named:
        pytest.skip("not run: SHMBRIDGE_ATROPOS_CHECKOUT names no checkout of Atropos")
    return Path(named).resolve() / "environments"


def write_model(folder: Path) -> None:
    """A tiny random model, whose tokens are bytes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False}
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=LONGEST,
        bos_token_id=None,
        **shape,
        **heads,
        **ends,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def played(batch, row: int, system_prompt: str) -> Played:
    """One of ROLL's rows: what was shown and said, and its tokens as Atropos' managed server has them."""
    tokenizer = byte_tokenizer()
    ids, trained = batch.batch["input_ids"][row], batch.batch["response_mask"][row].bool()
    prompt = tokenizer.decode(ids[batch.batch["prompt_mask"][row].bool()])
    shown = re.search(r"What is \d+ plus \d+\?", prompt)[0]
    assert prompt.endswith(f"{system_prompt}\n\n{shown}<|end|>\n<|assistant|>"), prompt
    said = ids[trained].tolist()
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": shown}]
    asked = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(said[:-1])
    assert said[-1] == tokenizer.eos_token_id
    return Played(shown, text, [*asked, *said], [*[-100] * len(asked), *said])


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_rolls_pipeline_plays_upstreams_gsm8k(needs_checkout, scripts, tmp_path):
    """The scores in the batches that ROLL trains are the environment's own; the engine has ROLL's weights."""
    from roll.distributed.scheduler.protocol import DataProto

    write_data(tmp_path)
    write_model(tmp_path / "model")
    environment = os.environ | {
        "SHMBRIDGE_ROLL_CHECKOUT": str(Path(needs_checkout).resolve()), "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "USE_TF": "0", "ROLL_LOG_DIR": str(tmp_path / "logs"),
        "HF_DATASETS_CACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    command = [sys.executable, str(HERE / "play_on_cpu.py"), str(scripts / SCRIPTS["gsm8k"].path)]
    with (tmp_path / "log").open("w+") as log:
        run = subprocess.Popen(
            [*command, str(tmp_path), "--steps", str(STEPS)], stdout=log, stderr=log, env=environment
        )
        try:
            assert run.wait() == 0, (tmp_path / "log").read_text()[-6000:]
        finally:
            run.kill()
    system_prompt = gsm8k(scripts).system_prompt
    metrics, groups, rewards = json.loads((tmp_path / "metrics.json").read_text()), {}, []
    for step in range(STEPS):
        with (tmp_path / f"rollouts/train/step_{step:06}.pkl").open("rb") as file:
            batch: DataProto = pickle.load(file)
        columns = batch.non_tensor_batch
        assert len(batch) == GROUP * GROUPS
        assert sorted(columns["env_ids"]) == list(range(GROUP * GROUPS))
        scores = [float(each) for each in columns["episode_scores"]]
        for row, name in enumerate(columns["traj_group_id"]):
            placed = batch.batch["scores"][row].nonzero().flatten().tolist()
            last = int(batch.batch["attention_mask"][row].sum()) - 1
            assert placed in ([last], []), "on the last token"
            assert float(batch.batch["scores"][row, last]) == np.float32(scores[row])
            groups.setdefault(name, []).append((played(batch, row, system_prompt), scores[row]))
        assert metrics[step]["critic/score/mean"] == pytest.approx(np.mean(scores), abs=1e-6)
        difference = metrics[step]["actor/train_infer_diff_token_mean@sum"]
        assert abs(difference) < 1e-6, "the engine has the weights that are trained"
        rewards += scores
    assert [len(each) for each in groups.values()] == [GROUP] * GROUPS * STEPS
    for group in groups.values():
        assert len({each.shown for each, _ in group}) == 1, "siblings have one item"
        own = own_scores(scripts, [each for each, _ in group], LONGEST)
        assert [reward for _, reward in group] == own
    assert len(rewards) == 100
    assert {1.0, -1.0} < set(rewards), "and some are worth less for length"
