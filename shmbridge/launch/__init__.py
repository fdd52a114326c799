"""`shmbridge launch`, a training run as one command; and `shmbridge demo`, a launch of `demo.yaml` in here.

`environments/` has the demo's two Atropos environments, ordinary scripts that import nothing of shmbridge.
"""

__all__ = ["config", "demo", "logs", "plan", "supervisor"]
