"""Every fail-point in the sources is known, and every known one is used by a test here."""

import re
from pathlib import Path

from shmbridge.testing import faults

ROOT = Path(__file__).parents[3]


def labels_in_sources() -> list[str]:
    found: list[str] = []
    for path in [
        *(ROOT / "shmbridge").rglob("*.py"),
        *(ROOT / "shmbridge/_ext").glob("*.pyx"),
        *(ROOT / "shmbridge/_ext").glob("*.pxi"),
        *(ROOT / "shmbridge/_ext/c").glob("*.[ch]"),
    ]:
        if path.suffix == ".c" and path.with_suffix(".pyx").exists():
            continue
        found += re.findall(r"""\bfault(?:_hit)?\(\s*b?["']([\w.]+)["']""", path.read_text())
    return found


def test_every_label_of_the_sources_is_listed_once():
    found = labels_in_sources()
    assert sorted(found) == sorted(set(found)), "a label stands for one place"
    assert sorted(found) == sorted(label for labels in faults.LABELS.values() for label in labels)


def test_every_listed_label_is_used_by_a_test():
    tests = "".join(
        path.read_text()
        for path in Path(__file__).parent.glob("test_*.py")
        if path.name != Path(__file__).name
    )
    groups = {
        name: value for name, value in vars(faults).items() if name.isupper() and isinstance(value, tuple)
    }
    unused = [name for name in groups if f"faults.{name}" not in tests]
    assert not unused
    assert {label for labels in groups.values() for label in labels} == {
        label for labels in faults.LABELS.values() for label in labels
    }


def test_the_build_has_fail_points(faulty):
    """Otherwise every other test here would pass for nothing."""
    with faulty("produce", "victim", 1, fault=faults.Fault("producer.claimed")) as child:
        child.end_on_fault()
    assert "put 0" not in child.said
