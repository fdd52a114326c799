"""`--compat strict`: an exact twin of the archived Atropos server (docs/adr/0012-less.md). Frozen.

It is the hub from the beginning, with that server's queue (`queue.py`).
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exception_handlers import http_exception_handler
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import PlainTextResponse, Response
from starlette.exceptions import HTTPException

from shmbridge import Run
from shmbridge.consumers.gateway.app import make_app
from shmbridge.consumers.gateway.environments import RemoteEnvs, StateFile
from shmbridge.consumers.gateway.gateway import Gateway
from shmbridge.consumers.gateway.limits import GatewayOptions, Refusals
from shmbridge.consumers.gateway.posts import Outcomes, Places, PostLedger, RemoteLane
from shmbridge.consumers.gateway.strict.queue import NoSuchThing, StrictTaker
from shmbridge.errors import NoWeight
from shmbridge.httpd.door import Refused
from shmbridge.httpd.gate import BrokenOff

_SHARED = 1  # the lane of environments that are unknown or have no lane


class StrictGateway(Gateway):
    """The hub from the beginning, with the original's queue. `open` raises ConsumerTaken."""

    taker: StrictTaker

    def __init__(self, options: GatewayOptions) -> None:
        super().__init__(options)
        self.ledger = PostLedger(options.post_deadline_s, self._outcomes)
        self.taker = StrictTaker(options, self.state)
        # remains empty: the taker has the environments
        self.envs = RemoteEnvs(options, StateFile(options.bridge), self.taker.own)
        self._lanes: dict[int | None, RemoteLane] = {}

    async def _outcomes(self, places: Places) -> Outcomes:
        return await self.hub(self.taker.posted, places)

    def lane_of(self, group: dict[str, Any]) -> RemoteLane:
        """Returns the lane that a group goes to; environments beyond the lanes share one."""
        number = group.get("env_id")
        known = number if number is not None and number < len(self.taker.upstream.envs) else None
        if known not in self._lanes and len(self._lanes) + _SHARED >= self.options.lanes:
            known = None  # no consumer would take from another lane
        lane = self._lanes.get(known)
        if lane is None:
            name = "gateway" if known is None else self.taker.upstream.envs[known].desired_name
            lane = self._lanes[known] = RemoteLane(self.options, name, self.taker.own)
        return lane

    async def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to /register-env."""
        return await self.hub(self.taker.register_env, wish)

    async def disconnect_env(self, number: int) -> dict[str, Any]:
        """Returns the response to /disconnect-env."""
        return await self.hub(self.taker.disconnect_env, number)

    async def env_status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env. Raises NoSuchThing where the original fails."""
        try:
            return await self.hub(self.taker.env_status, number)
        except (IndexError, NoWeight):
            raise NoSuchThing from None

    async def status(self) -> dict[str, int]:
        """Returns the response to /status."""
        return await self.hub(self.taker.status)

    async def run(self) -> Run | None:
        """Returns the run; after a reset its numbers are -1 and its names gone, as in the original."""
        return await self.hub(self.taker.said_run)

    async def latest(self) -> dict[str, Any] | None:
        """Returns the group that was queued last; None before the first."""
        return await self.hub(self.taker.latest)

    async def reset(self) -> None:
        """Clears registrations and queue."""
        await super().reset()
        lanes, self._lanes = self._lanes, {}
        for lane in lanes.values():
            lane.close()

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        return {**super().stats(), "environments": len(self.taker.upstream.envs)}

    def end(self) -> None:
        """Refuses posts that wait for room, and closes all lanes; what is in them stays."""
        super().end()
        for lane in self._lanes.values():
            lane.close()


class UpstreamRefusals(Refusals):
    """Answers an invalid gzip body as the original does."""

    def answer(self, refused: Refused) -> Response:
        """Returns the response to a refused request."""
        if refused.kind != "gzip":
            return super().answer(refused)
        self.counts[refused.kind] += 1
        if isinstance(refused, BrokenOff):
            return PlainTextResponse("Internal Server Error", 500)
        return PlainTextResponse("Invalid gzip payload", 400)


def make_strict_app(gateway: StrictGateway) -> FastAPI:
    """Returns the application of one strict gateway, which must be open while it serves."""
    app = make_app(gateway, UpstreamRefusals(), greeting={"message": "AtroposLib API"})
    app.add_exception_handler(HTTPException, http_exception_handler)  # type: ignore[arg-type]
    # any origin; a browser's preflight (CORS) passes without the token: browsers send none with it
    app.add_middleware(
        CORSMiddleware, allow_origins=["*"], allow_credentials=True, allow_methods=["*"], allow_headers=["*"]
    )

    @app.exception_handler(NoSuchThing)
    async def fails_there(request: Request, wrong: NoSuchThing) -> Response:
        return PlainTextResponse("Internal Server Error", 500)

    return app
