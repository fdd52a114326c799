"""`shmbridge launch`: a training run as one command. Used by the command alone."""

__all__ = ["config", "logs", "services", "start"]
