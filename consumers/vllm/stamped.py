"""Adds the policy version to responses: a header on all, two fields in the JSON of completions. The fields
bound the versions of a response's tokens; `/generate` gives exact spans.
"""

from __future__ import annotations

from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.types import Message, Send

Version = Callable[[], int | None]

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def version_header(version: int | None) -> dict[str, str]:
    """Returns the header `X-Policy-Version`, or nothing for an unknown version."""
    return {} if version is None else {"x-policy-version": str(version)}


def stamped(send: Send, path: str, version: Version) -> Send:
    """Returns a `send` that adds the version to the response for a request that has just arrived.

    Args:
        send: of the request.
        path: of the request.
        version: returns the version of tokens generated now.
    """
    oldest = version()
    held: list[Message] = []  # the start of a response whose length will change, and its body so far

    async def send_stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            if header := version_header(version()):
                message = {"headers": [], **message}
                headers = MutableHeaders(scope=message)
                headers.update(header)
                is_json = headers.get("content-type", "").startswith("application/json")
                if path in _COMPLETIONS and message["status"] == 200 and is_json:
                    held.append(message)
                    return
        elif held and message["type"] == "http.response.body":
            held.append(message)
            if message.get("more_body", False):
                return
            raw = b"".join(part.get("body", b"") for part in held[1:])
            raw = _with_versions(raw, version(), oldest)
            MutableHeaders(scope=held[0])["content-length"] = str(len(raw))
            await send(held[0])
            held.clear()
            message = {"type": "http.response.body", "body": raw}
        await send(message)

    return send_stamped


def _with_versions(raw: bytes, newest: int | None, oldest: int | None) -> bytes:
    """Returns the JSON object with two fields appended; null stands for an unknown version."""
    body = raw.rstrip()
    if not body.endswith(b"}") or body == b"{}":
        return raw
    fields = b',"weight_version":%s,"oldest_weight_version":%s}' % (_json(newest), _json(oldest))
    return body[:-1] + fields


def _json(version: int | None) -> bytes:
    return b"null" if version is None else b"%d" % version
