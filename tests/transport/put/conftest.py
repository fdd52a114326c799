"""Makes the table of forms importable for the tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for put_forms
