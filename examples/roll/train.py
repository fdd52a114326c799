"""Runs ROLL's agentic pipeline with one of the YAML files beside this one.

    python examples/roll/train.py atropos_gsm8k_grpo max_steps=10

As ROLL's `examples/start_agentic_pipeline.py`, but for one thing: Ray's workers register `AtroposGemEnv` with
gem as they start, so that `env_type: atropos` is known to them.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def configuration(name: str, overrides: list[str]) -> Any:
    """Returns (ROLL's AgenticConfig, the pipeline's class) of a file beside this one."""
    from dacite import from_dict
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf
    from roll.pipeline.agentic.agentic_config import AgenticConfig
    from roll.utils.import_utils import safe_import_class

    with initialize_config_dir(str(HERE.resolve()), version_base=None):
        given = compose(config_name=name, overrides=overrides)
    default = "roll.pipeline.agentic.agentic_pipeline.AgenticPipeline"
    pipeline = safe_import_class(given.get("pipeline_cls") or default)
    return from_dict(AgenticConfig, OmegaConf.to_container(given, resolve=True)), pipeline


def start_ray() -> None:
    """Starts Ray, or joins the cluster that RAY_ADDRESS names."""
    import ray
    from roll.platforms import current_platform
    from roll.utils.constants import RAY_NAMESPACE

    path = os.pathsep.join([str(ROOT), *sys.path[1:]])
    ray.init(
        namespace=RAY_NAMESPACE,
        runtime_env={
            "env_vars": {**current_platform.get_custom_env_vars(), "PYTHONPATH": path},
            "worker_process_setup_hook": "shmbridge.producers.gem.register",
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = sorted(path.stem for path in HERE.glob("*.yaml"))
    parser.add_argument("name", choices=names, help="a file beside this one, without .yaml")
    parser.add_argument("overrides", nargs="*", help="such as max_steps=10")
    options = parser.parse_args()
    try:
        config, pipeline = configuration(options.name, options.overrides)
    except ModuleNotFoundError as missing:
        hint = "PYTHONPATH=../ROLL, a checkout of github.com/alibaba/ROLL, and what its requirements list"
        parser.exit(1, f"{missing} -> {hint}\n")
    start_ray()
    pipeline(pipeline_config=config).run()


if __name__ == "__main__":
    main()
