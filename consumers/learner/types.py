"""The type of a step's metrics, for everybody who makes or takes some."""

from typing import Any

Metrics = dict[str, Any]  # name -> number or text
