"""The steps of an update on vLLM's AsyncLLM: pause, load, empty the caches, resume. Used by `follow.py`."""

from __future__ import annotations

import logging
from typing import Any

from shmbridge.consumers.engines.engine import UNKNOWN, EngineFailed, doubt, doubt_hint
from shmbridge.consumers.vllm.follow_settings import FollowSettings

logger = logging.getLogger("vllm.shmbridge")


class LiveEngine:
    """The follower's operations on an engine.

    Args:
        client: vLLM's AsyncLLM, whose workers have the weight-transfer backend `shmbridge`.
        settings: how it is paused, and which bridge the workers read.
        engines: how many data-parallel engines the client asks; each loads for itself.
    """

    def __init__(self, client: Any, settings: FollowSettings, engines: int = 1) -> None:
        self._client = client
        self._settings = settings
        self._engines = engines
        self._in_doubt = False

    @property
    def alive(self) -> bool:
        """Whether the engine still accepts calls."""
        return not self._client.errored

    @property
    def in_doubt(self) -> bool:
        """Whether its version is uncertain: a load failed midway, or in only some engines."""
        return self._in_doubt

    async def is_paused(self) -> bool:
        """Whether it is paused."""
        return bool(await self._client.is_paused())

    async def pause(self) -> None:
        """Stops generation; treats requests in flight by the pause mode."""
        await self._client.pause_generation(mode=self._settings.pause, clear_cache=False)

    async def resume(self) -> None:
        """Resumes generation, including kept requests."""
        await self._client.resume_generation()

    async def load(self, version: int) -> None:
        """Makes all workers load a version, all or nothing. The engine must be paused.

        Of several data-parallel engines one may load it and another fail, and an accelerator cannot undo a
        partial load. Samples then have no version until one is loaded.

        Raises:
            EngineFailed: a worker's error; its weights are uncertain. Exception: it keeps its earlier
                weights.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        client = self._client
        try:
            await client.start_weight_update()
        except Exception:
            # an update that was begun and not ended; this backend loses nothing by closing it
            await client.finish_weight_update()
            await client.start_weight_update()
        request = WeightTransferUpdateRequest(
            update_info={"bridge": self._settings.bridge, "version": version}
        )
        taken = False
        try:
            await client.update_weights(request)
            taken = True
            await client.finish_weight_update(str(version))
        except Exception as error:
            if not (why := "it has taken it" if taken else doubt(error, self._engines)):
                raise
            self._in_doubt = True
            # each engine does that after its load, however it ended
            await client.update_weight_version(UNKNOWN)
            raise EngineFailed(str(error), hint=doubt_hint(why)) from error
        self._in_doubt = False

    async def empty_caches(self) -> None:
        """Drops caches computed with other weights. The engine must be paused."""
        client, settings = self._client, self._settings
        recompute = settings.pause == "keep" and settings.recompute
        emptied = await client.reset_prefix_cache(reset_running_requests=recompute, reset_connector=True)
        if not emptied:
            logger.warning(
                "requests in flight hold the prefix cache: it keeps entries of earlier versions (recompute "
                "is %s)",
                recompute,
            )
        if client.model_config.is_multimodal_model:
            await client.reset_encoder_cache()
