"""A scripted service: lives, answers, dies, ignores signals, leaves processes behind.

Standard library alone.
"""

import argparse
import http.server
import os
import signal
import sys
import threading
import time
from pathlib import Path


def note(options, what):
    with Path(options.notes).open("a") as notes:
        notes.write(f"{options.name} {what} {os.getpid()}\n")


def leave_behind(options):
    """Starts a process in a session of its own, whose parent ends, and which ignores signals to end."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                signal.signal(signum, signal.SIG_IGN)
            note(options, "stray")
            while True:
                time.sleep(60)
        os._exit(0)
    os.wait()


class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        allowed = not options.token or self.headers.get("Authorization") == f"Bearer {options.token}"
        self.send_response(200 if allowed else 401)
        self.end_headers()

    def log_message(self, *args):
        pass


parser = argparse.ArgumentParser()
parser.add_argument("--name", required=True)
parser.add_argument("--notes", required=True)
parser.add_argument("--port", type=int)
parser.add_argument("--token")
parser.add_argument("--answer-after", type=float, default=0.0)
parser.add_argument("--live", type=float, default=3600.0)
parser.add_argument("--status", type=int, default=0)
parser.add_argument("--on-term", type=int)
parser.add_argument("--stray", action="store_true")
parser.add_argument("--stubborn", action="store_true")
parser.add_argument("--until", type=Path)
options = parser.parse_args()


def on_term(signum, frame):
    note(options, signal.Signals(signum).name)
    if not options.stubborn:
        sys.exit(0 if options.on_term is None else options.on_term)


signal.signal(signal.SIGTERM, on_term)
note(options, "start")
print(f"{options.name} says hello", flush=True)
if options.stray:
    leave_behind(options)
began = time.monotonic()
if options.port:
    time.sleep(options.answer_after)
    server = http.server.HTTPServer(("127.0.0.1", options.port), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    note(options, "answers")
while time.monotonic() - began < options.live and not (options.until and options.until.exists()):
    time.sleep(0.02)
print(f"{options.name} is leaving with {options.status}", flush=True)
sys.exit(options.status)
