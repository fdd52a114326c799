"""The files for Slurm and KubeRay are what a shell and Kubernetes read. RayCluster has no schema here."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
SCRIPT = ROOT / "examples/slurm/several_nodes.sbatch"
CLUSTER = ROOT / "examples/kuberay/raycluster.yaml"


def groups() -> list[dict[str, Any]]:
    spec = yaml.safe_load(CLUSTER.read_text())["spec"]
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def shellcheck(path: Path) -> str:
    """What is wrong with a script, or an empty text."""
    words = [str(Path(sys.executable).with_name("shellcheck")), str(path)]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout


def test_the_batch_script_is_one(tmp_path: Path) -> None:
    assert subprocess.run(["bash", "-n", SCRIPT], check=False).returncode == 0
    assert shellcheck(SCRIPT) == ""
    wrong = tmp_path / "wrong.sbatch"
    wrong.write_text(SCRIPT.read_text().replace('--nodelist="$head" "$@"', '--nodelist=$head "$@"'))
    assert "SC2086" in shellcheck(wrong)


@pytest.mark.parametrize("version", ["1.27", "1.33"])
def test_the_pods_are_some(version: str) -> None:
    for group in groups():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "run1"}, **group["template"]}
        kubernetes_validate.validate(pod, version, strict=True)


def test_containers_of_a_pod_share_memory_and_user_and_are_labelled_for_the_relay() -> None:
    assert [group["labels"]["shmbridge"] for group in groups()] == ["learner", "environments"]
    assert groups()[0]["template"]["spec"]["terminationGracePeriodSeconds"] >= 120, "the learner saves"
    for group in groups():
        spec = group["template"]["spec"]
        assert spec["containers"][0]["name"].startswith("ray-")
        assert isinstance(spec["securityContext"]["runAsUser"], int)
        assert any(each.get("emptyDir", {}).get("medium") == "Memory" for each in spec["volumes"])
        for container in spec["containers"]:
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
            assert all(isinstance(word, str) for word in container.get("command", []))


def test_its_commands_have_these_flags() -> None:
    from shmbridge.cli.commands import parser_of

    for group in groups():
        for container in group["template"]["spec"]["containers"][1:]:
            name, *words = container["command"][1:]
            known = {flag for action in parser_of(name)._actions for flag in action.option_strings}
            assert {word for word in words if word.startswith("--")} - known == set()
