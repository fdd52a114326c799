"""Keeps a torch module at the newest version of a bridge's weights. Used by `engine.py`, in its thread."""

from __future__ import annotations

import logging
import time

import torch

import shmbridge
from shmbridge.consumers.engines.published_tensors import copy_into
from shmbridge.consumers.pinned.weights import PinnedWeights
from shmbridge.weights import WeightsReader

logger = logging.getLogger(__name__)

_LEASE_TIMEOUT_S = 1.0


class WeightsFollower:
    """Copies each new version into a module; for one thread.

    Args:
        source: where versions come from; a missing segment, or one whose learner died, is no error.
        module: the torch module; changed in place, whole versions only.
    """

    def __init__(self, source: WeightsReader, module: torch.nn.Module) -> None:
        self._source = source
        self._module = module
        self._pinned = PinnedWeights(source)
        self._considered: int | None = None  # a version that does not fit is not tried again at every batch
        self._loaded: int | None = None  # what the module holds: the next version is copied where it differs
        self._complaint = ""
        self._refused: tuple[int, str] | None = None
        self.loaded_total = 0

    @property
    def refused(self) -> tuple[int, str] | None:
        """The last version tried, and why it was refused; None if it was loaded. Any thread."""
        return self._refused

    def refresh(self) -> int | None:
        """Loads the newest version if it differs; returns it, or None if nothing changed.

        Blocks for the copy. An error of the segment is logged once and leaves the module unchanged.
        """
        try:
            newest = self._source.version
            if newest is None or newest == self._considered:
                return None
            return self._load()
        except shmbridge.ShmBridgeError as error:
            if (complaint := str(error)) != self._complaint:
                logger.warning("weights stay as they are: %s", complaint)
                self._complaint = complaint
            return None

    def _load(self) -> int:
        began = time.perf_counter()
        with self._source.lease(timeout_s=_LEASE_TIMEOUT_S) as weights:
            self._considered = weights.version
            self._pinned.pin(next(self._module.parameters()).device)
            changed = None if self._loaded is None else weights.changed_since(self._loaded)
            self._loaded = None
            try:
                weights.require_finite()
                copy_into(self._module, weights.tensors, weights.dtypes, only=changed)
            except shmbridge.WeightsMismatch as error:
                self._refused = weights.version, str(error)
                raise
            self._loaded, self._refused = weights.version, None
        self.loaded_total += 1
        self._complaint = ""
        logger.info("policy version %d in %.1f ms", weights.version, (time.perf_counter() - began) * 1e3)
        return weights.version

    def close(self) -> None:
        """Closes the segment; never blocks."""
        self._pinned.close()
        self._source.close()
