"""The monotonic clock, and time namespaces."""

import pytest

from shmbridge.doctor import clock


def test_the_clock_here() -> None:
    found = clock.monotonic()
    assert found.name == "clock"
    assert found.text.startswith("CLOCK_MONOTONIC counts ")
    assert clock.time_namespace().state == "ok"


@pytest.mark.parametrize(("cost", "resolution"), [(5000.0, 1e-9), (50.0, 4e-3)])
def test_a_slow_or_coarse_clock(tmp_path, monkeypatch, cost, resolution) -> None:
    source = tmp_path / "sys/devices/system/clocksource/clocksource0/current_clocksource"
    source.parent.mkdir(parents=True)
    source.write_text("acpi_pm\n")
    monkeypatch.setattr(clock, "_cost_ns", lambda: cost)
    monkeypatch.setattr(clock.time, "clock_getres", lambda which: resolution)
    found = clock.monotonic(tmp_path)
    assert found.state == "warn"
    assert found.text == (
        f"CLOCK_MONOTONIC counts {resolution * 1e9:.0f} ns, a look costs {cost:.0f} ns (acpi_pm)"
    )
    assert "clocksource=tsc" in found.fix


@pytest.mark.parametrize(
    ("seconds", "part", "says"),
    [(1000000, 0, "1e+06 s ahead of"), (-6, 500000000, "5.5 s behind"), (0, 0, None)],
)
def test_time_namespaces(tmp_path, seconds, part, says) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    offsets = f"monotonic {seconds:>12} {part:>12}\nboottime 7 0\n"
    (tmp_path / "proc/self/timens_offsets").write_text(offsets)
    found = clock.time_namespace(tmp_path)
    assert (found.name, found.state) == ("time namespace", "warn" if says else "ok")
    assert not says or found.text == f"this process' clock is {says} the machine's"
    assert not says or "in one time namespace" in found.fix


def test_a_kernel_without_time_namespaces(tmp_path) -> None:
    assert clock.time_namespace(tmp_path).text == "the kernel has none: one clock for all"
