"""The curves of one or several runs as a picture, and one HTML page with them, the summaries and the groups.

The page is one file without a script, and loads nothing. matplotlib is imported when curves are drawn.
"""

from __future__ import annotations

import base64
import io
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import cycle, groupby
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.learner.config.flags import CONFIG_FILE
from shmbridge.consumers.learner.report.logs import FACTS_FILE
from shmbridge.consumers.learner.report.run import Floats, RunMetrics, as_text
from shmbridge.consumers.learner.report.samples import SampledGroup, SampledRow, Samples, read_samples

_MOST_POINTS = 200  # of a line; each is the mean over as many steps as needed, in a band of their extremes
_MOST_LINES = 8  # of one kind that can be told apart, such as environments
_REWARD, _TIME = "mean score of a batch", "share of a step's time"
_CURVES = (  # title, metric, name of the line
    (_REWARD, "reward_mean", "all"),
    (_REWARD, "eval/mean_score", "evaluation groups"),
    ("loss", "loss", ""),
    ("staleness, policy versions", "staleness_mean", "mean"),
    ("staleness, policy versions", "staleness_max", "largest"),
    ("sampler against policy, nats", "logprob_diff_mean", "all tokens"),
    ("sampler against policy, nats", "logprob_diff_mean_fresh", "fresh tokens"),
    ("entropy, nats", "entropy", ""),
    ("length of completions, tokens", "atropos/avg_response_length", ""),
    ("lanes", "bridge/lanes_live", "live"),
    ("lanes", "bridge/lanes_dead", "dead"),
    ("lanes", "bridge/lanes_quarantined", "quarantined"),
    ("lanes", "bridge/lanes_refused", "refused"),
    ("fill of the lanes, share of their memory", "bridge/lane_fill_frac", ""),
    ("groups waiting, in no batch yet", "bridge/queue_groups", ""),
    ("age of a group at its batch, s", "bridge/group_wait_s", ""),
)
_ENVIRONMENT = re.compile(r"atropos/(.+)/mean_score")
_LOST = re.compile(r"bridge/(drops|discards)_(\w+)_total")
_INKS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#7f7f7f")
_DASHES = ("-", "--", ":", "-.")  # with the inks, lines differ in grey, too
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: auto; padding: 1em }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .4em 0 }
img { width: 100%; background: white }
table { border-collapse: collapse } td, th { padding: .15em .8em; text-align: right }
summary { cursor: pointer } h4 { margin: .8em 0 0 }
.rows { display: grid; grid-template-columns: repeat(auto-fit, minmax(24em, 1fr)); gap: 1em }
.plus { text-decoration: underline } .minus { text-decoration: underline dotted } .untrained { opacity: .55 }
.step { border: 1px solid; padding: 0 .3em; font-size: 85% }
"""
_COMPARED = {  # number of a summary -> its name in the table of several runs
    "steps": "steps",
    "reward_first": "reward at the start",
    "reward_last": "reward at the end",
    "reward_best": "best reward",
    "reward_best_step": "at step",
    "eval_last": "last evaluation",
    "tokens_per_s": "tokens per second",
    "idle_frac_running": "share of waiting",
    "staleness_mean": "staleness",
    "dropped_total": "dropped",
    "discarded_total": "discarded",
}

_Lines = list[tuple[str, npt.NDArray[Any], Floats]]  # name, steps, values


class MatplotlibMissing(Exception):
    """The matplotlib package is not installed; the message says how to get it."""


# --- curves -----------------------------------------------------------------------------------------------


def plot(runs: Sequence[RunMetrics], file: Path | IO[bytes], form: str) -> None:
    """Draws the curves of the runs. Blocks. Raises `MatplotlibMissing`, OSError.

    Args:
        runs: at least one; several share each chart.
        file: to write.
        form: "svg" or "png".
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot: no window, no state
    except ImportError as error:
        raise MatplotlibMissing(
            f"curves need the matplotlib package ({error}): pip install 'shmbridge[learner]', or --format "
            "none"
        ) from error
    charts = _charts(runs)
    looks: Any = {"font.size": 8, "axes.titlesize": 9, "text.parse_math": False}
    looks |= {"svg.fonttype": "none", "svg.hashsalt": "shmbridge", "hatch.linewidth": 0.4}
    with mpl.rc_context(looks):
        rows = math.ceil((len(charts) + 1) / 2)
        figure = Figure(figsize=(10.0, 2.2 * rows), layout="constrained")
        axes = figure.subplots(rows, 2, squeeze=False).ravel()
        for axis in axes[len(charts) + 1 :]:
            axis.set_visible(False)
        for axis, (title, lines) in zip(axes, charts.items(), strict=False):
            axis.set_title(title)
            _draw(axis, lines)
        axes[len(charts)].set_title(_TIME)
        _draw_time(axes[len(charts)], runs)
        if isinstance(file, Path):
            file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if form == "svg" else None  # makes the file reproducible
        figure.savefig(file, format=form, dpi=100, metadata=metadata)


def _charts(runs: Sequence[RunMetrics]) -> dict[str, _Lines]:
    """Returns title -> lines of what the runs have measured."""
    found: dict[str, _Lines] = {}

    def add(title: str, name: str, steps: npt.NDArray[Any], values: Floats) -> None:
        if np.isfinite(values).any():
            full = f"{run.name} {name}".strip() if len(runs) > 1 else name
            found.setdefault(title, []).append((full, steps, values))

    for run in runs:
        for title, metric, name in _CURVES:
            add(title, name, run.steps, run.column(metric))
        add("tokens per second", "", run.steps, run.tokens_per_s)
        environments = [match for each in run.columns if (match := _ENVIRONMENT.fullmatch(each))]
        if len(runs) == 1 and len(environments) > 1:
            for match in environments[: _MOST_LINES - 1]:
                add(_REWARD, match[1], run.steps, run.column(match[0]))
        for match in filter(None, map(_LOST.fullmatch, run.columns)):
            if run.counted(match[0]):
                verb = "dropped" if match[1] == "drops" else "discarded"
                add("records lost, by reason", f"{verb}, {match[2]}", run.steps, run.column(match[0]))
        for (env, name), (steps, values) in list(run.evaluations.items())[:_MOST_LINES]:
            add(f"evaluation: {name}", env, steps, values)
    return found


def _draw(axis: Any, lines: _Lines) -> None:
    looks = cycle((ink, dash) for dash in _DASHES for ink in _INKS)
    for (name, steps, values), (ink, dash) in zip(lines, looks, strict=False):
        at, _, _ = _thinned(steps)
        mean, low, high = _thinned(values)
        known = np.isfinite(mean)  # an environment need not be in every batch
        mark = "." if known.sum() < 30 else None
        axis.plot(at[known], mean[known], dash, color=ink, marker=mark, linewidth=1.0, label=name)
        if values.size > _MOST_POINTS:
            axis.fill_between(at[known], low[known], high[known], color=ink, alpha=0.15, linewidth=0)
    axis.grid(linewidth=0.3, color="#cccccc")
    if any(name for name, _, _ in lines):
        axis.legend(fontsize=7)


def _draw_time(axis: Any, runs: Sequence[RunMetrics]) -> None:
    """Draws the time shares of a step, one area for each phase; of several runs, the share of waiting."""
    if len(runs) > 1:
        spent = [np.sum(list(run.phases.values()), axis=0) for run in runs]
        shares = [
            run.column("wait_s") / np.maximum(each, 1e-12) for run, each in zip(runs, spent, strict=True)
        ]
        _draw(axis, [(f"{run.name} wait", run.steps, each) for run, each in zip(runs, shares, strict=True)])
        return
    (run,) = runs
    parts = {name: _thinned(values)[0] for name, values in run.phases.items()}
    whole = np.maximum(np.sum(list(parts.values()), axis=0), 1e-12)
    if parts:
        shares = [part / whole for part in parts.values()]
        axis.stackplot(_thinned(run.steps)[0], shares, labels=list(parts), edgecolor="black", linewidth=0.3)
        axis.set_ylim(0.0, 1.0)
        axis.legend(fontsize=7, ncols=4)


def _thinned(values: npt.NDArray[Any]) -> tuple[Floats, Floats, Floats]:
    """Returns mean, least and most of the known values over at most _MOST_POINTS equal parts."""
    starts = np.arange(0, values.size, -(-values.size // _MOST_POINTS))
    known = np.isfinite(values)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    low = np.minimum.reduceat(np.where(known, values, np.inf), starts)
    high = np.maximum.reduceat(np.where(known, values, -np.inf), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / np.add.reduceat(known.astype(np.float64), starts), low, high


# --- the page ---------------------------------------------------------------------------------------------


def write_page(
    folders: Sequence[Path], runs: Sequence[RunMetrics], found: Sequence[Mapping[str, Any]], file: Path
) -> None:
    """Writes the page of at least one run. Blocks; raises OSError.

    All text of a run is escaped, and the page's policy lets no script run. Without matplotlib a line stands
    in place of the curves.

    Args:
        folders: of the runs.
        runs: their metrics.
        found: their summaries.
        file: to write.
    """
    title = escape(" and ".join(run.name for run in runs))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    try:
        plot(runs, picture := io.BytesIO(), "svg")
        source = base64.b64encode(picture.getvalue()).decode()
        curves = f'<img alt="curves by optimizer step" src="data:image/svg+xml;base64,{source}">'
    except MatplotlibMissing as error:
        curves = f"<p>{escape(str(error))}</p>"
    summaries = "".join(f"<pre>{escape(as_text(dict(each)))}</pre>\n" for each in found)
    groups = "".join(
        f"<h3>{escape(run.name)}</h3>\n{_groups(read_samples(folder))}"
        for run, folder in zip(runs, folders, strict=True)
    )
    files = "".join(
        f"<details><summary>{escape(str(path))}</summary><pre>{escape(_text_of(path))}</pre></details>\n"
        for folder in folders
        for path in (folder / CONFIG_FILE, folder / FACTS_FILE)
    )
    page = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title} - shmbridge report</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
{_table(found) if len(runs) > 1 else ""}{summaries}
<h2>Curves</h2>
<p>By optimizer step. Of a long run a point is the mean of some steps, and the band goes from their smallest
to their largest value.</p>
{curves}
<h2>Groups</h2>
<p>Every few steps two groups of the batch: that whose scores differ most, and one at random. Underlined
tokens were made more likely, dotted ones less likely, the stronger their colour the more; pale ones were not
trained. The tip of a token says its advantage.</p>
{groups}
<h2>Configuration, versions and host</h2>
{files}<p>Made by shmbridge {escape(shmbridge.__version__)}.</p>
</body>
</html>
"""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    """Returns the numbers of several runs side by side."""
    head = "".join(f"<th>{escape(each['run'])}</th>" for each in found)
    rows = "".join(
        f"<tr><th>{name}</th>"
        + "".join(f"<td>{'' if each[key] is None else f'{each[key]:,.5g}'}</td>" for each in found)
        + "</tr>\n"
        for key, name in _COMPARED.items()
    )
    return f"<table><tr><td></td>{head}</tr>\n{rows}</table>\n"


def _text_of(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError as error:
        return str(error.strerror)


def _groups(samples: Samples) -> str:
    if not samples.groups:
        return "<p>There are no samples: the learner writes them with --sample-every above 0.</p>\n"
    torn = f"<p>{samples.torn:,} torn lines are left out.</p>\n" if samples.torn else ""
    more = f"<p>{samples.left_out:,} more groups are in samples.jsonl.</p>\n" if samples.left_out else ""
    return "".join(map(_group, samples.groups)) + more + torn


def _group(group: SampledGroup) -> str:
    """Returns one group, closed: its prompt, and its completions side by side, best score first."""
    every = [abs(each) for row in group.trajectories for each in row.advantages if each is not None]
    largest = max(every, default=0.0) or 1.0
    rows = sorted(group.trajectories, key=lambda row: -math.inf if row.score is None else row.score)
    scores = ", ".join("no score" if row.score is None else f"{row.score:.3g}" for row in reversed(rows))
    version = "" if group.min_policy_version is None else f", version {group.min_policy_version}"
    head = f"step {group.step}, {group.env_name}, {group.why}{version}: {scores}"
    cards = "".join(f"<article>{_row(row, largest)}</article>\n" for row in reversed(rows))
    return (
        f"<details><summary>{escape(head)}</summary><p>{escape(group.group_id)}, {len(rows)} of "
        f"{group.group_size} completions</p><pre>{escape(group.prompt)}</pre>\n"
        f'<div class="rows">{cards}</div></details>\n'
    )


def _row(row: SampledRow, largest: float) -> str:
    score = "no score" if row.score is None else f"score {row.score:.4g}"
    prompt = "" if row.prompt is None else f"<pre>{escape(row.prompt)}</pre>"
    head = f"{score}, {row.finish_reason or 'end unknown'}"
    return f"<h4>{escape(head)}</h4>{prompt}<pre>{''.join(_pieces(row, largest))}</pre>"


def _pieces(row: SampledRow, largest: float) -> Iterator[str]:
    """Yields neighbours of one advantage together, rewards of steps where they end, and the cut."""

    def place(index: int) -> tuple[float | None, bool, int]:
        behind_cut = row.cut > 0 and index >= row.cut_at
        return row.advantages[index], behind_cut, bisect_right(row.step_ends, index + behind_cut * row.cut)

    def steps(first: int, last: int) -> Iterator[str]:
        for number, reward in enumerate(row.step_rewards[first:last], first + 1):
            yield f'<span class="step">step {number}: {"?" if reward is None else f"{reward:+g}"}</span>'

    done, was_cut = 0, False
    for (advantage, behind_cut, ended), indexes in groupby(range(len(row.tokens)), key=place):
        yield from steps(done, ended)
        if behind_cut and not was_cut:
            yield f'<span class="step">{row.cut:,} tokens left out</span>'
        done, was_cut = ended, behind_cut
        text = escape("".join(row.tokens[index] for index in indexes))
        if advantage is None:
            yield f'<span class="untrained">{text}</span>'
            continue
        kind, colour = ("plus", "0, 114, 178") if advantage >= 0.0 else ("minus", "213, 94, 0")
        strength = f"background: rgba({colour}, {0.6 * abs(advantage) / largest:.2f})"
        yield f'<span class="{kind}" style="{strength}" title="advantage {advantage:+.3g}">{text}</span>'
    yield from steps(done, len(row.step_rewards))
