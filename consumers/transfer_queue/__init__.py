"""Stores the values of TransferQueue, which verl and others read, in shared memory.

Call `register()` in every process before `transfer_queue.init()`; then its configuration may name the
backend `shmbridge`. Ray calls it in its workers by
`runtime_env={"worker_process_setup_hook": "shmbridge.consumers.transfer_queue.register"}`.

Released: the values of a row when the row is cleared (`kv_clear`, `clear_samples`, `clear_partition`), from
any process; a view that was read before stays valid. After a kill of any writer or reader: values that were
put stay readable; a put that was cut short never existed. There is no hub: the controller of TransferQueue
knows where each value is, and any process reads in place. The queue lives as long as the process that first
called `init()`, as its controller does; docs/how-to/transferqueue.md has more.
"""


def register() -> None:
    """Makes the storage backend `shmbridge` known to TransferQueue in this process. Idempotent, never blocks.

    Raises:
        ModuleNotFoundError: TransferQueue is not installed.
    """
    from shmbridge.consumers.transfer_queue import backend

    backend.register()
