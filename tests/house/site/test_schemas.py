"""YAML that people copy is what Kubernetes, Compose and GitHub read, by their own schemas."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
KUBERNETES = ("1.27", "1.33")


def pod() -> Any:
    """The pod of the page."""
    page = (ROOT / "docs/how-to/kubernetes.md").read_text()
    return yaml.safe_load(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0])


def checked(schema: str, *paths: Path) -> str:
    """What is wrong with files, or an empty text."""
    words = ["--builtin-schema", f"vendor.{schema}", *map(str, paths)]
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", *words], capture_output=True, text=True, check=False
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


@pytest.mark.parametrize("version", KUBERNETES)
def test_the_pod_is_one(version: str) -> None:
    kubernetes_validate.validate(pod(), version, strict=True)


def test_a_misspelt_key_of_the_pod_is_seen() -> None:
    wrong = pod()
    wrong["spec"]["volumes"][0]["emptyDir"]["sizelimit"] = "1Gi"
    with pytest.raises(kubernetes_validate.ValidationError, match="sizelimit"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


def test_the_compose_file_is_one(tmp_path: Path) -> None:
    assert checked("compose-spec", ROOT / "compose.yaml") == ""
    wrong = tmp_path / "compose.yaml"
    wrong.write_text((ROOT / "compose.yaml").read_text().replace("driver_opts:", "driver_options:"))
    assert "driver_options" in checked("compose-spec", wrong)


def test_the_workflows_are_some() -> None:
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    assert workflows
    assert checked("github-workflows", *workflows) == ""
