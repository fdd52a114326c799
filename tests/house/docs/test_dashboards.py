"""The dashboard, the alerts and their pages name metrics that exist, with labels that these have."""

import json
import re
from pathlib import Path

import pytest
import yaml

from shmbridge.metrics import COUNTERS

ROOT = Path(__file__).parents[3]
RULES = yaml.safe_load((ROOT / "examples/grafana/alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((ROOT / "examples/grafana/shmbridge.json").read_text())
PAGE = (ROOT / "docs/how-to/alerts.md").read_text()
LABELS = {
    "mount": set(),
    "bridge": {"bridge"},
    "environment": {"bridge", "environment"},
    "reason": {"bridge", "environment", "reason"},
}
KINDS = {each.prometheus: each.kind for each in COUNTERS}
THERE = {each.prometheus: LABELS[each.per] for each in COUNTERS if each.kind != "histogram"} | {
    f"{each.prometheus}_{part}": LABELS[each.per] | ({"le"} if part == "bucket" else set())
    for each in COUNTERS
    if each.kind == "histogram"
    for part in ("bucket", "sum", "count")
}


def panels() -> dict[str, str]:
    return {
        f"{panel['title']}: {target['legendFormat']}": target["expr"]
        for panel in DASHBOARD["panels"]
        for target in panel["targets"]
    }


def alerts() -> dict[str, str]:
    return {rule["alert"]: rule["expr"] for rule in RULES}


def wrong_in(expression: str) -> list[str]:
    """Names that are not exported, labels that a name does not have, rates of what is no counter."""
    found = []
    names = re.findall(r"\b(shmbridge_\w+)(?:\{([^}]*)\})?", expression)
    if not names:
        return ["no metric"]
    for name, matchers in names:
        labels = set(re.findall(r"(\w+)\s*=", matchers))
        if name not in THERE:
            found.append(f"{name} is not exported")
        elif labels - THERE[name]:
            found.append(f"{name} has no label {labels - THERE[name]}")
    for name in re.findall(r"(?:rate|increase)\((shmbridge_\w+)", expression):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        if KINDS.get(name, KINDS.get(family)) == "gauge":
            found.append(f"a rate of {name}, a gauge")
    for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", expression):
        for label in labels.split(","):
            if not any(label.strip() in THERE.get(name, ()) for name, _ in names):
                found.append(f"nothing has the label {label}")
    if expression.count("(") != expression.count(")"):
        found.append("brackets")
    return found


@pytest.mark.parametrize("of", [panels, alerts], ids=["dashboard", "alerts"])
def test_expressions_are_of_metrics_that_exist(of):
    wrong = {title: said for title, expression in of().items() if (said := wrong_in(expression))}
    assert len(of()) > 10
    assert not wrong


def test_the_check_finds_what_is_wrong():
    assert wrong_in("rate(shmbridge_recods_total[1m])") == ["shmbridge_recods_total is not exported"]
    assert wrong_in('shmbridge_held{reason="x"}') == ["shmbridge_held has no label {'reason'}"]
    assert wrong_in("rate(shmbridge_held[1m])") == ["a rate of shmbridge_held, a gauge"]
    assert wrong_in("sum by (pid) (shmbridge_held)") == ["nothing has the label pid"]


def test_each_panel_shows_one_bridge_and_lies_beside_the_others():
    cells = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        mine = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not mine & cells, panel["title"]
        assert at["x"] + at["w"] <= 24
        cells |= mine
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert all(
        'bridge="$bridge"' in expression or "shmbridge_mount" in expression
        for expression in panels().values()
    )


def test_labels_in_texts_are_there():
    for rule in RULES:
        left = set().union(*(THERE[name] for name in re.findall(r"shmbridge_\w+", rule["expr"])))
        if "by (bridge)" in rule["expr"]:
            left = {"bridge"}
        assert set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])) <= left, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_every_alert_is_on_the_page_with_its_names():
    rows = dict(re.findall(r"^\| `(Shmbridge\w+)` \| (.*)$", PAGE, re.MULTILINE))
    assert set(rows) == set(alerts())
    for alert, row in rows.items():
        named = re.findall(r"shmbridge_\w+", row.split(" | ")[0])
        assert named, alert
        assert set(named) <= set(re.findall(r"shmbridge_\w+", alerts()[alert])), alert
