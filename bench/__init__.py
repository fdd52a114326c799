"""Measurements: the same groups through the lanes, through a C twin that is the limit, and through other
transports.

Installed as shmbridge.bench, for `shmbridge bench`; the pytest suites beside it are not. Of the package only
its command imports this.
"""
