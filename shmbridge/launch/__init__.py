"""`shmbridge launch`: a training run as one command.

Stands on top: imports public things, is imported by the command alone.
"""

__all__ = ["config", "services", "start"]
