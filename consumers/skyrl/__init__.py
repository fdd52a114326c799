"""Feeds SkyRL from a bridge: `trainer.override_entrypoint=shmbridge.consumers.skyrl.entrypoint`.

- `generator.py`: groups of a feed as the outputs of a SkyRL generator; `arrange.py` gives each prompt its
  rows, `rows.py` makes SkyRL's lists of a row.
- `estimator.py`: the advantage estimator `shmbridge`, which hands token-level values through.
- `trainer.py`: SkyRL's trainers, which tell the feed of steps and checkpoints; `weights.py`: the policy
  worker's half of the way back, `inference_client.py` the trainer's.
- `config.py`, `prompts.py`, `entrypoint.py`: SkyRL's config with a section `bridge`, a data set of empty
  prompts, the program.
"""

from shmbridge.consumers.skyrl import python_311
from shmbridge.consumers.tested_versions import warn_if_untested

warn_if_untested("skyrl", "0.3", "0.5")  # first: another release may fail at its import
python_311.prepare()
