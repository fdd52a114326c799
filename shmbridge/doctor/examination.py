"""All checks of this host, in the order in which they are shown."""

import functools

from shmbridge.doctor import clock, gpu, open_files, remove_ipc, shared_memory, software
from shmbridge.doctor.check import Check, guarded


def examine(*, gpu_asked: bool = False) -> list[Check]:
    """Checks this host; nothing that the checks make outlives them.

    Blocks for a second or two, longer where there is a GPU. Never raises. The extensions come first: without
    them most other checks cannot run, and are left out.
    """
    loaded = guarded("extensions", software.extensions)
    found = [
        *guarded("shared memory", shared_memory.mount),
        *guarded("inodes", shared_memory.inodes),
        *guarded("memory", shared_memory.memory),
        *guarded("logout", remove_ipc.logout),
        *guarded("versions", software.versions),
        *guarded("optional packages", software.optional_packages),
        *loaded,
    ]
    if all(each.state != "fail" for each in loaded):
        found += _with_extensions()
    found += guarded("open files", open_files.descriptors)
    found += guarded("clock", clock.monotonic)
    found += guarded("time namespace", clock.time_namespace)
    return found + guarded("gpu", functools.partial(gpu.devices, gpu_asked))


def _with_extensions() -> list[Check]:
    from shmbridge.doctor import leaks, pages, peer

    return [
        *guarded("dead bridges", leaks.dead_bridges),
        *guarded("other users", leaks.other_users),
        *guarded("atomics", software.atomics),
        *guarded("mapped writes", shared_memory.mapped_writes),
        *guarded("another process", peer.another_process),
        *guarded("huge pages", pages.huge_pages),
        *guarded("locked memory", pages.locked_memory),
        *guarded("numa", pages.numa),
    ]
