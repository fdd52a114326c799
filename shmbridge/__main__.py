"""`python -m shmbridge`, for when the script is not on PATH."""

import sys

from shmbridge.cli import main

sys.exit(main())
