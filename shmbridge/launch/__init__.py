"""`shmbridge launch`: a training run as one command. Used by its commands and the demo."""

__all__ = ["config", "guardian", "logs", "plan", "supervisor"]
