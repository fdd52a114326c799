"""The trainer's half of the way back: SkyRL's inference client where engines sample elsewhere and follow a
bridge.

Generation is external: environments ask their own engines, so this client answers no prompt. Of a weight sync
it hears the end, and publishes the policy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partialmethod
from typing import Any, NoReturn

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

from shmbridge.consumers.feed import Feed
from shmbridge.weights import WeightsReader


class SampledElsewhere(RuntimeError):
    """SkyRL asked this client to sample, or for something that only engines of its own have."""


class ShmInferenceClient(InferenceEngineInterface):
    """SkyRL's inference client over a bridge; lives in the trainer's process, beside the feed.

    Ray copies it into the policy's workers: there it has no feed, and only says what the sender of weights
    needs.

    Args:
        feed: of the bridge; None in a worker. Stays open.
        bridge: its bridge.
        model_name: what SkyRL calls the model.
        engines: URLs of engines to which each version is pushed; engines that follow the bridge by
            themselves need no mention.
    """

    def __init__(
        self, feed: Feed | None, bridge: str, model_name: str = "", engines: Sequence[str] = ()
    ) -> None:
        self._feed, self.bridge, self._model_name = feed, bridge, model_name
        self.engines = tuple(engines)
        self._reader: WeightsReader | None = None
        self._begun = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ShmInferenceClient, (None, self.bridge, self._model_name, self.engines)

    # -- what SkyRL's dispatch calls in the trainer's process

    def increment_weight_version(self) -> None:
        """Publishes the policy version: that of the newest weights in the bridge, or else the next number.

        Called by SkyRL at the end of each weight sync; the first begins the run. Never blocks.
        """
        if self._feed is None:
            return
        if self._reader is None:
            self._reader = WeightsReader(self.bridge)
        weights = self._reader.version
        following = self.weight_version + 1
        publish, self._begun = self._feed.publish if self._begun else self._feed.begin_run, True
        publish(following if weights is None else max(weights, following))

    @property
    def weight_version(self) -> int:
        """The published policy version; -1 before the first."""
        return -1 if self._feed is None else self._feed.consumer.policy_version

    @property
    def model_name(self) -> str:
        """What SkyRL calls the model."""
        return self._model_name

    async def teardown(self) -> None:
        """Closes the reader of weights; the feed stays open."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def get_world_size(self) -> tuple[int, int]:
        """Returns (0, 0): no engine is a rank of a process group."""
        return 0, 0

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: engines elsewhere pause and empty their caches themselves when they load a version,
        share no memory with the trainer, and are in no process group of its; environments end sessions.
        """

    pause_generation = resume_generation = reset_prefix_cache = finish_session = _nothing
    wake_up = sleep = wake_for_weight_sync = sleep_for_weight_sync = _nothing
    init_weight_update_communicator = _nothing

    def get_endpoint_url(self) -> NoReturn:
        """Raises SampledElsewhere."""
        raise self._elsewhere("get_endpoint_url")

    async def _refuse(self, call: str, *_: Any, **__: Any) -> NoReturn:
        raise self._elsewhere(call)

    generate = partialmethod(_refuse, "generate")
    chat_completion = partialmethod(_refuse, "chat_completion")
    completion = partialmethod(_refuse, "completion")
    render_chat_completion = partialmethod(_refuse, "render_chat_completion")
    update_named_weights = partialmethod(_refuse, "update_named_weights")
    load_lora_adapter = partialmethod(_refuse, "load_lora_adapter")

    def _elsewhere(self, call: str) -> SampledElsewhere:
        return SampledElsewhere(
            f"{call}() of bridge {self.bridge!r}: environments sample with engines of theirs -> use SkyRL's "
            "own client for this, or leave it out"
        )
