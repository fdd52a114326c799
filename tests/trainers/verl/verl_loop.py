"""verl's v1 loop on a CPU, in this process: verl_loop.py BRIDGE MODEL STEPS OVERRIDE ..."""

import runpy
import sys
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[3] / "examples"


def configured(bridge: str, model: str, steps: int, more: list[str]) -> Any:
    """verl's configuration, of examples/verl_grpo.yaml."""
    from hydra import compose, initialize_config_dir

    example = runpy.run_path(str(EXAMPLES / "verl_grpo.py"))
    with initialize_config_dir(str(EXAMPLES), version_base=None):
        return compose("verl_grpo", overrides=[*example["overrides"](bridge, model, steps), *more])


def main() -> None:
    import ray
    from verl.trainer.main_ppo import TaskRunnerV1

    bridge, model, steps, *more = sys.argv[1:]
    config = configured(bridge, model, int(steps), more)
    ray.init(num_cpus=12, num_gpus=1, include_dashboard=False)
    TaskRunnerV1.__ray_metadata__.modified_class().run(config)


if __name__ == "__main__":
    main()
