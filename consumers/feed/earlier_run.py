"""What an earlier trainer left: a bridge that it has trained, and the records in its saved state.

A trainer that was killed, and starts again without its checkpoint, would send the base model to environments
and engines. Nothing here takes records, and torch is imported only to load weights. A released record is
never redelivered, and a producer's id identifies one lane for ever. A lane on another mount, such as another
machine's, cannot be read from here, so its records stay.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

import shmbridge
from shmbridge.segments import mount_id, unreleased_sequences
from shmbridge.weights import lease_from_outside

log = logging.getLogger(__name__)

Start = Literal["from-bridge", "from-scratch"]


class BridgeAhead(shmbridge.ShmBridgeError, RuntimeError):
    """The bridge's versions hold trained steps, and the learner has no checkpoint that belongs to them."""

    code = "SB518"


def bridge_info(name: str) -> shmbridge.BridgeInfo | None:
    """Returns what is known of a bridge from outside; None if there is none. Never blocks.

    A participant that leaves a bridge in which no other process lives would remove its weights.
    """
    return next((each for each in shmbridge.list_bridges() if each.name == name), None)


def trained_as(bridge: shmbridge.BridgeInfo | None) -> tuple[str, int | None]:
    """Returns the run of a bridge's versions, "" if none is named, and the version it was trained to."""
    return ("", None) if bridge is None else (bridge.run_id, bridge.trained_version)


def require_start(
    bridge: str, found: tuple[str, int | None], start: Start | None, run_id: str | None
) -> None:
    """Raises BridgeAhead if a trainer would throw a trained bridge back. Never blocks.

    Args:
        bridge: its name.
        found: what `trained_as` returned before this trainer opened it.
        start: how the user wants to begin; None: with a checkpoint.
        run_id: the run of the loaded checkpoint; None: there is none.
    """
    run, trained = found
    if trained is None or start is not None or (run_id is not None and run in ("", run_id)):
        return
    loaded = "no checkpoint was loaded" if run_id is None else "the loaded checkpoint is of another run"
    raise BridgeAhead(
        f"bridge {bridge} has been trained up to version {trained}, and {loaded}",
        hint="resume from the checkpoint of that run; "
        'start="from-bridge" takes the bridge\'s weights, once `shmbridge.consumers.load_published` has '
        f'loaded them; start="from-scratch" gives version {trained} up',
    )


def save_published(bridge: str, source: str, folder: str, tokenizer: Any, **options: Any) -> bool:
    """Saves a trained bridge's weights as the model that a trainer begins with; returns whether it has any.

    Blocks for both. Raises as `load_published`.

    Args:
        bridge: its name.
        source: the model that it was begun with.
        folder: where the model with the bridge's weights goes, with its tokenizer.
        tokenizer: of transformers.
        options: further arguments of `from_pretrained`.
    """
    import transformers

    if trained_as(bridge_info(bridge))[1] is None:
        log.warning("bridge %r has no trained weights: a new run begins with %s", bridge, source)
        return False
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **options)
    version = load_published(bridge, model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    log.info("version %d of bridge %r is in %s, for the run to begin with", version, bridge, folder)
    return True


def load_published(bridge: str, model: Any) -> int:
    """Copies a bridge's newest published weights into a torch module; returns their version.

    Blocks for the copy. For a trainer that goes on with them, before it opens the bridge.

    Args:
        bridge: its name. No other process needs to live there.
        model: changed in place, and only if every tensor fits.

    Raises:
        WeightsMismatch: the weights are of another model. NotReady: the bridge has none.
    """
    from shmbridge.consumers.engines.published_tensors import copy_into

    with lease_from_outside(bridge) as lease:
        copy_into(model, lease.tensors, lease.dtypes)
        return lease.version


class HeldRecords:
    """Sequences by producer id, and the mount of each producer's lane. For one thread.

    Args:
        held: sequences by producer id.
        mounts: of the producers' lanes; the records of one without stay.
    """

    def __init__(self, held: Mapping[str, Iterable[int]], mounts: Mapping[str, str]) -> None:
        self.held = {str(producer): set(map(int, numbers)) for producer, numbers in held.items()}
        self.mounts = {producer: mounts[producer] for producer in self.held if producer in mounts}

    @classmethod
    def of(cls, places: Iterable[tuple[str, int]], mounts: Mapping[str, str] | None = None) -> Self:
        """Returns records of producers and sequences; without `mounts` their lanes are on this one."""
        held: dict[str, set[int]] = {}
        for producer, sequence in places:
            held.setdefault(producer, set()).add(sequence)
        if mounts is None:
            mounts = dict.fromkeys(held, here) if (here := mount_id()) else {}
        return cls(held, mounts)

    def contains(self, meta: Any) -> bool:
        """Returns whether a record is one of these. Never blocks.

        Only a redelivered record can be: any other with that number is of a producer that counts from 0
        again.
        """
        return bool(meta.redelivered) and meta.sequence in self.held.get(meta.producer_id, ())

    def that_may_come_again(self) -> Self:
        """Returns those that are not known to be released.

        Never blocks; looks at lanes and changes nothing.
        """
        here = mount_id()
        shown = unreleased_sequences(name for name in self.held if here and self.mounts.get(name) == here)
        left = {name: numbers & shown.get(name, numbers) for name, numbers in self.held.items()}
        return type(self)({name: numbers for name, numbers in left.items() if numbers}, self.mounts)

    def __ior__(self, others: HeldRecords) -> Self:
        for name, numbers in others.held.items():
            self.held.setdefault(name, set()).update(numbers)
        self.mounts |= others.mounts
        return self

    def state(self) -> dict[str, Any]:
        """Returns `held` and `mounts` as lists, numbers and words. Never blocks."""
        held = {name: sorted(numbers) for name, numbers in self.held.items()}
        return {"held": held, "mounts": dict(self.mounts)}
