"""Huge pages, locked memory and NUMA nodes."""

import resource

import pytest

from shmbridge.doctor import pages


@pytest.fixture
def root(tmp_path):
    setting = tmp_path / "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    setting.parent.mkdir(parents=True)
    setting.write_text("always within_size advise never [deny] force\n")
    return tmp_path


def test_huge_pages_are_tried_here(monkeypatch) -> None:
    found = pages.huge_pages()
    assert found.name == "huge pages"
    assert "shmem_enabled is " in found.text
    assert found.state == ("ok" if "was made on request" in found.text else "warn")
    monkeypatch.setenv("SHMBRIDGE_HUGE_PAGES", "never")
    found = pages.huge_pages()
    assert found.state == "ok"
    assert found.text.startswith("turned off by SHMBRIDGE_HUGE_PAGES=never; ")


@pytest.mark.parametrize(
    ("kernel", "fix"),
    [("5.15.0-91-generic", "Linux 6.1 or newer"), ("6.8.0", "no `deny` in /sys/kernel/mm/")],
)
def test_no_huge_page(root, monkeypatch, kernel, fix) -> None:
    monkeypatch.setattr("shmbridge.doctor.pages.fill_huge_pages", lambda fd, at, size: False)
    monkeypatch.setattr(pages.platform, "release", lambda: kernel)
    found = pages.huge_pages(root)
    assert found.state == "warn"
    assert found.text == (
        "no page of 2 MiB could be made, so lanes have small ones, which cost speed only; "
        "shmem_enabled is deny"
    )
    assert fix in found.fix


def test_no_huge_page_is_tried_without_memory(monkeypatch) -> None:
    monkeypatch.setattr("shmbridge.doctor.pages.memory_headroom", lambda: (1 << 20, "the machine"))
    assert pages.huge_pages().text.startswith("too little memory is left to try one; ")


@pytest.fixture
def user(tmp_path, monkeypatch):
    """A process with a limit of locked memory and these capabilities."""

    def plant(limit: int, capabilities: str = "0000000000000000"):
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
        monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
        return tmp_path

    return plant


def test_locked_memory_here(monkeypatch) -> None:
    monkeypatch.delenv("SHMBRIDGE_LOCK_MEMORY", raising=False)
    found = pages.locked_memory()
    assert (found.name, found.state) == ("locked memory", "ok")


def test_a_limit_matters_only_if_lanes_are_locked(user, monkeypatch) -> None:
    monkeypatch.delenv("SHMBRIDGE_LOCK_MEMORY", raising=False)
    root = user(8 << 20)
    assert pages.locked_memory(root).text == (
        "RLIMIT_MEMLOCK is 8 MiB for each process; lanes are locked with SHMBRIDGE_LOCK_MEMORY=1 only"
    )
    monkeypatch.setenv("SHMBRIDGE_LOCK_MEMORY", "1")
    found = pages.locked_memory(root)
    assert found.state == "warn"
    assert found.text.startswith("RLIMIT_MEMLOCK is 8 MiB for each process, a lane has 64 MiB: ")
    assert found.fix == "ulimit -l unlimited (docker run --ulimit memlock=-1)"


@pytest.mark.parametrize(
    ("limit", "capabilities"), [(8 << 20, "000001ffffffffff"), (64 << 20, "0"), (resource.RLIM_INFINITY, "0")]
)
def test_a_limit_that_lets_lanes_be_locked(user, monkeypatch, limit, capabilities) -> None:
    monkeypatch.setenv("SHMBRIDGE_LOCK_MEMORY", "1")
    assert pages.locked_memory(user(limit, capabilities)).state == "ok"


def test_numa(tmp_path) -> None:
    assert (pages.numa().name, pages.numa().state) == ("numa", "ok")
    assert pages.numa(tmp_path).text == "one node"
    for number in range(2):
        (tmp_path / f"sys/devices/system/node/node{number}").mkdir(parents=True)
    found = pages.numa(tmp_path)
    assert found.state == "ok"
    assert found.text.startswith("2 nodes: a lane lies on its producer's; numactl --preferred")
