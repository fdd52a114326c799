"""SkyRL's data sets: from files, folders and names; what is no task is refused with row and field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shmbridge.producers.skyrl_gym import BadTask, SkyRLTasks, check_registered

ROWS = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{number} and one?"}],
        "env_class": "gsm8k",
        "reward_spec": {"method": "rule", "ground_truth": str(number + 1)},
        "extra_info": {"index": number},
    }
    for number in range(4)
]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.json"])
def test_a_row_is_prompt_environment_and_extras(tmp_path: Path, name: str) -> None:
    tasks = SkyRLTasks.load(write(tmp_path / name, ROWS))
    assert len(tasks) == 4
    task = tasks[2]
    assert (task.messages, task.instance_id) == (ROWS[2]["prompt"], "2")
    assert task.data.env_class == "gsm8k"
    assert task.data.extras == {key: ROWS[2][key] for key in ("data_source", "reward_spec", "extra_info")}


def test_of_a_folder_the_files_of_the_split_are_taken(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", ROWS[:3])
    write(tmp_path / "validation.parquet", ROWS[3:])
    assert len(SkyRLTasks.load(str(tmp_path))) == 3
    assert len(SkyRLTasks.load(str(tmp_path), split="validation")) == 1
    write(tmp_path / "other" / "part.jsonl", ROWS[:1])
    assert len(SkyRLTasks.load(str(tmp_path / "other"))) == 1
    write(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", ROWS[:2])
    assert len(SkyRLTasks.load(str(tmp_path / "hub"))) == 2


def test_a_folder_that_datasets_saved(tmp_path: Path) -> None:
    import datasets

    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(str(tmp_path / "two"))
    assert len(SkyRLTasks.load(str(tmp_path / "one"))) == 4
    assert len(SkyRLTasks.load(str(tmp_path / "two"), split="test")) == 1
    with pytest.raises(BadTask, match="no split 'dev': it has train, test"):
        SkyRLTasks.load(str(tmp_path / "two"), split="dev")


def test_a_name_is_loaded_by_datasets(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked = []

    def load(name: str) -> Any:
        asked.append(name)
        return datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)})

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(SkyRLTasks.load("someone/rows")) == 4
    with pytest.raises(BadTask, match="no split 'validation'"):
        SkyRLTasks.load("someone/rows:validation")
    assert asked == ["someone/rows"] * 2


def test_one_environment_for_all_rows() -> None:
    assert SkyRLTasks(ROWS, env_class="gsm8k_multi_turn")[0].data.env_class == "gsm8k_multi_turn"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"env_class": "gsm8k"}, "row 1 has no prompt; it has env_class"),
        ({"prompt": "2 + 2?", "env_class": "gsm8k"}, "row 1: the prompt '2 [+] 2[?]' is no list of messages"),
        ({"prompt": [], "env_class": "gsm8k"}, "no list of messages"),
        ({"prompt": [{"role": "user"}], "env_class": "gsm8k"}, "no list of messages"),
        ({"prompt": ROWS[0]["prompt"]}, "row 1 names no environment"),
        ({"prompt": ROWS[0]["prompt"], "env_class": None}, "row 1 names no environment"),
    ],
)
def test_a_row_that_is_no_task(row: dict[str, Any], said: str) -> None:
    with pytest.raises(BadTask, match=said) as error:
        SkyRLTasks([ROWS[0], row])
    assert (error.value.code, bool(error.value.hint)) == ("SB512", True)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.jsonl", '{"prompt": 1}\n{oops\n', "line 2: no JSON"),
        ("rows.jsonl", "[1]\n", "line 1: a list, where a dict is wanted"),
        ("rows.json", "[1, 2", "no JSON"),
        ("rows.parquet", "no parquet", "rows.parquet: "),
        ("rows.csv", "a,b\n", "is none of .parquet"),
        ("rows.jsonl", "", "has no rows"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(BadTask, match=said):
        SkyRLTasks.load(str(tmp_path / name))


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadTask, match="there is no file or folder"):
        SkyRLTasks.load(str(tmp_path / "none.parquet"))
    with pytest.raises(BadTask, match="has no file of"):
        SkyRLTasks.load(str(tmp_path))


def test_epochs_and_their_order() -> None:
    tasks = SkyRLTasks(ROWS)
    assert [task.instance_id for task in tasks.repeated(epochs=2)] == ["0", "1", "2", "3"] * 2
    shuffled = [task.instance_id for task in tasks.repeated(epochs=3, seed=1)]
    assert shuffled == [task.instance_id for task in tasks.repeated(epochs=3, seed=1)]
    assert [sorted(shuffled[at : at + 4]) for at in (0, 4, 8)] == [["0", "1", "2", "3"]] * 3
    assert len({tuple(shuffled[at : at + 4]) for at in (0, 4, 8)}) > 1


def test_environments_must_be_registered() -> None:
    check_registered(["gsm8k", "counting"])
    with pytest.raises(BadTask, match="no environment 'chess' is registered; there are aime"):
        check_registered(["chess"])
    with pytest.raises(BadTask, match="my_missing_envs cannot be imported"):
        check_registered([], ["my_missing_envs"])
