"""Errors: a stable code, numbers in the message, one next action, and the builtin that callers expect."""

import re
from pathlib import Path

import pytest

import shmbridge
from shmbridge import errors

DOCUMENT = Path(__file__).parents[2] / "docs/errors/README.md"
ALL = [
    each
    for each in vars(errors).values()
    if isinstance(each, type) and issubclass(each, errors.ShmBridgeError)
]
BUILTIN = {
    "ArchiveFull": OSError,
    "ArchiveUnwritable": OSError,
    "ArchiveTaken": RuntimeError,
    "ArchiveUnreadable": ValueError,
    "BadArgument": ValueError,
    "BadBridgeName": ValueError,
    "ShmTooSmall": MemoryError,
    "ShmPermission": PermissionError,
    "NotReady": TimeoutError,
    "LayoutMismatch": ValueError,
    "SchemaMismatch": ValueError,
    "RecordTooBig": ValueError,
    "InvalidRecord": ValueError,
    "RecordUnreadable": ValueError,
    "ProcessLimit": OSError,
    "ShmUnavailable": OSError,
    "LaneQuarantined": RuntimeError,
    "LaneRemoved": RuntimeError,
    "ClaimOpen": RuntimeError,
    "RankTaken": RuntimeError,
    "ServesRanks": RuntimeError,
    "LaneFull": TimeoutError,
    "NotAdmitted": TimeoutError,
    "ConsumerEmpty": TimeoutError,
    "LeaseReleased": RuntimeError,
    "BatchTooBig": ValueError,
    "ConsumerTaken": RuntimeError,
    "NoColumn": KeyError,
    "NoConsumer": TimeoutError,
    "BridgeDraining": RuntimeError,
    "UnknownEnvironment": ValueError,
    "NoWeight": ValueError,
    "UsedByTwoThreads": RuntimeError,
    "IterationOver": RuntimeError,
    "QueueTaken": RuntimeError,
    "RelayTaken": RuntimeError,
    "LaneRefused": RuntimeError,
    "Closed": RuntimeError,
    "WeightsMismatch": ValueError,
    "WeightsBusy": TimeoutError,
    "FillingOver": RuntimeError,
    "BadConfig": ValueError,
    "LaunchFailed": RuntimeError,
}


def test_the_documents_table_has_every_class() -> None:
    import shmbridge.consumers.engines.engine
    import shmbridge.control.messages
    import shmbridge.control.server
    import shmbridge.producers.atropos.lane
    from shmbridge.producers import gem, nemo_gym, rewards, rollout, skyrl_gym, verifiers

    elsewhere = [
        shmbridge.control.messages.BadMessage,
        shmbridge.control.server.RequestRefused,
        shmbridge.producers.atropos.lane.GroupsRefused,
        *(gem.NotSuspendable, gem.EnvFailed, gem.GroupNotAlike, rewards.RewardsFailed),
        *(rollout.ServerFailed, rollout.NoTokens, rollout.ContextFull, rollout.EpisodeUnfinished),
        *(rollout.TooManyFailures, rollout.EpisodesLost, rollout.NothingCame),
        *(verifiers.NoTokenRoute, verifiers.EpisodeFailed),
        nemo_gym.CaptureRefused,
        *(skyrl_gym.BadTask, skyrl_gym.EnvironmentFailed, skyrl_gym.EnvProcessEnded),
        shmbridge.consumers.engines.engine.EngineFailed,
    ]
    rows = dict(re.findall(r"^\| (SB\d{3}) \| (\w+) \|", DOCUMENT.read_text(), re.MULTILINE))
    with_others = {"SB506": "WeightsNotLoaded", "SB518": "BridgeAhead", "SB526": "SessionUnusable"}
    assert (
        rows
        == {each.code: each.__name__ for each in [*ALL, *elsewhere] if each is not errors.ShmBridgeError}
        | with_others
    )
    assert {each.__name__ for each in ALL} - {"ShmBridgeError"} == set(BUILTIN)


def test_codes_are_unique() -> None:
    codes = [each.code for each in ALL]
    assert len(set(codes)) == len(codes)
    assert all(len(code) == 5 and code.startswith("SB") for code in codes)


@pytest.mark.parametrize("name", sorted(BUILTIN))
def test_each_error_is_also_the_nearest_builtin(name) -> None:
    assert issubclass(getattr(shmbridge, name), BUILTIN[name])
    assert issubclass(getattr(shmbridge, name), shmbridge.ShmBridgeError)


def test_the_text_has_code_message_and_hint() -> None:
    wrong = shmbridge.LaneFull("no room for 3 KiB", hint="start the learner")
    assert str(wrong) == "[SB301] no room for 3 KiB -> start the learner"
    assert (wrong.code, wrong.message, wrong.hint) == ("SB301", "no room for 3 KiB", "start the learner")


def test_without_a_hint_there_is_no_arrow() -> None:
    assert str(shmbridge.Closed("it is closed")) == "[SB405] it is closed"


def test_an_invalid_record_says_where() -> None:
    wrong = shmbridge.InvalidRecord("bad", column="advantages", row=2, position=7)
    assert (wrong.column, wrong.row, wrong.position) == ("advantages", 2, 7)
