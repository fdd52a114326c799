"""Tests here import harness.py and planted.py, which are programs beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
