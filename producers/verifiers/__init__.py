"""Environments of verifiers 0.4, unedited: verifiers plays them, and a row goes into a lane for each branch.

`rollout.py` has them played, and makes columns; `door.py` stands between verifiers and the inference server.
Needs the extra `verifiers`, which only `VerifiersRollout` imports.
"""

from shmbridge.producers.verifiers.door import NoTokenRoute
from shmbridge.producers.verifiers.rollout import EpisodeFailed, VerifiersRollout

__all__ = ["EpisodeFailed", "NoTokenRoute", "VerifiersRollout"]
