"""Groups of records: their assembly, which is compiled (_ext/groups.pyx), and what a call notes of them."""

import logging
from collections.abc import Iterable

from shmbridge._ext.groups import NO_VERSION as NO_VERSION
from shmbridge._ext.groups import Group as Group
from shmbridge._ext.groups import GroupAssembler as GroupAssembler
from shmbridge.record.unreleased import Call

log = logging.getLogger(__name__)


def hand_out(groups: Iterable[Group], call: Call, *, looked_at: bool) -> None:
    """Notes which call handed out the groups' records, and whether the records count as looked at."""
    for group in groups:
        for record in group.records:
            record._handed_out_by, record._looked_at = call, looked_at


def log_contradictions(assembler: GroupAssembler) -> None:
    """Logs the groups whose fragments were found to contradict each other since the last call."""
    while assembler.contradictory:
        group = assembler.contradictory.pop()
        log.error(
            "group %s of %s will be discarded: %s -> one group_size= for all fragments of a group",
            group.group_id,
            group.producer_id,
            group.wrong,
        )
