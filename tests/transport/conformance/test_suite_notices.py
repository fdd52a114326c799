"""The suite against rings with one planted error each: the state machine must find every one, with no model
beside them.
"""

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from model_ring import ModelRing
from ring_machine import ring_machine

from shmbridge.testing.model import LINE, State, lines


class ClaimsOneLineTooFew(ModelRing):
    def claim(self, lane, size):
        at = self.models[lane].place_for(max(size - LINE, 1))
        if at is None or at + lines(size) > self.data_bytes:
            return super().claim(lane, size)
        self.models[lane]._claim = self._claims[lane] = (at, lines(size))
        return at


class FullWithOneSlotLeft(ModelRing):
    def claim(self, lane, size):
        return None if self.models[lane].unreleased == self.slots - 1 else super().claim(lane, size)


class AbortPublishes(ModelRing):
    def abort(self, lane):
        self.commit(lane, bytes(self._claims[lane][1]))


class DeathOfAProducerLosesItsLastRecord(ModelRing):
    def producer_dies(self, lane):
        model = self.models[lane]
        super().producer_dies(lane)
        if model._records and (last := model._records[max(model._records)]).state is State.WAITING:
            last.state = State.ADRIFT


class ForgetsMarks(ModelRing):
    def hub_starts(self):
        super().hub_starts()
        for model in self.models:
            model._head_found = 0


class MarksEverythingCommitted(ModelRing):
    def hub_starts(self):
        super().hub_starts()
        for model in self.models:
            model._head_found = model.tail


class DeathOfAHubReleasesItsLeases(ModelRing):
    def hub_dies(self):
        for model in self.models:
            for sequence in [
                sequence for sequence, record in model._records.items() if record.state is State.HELD
            ]:
                model.release(sequence)
        super().hub_dies()


class SuccessorMissesTheOldest(ModelRing):
    def hub_starts(self):
        super().hub_starts()
        for model in self.models:
            if len(model._records) > 2:
                model._records[min(model._records)].state = State.ADRIFT


class GivesTheSecondFirst(ModelRing):
    def take(self):
        passed_over = []
        for model in self.models:
            if model.waiting > 1:
                passed_over.append(
                    next(
                        record
                        for _, record in sorted(model._records.items())
                        if record.state is State.WAITING
                    )
                )
                passed_over[-1].state = State.ADRIFT
        try:
            return super().take()
        finally:
            for record in passed_over:
                record.state = State.WAITING


class AbandonedComesAgainAtOnce(ModelRing):
    def abandon(self, lane, sequence):
        self.models[lane]._records[sequence].state = State.WAITING


class ViewsAreNotWaitedFor(ModelRing):
    def release_under_view(self, lane, sequence):
        self.models[lane].release(sequence)

    def drop_view(self, lane, sequence):
        pass


class DiscardsInSilence(ModelRing):
    def discard(self, lane, sequence):
        self.models[lane].release(sequence)


class ReadsNonsense(ModelRing):
    def damage(self, lane):
        pass


class QuarantinesItsNeighbour(ModelRing):
    def take(self):
        seen = super().take()
        if any(model.quarantined for model in self.models):
            for model in self.models:
                model.discarded += model.waiting
                model.quarantined = True
        return seen


class QuarantineCountsOneOnly(ModelRing):
    def take(self):
        before = [(model.discarded, model.quarantined) for model in self.models]
        seen = super().take()
        for model, (discarded, quarantined) in zip(self.models, before, strict=True):
            if model.quarantined and not quarantined:
                model.discarded = discarded + 1
        return seen


class ServesTheFirstLaneOnly(ModelRing):
    def take(self):
        self._turn = 0
        waiting = [model for model in self.models[1:] if model.waiting]
        for model in waiting:
            model._has_hub = False
        try:
            return super().take() if self.models[0].waiting else None
        finally:
            for model in waiting:
                model._has_hub = True


BROKEN = [
    ClaimsOneLineTooFew,
    FullWithOneSlotLeft,
    AbortPublishes,
    DeathOfAProducerLosesItsLastRecord,
    ForgetsMarks,
    MarksEverythingCommitted,
    DeathOfAHubReleasesItsLeases,
    SuccessorMissesTheOldest,
    GivesTheSecondFirst,
    AbandonedComesAgainAtOnce,
    ViewsAreNotWaitedFor,
    DiscardsInSilence,
    ReadsNonsense,
    QuarantinesItsNeighbour,
    QuarantineCountsOneOnly,
    ServesTheFirstLaneOnly,
]


@pytest.mark.parametrize("ring", BROKEN, ids=lambda ring: ring.__name__)
def test_a_planted_error_is_found(ring):
    """Not shrunk: that it is found is all that counts.

    How soon depends on what else is imported: Hypothesis takes constants from there.
    """
    found = settings(
        max_examples=3000,
        stateful_step_count=60,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, KeyError)):
        run_state_machine_as_test(ring_machine(ring), settings=found)
