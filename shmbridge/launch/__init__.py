"""`shmbridge launch`: a training run as one command, started by `cli` by name. The demo uses the guardian."""

__all__ = ["guardian"]
