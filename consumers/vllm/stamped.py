"""Says on the way out which policy version an answer is from: a header on all of them, two fields in the JSON
of completions.

Knows nothing of engines. The fields bound the versions of an answer's tokens; exact spans come with
`/generate`.
"""

from __future__ import annotations

from collections.abc import Callable

from shmbridge.consumers.vllm.asgi import Header, Message, Send

Version = Callable[[], int | None]

_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")


def version_header(version: int | None) -> list[Header]:
    """Returns the header `X-Policy-Version`, or nothing for a version that is unknown."""
    return [] if version is None else [(b"x-policy-version", str(version).encode())]


def stamped(send: Send, path: str, version: Version) -> Send:
    """Returns a `send` that adds to what a server sends.

    Args:
        send: of the request.
        path: of the request, which arrives now.
        version: that tokens come from when it is called.
    """
    oldest = version()
    held: list[Message] = []  # the start of an answer whose length will change, and its body so far

    async def send_stamped(message: Message) -> None:
        if message["type"] == "http.response.start":
            if version_header(newest := version()):
                message = {**message, "headers": [*message.get("headers", ()), *version_header(newest)]}
                if path in _COMPLETIONS and message["status"] == 200 and _is_json(message):
                    held.append(message)
                    return
        elif held and message["type"] == "http.response.body":
            held.append(message)
            if message.get("more_body", False):
                return
            raw = b"".join(part.get("body", b"") for part in held[1:])
            raw = _with_versions(raw, version(), oldest)
            headers = [pair for pair in held[0]["headers"] if pair[0].lower() != b"content-length"]
            await send({**held[0], "headers": [*headers, (b"content-length", str(len(raw)).encode())]})
            held.clear()
            message = {"type": "http.response.body", "body": raw}
        await send(message)

    return send_stamped


def _is_json(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"application/json")
        for name, value in start["headers"]
    )


def _with_versions(raw: bytes, newest: int | None, oldest: int | None) -> bytes:
    """The JSON object with two more fields at its end; a null says that tokens may be of a version that is
    unknown.
    """
    body = raw.rstrip()
    if not body.endswith(b"}") or body == b"{}":
        return raw
    fields = b',"weight_version":%s,"oldest_weight_version":%s}' % (_json(newest), _json(oldest))
    return body[:-1] + fields


def _json(version: int | None) -> bytes:
    return b"null" if version is None else b"%d" % version
