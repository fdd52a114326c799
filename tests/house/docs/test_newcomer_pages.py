"""Every Python block of the pages that newcomers ask for runs, page by page; their YAML parses."""

import importlib
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from own_bridges import clean_own_bridges, with_own_bridges

HOW_TO = Path(__file__).parents[3] / "docs/how-to"
EXAMPLES = Path(__file__).parents[3] / "examples"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (HOW_TO / page).read_text(), re.DOTALL)


def run(page: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": page}
    try:
        for block in blocks(page, "python"):
            exec(compile(with_own_bridges(block), page, "exec"), names)
    finally:
        for name in ("batch", "record", "producer", "consumer"):
            names.pop(name, None)
        clean_own_bridges()
    return names


def test_the_memory_page_prints_its_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    run("how-much-memory.md")
    text = (HOW_TO / "how-much-memory.md").read_text()
    option, mib = capsys.readouterr().out.split()
    assert f"# {option}:" in text
    assert f"# {mib} MiB" in text


def test_the_notebook_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    run("notebook.md")
    assert capsys.readouterr().out == "[0. 0. 0. 0. 0.]\n"


def test_multi_turn_rows_arrive_as_written() -> None:
    assert len(blocks("multi-turn.md", "python")) == 2
    run("multi-turn.md")


@pytest.mark.parametrize(
    ("page", "example"), [("own-loop.md", "own_loop.py"), ("own-environment.md", "numpy_env.py")]
)
def test_the_page_shows_the_whole_example(page: str, example: str) -> None:
    text = (EXAMPLES / example).read_text()
    assert text in blocks(page, "python")
    assert len(text.splitlines()) <= 60


def test_a_loss_of_ones_own_trains_no_first_token() -> None:
    torch = pytest.importorskip("torch")
    names: dict[str, Any] = {"losses": importlib.import_module("shmbridge.consumers.losses")}
    exec(blocks("own-loop.md", "python")[-1], names)
    one = torch.zeros(5, requires_grad=True)
    names["my_loss"](
        one, torch.zeros(5), torch.ones(5), torch.ones(5, dtype=torch.bool), torch.tensor([0, 2, 5])
    ).backward()
    assert one.grad is not None
    assert (one.grad != 0).tolist() == [False, True, False, True, True]


def test_the_pod_shares_memory_and_user() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("kubernetes.md", "yaml")
    spec = yaml.safe_load(text)["spec"]
    assert [each["name"] for each in spec["containers"]] == ["learner", "policy", "environments"]
    assert isinstance(spec["securityContext"]["runAsUser"], int)
    for container in spec["containers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert all(isinstance(word, str) for word in container["command"] + container["args"])
        assert "securityContext" not in container
    assert {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}} in spec["volumes"]


def test_the_compose_services_share_memory_and_user() -> None:
    yaml = pytest.importorskip("yaml")
    (text,) = blocks("docker.md", "yaml")
    compose = yaml.safe_load(text)
    assert {service["user"] for service in compose["services"].values()} == {"1000:1000"}
    assert all("shm:/dev/shm" in service["volumes"] for service in compose["services"].values())
    assert text == (HOW_TO.parents[1] / "compose.yaml").read_text(), "the page shows the file"
    assert compose["volumes"]["shm"]["driver_opts"]["type"] == "tmpfs"


def test_the_batch_script_is_a_script() -> None:
    (script,) = re.findall(r"```\n(#!/bin/bash\n.*?)```", (HOW_TO / "slurm.md").read_text(), re.DOTALL)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert "#SBATCH --nodes=1" in script
