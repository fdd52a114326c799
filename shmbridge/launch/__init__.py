"""`shmbridge launch`, a training run as one command; and `shmbridge demo`, a launch of `demo.yaml` in here.

`environments/` has the two Atropos environments of the demo, scripts that import nothing of shmbridge.
"""
