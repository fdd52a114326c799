"""One update: a packed batch in, a gradient and an optimizer step out.

`objective.py` defines the loss, `credit.py` the advantages.

Default differences from the GRPO paper (arXiv 2402.03300):
1. the loss is a mean over tokens, not over completions, and the two clip bounds are separate (DAPO,
2503.14476);
2. no KL term; an entropy bonus instead, off by default;
3. advantages that an environment wrote per token replace those from the scores, token by token;
4. one update per batch: the ratio corrects for staleness, not for epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import shmbridge
from shmbridge.consumers import losses
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import require_advantages
from shmbridge.consumers.advantages.from_scores import Reduce, alone
from shmbridge.consumers.learner import Metrics, Untrainable
from shmbridge.consumers.learner.data.microbatch import MicroBatch, micro_batches
from shmbridge.consumers.learner.data.row_checks import DIFFERENCE, RowCheck
from shmbridge.consumers.learner.data.training_rows import (
    NO_LOGPROB,
    TrainingRows,
    prepare,
    refuse_images,
    rows_with_unknown_tokens,
)
from shmbridge.consumers.learner.model.forward import trained_logprobs
from shmbridge.consumers.learner.model.load import Reference
from shmbridge.consumers.learner.model.optimizer import new_optimizer
from shmbridge.consumers.learner.model.sharding import Parallel, whole
from shmbridge.consumers.learner.report.step_metrics import StepTimes
from shmbridge.consumers.learner.train.objective import LOSS_SHARES, SHARES, Counts, Objective, micro_loss
from shmbridge.consumers.learner.world import World

_OF = ("mismatch_kl", "logprob_diff_mean", "logprob_diff_max")
MISMATCH = (*_OF, *(f"{name}_fresh" for name in _OF), "tokens_fresh")
_UNSEEN_STEPS = 10  # warn after this many steps without a fresh token
__all__ = ["Learner", "NoReference", "Objective"]
_IDLE = TrainingRows(
    tokens=np.zeros(2, np.int32),
    cu_seqlens=np.array([0, 2], np.int32),
    trained=np.array([False, True]),
    advantages=np.zeros(2, np.float32),
    sampled_logprobs=np.full(2, NO_LOGPROB, np.float32),
    temperature=np.ones(1, np.float32),
)  # the batch of a rank that has nothing to train
Result = TypeVar("Result")


class Mismatch:
    """Sums the differences over a step's trained tokens whose sampler log-probability is known."""

    def __init__(self) -> None:
        # sums over all ranks; rows: all tokens, fresh tokens; columns: count, divergence, distance
        self._sums = np.zeros((2, 3))
        self._largest = np.zeros(2)
        # of this rank and batch, (2, 4) on the device: the same sums, and the largest distance
        self._own: list[Tensor] = []

    def add(self, logprobs: Tensor, sampled_logprobs: Tensor, fresh: Tensor | None) -> None:
        """Counts a micro-batch. Never blocks.

        Args:
            logprobs: (n,) nats, under the policy about to be updated, without gradient.
            sampled_logprobs: (n,) nats, recorded when the token was sampled; NaN where unknown.
            fresh: (n,) bool, token_versions says that the trained version sampled the token; None: unknown.
        """
        known = losses.known(sampled_logprobs)
        apart = torch.where(known, (logprobs - sampled_logprobs).abs(), 0.0).double()
        # The tokens were drawn by the sampler, so this estimates KL(sampler || policy).
        divergence = losses.kl_estimate(
            torch.where(known, sampled_logprobs, logprobs).double(), logprobs.double(), "k3"
        )
        rows = []
        for counted in (known, torch.zeros_like(known) if fresh is None else known & fresh):
            distance = torch.where(counted, apart, 0.0)
            largest = torch.nn.functional.pad(distance, (0, 1)).max()
            rows.append(
                torch.stack(
                    [
                        counted.sum().double(),
                        torch.where(counted, divergence, 0.0).sum(),
                        distance.sum(),
                        largest,
                    ]
                )
            )
        self._own.append(torch.stack(rows))

    def metrics(self, reduce: Reduce = alone) -> Metrics:
        """Returns the metrics of all batches so far; NaN without tokens. Maxima are of this rank alone.

        Blocks as long as `reduce`, the sum of an array over all ranks; every rank calls it once.
        """
        own = torch.stack(self._own).cpu().numpy() if self._own else np.zeros((1, 2, 4))
        self._own = []
        self._sums += reduce(own[..., :3].sum(axis=0))
        self._largest = np.maximum(self._largest, own[..., 3].max(axis=0))
        found: Metrics = {}
        for (count, divergence, distance), largest, suffix in zip(
            self._sums.tolist(), self._largest.tolist(), ("", "_fresh"), strict=True
        ):
            values = (divergence / count, distance / count, largest) if count else (float("nan"),) * 3
            found |= {f"{name}{suffix}": value for name, value in zip(_OF, values, strict=True)}
        return found | {"tokens_fresh": self._sums[1, 0].item()}


class MismatchAlarm:
    """Warns if fresh tokens differ by more than `limit` nats in the mean (0: never), or if none is fresh."""

    def __init__(self, limit: float, say: Callable[[str], None]) -> None:
        self._limit, self._say = limit, say
        self._above = False
        self._total = 0
        self._unseen = 0  # steps with log-probabilities but no fresh token, until the first fresh one

    def looked(self, measured: Metrics) -> Metrics:
        """Reads a step's metrics; returns how many steps were above the limit, and warns of the first."""
        self._look_for_fresh(measured)
        mean = measured.get("logprob_diff_mean_fresh", float("nan"))
        above = bool(self._limit) and mean > self._limit
        self._total += above
        if above and not self._above:
            self._say(
                f"the sampler is not the policy: over {measured['tokens_fresh']:.0f} tokens of this very "
                f"version their log-probabilities are {mean:.3g} nats apart in the mean, "
                f"{measured['logprob_diff_max_fresh']:.3g} at most (--mismatch-warn {self._limit:g}) -> "
                "does the engine report processed log-probabilities, of the temperature that the record "
                "says, without top_p and top_k, and does it have the newest weights?"
            )
        self._above = above
        return {"mismatch_alarms_total": self._total}

    def _look_for_fresh(self, measured: Metrics) -> None:
        """Warns once that nothing is compared, if some steps had log-probabilities but no fresh token."""
        if (
            not self._limit
            or self._unseen >= _UNSEEN_STEPS
            or math.isnan(measured.get("logprob_diff_mean", float("nan")))
        ):
            return
        self._unseen = _UNSEEN_STEPS if measured.get("tokens_fresh") else self._unseen + 1
        if self._unseen == _UNSEEN_STEPS and not measured.get("tokens_fresh"):
            self._say(
                f"whether the sampler is the policy is not looked at: in {_UNSEEN_STEPS} steps no token "
                "named the version being trained -> write token_versions, the version that each token was "
                "sampled with; where they are there, all were older"
            )


class NoReference(Untrainable):
    """There is a KL term, but no reference log-probabilities."""


class NothingToLearn(Untrainable):
    """Every advantage of a step is 0 and the loss has no other term; the message says what to do."""


class UnknownTokens(Untrainable):
    """A token id is not in the model's vocabulary; the message names it and its environment."""


class LongRow(Untrainable):
    """A row has more tokens than may be trained; the message names it, its group and environment."""


class Learner:
    """A model, its optimizer and the count of steps done; turns batches into updates.

    Args:
        model: a Hugging Face causal language model on its device; parameters without requires_grad are not
            trained.
        objective: what to optimise.
        learning_rate: step (0-based) -> learning rate.
        weight_decay: of AdamW.
        max_grad_norm: the gradient's norm is clipped to this.
        reference: policy of the KL term for records without ref_logprobs; None: the records must have them.
        parallel: how the ranks share the model; None: a single rank.
    """

    def __init__(
        self,
        model: Any,
        objective: Objective,
        learning_rate: Callable[[int], float],
        *,
        weight_decay: float = 0.0,
        max_grad_norm: float = 1.0,
        reference: Reference | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        self.model = model
        self._parallel = parallel or Parallel(model)
        self.objective = objective
        self.step = 0
        self.optimizer = new_optimizer(model.parameters(), weight_decay)
        self.times = StepTimes(next(model.parameters()).device)
        self._learning_rate = learning_rate
        self._max_grad_norm = max_grad_norm
        self._reference = reference
        self._counts = Counts(0.0, 0.0, 0.0, 0.0)  # of the accumulated gradient
        self._shares = np.zeros(len(SHARES))
        self._mismatch = Mismatch()
        self._push = 0.0  # only sft: the largest |advantage| in the gradient
        self._updating = False
        self._difference_told = False

    @property
    def consistent(self) -> bool:
        """Whether parameters and optimizer match `step`; False after an interrupted update."""
        return not self._updating

    @property
    def world(self) -> World:
        """The ranks that train this model."""
        return self._parallel.world

    def read(self, compute: Callable[[Any], Result]) -> Result:
        """Returns `compute(model)`, which takes no gradient and must not raise. Every rank calls it."""
        return self._parallel.read(compute)

    def accumulate(
        self,
        batch: shmbridge.Batch,
        policy_version: int | None = None,
        *,
        first: bool = True,
        look: Callable[[TrainingRows], None] | None = None,
    ) -> Metrics:
        """Computes the gradient of one batch into the parameters' `grad`; their values do not change.

        Blocks for the compute, and for other ranks.

        Args:
            batch: a packed `shmbridge.Batch`, or anything with its attributes; this rank's shard of the whole
                batch.
            policy_version: the version about to be trained; token staleness is counted from it. None if
                unknown.
            first: False accumulates: the gradient is that of this batch and the earlier ones as one batch.
                The loss and the policy's metrics then cover all of them; every other number covers this
                batch.
            look: gets the batch's training arrays, once the gradient is computed.

        Raises:
            UnreadImages: a row has images, and the objective does not ignore images.
            UnknownTokens: a token id outside the model's vocabulary, and the objective does not leave such
                rows out.
            LongRow: a row longer than the model's positions, or than the objective allows, likewise.
            NoAdvantages: a group needs the fallback that the objective does not allow.
            NoReference: a KL term, no reference, and no record of the batch has ref_logprobs.
        """
        goal, world = self.objective, self.world
        facts = BatchFacts(batch, goal.temperature, goal.whole_rows)
        # checks that may fail on one rank alone come before the first collective
        with world.together():
            unknown_tokens, too_long = self._unknown_tokens(batch), self._too_long(batch)
            if not goal.ignore_images:
                refuse_images(facts)
            require_advantages(facts, facts.trained_tokens, goal.credit)
        rows, metrics = prepare(
            facts,
            credit=goal.credit,
            reduce=world.all_reduce_sum,
            with_reference=goal.kl > 0.0,
            policy_version=policy_version,
            max_token_staleness=goal.max_token_staleness,
            truncated=goal.truncated,
            unknown_tokens=unknown_tokens,
            too_long=too_long,
        )
        counts = Counts.of(rows, world.all_reduce_sum)
        unknown = counts.tokens - counts.with_reference if goal.kl else 0.0
        if unknown and self._reference is None and not counts.with_reference:
            raise NoReference(
                f"the objective has a KL term of weight {goal.kl}, and none of {counts.tokens:.0f} trained "
                "tokens has ref_logprobs -> give the learner a reference, or let the environments write "
                "ref_logprobs"
            )
        reference = self._reference if unknown else None
        self._make_room(counts, first)
        if goal.loss == "sft":
            own_push = np.abs(rows.advantages[rows.places]).max(initial=0.0)
            self._push = max(self._push, float(world.all_reduce_sum(np.array([own_push], np.float64))[0]))
        device = next(self.model.parameters()).device
        totals = torch.zeros(len(SHARES), device=device)
        check = RowCheck(facts, rows, goal.credit)
        pieces = self.times.each("copy", micro_batches(rows, goal.micro_tokens, device, goal.layout))
        for micro in self._parallel.rounds(pieces):
            if micro is None:
                self._take_part(next(micro_batches(_IDLE, goal.micro_tokens, device)), reference)
            else:
                check.record(micro)
                totals += self._backward(micro, self._counts, reference)
        with self.times.of("sync"):
            self._shares += world.all_reduce_sum(totals.double().cpu().numpy())
            mismatch = self._mismatch.metrics(world.all_reduce_sum)
        shares = dict(zip(SHARES, self._shares.tolist(), strict=True))
        checked = check.metrics(describe=not self._difference_told)
        self._difference_told |= DIFFERENCE in checked
        if look is not None:
            look(rows)
        return {**shares, **mismatch, **metrics, **checked}

    def apply(self) -> Metrics:
        """Takes the optimizer step of the accumulated gradient, unless that is not finite.

        Raises:
            NothingToLearn: the loss is sft, and every advantage is 0; nothing was changed.
        """
        self._require_push()
        rate = self._learning_rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        norm = whole(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_grad_norm)).item()
        finite = math.isfinite(norm)
        if finite:
            self._updating = True
            self.optimizer.step()
        self.step += 1
        self._updating = False
        return {"step": self.step, "lr": rate, "grad_norm": norm, "update_skipped": not finite}

    def drop_gradient(self) -> None:
        """Frees the accumulated gradient; its batches have no effect."""
        self.optimizer.zero_grad(set_to_none=True)

    def _require_push(self) -> None:
        goal = self.objective
        if goal.loss != "sft" or self._push or not self._counts.tokens or goal.kl or goal.entropy:
            return
        way = (
            "--sft-normalization none, if equal advantages mean plain fine-tuning: normalised, they are all 0"
            if goal.credit.normalise != "none"
            else "another --loss, which passes over such a step; scores that differ help later steps only"
        )
        raise NothingToLearn(
            f"every advantage of step {self.step + 1} is 0, of {self._counts.tokens:.0f} trained tokens: "
            f"--loss sft would learn nothing -> {way}"
        )

    def _make_room(self, counts: Counts, first: bool) -> None:
        """Scales the accumulated gradient down to its share of the new total, the divisor of new shares."""
        before = self._counts
        if first:
            self._counts, self._shares, self._mismatch, self._push = (
                counts,
                np.zeros(len(SHARES)),
                Mismatch(),
                0.0,
            )
            self.optimizer.zero_grad(set_to_none=True)
            return
        self._counts = before + counts
        loss = self.objective.loss
        shrink = before.divisor(loss) / max(self._counts.divisor(loss), 1.0)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(shrink)
        self._shares[:LOSS_SHARES] *= shrink
        self._shares[LOSS_SHARES:] *= before.tokens / max(self._counts.tokens, 1.0)

    def _unknown_tokens(self, batch: shmbridge.Batch) -> npt.NDArray[np.bool_] | None:
        """Returns bool (B,): rows with a token that the model does not have; None if no row has one.

        Raises `UnknownTokens` unless the objective leaves such rows out.
        """
        # On a GPU an id out of range kills the process with an assertion that does not name the producer.
        size = self.model.get_input_embeddings().num_embeddings
        rows = rows_with_unknown_tokens(batch, size)
        if rows is None or self.objective.leave_out_unknown_tokens:
            return rows
        first = int(rows.argmax())
        begin, end = batch.cu_seqlens[first : first + 2].tolist()
        meta, wrong = (
            batch.meta[first],
            next(each for each in batch.tokens[begin:end].tolist() if not 0 <= each < size),
        )
        raise UnknownTokens(
            f"token id {wrong}, but the model has {size}: environment {meta.env_name!r} uses another "
            f"tokenizer than the learner, in {int(rows.sum())} trajectories, first in group "
            f"{meta.group_id}, record {meta.sequence} of producer {meta.producer_id} -> start it with the "
            "learner's; what it has put waits, and trains nothing under --leave-out-unknown-tokens"
        )

    def _too_long(self, batch: shmbridge.Batch) -> npt.NDArray[np.bool_] | None:
        """Returns bool (B,): rows longer than may be trained; None if no row is.

        Raises `LongRow` unless the objective leaves such rows out.
        """
        about: Any = getattr(self.model, "config", None)
        about = about.get_text_config() if hasattr(about, "get_text_config") else about
        positions = getattr(about, "max_position_embeddings", None)
        most = min(each for each in (positions, self.objective.longest_row, math.inf) if each)
        if not (rows := np.asarray(batch.lengths) > most).any():
            return None
        if self.objective.leave_out_long_rows:
            return rows
        first = int(rows.argmax())
        meta = batch.meta[first]
        limit = f"the model has {most} positions" if most == positions else f"--max-token-len is {most}"
        raise LongRow(
            f"a trajectory of {batch.lengths[first]} tokens, and {limit}: environment {meta.env_name!r}, "
            f"group {meta.group_id}, record {meta.sequence} of producer {meta.producer_id}; "
            f"{int(rows.sum())} in this batch -> have it end its episodes earlier; what it has put trains "
            "nothing under --leave-out-long-rows"
        )

    def _logprobs(self, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        """Returns (n,) log-probabilities and entropy; that has a gradient only if the objective uses it."""
        goal = self.objective
        logprobs, entropy = self._parallel(
            trained_logprobs,
            micro,
            precision=goal.precision,
            chunk_tokens=goal.chunk_tokens,
            with_entropy=True,
        )
        assert entropy is not None
        # detaching frees (n, V) numbers before the backward pass
        return logprobs, entropy if goal.entropy else entropy.detach()

    def _take_part(self, micro: MicroBatch, reference: Reference | None) -> None:
        """Adds 0 to every gradient by a forward and a backward, since other ranks have a micro-batch more."""
        goal = self.objective
        if reference is not None:
            reference.logprobs(micro, precision=goal.precision, chunk_tokens=goal.chunk_tokens)
        self._parallel.backward(self._logprobs(micro)[0].sum() * 0.0)

    def _backward(self, micro: MicroBatch, counts: Counts, reference: Reference | None) -> Tensor:
        """Adds one micro-batch's share of the gradient; returns its shares of the metrics."""
        goal, trained = self.objective, micro.trained
        of_reference = None if micro.reference_logprobs is None else micro.reference_logprobs[trained]
        with self.times.of("forward"):
            if of_reference is not None and reference is not None:
                asked = reference.logprobs(micro, precision=goal.precision, chunk_tokens=goal.chunk_tokens)
                of_reference = torch.where(losses.known(of_reference), of_reference, asked)
            logprobs, entropy = self._logprobs(micro)
            sampled = micro.sampled_logprobs[trained]
            self._mismatch.add(
                logprobs.detach(), sampled, None if micro.fresh is None else micro.fresh[trained]
            )
            loss, shares = micro_loss(
                goal,
                counts,
                micro.trained_lengths,
                logprobs,
                sampled,
                micro.advantages[trained],
                entropy=entropy,
                reference_logprobs=of_reference,
            )
        with self.times.of("backward"):
            self._parallel.backward(loss)
        return shares
