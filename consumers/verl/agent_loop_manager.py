"""verl's agent loop manager over a bridge: environments elsewhere play, a thread here writes their rows.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class:
      shmbridge.consumers.verl.agent_loop_manager.ShmAgentLoopManager

The environments own prompts and grouping. verl issues uids, and each whole group of the bridge is folded
onto one of them: `generate_sequences` notes the uids and returns; the thread takes as many groups, writes
their rows into TransferQueue (`kv_batch_put`), then sets the tags of the uids to finished.

HUB: this object, in verl's TaskRunner process; verl's actors never see the bridge's records.

RELEASED: a group's records, once verl has trained it and the weights are out. Under
`trainer.v1.trainer_mode=shmbridge` that is `PPOTrainer.on_step_end`, after the optimizer step and, in a step
with one, after the checkpoint. Groups that verl drops as stale, and all groups under verl's own modes, are
released at the next `generate_sequences` after verl has removed their rows (`kv_clear`).

AGAIN after a kill: all groups whose records were not released: those waiting, those in TransferQueue, those
of the step under way. Under verl's own modes also those of the last finished step.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import transfer_queue as tq

import shmbridge
from shmbridge import Batch
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.learner.data.batch_wait import BatchWait, NoBatch
from shmbridge.consumers.trajectories import columns_ignored, trajectories
from shmbridge.consumers.verl.folded_groups import Folded, FoldedGroups
from shmbridge.consumers.verl.metrics import atropos_metrics, summary_of
from shmbridge.consumers.verl.rows import COLUMNS, rows_of
from shmbridge.consumers.verl.settings import Settings, form_of, steps_until_taken
from shmbridge.record.groups import Group
from shmbridge.weights import WeightsReader

__all__ = ["NoGroups", "ShmAgentLoopManager"]

log = logging.getLogger(__name__)

_PARTITION = "train"
_LOOK_EVERY_S = 0.2  # for close()
_ASK_S = 1.5  # longer than the second after which the consumer says that a batch does not fit into the lanes
_LONGEST_ROW = 1 << 20
_NO_LAST_STEP = 1 << 30


class NoGroups(TimeoutError):
    """The environments wrote too few groups within the limits of `trainer.atropos`."""


@dataclass
class _Order:
    """What one call of generate_sequences asked for."""

    uids: list[str]
    step: int  # verl's global_steps


class ShmAgentLoopManager:
    """Folds a bridge's groups onto verl's prompts; see this module. Call it from verl's thread.

    Args:
        config: verl's whole configuration; `trainer.atropos` has the bridge's keys.

    Raises:
        ValueError: the configuration asks for what a bridge cannot give; names the key.
        ConsumerTaken: another process reads this bridge.
    """

    def __init__(self, config: Any) -> None:
        self._settings = settings = Settings.of(config)
        self._form = form_of(config)
        self._rows_of_group = int(config.actor_rollout_ref.rollout.n)
        self._weights = _weights_reader(config, settings)
        self._folded = FoldedGroups()
        self._error: BaseException | None = None  # what ended the thread
        self._ahead = 0  # versions that the bridge is ahead of verl's steps
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._waiting: list[str] = []  # uids of the order under way; this and the next for the thread only
        self._stock: list[Group] = []  # taken, not yet folded
        self._closing = threading.Event()
        per_step = int(config.data.train_batch_size)
        run = shmbridge.Run(
            batch_size=max(per_step * self._rows_of_group, 1),
            max_token_len=_LONGEST_ROW,
            num_steps=int(config.trainer.get("total_training_steps", None) or _NO_LAST_STEP),
        )
        limit, begun_within = settings.max_off_policy_steps, steps_until_taken(config, settings)
        # With a limit the bridge hands out whole steps; verl also asks for single groups, for dropped ones.
        self._at_once = None if limit is None else per_step
        self._consumer = shmbridge.Consumer(
            settings.bridge,
            run=run,
            lanes=settings.lanes,
            policy="fair" if limit is None else "oldest",
            max_off_policy_steps=begun_within,
            groups_per_step=None if limit is None else per_step,
        )
        self._thread = threading.Thread(target=self._drain, name="shmbridge-verl", daemon=True)
        self._thread.start()

    @classmethod
    def create(
        cls,
        config: Any,
        llm_client: Any = None,
        teacher_client: Any = None,
        reward_loop_worker_handles: Any = None,
    ) -> Self:
        """Returns a manager, as verl asks for one. Does not block.

        Args:
            config: verl's whole configuration.
            llm_client: not used: environments sample elsewhere.
            teacher_client: None, as `distillation.enabled` is refused.
            reward_loop_worker_handles: not used: environments score.

        Raises: as the class.
        """
        return cls(config)

    # -- calls of verl

    def generate_sequences(self, prompts: Any) -> None:
        """Asks for one group per prompt, and returns at once.

        Never waits for groups. Releases the groups that verl has cleared meanwhile.

        Args:
            prompts: a TensorDict with `uid` per row and `global_steps`; all else in it is not read.

        Raises:
            ValueError: prompts of validation.
            NoGroups, NoAdvantages, NoLogprobs, ...: what ended the thread; the groups in its hands are not
                released.
        """
        if prompts.get("validate"):
            raise ValueError(
                "verl validates with prompts of its own, and environments own them here -> "
                "trainer.val_before_train=False trainer.test_freq=-1; environments evaluate with split='eval'"
            )
        self._raise_error()
        step = int(prompts["global_steps"])
        self._follow_weights(step)
        self.release_cleared()
        self._orders.put(_Order([str(uid) for uid in prompts["uid"]], step))

    def step_ended(self, keys: Collection[str], version: int | None = None) -> dict[str, float]:
        """Releases the groups of a step that is over, and returns its metrics. Never blocks.

        Args:
            keys: the rows that were trained, verl's `{uid}_{session}_{index}`; others, such as padding, are
                skipped.
            version: of the weights that the step made; published to the environments.
        """
        if version is not None and version > self._consumer.policy_version:
            self._consumer.publish_policy_version(version)
        trained = self._folded.release({key.split("_")[0] for key in keys}, "groups_trained")
        return {
            **atropos_metrics([each.summary for each in trained]),
            **{f"shmbridge/{name}": count for name, count in self.stats().items()},
        }

    def release_cleared(self) -> int:
        """Releases the held groups of which TransferQueue has no row any more; returns how many.

        Blocks for one question to TransferQueue, if anything is held.
        """
        if not self._folded.uids():
            return 0
        there = (tq.kv_list(_PARTITION) or {}).get(_PARTITION, {})
        return len(self._folded.release(self._folded.uids_without_rows(there), "groups_cleared"))

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: what was folded, released, left out, and why. Never blocks."""
        name = "left_out_total{eval}"
        return {**self._folded.stats(), name: self._consumer.stats()[name]}

    def close(self) -> None:
        """Gives the bridge up; releases nothing. Idempotent; blocks for the thread."""
        self._closing.set()
        self._thread.join()
        self._folded.forget()
        self._stock.clear()
        if self._weights is not None:
            self._weights.close()
        self._consumer.close()

    # -- the thread

    def _drain(self) -> None:
        while not self._closing.is_set():
            try:
                order = self._orders.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
            self._waiting = list(order.uids)
            try:
                self._fill(order)
            except BaseException as error:
                self._fail(error)
                return

    def _fill(self, order: _Order) -> None:
        """Takes the groups of an order and writes them."""
        if (groups := self._take(len(order.uids))) is None:
            return
        batch = Batch(groups, "packed")
        if self._settings.whole_rows:
            batch.train_whole_rows()
        try:
            found, credit = trajectories(batch, self._settings.credit, whole_rows=self._settings.whole_rows)
        except NoAdvantages as none:
            raise NoAdvantages(
                f"{str(none).split(' -> ')[0]} -> trainer.atropos.fallback_to_grpo=true"
            ) from None
        versions = [self._steps_of(group, order) for group in groups]
        rows = rows_of(found, order.uids, versions, self._form)
        of_group: dict[str, list[str]] = {uid: [] for uid in order.uids}
        for key in rows.keys:
            of_group[key.split("_")[0]].append(key)
        counts = rows.counts + self._counted(groups, credit, columns_ignored(batch, COLUMNS))
        by_group: list[list[Any]] = [[] for _ in groups]
        for row in found:
            by_group[int(batch.group_index[row.row])].append(row)
        folded = {
            uid: Folded(group, of_group[uid], summary_of(of_it))
            for uid, group, of_it in zip(order.uids, groups, by_group, strict=True)
        }
        self._folded.hold(folded, counts)
        if rows.fields is not None:
            tq.kv_batch_put(keys=rows.keys, partition_id=_PARTITION, fields=rows.fields, tags=rows.tags)
        self._finish(order.uids, versions, of_group)
        self._folded.release([uid for uid, keys in of_group.items() if not keys], "groups_without_response")

    def _take(self, count: int) -> list[Group] | None:
        """Returns `count` whole groups; None if the manager is closing."""
        wait = BatchWait(self._settings.patience, lambda: self._missing(count), log.warning)
        with self._consumer.one_wait():
            while (lacking := count - len(self._stock)) > 0:
                groups = self._consumer.take_groups(
                    groups=self._at_once or lacking,
                    max_staleness=self._settings.max_off_policy_steps,
                    timeout_s=_ASK_S,
                )
                if groups is not None:
                    self._stock += groups
                    continue
                if self._closing.is_set():
                    return None
                if self._consumer.draining and self._consumer.queue.groups() < lacking:
                    raise NoGroups(
                        f"{self._missing(count)}, and is drained -> end training, or take another bridge"
                    )
                try:
                    wait.look()
                except NoBatch as over:
                    raise NoGroups(
                        f"{str(over).split(' -> ')[0]} -> start environments on this bridge, or raise "
                        "trainer.atropos.max_wait_time, timeout or retry_attempts"
                    ) from None
        taken, self._stock = self._stock[:count], self._stock[count:]
        return taken

    def _missing(self, count: int) -> str:
        there = self._consumer.queue.groups() + len(self._stock)
        return f"bridge {self._settings.bridge!r} has {there} of the {count} groups that a step wants"

    def _finish(
        self, uids: Sequence[str], versions: Sequence[tuple[int, int]], keys: dict[str, list[str]]
    ) -> None:
        """Lets verl sample the groups; a group without rows is a failed one, which verl replaces."""
        tags = [
            {
                "is_prompt": True,
                "status": "finished" if keys[uid] else "failure",
                "global_steps": oldest + 1,  # verl's prompts of step s are sampled under the weights of s - 1
            }
            for uid, (oldest, _) in zip(uids, versions, strict=True)
        ]
        tq.kv_batch_put(keys=list(uids), partition_id=_PARTITION, tags=tags)
        self._waiting = []

    def _fail(self, error: BaseException) -> None:
        """Keeps the error for verl's next call, and wakes a trainer that waits for the order."""
        # As text: a traceback would keep the groups, and with them the bridge, from a successor.
        log.error("no more rows for verl: %s", "".join(traceback.format_exception(error)))
        error.__context__ = error.__cause__ = None
        self._error = error.with_traceback(None)
        try:
            if self._waiting:
                tags = [{"is_prompt": True, "status": "failure", "global_steps": 0} for _ in self._waiting]
                tq.kv_batch_put(keys=self._waiting, partition_id=_PARTITION, tags=tags)
        except Exception:
            log.exception("TransferQueue does not take the failure either")

    # -- what groups are

    def _steps_of(self, group: Group, order: _Order) -> tuple[int, int]:
        """Returns the smallest and largest version of a group, in verl's steps."""
        metas = [record.meta for record in group.records]
        oldest = min(meta.min_policy_version for meta in metas)
        newest = max(meta.max_policy_version for meta in metas)
        if oldest < 0:
            self._folded.count("groups_without_version")
            return order.step - 1, order.step - 1
        return oldest - self._ahead, newest - self._ahead

    def _counted(
        self, groups: Iterable[Group], credit: dict[str, float], ignored: dict[str, int]
    ) -> Counter[str]:
        listed = list(groups)
        return Counter(
            {
                "groups": len(listed),
                "rows": sum(group.rows for group in listed),
                "groups_uneven": sum(group.rows != self._rows_of_group for group in listed),
                "groups_redelivered": sum(group.records[0].meta.redelivered for group in listed),
                "groups_fallback": int(credit["groups_fallback"]),
                **{f"columns_ignored{{{name}}}": count for name, count in ignored.items()},
            }
        )

    def _follow_weights(self, step: int) -> None:
        """Publishes the version that verl's weights have, and notes how it differs from verl's steps."""
        current, known = step - 1, self._consumer.policy_version
        if self._weights is not None and (written := self._weights.version) is not None:
            self._ahead = written - current
        elif known > current + self._ahead:  # an earlier run's
            self._ahead = known + 1 - current
        if (version := current + self._ahead) > known:
            self._consumer.publish_policy_version(version)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _weights_reader(config: Any, settings: Settings) -> WeightsReader | None:
    """Returns a reader of the versions that the checkpoint engine writes; None if it is another engine."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != "shmbridge":
        return None
    named = (engine.engine_kwargs.get("shmbridge", None) or {}).get("bridge", settings.bridge)
    return WeightsReader(named)
