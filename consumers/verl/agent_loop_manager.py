"""verl's agent loop manager over a bridge: environments elsewhere play, a thread here writes their rows.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class:
      shmbridge.consumers.verl.agent_loop_manager.ShmAgentLoopManager

The environments own prompts and grouping. verl issues uids, and each whole group of the bridge is folded
onto one of them: `generate_sequences` notes the uids and returns; the thread takes as many groups, writes
their rows into TransferQueue (`kv_batch_put`), then sets the tags of the uids to finished.

The hub is this object's feed, in verl's TaskRunner process; verl's actors never see the bridge's records.
Groups that verl drops as stale, and all groups under verl's own trainer modes, are released at the next
`generate_sequences` after verl has removed their rows. Otherwise `trainer.py` says when a step is over; what
comes again after a kill: docs/how-to/verl.md.
"""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Self

import transfer_queue as tq

import shmbridge
from shmbridge import ConsumerEmpty
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.feed import Feed, Step
from shmbridge.consumers.trajectories import columns_ignored
from shmbridge.consumers.verl.metrics import GroupSummary, atropos_metrics, summary_of
from shmbridge.consumers.verl.rows import COLUMNS, Rows, rows_of
from shmbridge.consumers.verl.settings import (
    MODE,
    Settings,
    form_of,
    longest_row,
    release_at,
    steps_until_taken,
)
from shmbridge.record import Group
from shmbridge.weights import WeightsReader

__all__ = ["ShmAgentLoopManager"]

log = logging.getLogger(__name__)

_PARTITION = "train"
_ANY_LENGTH = 1 << 20
_NO_LAST_STEP = 1 << 30
_Order = tuple[list[str], int]  # uids of a call of generate_sequences, and verl's global_steps
_COUNTED = ("feed_", "left_out_", "discarded_")  # of the feed's counters, in verl's log


class _Folded(NamedTuple):
    """One group of the bridge, under the uid it was folded onto."""

    step: Step  # of this group alone
    keys: list[str]  # of its rows in TransferQueue
    summary: GroupSummary


class ShmAgentLoopManager:
    """Folds a bridge's groups onto verl's prompts; see this module. Call it from verl's thread.

    Args:
        config: verl's whole configuration; `trainer.atropos` has the bridge's keys.

    Attributes:
        feed: the bridge's Feed, whose steps are single groups here.

    Raises:
        ValueError: the configuration asks for what a bridge cannot give; names the key.
        ConsumerTaken: another process reads this bridge.
    """

    def __init__(self, config: Any) -> None:
        self._settings = settings = Settings.of(config)
        mode = config.trainer.v1.trainer_mode
        self._is_told = mode == MODE  # of checkpoints, by the trainer
        if settings.start == "from-bridge" and mode != MODE:
            raise ValueError(
                f"trainer.atropos.start=from-bridge with trainer_mode={mode}, which does not load the "
                f"bridge's weights -> trainer.v1.trainer_mode={MODE}, or trainer.atropos.start=from-scratch"
            )
        self._form = form_of(config)
        self._rows_of_group = int(config.actor_rollout_ref.rollout.n)
        self._weights = _weights_reader(config, settings)
        self._folded: dict[str, _Folded] = {}  # by uid, until verl is done with them
        self._counts: Counter[str] = Counter()
        self._error: BaseException | None = None  # what ended the thread
        self._closing = threading.Event()
        self._ahead = 0  # versions that the bridge is ahead of verl's steps
        self._orders: queue.SimpleQueue[_Order | None] = queue.SimpleQueue()  # None ends the thread
        per_step, longest = int(config.data.train_batch_size), longest_row(config, settings)
        run = shmbridge.Run(
            batch_size=max(per_step * self._rows_of_group, 1),
            max_token_len=longest or _ANY_LENGTH,
            num_steps=int(config.trainer.get("total_training_steps", None) or _NO_LAST_STEP),
            checkpoint_dir=config.trainer.default_local_dir,
            save_checkpoint_interval=config.trainer.save_freq,
        )
        limit, begun_within = settings.max_off_policy_steps, steps_until_taken(config, settings)
        self.feed = Feed(
            settings.bridge,
            groups=per_step,
            exact=True,
            run=run,
            release_at=release_at(config, settings),
            max_staleness=limit,
            set_aside_after=settings.set_aside_after,
            unfit=settings.unfit,
            longest_row=longest,
            credit=settings.credit,
            whole_rows=settings.whole_rows,
            start=settings.start,
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
        """Returns a manager, as verl asks for one: its clients are not used. Raises as the class."""
        return cls(config)

    # -- calls of verl

    def generate_sequences(self, prompts: Any) -> None:
        """Asks for one group per prompt, and returns at once.

        Never waits for groups. Releases the groups that verl has cleared meanwhile.

        Args:
            prompts: a TensorDict with `uid` per row and `global_steps`; all else in it is not read.

        Raises:
            ValueError: prompts of validation.
            ConsumerEmpty, Drained, NoAdvantages, NoLogprobs, ...: what ended the thread; the groups in its
                hands are not released.
        """
        if prompts.get("validate"):
            raise ValueError(
                "verl validates with prompts of its own, and environments own them here -> "
                "trainer.val_before_train=False trainer.test_freq=-1; environments evaluate with split='eval'"
            )
        if self._error is not None:
            raise self._error
        step = int(prompts["global_steps"])
        if not self._is_told and step > 1:
            self.feed.load_state_dict(self.feed.state_dict())  # verl has loaded a checkpoint
        self._is_told = True
        self._follow_weights(step)
        self.release_cleared()
        self._orders.put(([str(uid) for uid in prompts["uid"]], step))

    def step_ended(self, keys: Collection[str], version: int | None = None) -> dict[str, float]:
        """Notes that the groups of a step are trained, and returns the step's metrics. Never blocks.

        They are released, or held for a checkpoint: see this module.

        Args:
            keys: the rows that were trained, verl's `{uid}_{session}_{index}`; others, such as padding, are
                skipped.
            version: of the weights that the step made; published to the environments.
        """
        trained = self._pop(dict.fromkeys(key.split("_")[0] for key in keys))
        newer = version if version is not None and version > self.feed.consumer.policy_version else None
        if trained:
            self.feed.trained([each.step for each in trained], version=newer)
        elif newer is not None:
            self.feed.consumer.publish_policy_version(newer)
        return {
            **atropos_metrics([each.summary for each in trained]),
            **{f"shmbridge/{name}": count for name, count in self.stats().items()},
        }

    def step_failed(self, error: BaseException) -> None:
        """Notes that verl's step raised an error: a resumed run tries its groups apart. Never raises.

        Blocks for the disk, and for one question to TransferQueue.
        """
        try:
            if sampled := self._taken(cleared=False):
                self.feed.failed([each.step for each in sampled], error)
        except BaseException as raised:
            if raised is not error:
                log.exception("the failed step is not noted, so its groups come again as if nothing was")

    def release_cleared(self) -> int:
        """Releases the held groups of which TransferQueue has no row any more; returns how many.

        Blocks for one question to TransferQueue, if anything is held.
        """
        cleared = self._taken(cleared=True) if self._folded else []
        if cleared:
            self.feed.dropped([each.step for each in cleared], "cleared")
        return len(cleared)

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: what was folded, released, left out, and why. Never blocks."""
        return {
            **{f"{name}_total": float(count) for name, count in sorted(self._counts.items())},
            **{name: count for name, count in self.feed.stats().items() if name.startswith(_COUNTED)},
            "groups_held": float(len(self._folded)),
        }

    def close(self) -> None:
        """Gives the bridge up; releases nothing. Idempotent; blocks for the thread."""
        self._closing.set()
        self.feed.close()  # ends the wait for groups
        self._orders.put(None)
        self._thread.join()
        self._folded.clear()
        if self._weights is not None:
            self._weights.close()

    def _pop(self, uids: Iterable[str]) -> list[_Folded]:
        return [self._folded.pop(uid) for uid in uids if uid in self._folded]

    def _taken(self, *, cleared: bool) -> list[_Folded]:
        """Takes out the groups whose prompts verl has removed, and whose rows it has cleared or has not."""
        there = (tq.kv_list(_PARTITION) or {}).get(_PARTITION, {}).keys()
        folded = list(self._folded.items())
        return self._pop(
            [uid for uid, each in folded if uid not in there and there.isdisjoint(each.keys) == cleared]
        )

    # -- the thread

    def _drain(self) -> None:
        while (order := self._orders.get()) is not None:
            try:
                self._fill(order)
            except BaseException as error:
                if not self._closing.is_set():
                    self._fail(order, error)
                return

    def _fill(self, order: _Order) -> None:
        """Takes the groups of an order and writes them."""
        uids, at_step = order
        try:
            step = self.feed.take(self._settings.patience_s, groups=len(uids))
        except ConsumerEmpty as none:
            hint = "start environments on this bridge, or raise trainer.atropos.max_wait_time, timeout or "
            raise ConsumerEmpty(none.message, hint=f"{hint}retry_attempts") from None
        versions = [self._steps_of(group, at_step) for group in step.groups]
        try:
            rows = rows_of(step.rows, uids, versions, self._form)
        except Exception as error:
            if isinstance(error, NoAdvantages):
                words = str(error).split(" -> ")[0]
                error = NoAdvantages(f"{words} -> trainer.atropos.fallback_to_grpo=true")
            self.feed.failed(step, error)
            raise error from None
        self._count(step, rows)
        keys: dict[str, list[str]] = {uid: [] for uid in uids}
        for key in rows.keys:
            keys[key.split("_")[0]].append(key)
        empty, tags, group_of = [], [], step.batch.group_index
        for number, part in enumerate(self.feed.parts(step)):
            uid, (oldest, _) = uids[number], versions[number]
            if keys[uid]:
                of_it = [row for row in step.rows if group_of[row.row] == number]
                self._folded[uid] = _Folded(part, keys[uid], summary_of(of_it))
            else:  # verl replaces it
                empty.append(part)
            # verl's prompts of step s are sampled under the weights of s - 1
            status = "finished" if keys[uid] else "failure"
            tags.append({"is_prompt": True, "status": status, "global_steps": oldest + 1})
        if rows.fields is not None:
            tq.kv_batch_put(keys=rows.keys, partition_id=_PARTITION, fields=rows.fields, tags=rows.tags)
        tq.kv_batch_put(keys=uids, partition_id=_PARTITION, tags=tags)  # verl may sample them now
        if empty:
            self.feed.dropped(empty, "no_response")

    def _fail(self, order: _Order, error: BaseException) -> None:
        """Keeps the error for verl's next call, and wakes a trainer that waits for the order."""
        # As text: a traceback would keep the groups, and with them the bridge, from a successor.
        log.error("no more rows for verl: %s", "".join(traceback.format_exception(error)))
        error.__context__ = error.__cause__ = None
        self._error = error.with_traceback(None)
        try:
            tags = [{"is_prompt": True, "status": "failure", "global_steps": 0} for _ in order[0]]
            tq.kv_batch_put(keys=order[0], partition_id=_PARTITION, tags=tags)
        except Exception:
            log.exception("TransferQueue does not take the failure either")

    # -- what groups are

    def _steps_of(self, group: Group, at_step: int) -> tuple[int, int]:
        """Returns the smallest and largest version of a group, in verl's steps."""
        newest = max(record.meta.max_policy_version for record in group.records)
        if (oldest := group.oldest_version) < 0:
            self._counts["groups_without_version"] += 1
            return at_step - 1, at_step - 1
        return oldest - self._ahead, newest - self._ahead

    def _count(self, step: Step, rows: Rows) -> None:
        self._counts.update(rows.counts)
        self._counts["rows"] += len(rows.keys)
        self._counts["groups_uneven"] += sum(group.rows != self._rows_of_group for group in step.groups)
        self._counts["groups_fallback"] += int(step.metrics["groups_fallback"])
        for name, count in columns_ignored(step.batch, COLUMNS).items():
            self._counts[f"columns_ignored{{{name}}}"] += count

    def _follow_weights(self, step: int) -> None:
        """Publishes the version that verl's weights have, and notes how it differs from verl's steps."""
        current, known = step - 1, self.feed.consumer.policy_version
        if self._weights is not None and (written := self._weights.version) is not None:
            self._ahead = written - current
        elif known > current + self._ahead:  # an earlier run's
            self._ahead = known + 1 - current
        if (version := current + self._ahead) > known:
            self.feed.consumer.publish_policy_version(version)


def _weights_reader(config: Any, settings: Settings) -> WeightsReader | None:
    """Returns a reader of the versions that the checkpoint engine writes; None if it is another engine."""
    engine = config.actor_rollout_ref.rollout.checkpoint_engine
    if engine.backend != "shmbridge":
        return None
    named = (engine.engine_kwargs.get("shmbridge", None) or {}).get("bridge", settings.bridge)
    return WeightsReader(named)
