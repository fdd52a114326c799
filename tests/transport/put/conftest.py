"""Puts the table of forms where tests import it from."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # for put_forms
