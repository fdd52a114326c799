"""Makes the parts of kill_fuzz.py importable here, as they are beside the script."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
