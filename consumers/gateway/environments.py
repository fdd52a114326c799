"""Remote environments in default mode: names, numbers and lanes here, weights and queues in the hub's table.

Every request goes over the control socket to the hub: this process, or a learner. For one event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec.structs import replace

from shmbridge import ShmBridgeError
from shmbridge.config import Run
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.consumers.gateway.posts import RemoteLane
from shmbridge.control import AsyncControlClient, RequestRefused
from shmbridge.control.messages import (
    UNKNOWN_ENV,
    Answer,
    Goodbye,
    Register,
    Registered,
    Request,
    RunInfo,
    RunInfoRequest,
    Status,
    StatusRequest,
)
from shmbridge.errors import NoConsumer
from shmbridge.httpd.door import Refused
from shmbridge.segments import gateway_directory

log = logging.getLogger(__name__)

_ASK_S = 1.5
_MISSING_S = 0.5  # after a request without response, no further request for so long

_SHARED = 1  # the lane of those who are not known
_FORGOTTEN_AFTER = 60  # times as long as it takes to count as silent

_WAIT = {"status": "wait for trainer to start"}


@dataclass(eq=False, slots=True)
class RemoteEnv:
    """One environment beyond the bridge."""

    about: SavedEnv
    lane: RemoteLane
    own_lane: bool = True
    hub_id: int | None = None
    heard_s: float = field(default_factory=time.monotonic)
    silent: bool = False
    status: dict[str, Any] = field(default_factory=dict)
    _refusal: str = ""

    def refused(self, why: str) -> None:
        """Logs why the hub, or memory, has no place for it; once, because it asks ten times a second."""
        if why != self._refusal:
            self._refusal = why
            log.warning("environment %s: %s", self.about.wandb_name, why)


class RemoteEnvs:
    """All remote environments, by the number given to them."""

    def __init__(self, options: GatewayOptions, state: StateFile, lane_opened: Callable[[str], None]) -> None:
        self._options, self._state, self._lane_opened = options, state, lane_opened
        self._table: dict[int, RemoteEnv] = {}
        self._client: AsyncControlClient | None = None
        self._turn = asyncio.Lock()
        self._missing_until = 0.0
        self.shared = RemoteLane(options, "gateway", lane_opened)

    def restore(self) -> None:
        """Continues with the environments of an earlier gateway."""
        for saved in self._state.saved.envs:
            if saved.connected:
                lane = RemoteLane(self._options, saved.desired_name, self._lane_opened)
                self._table[saved.env_id] = RemoteEnv(saved, lane, silent=saved.silent)

    def __len__(self) -> int:
        return len(self._table)

    # -- the hub

    async def ask(self, question: Request) -> Answer:
        """Returns the hub's response. Raises RequestRefused, and NoConsumer, at once after another."""
        async with self._turn:
            if time.monotonic() < self._missing_until:
                raise NoConsumer(f"no consumer of bridge {self._options.bridge!r} answers")
            if self._client is None:
                self._client = AsyncControlClient(self._options.bridge, role="gateway", name="gateway")
            try:
                return await self._client.request(question, _ASK_S)
            except NoConsumer:
                self._missing_until = time.monotonic() + _MISSING_S
                raise

    def hub_came(self) -> None:
        """Notes that there is a hub, so that it is asked again at once."""
        self._missing_until = 0.0

    async def run_info(self) -> RunInfo | None:
        """Returns the hub's run; None without a hub."""
        try:
            answer = await self.ask(RunInfoRequest())
        except NoConsumer:
            return None
        return answer if isinstance(answer, RunInfo) else None

    # -- environments

    async def register(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to /register-env. Raises RequestRefused, Refused."""
        name = wish["desired_name"]
        info = await self.run_info()
        if info is None or info.run is None:
            return _WAIT
        if self._lanes_are_taken():
            have, most = self._options.lanes - _SHARED, self._options.lanes
            raise Refused(
                503,
                f"{have} environments have lanes, {most} lanes are taken from at once: raise --lanes",
                "lanes",
            )
        lane = RemoteLane(self._options, name, self._lane_opened)
        try:
            producer = await lane.open()
            await self._admit_all()  # environments of an earlier gateway keep their names
            wanted = self._state.saved.next_env_id or None  # None: the hub chooses
            answer = await self.ask(Register(**wish, producer_id=producer.producer_id, env_id=wanted))
        except BaseException as failed:
            lane.close()
            if isinstance(failed, NoConsumer):
                return _WAIT
            raise
        if not isinstance(answer, Registered):
            lane.close()
            return _WAIT
        number = answer.env_id
        while number in self._table:  # the hub is another than the one that gave this number
            number += 1
        about = SavedEnv(env_id=number, wandb_name=answer.wandb_name, **wish)
        self._table[number] = RemoteEnv(about, lane, hub_id=answer.env_id)
        self._save()
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": answer.wandb_name,
            "checkpoint_dir": answer.run.checkpoint_dir,
            "starting_step": answer.current_step,
            "checkpoint_interval": answer.run.save_checkpoint_interval,
            "num_steps": answer.run.num_steps,
        }

    def _lanes_are_taken(self) -> bool:
        return (
            sum(env.own_lane and not env.silent for env in self._table.values()) + _SHARED
            >= self._options.lanes
        )

    def _save(self) -> None:
        rows = [replace(env.about, silent=env.silent) for env in self._table.values() if env.own_lane]
        most = max((row.env_id + 1 for row in rows), default=0)
        self._state.update(envs=rows, next_env_id=max(self._state.saved.next_env_id, most))

    async def disconnect(self, number: int) -> dict[str, Any]:
        """Returns the response to /disconnect-env; frees weight and allocation, keeps posted groups."""
        env = self._table.pop(number, None)
        if env is None:
            return {"status": "failure", "error": f"no environment {number} is registered here"}
        self._save()
        await self._leave(env)
        return {"status": "success"}

    async def _leave(self, env: RemoteEnv) -> None:
        hub_id, env.hub_id = env.hub_id, None
        if env.own_lane:
            env.lane.close()
        if hub_id is not None:
            try:
                await self.ask(Goodbye(hub_id))
            except ShmBridgeError as gone:  # without a hub there is none to notify
                log.debug("no goodbye for environment %s: %s", env.about.wandb_name, gone)

    def lane_of(self, number: int | None) -> RemoteLane:
        """Returns the lane for an environment's posts: the shared one for unknown environments."""
        env = None if number is None else self._table.get(number)
        if env is None:
            return self.shared
        self._hear(env)
        return env.lane

    def _hear(self, env: RemoteEnv) -> None:
        """Notes a sign of life; a silent one gets its lane again, or the shared one if all are taken."""
        if env.silent and env.own_lane and self._lanes_are_taken():
            log.warning(
                "environment %s speaks again and shares a lane: others have all lanes, raise --lanes",
                env.about.wandb_name,
            )
            env.lane, env.own_lane = self.shared, False
        env.heard_s, env.silent = time.monotonic(), False

    async def status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env, the last one without a hub. Admits unknown environments."""
        env = self._table.get(number) or self._stranger(number)
        self._hear(env)
        try:
            await self._admit_all()
            answer = await self._ask_status(env)
        except NoConsumer:
            answer = None
        except ShmBridgeError as refused:
            env.refused(str(refused))
            answer = None
        if answer is not None:
            waiting = env.lane.posting
            env.status = {
                "current_step": answer.current_step,
                # what waits for room is queued as well, and throttles as well
                "queue_size": answer.queue_groups + waiting,
                "unallocated_fraction": answer.unallocated_fraction,
                "self_queue_size": answer.self_queue_groups + waiting,
                "max_group_size": answer.max_group_size,
                "env_weight": answer.env_weight,
            }
        return env.status or {
            "current_step": self._state.saved.step,
            "queue_size": env.lane.posting,
            "unallocated_fraction": 1.0,
            "self_queue_size": env.lane.posting,
            "max_group_size": 1,
            "env_weight": 1.0,
        }

    def _stranger(self, number: int) -> RemoteEnv:
        log.warning("environment %d is not registered here; it is admitted with what is known", number)
        run = self._state.saved.run
        about = SavedEnv(number, f"env_{number}", f"env_{number}", run.max_token_len if run else 2048, 1, 1.0)
        env = self._table[number] = RemoteEnv(about, self.shared, own_lane=False)
        return env

    async def _admit_all(self) -> None:
        """Registers all environments with the hub, which weighs one by all others.

        One that cannot be admitted keeps no other out and gets no 5xx: Atropos' environments end after three.
        """
        for env in list(self._table.values()):
            if env.hub_id is None and not env.silent:
                try:
                    await self._admit(env)
                except NoConsumer:
                    raise
                except ShmBridgeError as refused:
                    # such as no memory for its lane yet; the next request retries
                    env.refused(str(refused))

    async def _admit(self, env: RemoteEnv) -> None:
        """Registers with the current hub, under its number and name."""
        about = env.about
        if env.own_lane:
            await env.lane.open()
        producer = env.lane.producer if env.own_lane else None
        answer = await self.ask(
            Register(
                about.desired_name,
                about.max_token_length,
                max(1, about.group_size),
                about.weight,
                about.min_batch_allocation,
                producer.producer_id if producer is not None else "",
                about.env_id,
                about.wandb_name,
            )
        )
        env.hub_id = answer.env_id if isinstance(answer, Registered) else None

    async def _ask_status(self, env: RemoteEnv) -> Status | None:
        for _ in range(2):
            if env.hub_id is None:
                return None
            try:
                answer = await self.ask(StatusRequest(env.hub_id))
                return answer if isinstance(answer, Status) else None
            except RequestRefused as refused:
                if refused.reason != UNKNOWN_ENV:
                    raise
                await self._admit(env)  # another hub, which has no registrations
        return None

    # -- the end

    async def let_the_silent_go(self) -> None:
        """Frees weight and lane of silent environments; forgets them much later."""
        timeout_s, changed = self._options.env_timeout_s, False
        for number, env in list(self._table.items()):
            quiet_s = time.monotonic() - env.heard_s
            if env.silent and quiet_s > _FORGOTTEN_AFTER * timeout_s and self._table.get(number) is env:
                del self._table[number]
                changed = True
            elif not env.silent and quiet_s > timeout_s and not env.lane.posting:
                env.silent = changed = True
                log.warning("environment %s has been silent for %.0f s", env.about.wandb_name, timeout_s)
                await self._leave(env)
        if changed:
            self._save()

    def forget(self) -> None:
        """Clears all registrations after a reset, without notifying a hub."""
        envs, self._table = list(self._table.values()), {}
        for env in envs:
            if env.own_lane:
                env.lane.close()

    def close_lanes(self) -> None:
        """Closes all lanes; their records stay."""
        for env in self._table.values():
            env.lane.close()
        self.shared.close()

    def close(self) -> None:
        """Closes the lanes and the control client."""
        self.close_lanes()
        if self._client is not None:
            self._client.close()
            self._client = None


log = logging.getLogger(__name__)

_STATE_VERSION = 1


class SavedEnv(msgspec.Struct, frozen=True):
    """A remote environment as it registered, with the number and the name it was given."""

    env_id: int
    wandb_name: str
    desired_name: str
    max_token_length: int
    group_size: int
    weight: float
    min_batch_allocation: float | None = None
    connected: bool = True
    silent: bool = False  # in default mode: it has no lane until its next request


class Saved(msgspec.Struct, frozen=True):
    """The file. `step` is that of the next batch to form: batches that were not read are counted again."""

    version: int = _STATE_VERSION
    compat: str = "default"
    run: Run | None = None
    started: bool = False
    step: int = 0
    envs: list[SavedEnv] = []
    next_env_id: int = 0


class StateFile:
    """The file of one bridge. A second gateway of that bridge reads and writes nothing."""

    def __init__(self, bridge: str) -> None:
        self._folder = gateway_directory(bridge)
        self._lock = threading.Lock()
        self._fd = -1
        self.saved = Saved()

    def open(self) -> bool:
        """Locks and reads the file; returns False if another gateway has it. Never raises for its content."""
        for _ in range(100):
            with suppress(FileExistsError, FileNotFoundError):
                self._folder.mkdir(mode=0o700)
                self._folder.chmod(0o700)  # whatever the umask takes away
            try:
                self._fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                if os.fstat(self._fd).st_uid != os.geteuid():
                    raise PermissionError(f"{self._folder} is another user's")
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.stat(self._folder), os.fstat(self._fd)):
                    self._read()
                    return True
            except FileNotFoundError:  # `clean` removed it first
                pass
            except OSError as wrong:
                log.warning("registrations will not survive a restart of this gateway: %s", wrong)
                self.close()
                return False
            self.close()
        return False

    def _read(self) -> None:
        try:
            found = msgspec.json.decode((self._folder / "state.json").read_bytes(), type=Saved)
            if found.version != _STATE_VERSION:
                raise ValueError(f"it has version {found.version}, this gateway writes {_STATE_VERSION}")
            self.saved = found
        except FileNotFoundError:
            pass
        except (OSError, ValueError) as wrong:
            log.error("%s is ignored: %s", self._folder / "state.json", wrong)

    def update(self, **changes: Any) -> None:
        """Changes some fields, also in the file, which is replaced whole or not at all."""
        with self._lock:
            self.saved = msgspec.structs.replace(self.saved, **changes)
            if self._fd < 0:
                return
            try:
                self._write(msgspec.json.encode(self.saved))
            except OSError as full:
                log.error("the state of the gateway was not written: %s", full)

    def _write(self, text: bytes) -> None:
        fd = os.open(
            "state.new",
            os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
            dir_fd=self._fd,
        )
        with open(fd, "wb", closefd=True) as file:
            file.write(text)  # all of it, or an OSError: a full mount takes a part
        os.replace("state.new", "state.json", src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def forget(self) -> None:
        """Removes the file: there are no registrations any more."""
        with self._lock:
            self.saved = Saved(compat=self.saved.compat)
            if self._fd >= 0:
                with suppress(FileNotFoundError):
                    os.unlink("state.json", dir_fd=self._fd)

    def close(self) -> None:
        """Releases the file for others; removes an empty folder."""
        if self._fd >= 0:
            with suppress(OSError):
                self._folder.rmdir()
            os.close(self._fd)
            self._fd = -1
