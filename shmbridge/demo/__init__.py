"""The demo, `shmbridge demo`: a tiny model learns two skills over a bridge. Starts programs, imports none.

`environments/` has two Atropos environments, ordinary scripts that import nothing of shmbridge.
"""

__all__: list[str] = []
