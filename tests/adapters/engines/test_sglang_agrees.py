"""The requests that the stand-in for SGLang takes are those of SGLang's own package, which is read and not
imported.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from tests.adapters.engines.test_sglang_http import FIELDS

REQUESTS = {
    "/pause_generation": "PauseGenerationReqInput",
    "/update_weight_version": "UpdateWeightVersionReqInput",
    "/continue_generation": "ContinueGenerationReqInput",
    "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}


def test_requests_of_the_stand_in_are_those_of_the_package():
    """Names and types of the fields, in whichever SGLang is there."""
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("SGLang is not installed")
    tree = ast.parse((Path(found.origin).parent / "srt" / "managers" / "io_struct.py").read_text())
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    words = {str: "str", bool: "bool", int: "int", list: "List[str]", dict: "Dict[str, Any]"}
    for path, name in REQUESTS.items():
        fields = {
            line.target.id: ast.unparse(line.annotation)
            for line in classes[name].body
            if isinstance(line, ast.AnnAssign)
        }
        for field, annotation in fields.items():
            word = words[FIELDS[path][field]]
            assert annotation in (word, f"Optional[{word}]") or annotation.startswith("Literal['abort'"), (
                f"{name}.{field}"
            )
        if "flush_cache" in fields or path != "/update_weights_from_disk":  # 0.5.6 and 0.5.7 have fewer
            assert fields.keys() >= FIELDS[path].keys() - {"manifest", "torch_empty_cache"}, name
