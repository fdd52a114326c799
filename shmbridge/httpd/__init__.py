"""The front door of every HTTP server here: what a request must pass, and how much a peer may take.

`door` and `threads` need the standard library alone; `gate` and `server` stand before ASGI applications,
with starlette and uvicorn.
"""

__all__ = ["door", "gate", "server", "threads"]
