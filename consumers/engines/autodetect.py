"""An engine known only by its address: the first push detects its kind, so it may start after the learner."""

from __future__ import annotations

from collections.abc import Callable

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update
from shmbridge.consumers.engines.http_calls import answer_of
from shmbridge.consumers.engines.self_updating import Following
from shmbridge.consumers.engines.sglang_http import SglangHttp
from shmbridge.consumers.engines.vllm_http import VllmHttp

_TIMEOUT_S = 10.0
# (route, key in its response, kind), in the order of requests. Self-updating servers first: they must not
# be pushed to, even if they could be. /health last: SGLang generates a token for it, and hangs while paused.
_KINDS: tuple[tuple[str, str, Callable[[str], Engine]], ...] = (
    ("/policy_version", "version", Following),
    ("/get_world_size", "world_size", VllmHttp),
    ("/model_info", "model_path", SglangHttp),
    ("/health", "weight_version", Following),
)


class AtUrl(Engine):
    """A server of any supported kind at a URL; its kind is detected once."""

    def __init__(self, url: str) -> None:
        self.address = url.rstrip("/")
        self._found: Engine | None = None

    def update(self, update: Update) -> None:
        """Loads the version into the server, which samples on return. Blocks; raises EngineFailed."""
        self._engine().update(update)

    def version(self) -> int | None:
        """Returns the version that the server samples with. Blocks; raises EngineFailed."""
        return self._engine().version()

    def sleep(self, pause: Pause) -> bool:
        """Makes the server free its memory, if it can. Blocks; raises EngineFailed."""
        return self._engine().sleep(pause)

    def wake(self) -> None:
        """Undoes a sleep. Blocks; raises EngineFailed."""
        self._engine().wake()

    def close(self) -> None:
        """Closes the connection's resources. Idempotent."""
        if self._found is not None:
            self._found.close()

    def _engine(self) -> Engine:
        self._found = self._found or engine_at(self.address)
        return self._found


def engine_at(url: str) -> Engine:
    """Detects the engine at an address. Blocks for a few requests; raises EngineFailed."""
    for path, word, kind in _KINDS:
        if word in answer_of(url, path, timeout_s=_TIMEOUT_S):
            return kind(url)
    raise EngineFailed(
        f"{url} is no engine that takes weights: it has neither "
        f"{', '.join(path for path, *_ in _KINDS[:2])} nor {_KINDS[2][0]}",
        hint="vLLM needs VLLM_SERVER_DEV_MODE=1, or --middleware "
        "shmbridge.consumers.vllm.middleware.ShmBridge",
    )
