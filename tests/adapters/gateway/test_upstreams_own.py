"""A gateway as the original's clients see it: the original's own tests, its numbers to the last digit, its
answers to odd requests.
"""

from __future__ import annotations

import gzip
import os
import random
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import requests
from gateway_clients import ROOT, GatewayProcess, UpstreamProcess, group

import shmbridge
from shmbridge.consumers.gateway.bodies import shortest

TESTS = ("test_api_compression.py", "test_api_legacy.py", "test_api_messages_handling.py")


def test_upstreams_api_tests_pass_against_a_gateway(bridge: str):
    """The unchanged tests of the installed atroposlib; the server that they start is a strict gateway."""
    pytest.importorskip("atroposlib")
    folder = Path(next(iter(find_spec("atroposlib").submodule_search_locations)), "tests")
    environment = os.environ | {
        "UPSTREAM_TESTS_BRIDGE": bridge,
        "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}",
        "PYTEST_ADDOPTS": "",  # whoever runs this test may have options of their own
    }
    options = [
        "-q",
        "-p",
        "upstream_pointer",
        "-p",
        "no:cacheprovider",
        "-c",
        os.devnull,
        "--rootdir",
        str(folder),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(str(folder / each) for each in TESTS)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    for name in {each.name for each in shmbridge.list_bridges()} | {
        f"{bridge}-{number}" for number in range(len(TESTS))
    }:
        if name.startswith(f"{bridge}-"):
            shmbridge.clean(name, dry_run=False)
    assert "36 passed" in done.stdout.splitlines()[-1], done.stdout + done.stderr


def test_the_shortest_text_of_every_kind_of_float32():
    """numpy's own shortest text is the judge; over all bit patterns, powers of two and ten and their
    neighbours, decimals.
    """
    rng = np.random.default_rng(1)
    patterns = rng.integers(0, 1 << 32, 20_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    two = np.ldexp(np.float32(1), np.arange(-149, 128)).astype(np.float32)
    ten = (10.0 ** np.arange(-44, 39)).astype(np.float32)
    edges = np.concatenate([two, ten, np.nextafter(two, np.float32(0)), np.nextafter(ten, np.float32(1e38))])
    usual = np.concatenate([rng.standard_normal(20_000), rng.integers(-(10**6), 10**6, 5_000) / 1000]).astype(
        np.float32
    )
    values = np.concatenate(
        [patterns[np.isfinite(patterns)], edges, -edges, usual, np.array([0.0, -0.0], np.float32)]
    )
    said = shortest(values)
    assert said.tolist() == [float(str(value)) for value in values]
    assert (said.astype(np.float32).view(np.uint32) == values.view(np.uint32)).all()
    assert np.isnan(shortest(np.array([np.nan], np.float32)))[0]


@pytest.mark.parametrize("mode", ["default", "strict"])
def test_floats_come_back_as_they_were_written(start_gateway: Callable[..., GatewayProcess], mode: str):
    """A float of at most six digits has the same text afterwards, in a batch and as the latest example."""
    gateway = start_gateway("--compat", mode)
    gateway.start(batch_size=4)
    rng = random.Random(3)
    rows = [[round(rng.uniform(-20, 1), rng.randint(0, 4)) for _ in range(3)] for _ in range(4)]
    rows[0] = [-0.7, 1.0, 1e-7]
    logprobs = [[-0.7, 1.0, -1e-7], *([-abs(value) for value in row] for row in rows[1:])]
    more = {
        "inference_logprobs": logprobs,
        "advantages": rows,
        "ref_logprobs": logprobs,
        "distill_logprobs": [[row, [0.1], row] for row in rows],
    }
    if mode == "default":
        more["step_rewards"] = [[0.1, 0.3]] * 4
    gateway.put(1, **more)
    latest, (served,) = gateway.get("/latest_example").text, gateway.batch()
    assert {key: served[key] for key in more} == more
    assert "-0.7," in latest


WHOLE = [1.0, -0.0, 1e3, "7", "7.0", 1.5, "x", 1e300, None, [1]]


def test_whole_numbers_are_tokens_however_they_are_written(upstream: UpstreamProcess, strict: GatewayProcess):
    """1.0 is 1 and 1.5 is refused, as at the original; a number beyond int32 is refused."""
    for api in (upstream, strict):
        api.start(batch_size=1)
    for key in ("tokens", "masks", "distill_token_ids"):
        for value in WHOLE:
            posted = group(1, 1, **{key: [[[value, 2]]] if key.startswith("d") else [[value, 2, 3]]})
            there, here = (api.post("/scored_data", posted) for api in (upstream, strict))
            assert here.status_code == there.status_code, (key, value, here.text)
            assert strict.batch() == upstream.batch(), (key, value)
    assert strict.post("/scored_data", group(1, 1) | {"tokens": [[3000000000.0]]}).status_code == 422


def test_a_browser_that_asks_whether_it_may_ask(
    upstream: UpstreamProcess, start_gateway: Callable[..., GatewayProcess]
):
    """The answer is the original's. The request itself needs the token, so that pages of other sites stay
    out.
    """
    page = {"origin": "http://page.example"}
    ask = page | {
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type,authorization",
    }
    gateway = start_gateway("--compat", "strict", "--token", "secret")
    for path in ("/register", "/scored_data", "/nowhere"):
        there, here = (
            requests.options(api.url + path, headers=ask, timeout=30) for api in (upstream, gateway)
        )
        assert (here.status_code, here.text) == (there.status_code, there.text) == (200, "OK")
        assert {key: value for key, value in here.headers.items() if key not in ("date", "server")} == {
            key: value for key, value in there.headers.items() if key not in ("date", "server")
        }
    answer = gateway.get(
        "/info", headers=page | {"authorization": "Bearer secret", "sec-fetch-site": "cross-site"}
    )
    there = upstream.get("/info", headers=page)
    for name in ("access-control-allow-origin", "access-control-allow-credentials"):
        assert answer.headers[name] == there.headers[name]
    assert gateway.get("/info", headers=page).status_code == 401
    assert start_gateway().get("/info", headers=page).status_code == 403


def test_gzip_that_is_none(upstream: UpstreamProcess, strict: GatewayProcess):
    """A wrong head, rest or checksum is 400 with the original's text. A body that breaks off fails, as there.
    A padded one is taken.
    """
    whole = gzip.compress(b'{"env_id": 0}')
    bodies = [
        b"no gzip",
        whole + b"rest",
        whole[:-8] + bytes(4) + whole[-4:],
        whole[:-4] + bytes(4),
        whole[:-3],
        whole[:12],
        whole[:10] + b"\xff" * 20,
        whole + bytes(100),
        b"",
    ]
    for body in bodies:
        headers = {"content-encoding": "gzip", "content-type": "application/json"}
        there, here = (api.post("/disconnect-env", data=body, headers=headers) for api in (upstream, strict))
        assert here.status_code == there.status_code, body
        if here.status_code != 422:
            assert (here.text, here.headers["content-type"]) == (there.text, there.headers["content-type"]), (
                body
            )
