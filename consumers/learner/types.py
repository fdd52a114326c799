"""The type of a step's metrics, shared by all of the learner."""

from typing import Any

Metrics = dict[str, Any]  # name -> number or text
