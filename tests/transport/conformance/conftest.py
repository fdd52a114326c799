"""Tests here import the rings and the state machine beside them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
