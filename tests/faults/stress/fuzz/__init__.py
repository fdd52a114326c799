"""The parts of kill_fuzz.py, one idea each. Knows the public names of shmbridge only."""
