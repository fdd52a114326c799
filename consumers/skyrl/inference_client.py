"""The trainer's half of the way back: SkyRL's inference client where engines sample elsewhere and follow a
bridge.

Generation is external: environments ask their own engines, so this client answers no prompt. Of a weight sync
it hears the end, and publishes the policy version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface

from shmbridge.consumers.feed import Feed
from shmbridge.weights import WeightsReader


class SampledElsewhere(RuntimeError):
    """SkyRL asked this client to sample, or for something that only engines of its own have."""


class ShmInferenceClient(InferenceEngineInterface):
    """SkyRL's inference client over a bridge; lives in the trainer's process, beside the feed.

    Ray copies it into the policy's workers: there it has no feed, and only says what the sender of weights
    needs. Three words and a number travel so.

    Args:
        feed: of the bridge; None in a worker. Stays open.
        bridge: its bridge.
        model_name: what SkyRL calls the model.
        engines: URLs of engines to which each version is pushed; engines that follow the bridge by
            themselves need no mention.
        least_version: lowest version of the next weights.
    """

    def __init__(
        self,
        feed: Feed | None,
        bridge: str,
        model_name: str = "",
        engines: Sequence[str] = (),
        least_version: int = 0,
    ) -> None:
        self._feed, self.bridge, self._model_name = feed, bridge, model_name
        self.engines, self.least_version = tuple(engines), least_version
        self._reader: WeightsReader | None = None
        self._begun = False

    def __reduce__(self) -> tuple[Any, ...]:
        least = self.least_version if self._feed is None else self.weight_version + 1
        return ShmInferenceClient, (None, self.bridge, self._model_name, self.engines, least)

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

    async def pause_generation(self) -> None:
        """Does nothing: an engine pauses itself while it loads a version."""

    async def resume_generation(self) -> None:
        """Does nothing, see `pause_generation`."""

    async def wake_up(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: engines elsewhere share no memory with the trainer."""

    async def sleep(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing, see `wake_up`."""

    wake_for_weight_sync, sleep_for_weight_sync = wake_up, sleep

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> None:
        """Does nothing: an engine empties its cache when it loads a version."""

    async def finish_session(self, session_id: str) -> None:
        """Does nothing: sessions are the environments' affair."""

    async def teardown(self) -> None:
        """Closes the reader of weights; the feed stays open."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # -- what SkyRL's workers call

    async def get_world_size(self) -> tuple[int, int]:
        """Returns (0, 0): no engine is a rank of a process group."""
        return 0, 0

    async def init_weight_update_communicator(self, init_info: Any) -> None:
        """Does nothing: there is no process group to make."""

    # -- what nobody here answers

    async def generate(self, input_batch: Any, model: str | None = None) -> NoReturn:
        """Raises SampledElsewhere."""
        self._refuse("generate")

    def get_endpoint_url(self) -> NoReturn:
        """Raises SampledElsewhere."""
        self._refuse("get_endpoint_url")

    async def chat_completion(self, request_payload: dict[str, Any]) -> NoReturn:
        """Raises SampledElsewhere."""
        self._refuse("chat_completion")

    async def render_chat_completion(self, request_payload: dict[str, Any]) -> NoReturn:
        """Raises SampledElsewhere."""
        self._refuse("render_chat_completion")

    async def completion(self, request_payload: dict[str, Any]) -> NoReturn:
        """Raises SampledElsewhere."""
        self._refuse("completion")

    async def update_named_weights(self, request: Any) -> NoReturn:
        """Raises SampledElsewhere: low-rank adapters that SkyRL writes to disk go to engines of its own."""
        self._refuse("update_named_weights")

    async def load_lora_adapter(self, lora_name: str, lora_path: str) -> NoReturn:
        """Raises SampledElsewhere, see `update_named_weights`."""
        self._refuse("load_lora_adapter")

    def _refuse(self, call: str) -> NoReturn:
        raise SampledElsewhere(
            f"{call}() of bridge {self.bridge!r}: environments sample with engines of theirs -> use SkyRL's "
            "own client for this, or leave it out"
        )
