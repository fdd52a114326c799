"""Starts an environments' process, prints its pid, and waits to be killed."""

import sys
import time

from shmbridge.producers.skyrl_gym import EnvProcess, server_command

process = EnvProcess(server_command(sys.argv[1]), modules=["counting_env"])
process.wait_ready()
print(process.pid, flush=True)
time.sleep(600)
