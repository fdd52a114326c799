"use strict";
// Draws the curves and the browser of groups. All text of the run goes in as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "6 3", "2 2", "8 3 2 3", "1 3", "10 4", "4 1", "3 5"];
  const several = data.runs.length > 1;

  function make(name, props = {}, ...children) {
    const node = document.createElement(name);
    for (const [key, value] of Object.entries(props)) {
      if (key === "class") node.className = value;
      else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
      else if (value !== null && value !== undefined) node.setAttribute(key, value);
    }
    node.append(...children);
    return node;
  }
  function draw(name, attributes, text) {
    const node = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    return node;
  }
  const say = (value, how) => (value === null || value === undefined ? "–" : digits(value, how).replaceAll("-", "\u2212"));
  function digits(value, how) {
    if (how === "%") return `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)} %`;
    const size = Math.abs(value);
    if (value !== 0 && size < 0.001) return value.toExponential(1);
    if (size >= 1e6) return `${(value / 1e6).toFixed(size >= 1e7 ? 0 : 1)} M`;
    if (size >= 1e4) return `${(value / 1e3).toFixed(0)} k`;
    if (Number.isInteger(value)) return String(value);
    return value.toFixed(size >= 100 ? 0 : size >= 10 ? 1 : size >= 1 ? 2 : 3);
  }

  // ---- curves ------------------------------------------------------------------------------------------
  const colour = (number) => `var(--c${number % 8})`;
  const plots = [];

  function ticks(low, high, most) {
    const raw = (high - low) / most;
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((each) => each * power).find((each) => each >= raw);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-6; at += step) {
      found.push(Math.abs(at) < step * 1e-6 ? 0 : Number(at.toPrecision(12)));
    }
    return found;
  }

  // A step without a value is passed over: an environment need not be in every batch.
  function path(points) {
    return points.filter(([, y]) => y !== null)
      .map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
  }

  // All labels of an axis have as many decimals as its finest one needs.
  function onAxis(value, marks, how) {
    const largest = Math.max(...marks.map(Math.abs));
    if (how !== "%" && largest > 0 && largest < 0.001) return value === 0 ? "0" : value.toExponential(0).replaceAll("-", "\u2212");
    const scale = how === "%" ? 100 : largest >= 1e4 ? 1e-3 : 1;
    const step = scale * (marks.length > 1 ? marks[1] - marks[0] : marks[0] || 1);
    const decimals = Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const text = (value * scale).toFixed(decimals).replace("-", "\u2212");
    return how === "%" ? `${text} %` : scale === 1 ? text : `${text} k`;
  }

  // A running mean through noisy values; the values themselves stay visible behind it.
  function smooth(values) {
    const half = Math.floor(values.length / 40);
    if (half < 2) return null;
    return values.map((_, at) => {
      const near = values.slice(Math.max(0, at - half), at + half + 1).filter((each) => each !== null);
      return near.length ? near.reduce((sum, each) => sum + each, 0) / near.length : null;
    });
  }

  function plot(chart) {
    const series = chart.series.filter((each) => each.y.some((value) => value !== null));
    if (!series.length) return null;
    const legend = make("div", { class: "legend" });
    const svg = draw("svg", { class: "plot", role: "img", "aria-label": chart.title });
    const figure = make("figure", { "data-chart": chart.title },
      make("figcaption", {}, chart.title, make("span", { class: "unit" }, chart.unit || ""), legend), svg);
    const values = series.map((each, number) => {
      const key = draw("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" });
      if (chart.stack) key.append(draw("rect", { x: 4, width: 12, height: 10, rx: 2, fill: colour(number) }));
      else key.append(draw("line", { x1: 0, x2: 20, y1: 5, y2: 5, stroke: colour(number), "stroke-width": 2,
        "stroke-dasharray": DASHES[number % 8] }));
      const value = make("b");
      if (each.name) legend.append(make("span", {}, key, each.name, value));
      else legend.append(make("span", {}, value));
      return value;
    });
    const soft = series.map((each) => (chart.smooth ? smooth(each.y) : null));
    if (chart.stack) series.forEach((each, number) => { each.y = soft[number] || each.y; });
    let low = Infinity, high = -Infinity, first = Infinity, last = -Infinity;
    for (const each of series) {
      first = Math.min(first, each.x[0]);
      last = Math.max(last, each.x[each.x.length - 1]);
      for (const value of each.y) if (value !== null) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (chart.stack) { low = 0; high = 1; }
    if (chart.zero) { low = Math.min(low, 0); high = Math.max(high, 0); }
    if (low === high) { high += Math.abs(high) * 0.1 || 1; if (!chart.zero) low -= Math.abs(low) * 0.1 || 1; }
    if (!chart.stack) { const room = (high - low) * 0.06; high += room; if (low !== 0) low -= room; }
    if (first === last) { first -= 0.5; last += 0.5; }

    let cursor = null, note = null, width = 0;
    const left = 46, right = 8, top = 8, height = () => svg.clientHeight || 190;
    const xOf = (x) => left + ((x - first) / (last - first)) * (width - left - right);
    const yOf = (y) => (y === null ? null : top + ((high - y) / (high - low)) * (height() - top - 22));

    function render() {
      width = svg.clientWidth || 520;
      svg.replaceChildren();
      const bottom = height() - 22;
      const marks = ticks(low, high, 4).filter((each) => !chart.whole || Number.isInteger(each));
      for (const at of marks) {
        svg.append(draw("line", { class: "grid", x1: left, x2: width - right, y1: yOf(at), y2: yOf(at) }));
        svg.append(draw("text", { x: left - 7, y: yOf(at) + 4, "text-anchor": "end" }, onAxis(at, marks, chart.how)));
      }
      for (const at of ticks(first, last, Math.max(2, Math.floor(width / 90)))) {
        if (!Number.isInteger(at)) continue;
        const end = xOf(at) > width - 24;
        svg.append(draw("text", { x: end ? width - right : xOf(at), y: bottom + 16,
          "text-anchor": end ? "end" : "middle" }, at));
      }
      svg.append(draw("line", { class: "axis", x1: left, x2: width - right, y1: bottom, y2: bottom }));
      if (chart.stack) {
        let below = series[0].x.map(() => 0);
        series.forEach((each, number) => {
          const above = below.map((value, at) => value + (each.y[at] || 0));
          const edge = path(each.x.map((x, at) => [xOf(x), yOf(above[at])]));
          const back = below.map((value, at) => [xOf(each.x[at]), yOf(value)]).reverse();
          svg.append(draw("path", { class: "area", fill: colour(number),
            d: `${edge}${path(back).replace("M", "L")}Z` }));
          below = above;
        });
      } else {
        series.forEach((each, number) => {
          const style = { stroke: colour(number), "stroke-dasharray": DASHES[number % 8] };
          const points = (y) => path(each.x.map((x, at) => [xOf(x), yOf(y[at])]));
          if (each.x.length === 1) {
            svg.append(draw("circle", { cx: xOf(each.x[0]), cy: yOf(each.y[0]), r: 2.5, fill: colour(number) }));
          } else if (chart.steps) {
            const corners = each.x.flatMap((x, at) => [[xOf(at ? each.x[at - 1] : x), yOf(each.y[at])], [xOf(x), yOf(each.y[at])]]);
            svg.append(draw("path", { class: "curve", ...style, d: path(corners) }));
          } else {
            if (soft[number] && series.length === 1) svg.append(draw("path", { class: "raw", stroke: colour(number), d: points(each.y) }));
            svg.append(draw("path", { class: "curve", ...style, d: points(soft[number] || each.y) }));
          }
          for (const [x, y] of each.marks || []) {
            svg.append(draw("circle", { cx: xOf(x), cy: yOf(y), r: 3, fill: "var(--paper)", stroke: colour(number) }));
          }
        });
      }
      cursor = draw("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
      note = draw("text", { y: top + 9 });
      svg.append(cursor, note);
      look(null);
    }
    function look(step) {
      series.forEach((each, number) => {
        let at = each.x.length - 1;
        if (step !== null) {
          at = each.x.findIndex((x) => x >= step);
          if (at < 0) at = each.x.length - 1;
        }
        const value = (soft[number] || each.y)[at];
        values[number].textContent = say(step === null && chart.stack ? each.mean : value, chart.how);
      });
      cursor.setAttribute("visibility", step === null ? "hidden" : "visible");
      note.textContent = step === null ? "" : `step ${Math.round(step)}`;
      if (step === null) return;
      const near = xOf(step) > width - 70;
      for (const name of ["x1", "x2"]) cursor.setAttribute(name, xOf(step));
      note.setAttribute("x", xOf(step) + (near ? -5 : 5));
      note.setAttribute("text-anchor", near ? "end" : "start");
    }
    const all = (step) => plots.forEach((each) => each.look(step));
    svg.addEventListener("pointermove", (event) => {
      const share = (event.clientX - svg.getBoundingClientRect().left - left) / (width - left - right);
      all(Math.min(last, Math.max(first, first + share * (last - first))));
    });
    svg.addEventListener("pointerleave", () => all(null));
    plots.push({ render, look });
    return figure;
  }

  function fill(id, charts) {
    const box = document.getElementById(id);
    const drawn = charts.map(plot).filter((each) => each !== null);
    if (drawn.length) box.append(...drawn);
    else box.append(make("p", { class: "none" }, "Nothing of this is in the metrics."));
  }
  fill("curves", data.charts);
  fill("lanes", data.lanes);
  const renderAll = () => plots.forEach((each) => each.render());
  renderAll();
  let planned = 0;
  window.addEventListener("resize", () => { cancelAnimationFrame(planned); planned = requestAnimationFrame(renderAll); });

  // ---- groups ------------------------------------------------------------------------------------------
  const samples = data.runs.flatMap((run) => run.samples.map((sample) => ({ ...sample, run: run.name })));
  const browse = document.getElementById("browse"), list = document.getElementById("groups");
  const shown = document.getElementById("group");
  let matching = [], chosen = null, wanted = "";

  const mean = (values) => (values.length ? values.reduce((sum, each) => sum + each, 0) / values.length : null);
  const signed = (value) => (value === null ? "–" : `${value > 0 ? "+" : value < 0 ? "−" : ""}${say(Math.abs(value))}`);
  const scoreOf = (sample) => {
    const known = sample.trajectories.map((row) => row.score).filter((each) => each !== null);
    return known.length ? [Math.min(...known), Math.max(...known)] : null;
  };
  const differs = (sample) => { const range = scoreOf(sample); return range !== null && range[0] < range[1]; };
  const textOf = (row) => row.tokens.join("");
  const has = (text) => text.toLowerCase().includes(wanted);
  const isHit = (row) => wanted !== "" && has(textOf(row));

  function choice(label, name, entries) {
    const select = make("select", { "aria-label": label, onchange: filter });
    for (const [value, text] of entries) select.append(make("option", { value }, text));
    const wrapped = make("label", {}, name, select);
    browse.append(wrapped);
    return select;
  }
  let runs, steps, envs, search, count, back, next;

  function filter() {
    wanted = search.value.trim().toLowerCase();
    matching = samples.filter((sample) =>
      (!runs || runs.value === "" || sample.run === runs.value)
      && (steps.value === "" || String(sample.step) === steps.value)
      && (envs.value === "" || sample.env_name === envs.value)
      && (wanted === "" || has(sample.prompt) || sample.trajectories.some((row) => has(textOf(row)))));
    if (!matching.includes(chosen)) chosen = [...matching].reverse().find(differs) || matching[matching.length - 1] || null;
    list.replaceChildren(...matching.map((sample) => {
      const range = scoreOf(sample);
      const button = make("button", { onclick: () => { chosen = sample; show(); } },
        `step ${sample.step} · ${sample.env_name || "unnamed"} `,
        make("small", {}, range === null ? "no score" : range[0] === range[1] ? say(range[0]) : `${say(range[0])} … ${say(range[1])}`));
      button.sample = sample;
      return button;
    }));
    count.textContent = `${matching.length} of ${samples.length} groups`;
    show();
  }

  function tokens(row, most) {
    const short = (row.step_ends || []).length * 3 > row.tokens.length;  // steps of a token or two
    const box = make("div", { class: short ? "text short" : "text" });
    const marks = new Map();
    (row.step_ends || []).forEach((end, number) => {
      let at = end - 1;
      if (row.cut && at >= row.cut_at) at = Math.max(row.cut_at - 1, at - row.cut);
      at = Math.min(Math.max(at, 0), row.tokens.length - 1);
      if ((row.step_rewards[number] ?? null) === null) return;
      marks.set(at, [...(marks.get(at) || []), number]);
    });
    let before = null;
    row.tokens.forEach((text, at) => {
      const value = row.advantages[at];
      const kind = value === null ? "untrained" : value > 0 ? "plus" : value < 0 ? "minus" : "zero";
      const token = make("span", { class: `token ${kind}`,
        title: value === null ? `token ${at + 1}, not trained` : `advantage ${signed(value)}, token ${at + 1}` });
      if (kind === "plus" || kind === "minus") token.style.setProperty("--strength", (0.08 + 0.42 * Math.abs(value) / most).toFixed(3));
      if (kind !== before) token.classList.add("first");
      token.textContent = text.replaceAll("\n", "↵\n");
      before = kind;
      box.append(token);
      for (const number of marks.get(at) || []) {
        const value = signed(row.step_rewards[number]);
        box.append(make("span", { class: "step", title: `reward of step ${number + 1}: ${value}` },
          short ? value : `step ${number + 1}: ${value}`));
        if (!short) before = null;
      }
      if (row.cut && at === row.cut_at - 1) {
        box.append(make("span", { class: "cut" }, `… ${row.cut} tokens left out …`));
        before = null;
      }
    });
    if (!row.tokens.length) box.append(make("span", { class: "none" }, "no tokens"));
    return box;
  }

  function show() {
    for (const button of list.children) button.setAttribute("aria-pressed", String(button.sample === chosen));
    const place = matching.indexOf(chosen);
    back.disabled = place <= 0;
    next.disabled = place < 0 || place >= matching.length - 1;
    if (chosen === null) { shown.replaceChildren(make("p", { class: "none" }, "No group matches.")); return; }
    const pressed = list.children[place];
    if (pressed) list.scrollLeft = pressed.offsetLeft - list.offsetLeft - (list.clientWidth - pressed.offsetWidth) / 2;
    const range = scoreOf(chosen) || [0, 0];
    const most = Math.max(1e-9, ...chosen.trajectories.flatMap((row) => row.advantages.map((each) => Math.abs(each || 0))));
    const rows = [...chosen.trajectories].sort((one, other) => (other.score ?? -Infinity) - (one.score ?? -Infinity));
    const versions = [chosen.min_policy_version, chosen.max_policy_version];
    const about = [
      several ? `run ${chosen.run}` : "", `group ${chosen.group_id}`,
      chosen.why === "spread" ? "the widest scores of its batch" : "drawn at random",
      versions[0] === null || versions[0] === undefined ? "" : `sampled by policy version ${versions[0] === versions[1] ? versions[0] : versions.join(" to ")}`,
      chosen.group_size > rows.length ? `${rows.length} of ${chosen.group_size} trajectories` : `${rows.length} trajectories`,
    ];
    const cards = rows.map((row) => {
      const bar = make("i");
      const share = range[1] > range[0] && row.score !== null ? (row.score - range[0]) / (range[1] - range[0]) : 0;
      bar.style.width = `${(100 * share).toFixed(0)}%`;
      const known = row.advantages.filter((each) => each !== null);
      const facts = [`${row.tokens.length + (row.cut || 0)} tokens`, row.finish_reason || "", `advantage ${signed(mean(known))}`];
      const card = make("article", { class: isHit(row) ? "hit" : "" },
        make("header", {}, make("b", {}, row.score === null ? "no score" : say(row.score)),
          make("span", {}, facts.filter(Boolean).join(" · "))),
        make("div", { class: "bar" }, bar));
      if (row.prompt !== undefined) card.append(make("div", { class: "text prompt", "data-label": "its own prompt" }, row.prompt));
      card.append(tokens(row, most));
      return card;
    });
    shown.replaceChildren(
      make("p", { class: "about-group" }, make("b", {}, `step ${chosen.step} · ${chosen.env_name || "unnamed"}`), ` · ${about.filter(Boolean).join(" · ")}`),
      make("div", { class: "text prompt", "data-label": "prompt" }, chosen.prompt),
      make("div", { class: "rows" }, ...cards));
  }

  if (samples.length) {
    const unique = (values) => [...new Set(values)];
    if (several) runs = choice("run", "run", [["", "all"], ...unique(samples.map((each) => each.run)).map((each) => [each, each])]);
    steps = choice("step", "step", [["", "all"], ...unique(samples.map((each) => each.step)).sort((a, b) => a - b).map((each) => [each, each])]);
    envs = choice("environment", "environment", [["", "all"], ...unique(samples.map((each) => each.env_name)).map((each) => [each, each || "unnamed"])]);
    search = make("input", { type: "search", placeholder: "search prompts and completions", "aria-label": "search", oninput: filter });
    back = make("button", { "aria-label": "previous group", onclick: () => { chosen = matching[matching.indexOf(chosen) - 1]; show(); } }, "←");
    next = make("button", { "aria-label": "next group", onclick: () => { chosen = matching[matching.indexOf(chosen) + 1]; show(); } }, "→");
    count = make("span", { class: "count" });
    browse.append(search, back, next, count);
    filter();
  }

  // ---- theme -------------------------------------------------------------------------------------------
  document.getElementById("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });
  document.documentElement.dataset.ready = "true";
})();
