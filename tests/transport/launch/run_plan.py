"""Runs a plan from a file as `shmbridge launch` does: python run_plan.py PLAN
text|json.
"""

import sys
from pathlib import Path

from shmbridge.launch.config import Config
from shmbridge.launch.plan import Plan
from shmbridge.launch.supervisor import become_guardian

plan = Plan.load(Path(sys.argv[1]))
become_guardian(
    Config(bridge=plan.bridge), plan, label=f"launch of {sys.argv[1]}", as_json=sys.argv[2] == "json"
)
