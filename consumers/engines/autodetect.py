"""A server of which only the address is known: asked once what it is, when there is something to push.

Knows by which route each kind answers. A server need not be there yet when its learner starts.
"""

from __future__ import annotations

from collections.abc import Callable

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update
from shmbridge.consumers.engines.http_calls import answer_of
from shmbridge.consumers.engines.self_updating import Following
from shmbridge.consumers.engines.sglang_http import SglangHttp
from shmbridge.consumers.engines.vllm_http import VllmHttp

_TIMEOUT_S = 10.0
# (route, word in its answer, kind), in the order in which they are asked. One that follows must not be pushed
# to, also where it could be: that first. SGLang samples to say how it is, and says nothing while it is
# paused: that last.
_KINDS: tuple[tuple[str, str, Callable[[str], Engine]], ...] = (
    ("/policy_version", "version", Following),
    ("/get_world_size", "world_size", VllmHttp),
    ("/model_info", "model_path", SglangHttp),
    ("/health", "weight_version", Following),
)


class AtUrl(Engine):
    """Whatever kind of server listens there; the same kind as long as this object lives.

    Args:
        url: where it listens.
    """

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._found: Engine | None = None

    def update(self, update: Update) -> None:
        """Has the server at the version, and sampling. Blocks; raises EngineFailed."""
        self._engine().update(update)

    def version(self) -> int | None:
        """Returns the version that the server samples with. Blocks; raises EngineFailed."""
        return self._engine().version()

    def sleep(self, pause: Pause) -> bool:
        """Has the server give its memory back, where it can. Blocks; raises EngineFailed."""
        return self._engine().sleep(pause)

    def wake(self) -> None:
        """Undoes a sleep. Blocks; raises EngineFailed."""
        self._engine().wake()

    def close(self) -> None:
        """Lets the server go. Idempotent."""
        if self._found is not None:
            self._found.close()

    def _engine(self) -> Engine:
        self._found = self._found or engine_at(self.address)
        return self._found


def engine_at(url: str) -> Engine:
    """Returns the engine that listens at an address, by what it answers. Blocks for a few questions.

    Raises:
        EngineFailed: nobody answers, or with an error, or it is none that weights can be pushed to.
    """
    for path, word, kind in _KINDS:
        if word in answer_of(url, path, timeout_s=_TIMEOUT_S):
            return kind(url)
    raise EngineFailed(
        f"{url} is no engine that takes weights: it has neither "
        f"{', '.join(path for path, *_ in _KINDS[:2])} nor {_KINDS[2][0]}",
        hint="vLLM needs VLLM_SERVER_DEV_MODE=1, or --middleware "
        "shmbridge.consumers.vllm.middleware.ShmBridge",
    )
