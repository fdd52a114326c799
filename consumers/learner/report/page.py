"""One self-contained HTML page of one or several runs. It loads nothing, and its only script is ours."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.learner.config.flags import CONFIG_FILE
from shmbridge.consumers.learner.report.run import PHASES, RunMetrics, conclusions, read_facts, thinned
from shmbridge.consumers.learner.report.samples import Samples, read_samples
from shmbridge.wrong_value import plain, read_yaml

_HERE = Path(__file__).parent
Chart = dict[str, Any]
_ENVIRONMENT = re.compile(r"^atropos/(.+)/mean_score$")
_MOST_ENVIRONMENTS = 7  # lines that can be told apart
_MOST_EVALUATIONS = 8  # charts of them
_REASON = re.compile(r"^bridge/(drops|discards)_(\w+)_total$")
_LINES = ("-", "--", ":", "-.")
# with the line patterns, distinguishable in grey, too
_INKS = ("#000000", "#0072b2", "#d55e00", "#7f7f7f", "#009e73", "#cc79a7")
_COLOURS = ("#ffffff", "#e0e0e0", "#56b4e9", "#0072b2", "#3690c0", "#d55e00", "#a0a0a0", "#404040")
_FILLS = dict(zip(PHASES, _COLOURS, strict=True))
_HATCHES = dict(zip(PHASES, ("", "..", "", "//", "", "xx", "", ""), strict=True))


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


def curves(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns the charts of learning: title, unit and series each, the values of every run thinned."""
    return [
        _chart("Reward", "mean score of a batch", _rewards(runs), smooth=True),
        *_evaluations(runs),
        _chart("Loss", "", _of(runs, ("loss", "")), smooth=True),
        _chart(
            "Staleness",
            "policy versions",
            _of(runs, ("staleness_mean", "mean"), ("staleness_max", "largest")),
            zero=True,
        ),
        _chart(
            "Sampler against policy",
            "nats, difference of log-probabilities",
            _of(runs, ("logprob_diff_mean", "all tokens"), ("logprob_diff_mean_fresh", "fresh tokens")),
            zero=True,
            smooth=True,
        ),
        _chart(
            "Throughput",
            "tokens per second",
            [_series(run, _name(runs, run, ""), run.tokens_per_s) for run in runs],
            zero=True,
            smooth=True,
        ),
        _time(runs),
        _chart("Entropy", "nats", _of(runs, ("entropy", "")), zero=True, smooth=True),
        _chart(
            "Length of completions",
            "tokens, mean",
            _of(runs, ("atropos/avg_response_length", "")),
            zero=True,
            smooth=True,
        ),
        _chart("Lost records", "in total, by reason", _lost(runs), zero=True, steps=True, whole=True),
    ]


def lanes(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns the charts of the lanes over time."""
    states = ("live", "dead", "quarantined", "refused")
    kept = [
        (f"bridge/lanes_{state}", state)
        for state in states
        if state == "live" or any(np.nansum(run.column(f"bridge/lanes_{state}")) for run in runs)
    ]
    return [
        _chart("Lanes", "by state", _of(runs, *kept), zero=True, steps=True, whole=True),
        _chart(
            "Fill of the lanes",
            "share of their memory",
            _of(runs, ("bridge/lane_fill_frac", "")),
            zero=True,
            how="%",
        ),
        _chart(
            "Groups waiting",
            "committed, in no batch yet",
            _of(runs, ("bridge/queue_groups", "")),
            zero=True,
            whole=True,
        ),
        _chart(
            "Age of a group",
            "seconds from its commit to its batch",
            _of(runs, ("bridge/group_wait_s", "")),
            zero=True,
        ),
    ]


def lost_by_reason(run: RunMetrics) -> dict[str, int]:
    """Returns reason -> records that were dropped or discarded for it, where there are any."""
    found = {}
    for name, values in run.columns.items():
        match = _REASON.match(name)
        if match and (count := int(np.nanmax(values, initial=0.0))):
            found[f"{'dropped' if match[1] == 'drops' else 'discarded'}, {match[2]}"] = count
    return found


def _rewards(runs: Sequence[RunMetrics]) -> list[Chart]:
    names = [match[1] for name in runs[0].columns if (match := _ENVIRONMENT.match(name))]
    several = len(runs) == 1 and len(names) > 1
    found = []
    for run in runs:
        series = _series(run, _name(runs, run, "all" if several else ""), run.column("reward_mean"))
        evaluated = np.flatnonzero(np.isfinite(run.column("eval/mean_score")))
        if evaluated.size:
            values = run.column("eval/mean_score")[evaluated]
            series["marks"] = [
                [int(step), float(value)] for step, value in zip(run.steps[evaluated], values, strict=True)
            ]
        found.append(series)
    if several:
        found += [
            _series(runs[0], name, runs[0].column(f"atropos/{name}/mean_score"))
            for name in names[:_MOST_ENVIRONMENTS]
        ]
    return found


def _evaluations(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns a chart for each name that environments measured in evaluations of their own."""
    by_name: dict[str, list[Chart]] = {}
    for run in runs:
        for (env, name), (steps, values) in run.evaluations.items():
            several = sum(name == other for _, other in run.evaluations) > 1
            series = {
                "name": _name(runs, run, env if several else ""),
                "x": _numbers(thinned(steps)),
                "y": _numbers(thinned(values)),
            }
            by_name.setdefault(name, []).append(series)
    return [
        _chart(f"Evaluation: {name}", "of environments, by themselves", series)
        for name, series in list(by_name.items())[:_MOST_EVALUATIONS]
    ]


def _time(runs: Sequence[RunMetrics]) -> Chart:
    """Returns the shares of a step's time for one run, and the share of waiting for several."""
    if len(runs) > 1:
        waits = [
            _series(run, run.name, run.column("wait_s") / np.maximum(_spent(run), 1e-12)) for run in runs
        ]
        return _chart(
            "Waiting for environments", "share of a step's time", waits, zero=True, smooth=True, how="%"
        )
    (run,) = runs
    parts = [thinned(values) for values in run.phases.values()]
    whole = np.maximum(np.sum(parts, axis=0), 1e-12) if parts else np.zeros(0)
    seconds = run.running_phases
    all_of_it = max(sum(seconds.values()), 1e-12)
    words = {"wait": "waiting for environments", "sync": "waiting for ranks", "copy": "copying"}
    words |= {"publish": "publishing weights", "forward_backward": "forward and backward"}
    series = [
        {
            "name": words.get(name, name),
            "x": _numbers(thinned(run.steps)),
            "y": _numbers(part / whole),
            "mean": seconds[name] / all_of_it,
        }
        for name, part in zip(run.phases, parts, strict=True)
    ]
    return _chart("Where the time goes", "share of a step's time", series, stack=True, smooth=True, how="%")


def _lost(runs: Sequence[RunMetrics]) -> list[Chart]:
    found = []
    for run in runs:
        for name in run.columns:
            match = _REASON.match(name)
            if match and np.nanmax(run.columns[name], initial=0.0) > 0:
                verb = "dropped" if match[1] == "drops" else "discarded"
                found.append(_series(run, _name(runs, run, f"{verb}, {match[2]}"), run.columns[name]))
    return found


def _spent(run: RunMetrics) -> npt.NDArray[np.float64]:
    parts = list(run.phases.values())
    return np.sum(parts, axis=0) if parts else np.zeros(run.steps.size)


def _of(runs: Sequence[RunMetrics], *metrics: tuple[str, str]) -> list[Chart]:
    return [
        _series(run, _name(runs, run, words), run.column(name)) for run in runs for name, words in metrics
    ]


def _name(runs: Sequence[RunMetrics], run: RunMetrics, words: str) -> str:
    return words if len(runs) == 1 else f"{run.name} {words}".strip()


def _series(run: RunMetrics, name: str, values: npt.NDArray[np.float64]) -> Chart:
    return {"name": name, "x": _numbers(thinned(run.steps)), "y": _numbers(thinned(values))}


def _chart(title: str, unit: str, series: list[Chart], **more: Any) -> Chart:
    return {"title": title, "unit": unit, "series": series, **more}


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Returns values with six digits, None where unknown: JSON has no NaN."""
    return [float(f"{each:.6g}") if np.isfinite(each) else None for each in values.tolist()]


class MatplotlibMissing(Exception):
    """The matplotlib package is not installed; the message says how to get it."""


def plot(runs: Sequence[RunMetrics], file: Path) -> None:
    """Draws the runs into a file, .svg or .png. Blocks. Raises `MatplotlibMissing`."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot: no window, no state
    except ImportError as error:
        raise MatplotlibMissing(
            f"a plot needs the matplotlib package ({error}): pip install 'shmbridge[learner]', or --format "
            "none"
        ) from error
    with mpl.rc_context(
        {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "shmbridge", "hatch.linewidth": 0.4}
    ):
        figure = Figure(figsize=(7.0, 9.0), layout="constrained")
        axes = figure.subplots(5, 1, sharex=len(runs) == 1)
        curves = (
            ("mean reward of a batch", lambda run: run.column("reward_mean")),
            ("loss", lambda run: run.column("loss")),
            ("staleness, versions", lambda run: run.column("staleness_mean")),
            ("tokens per second", lambda run: run.tokens_per_s),
        )
        for axis, (label, values) in zip(axes, curves, strict=False):
            for number, run in enumerate(runs):
                ink, line = _INKS[number % len(_INKS)], _LINES[number % len(_LINES)]
                axis.plot(
                    thinned(run.steps), thinned(values(run)), line, color=ink, linewidth=1.0, label=run.name
                )
            axis.set_ylabel(label)
            axis.grid(linewidth=0.3, color="#cccccc")
        # the user's evaluation, if any, as markers on the reward
        for number, run in enumerate(runs):
            known = np.isfinite(run.column("eval/mean_score"))
            if known.any():
                ink = _INKS[number % len(_INKS)]
                marks = run.column("eval/mean_score")[known]
                axes[0].plot(
                    run.steps[known], marks, "o", color=ink, markersize=3, label=f"{run.name}, evaluation"
                )
        if len(axes[0].get_legend_handles_labels()[0]) > 1:
            axes[0].legend(fontsize=7)
        axes[3].set_xlabel("" if len(runs) == 1 else "step")
        if len(runs) == 1:
            _time_by_step(axes[4], runs[0])
        else:
            _time_by_run(axes[4], runs)
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if file.suffix == ".svg" else None  # makes the file reproducible
        figure.savefig(file, dpi=100, metadata=metadata)


def _time_by_step(axis: Any, run: RunMetrics) -> None:
    """Returns the time shares of a step, averaged per drawn point."""
    phases = run.phases
    if not phases:
        return
    steps = thinned(run.steps)
    parts = [thinned(values) for values in phases.values()]
    whole = np.maximum(np.sum(parts, axis=0), 1e-12)
    stack = axis.stackplot(
        steps,
        *[part / whole for part in parts],
        labels=list(phases),
        colors=[_FILLS[name] for name in phases],
        edgecolor="#000000",
        linewidth=0.3,
    )
    for area, name in zip(stack, phases, strict=True):
        area.set_hatch(_HATCHES[name])
    axis.set(ylim=(0.0, 1.0), ylabel="share of a step's time", xlabel="step")
    axis.legend(fontsize=7, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)


def _time_by_run(axis: Any, runs: Sequence[RunMetrics]) -> None:
    names = [run.name for run in runs]
    left = np.zeros(len(runs))
    for phase in PHASES:
        seconds = np.array([run.phases[phase].sum() if phase in run.phases else 0.0 for run in runs])
        whole = np.array([sum(values.sum() for values in run.phases.values()) for run in runs])
        shares = seconds / np.maximum(whole, 1e-12)
        if shares.any():
            axis.barh(
                names,
                shares,
                left=left,
                label=phase,
                color=_FILLS[phase],
                hatch=_HATCHES[phase],
                edgecolor="#000000",
                linewidth=0.4,
            )
        left += shares
    axis.set(xlim=(0.0, 1.0), xlabel="share of the time")
    axis.invert_yaxis()
    axis.legend(fontsize=7, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)
