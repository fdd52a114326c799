"""The parts of kill_fuzz.py can be imported here as they can beside the script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
