"""One self-contained HTML page of one or several runs. It loads nothing, and its only script is ours."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import shmbridge
from shmbridge.config import plain, read_yaml
from shmbridge.consumers.learner.config.file import NAME as CONFIG_FILE
from shmbridge.consumers.learner.report.conclusions import conclusions
from shmbridge.consumers.learner.report.curves import curves, lanes, lost_by_reason
from shmbridge.consumers.learner.report.read_samples import Samples, read_samples
from shmbridge.consumers.learner.report.run_facts import read_facts
from shmbridge.consumers.learner.report.run_report import RunMetrics

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class PageRun:
    """All that a page shows of one run."""

    metrics: RunMetrics
    summary: Mapping[str, Any]
    samples: Samples
    config: Mapping[str, Any]  # section -> option -> value; empty if unknown
    starts: Sequence[Mapping[str, Any]]  # as `read_facts`


def page_run(folder: Path, metrics: RunMetrics, summary: Mapping[str, Any]) -> PageRun:
    """Returns a run with its samples, configuration and facts, as far as they are there. Blocks."""
    return PageRun(metrics, summary, read_samples(folder), _config(folder / CONFIG_FILE), read_facts(folder))


def write_page(runs: Sequence[PageRun], file: Path) -> None:
    """Writes the page of at least one run. Blocks for the disk; raises OSError."""
    text = page(runs)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


def page(runs: Sequence[PageRun]) -> str:
    """Returns the page of at least one run. Never blocks.

    All text of a run is escaped, and the page's policy lets no script run but its own.
    """
    style, script = (_HERE / "page.css").read_text(), (_HERE / "page.js").read_text()
    metrics = [run.metrics for run in runs]
    data = {
        "runs": [{"name": run.metrics.name, "samples": run.samples.groups} for run in runs],
        "charts": curves(metrics),
        "lanes": lanes(metrics),
    }
    title = " and ".join(run.metrics.name for run in runs)
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:"
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - shmbridge report</title>
<style>{style}</style>
</head>
<body>
<header>
<div><h1>{escape(title)}</h1>{"".join(map(_about, runs))}</div>
<button id="theme" class="theme" aria-label="light or dark">light / dark</button>
</header>
<main>
{"".join(_conclusions(run, named=len(runs) > 1) for run in runs)}
{_tiles(runs[0]) if len(runs) == 1 else _table(runs)}
<h2>Curves</h2>
<p>{_curves_said(metrics)}</p>
<div class="charts" id="curves"></div>
<h2>Lanes</h2>
<p>A lane is the ring in shared memory of one producer. Values are those at the end of each step.</p>
<div class="charts" id="lanes"></div>
<h2>Groups</h2>
<p>{_samples_said(runs)}</p>
<div class="key"><span><span class="token plus first key-plus">tokens</span> made more likely</span>
<span><span class="token minus first key-minus">tokens</span> made less likely</span>
<span><span class="token untrained">tokens</span> not trained</span>
<span><span class="step">step 1: +1</span> reward of a step, where it ends</span>
<span>the stronger the colour, the larger the advantage in this group</span></div>
<div class="browse" id="browse"></div>
<div class="groups" id="groups"></div>
<div id="group"></div>
<h2>The run</h2>
{"".join(map(_details, runs))}
</main>
<footer>Made by shmbridge {escape(shmbridge.__version__)}. One file, without any link to the outside.</footer>
<script type="application/json" id="data">{_json(data)}</script>
<script>{script}</script>
</body>
</html>
"""


def _json(data: Any) -> str:
    """Returns JSON in which no text can end the script element."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))  # ASCII: other characters as \\uXXXX
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _config(path: Path) -> dict[str, Any]:
    try:
        found = plain(read_yaml(path.read_bytes()))
    except (ImportError, OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _option(run: PageRun, section: str, name: str) -> Any:
    inner = run.config.get(section)
    return inner.get(name) if isinstance(inner, dict) else None


def _about(run: PageRun) -> str:
    """Returns a line: what was trained, how, when, on what."""
    start = run.starts[0] if run.starts else {}
    groups, size = _option(run, "batch", "groups"), _option(run, "batch", "group_size")
    parts = [
        _option(run, "run", "model"),
        f"bridge {bridge}" if (bridge := _option(run, "run", "bridge")) else None,
        f"loss {loss}" if (loss := _option(run, "objective", "loss")) else None,
        f"{groups} groups of {size} a step" if groups and size else None,
        f"learning rate {rate:g}"
        if isinstance(rate := _option(run, "optimizer", "lr"), (int, float))
        else None,
        start.get("device"),
        f"started {started}" if (started := start.get("started")) else None,
    ]
    said = " · ".join(escape(str(each)) for each in parts if each)
    return f'<p class="about">{said}</p>' if said else ""


def _conclusions(run: PageRun, *, named: bool) -> str:
    items = "".join(
        f'<li class="{each.level}">{escape(_sentence(each.text))}</li>'
        for each in conclusions(run.metrics, dict(run.summary))
    )
    head = f'<h3 class="run">{escape(run.metrics.name)}</h3>' if named else ""
    return f'{head}<ul class="conclusions">{items}</ul>' if items else head


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _headlines(run: PageRun) -> Iterable[tuple[str, str, str]]:
    """Yields (name, value, remark) of the headline numbers."""
    found = run.summary
    lost = (found["dropped_total"] or 0) + (found["discarded_total"] or 0)
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in lost_by_reason(run.metrics).items())
    best, waits = found["reward_best"], found["idle_frac_running"]
    yield (
        "Reward at the end",
        _say(found["reward_last"], ".3f"),
        f"{_say(found['reward_first'], '.3f')} at the start"
        + ("" if best is None else f", best {best:.3f} at step {found['reward_best_step']}"),
    )
    yield "Steps", f"{found['steps']:,}", f"in {_duration(found['wall_s'])}" if found["wall_s"] else ""
    yield "Tokens per second", _say(found["tokens_per_s"], ",.0f"), f"{_large(found['tokens'])} tokens in all"
    yield (
        "Waiting",
        "unknown" if waits is None else f"{100 * waits:.0f} %",
        "of the time since the first batch",
    )
    yield (
        "Staleness",
        _say(found["staleness_mean"], ".2f"),
        f"versions in the mean, at most {_say(found['staleness_max'], '.0f')}",
    )
    yield "Lost records", f"{lost:,.0f}", reasons or "dropped or discarded"
    if found["eval_last"] is not None:
        yield "Evaluation", f"{found['eval_last']:.3f}", "at the last"


def _tiles(run: PageRun) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}<small>{escape(remark)}</small></dd></div>"
        for name, value, remark in _headlines(run)
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _table(runs: Sequence[PageRun]) -> str:
    rows = [{name: value for name, value, _ in _headlines(run)} for run in runs]
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f'<th class="n">{escape(name)}</th>' for name in names)
    body = "".join(
        f"<tr><td>{escape(run.metrics.name)}</td>"
        + "".join(f'<td class="n">{escape(row.get(name, ""))}</td>' for name in names)
        + "</tr>"
        for run, row in zip(runs, rows, strict=True)
    )
    return f'<div class="scroll"><table class="runs"><tr><th>Run</th>{head}</tr>{body}</table></div>'


def _curves_said(runs: Sequence[RunMetrics]) -> str:
    lost = any(lost_by_reason(run) for run in runs)
    said = "By optimizer step. Bold lines are running means; the pointer shows the values at a step."
    return said + ("" if lost else " No record was dropped or discarded.")


def _samples_said(runs: Sequence[PageRun]) -> str:
    groups = sum(len(run.samples.groups) for run in runs)
    if not groups:
        return (
            "There are no samples: the learner writes samples.jsonl into its run directory with "
            "--sample-every above 0."
        )
    left = sum(run.samples.left_out for run in runs)
    torn = sum(run.samples.torn for run in runs)
    return (
        "Every few steps two groups of the batch: that whose scores differ most, and one at random."
        + (f" {left:,} more groups are in samples.jsonl." if left else "")
        + (f" {torn:,} torn lines are left out." if torn else "")
    )


def _details(run: PageRun) -> str:
    start = run.starts[-1] if run.starts else {}
    packages, cores = start.get("packages"), start.get("cores")
    facts = {
        "Run": run.metrics.name,
        "Started": ", ".join(str(each.get("started", "unknown")) for each in run.starts),
        "Versions": ", ".join(
            f"{name} {version}"
            for name, version in {
                "shmbridge": start.get("shmbridge"),
                "Python": start.get("python"),
                **(packages if isinstance(packages, dict) else {}),
            }.items()
            if version
        ),
        "Host": ", ".join(
            str(each)
            for each in (
                start.get("host"),
                start.get("system"),
                f"{cores} cores" if cores else None,
                start.get("device"),
            )
            if each
        ),
    }
    rows = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items() if value
    )
    sections = "".join(
        f"<section><h4>{escape(str(section))}</h4><dl>"
        + "".join(
            f"<dt>{escape(str(name))}</dt><dd>{escape(_plain(value))}</dd>" for name, value in inner.items()
        )
        + "</dl></section>"
        for section, inner in run.config.items()
        if isinstance(inner, dict)
    )
    config = (
        f'<details><summary>The whole configuration</summary><div class="config">{sections}</div></details>'
        if sections
        else '<p class="none">There is no readable config.yaml in the run directory.</p>'
    )
    return f'<dl class="facts">{rows}</dl>{config}'


def _plain(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _say(value: float | None, how: str) -> str:
    return "unknown" if value is None else format(value, how)


def _large(count: int) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {letter}"
    return str(count)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"
