// Lines over time, drawn as SVG. A point nobody knows is a gap; single points are dots.

import { el, svg } from "./dom.js";
import { NONE, clock, number, percent, seconds } from "./format.js";
import { ratio } from "./figures.js";

const HEIGHT = 112;
const [LEFT, RIGHT, TOP, BOTTOM] = [46, 6, 8, 18];
const POINTS = 60;

const of = (added, name) => (added ? added.totals[name] : null);
const CHARTS = [
  {
    title: "Prompt tokens reused",
    format: percent,
    high: 1,
    lines: [{ name: "", colour: "good-line", filled: true, value: (added) => ratio(of(added, "reused_tokens"), of(added, "prompt_tokens")) }],
  },
  {
    title: "First token, mean",
    format: seconds,
    lines: [
      { name: "reused", colour: "good-line", value: (added) => ratio(of(added, "ttft_store_s"), of(added, "ttft_store")) },
      { name: "nothing reused", colour: "plain-line", value: (added) => ratio(of(added, "ttft_none_s"), of(added, "ttft_none")) },
    ],
  },
  {
    title: "Prefill a minute",
    format: (value) => `${number(value)} s`,
    lines: [
      { name: "saved", colour: "good-line", filled: true, value: (added) => perMinute(added, "saved_s") },
      { name: "spent waiting", colour: "cost-line", value: (added) => perMinute(added, "spent_s") },
    ],
  },
];

function perMinute(added, name) {
  const value = of(added, name);
  return value === null || value === undefined ? null : (60 * value) / added.seconds;
}

function niceHigh(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((step) => step * power >= value * 1.02) * power;
}

class Chart {
  constructor(what) {
    this.what = what;
    this.points = [];
    this.at = null; // which point the pointer is on
    this.values = what.lines.map(() => el("span"));
    this.time = el("span");
    const legend = el("div", { class: "legend" }, el("b", {}, what.title), this.time,
      ...what.lines.map((line, n) => el("span", {}, el("i", { class: line.colour }), line.name ? `${line.name} ` : "", this.values[n])));
    this.plot = svg("svg", { role: "img", "aria-label": what.title });
    this.plot.addEventListener("pointermove", (event) => this.point(event));
    this.plot.addEventListener("pointerleave", () => { this.at = null; this.draw(this.points, this.span); });
    this.host = el("div", { class: "chart" }, legend, this.plot);
  }

  point(event) {
    const box = this.plot.getBoundingClientRect();
    const share = (event.clientX - box.left - LEFT) / (box.width - LEFT - RIGHT);
    this.at = Math.max(0, Math.min(this.points.length - 1, Math.round(share * (this.points.length - 1))));
    this.draw(this.points, this.span);
  }

  draw(points, span) {
    [this.points, this.span] = [points, span];
    const width = this.plot.clientWidth || 480;
    const columns = this.what.lines.map((line) => points.map((point) => line.value(point.added)));
    const known = columns.flat().filter((value) => value !== null && Number.isFinite(value));
    const high = this.what.high || niceHigh(Math.max(...known, 0));
    const x = (n) => LEFT + (n / Math.max(points.length - 1, 1)) * (width - LEFT - RIGHT);
    const y = (value) => TOP + (1 - value / high) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const share of [0, 0.5, 1]) {
      parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * high), y2: y(share * high) }));
      if (known.length) parts.push(svg("text", { x: LEFT - 6, y: y(share * high) + 4, "text-anchor": "end" }, this.what.format(share * high)));
    }
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const back = (1 - share) * span;
      const told = back === 0 ? "now" : `−${back >= 60 ? `${+(back / 60).toFixed(1)} min` : `${back} s`}`;
      parts.push(svg("text", { x: LEFT + share * (width - LEFT - RIGHT), y: HEIGHT - 4, "text-anchor": anchor }, told));
    }
    if (!known.length) parts.push(svg("text", { class: "empty", x: (LEFT + width) / 2, y: HEIGHT / 2, "text-anchor": "middle" }, "nothing yet in this time"));
    columns.forEach((column, n) => parts.push(...line(this.what.lines[n], column, x, y)));
    if (this.at !== null && points.length) parts.push(svg("line", { class: "cross", x1: x(this.at), x2: x(this.at), y1: TOP, y2: HEIGHT - BOTTOM }));
    this.plot.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.plot.replaceChildren(...parts);
    const shown = this.at === null ? columns.map(last) : columns.map((column) => column[this.at]);
    this.time.textContent = this.at !== null && points[this.at] ? clock(points[this.at].at_s) : "";
    this.values.forEach((node, n) => { node.textContent = shown[n] === null || shown[n] === undefined ? NONE : this.what.format(shown[n]); });
  }
}

function last(column) {
  const known = column.filter((value) => value !== null);
  return known.length ? known[known.length - 1] : null;
}

// Points near each other as lines, with dots where some between them are missing; what stands alone as a dot.
const NEAR = 8;
function line(what, column, x, y) {
  const known = column.map((value, n) => [n, value]).filter(([, value]) => value !== null && Number.isFinite(value));
  const sparse = known.length && known.length < 0.8 * (known[known.length - 1][0] - known[0][0] + 1);
  const runs = [];
  for (const [n, value] of known) {
    const run = runs[runs.length - 1];
    if (run && n - run[run.length - 1][0] <= (sparse ? NEAR : 1)) run.push([n, value]);
    else runs.push([[n, value]]);
  }
  const parts = [];
  for (const run of runs) {
    const points = run.map(([n, value]) => `${x(n).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    if (what.filled && run.length > 1) {
      parts.push(svg("polygon", { class: what.colour, points: `${x(run[0][0])},${y(0)} ${points} ${x(run[run.length - 1][0])},${y(0)}` }));
    }
    if (run.length > 1) parts.push(svg("polyline", { class: what.colour, points }));
    if (run.length === 1 || sparse) parts.push(...run.map(([n, value]) => svg("circle", { class: what.colour, cx: x(n), cy: y(value), r: 2.5 })));
  }
  return parts;
}

const SPANS = [["5 min", 300], ["15 min", 900], ["1 h", 3600]];

export class Charts {
  constructor(host, range) {
    this.charts = CHARTS.map((what) => new Chart(what));
    this.span = SPANS[0][1];
    host.replaceChildren(...this.charts.map((chart) => chart.host));
    this.buttons = SPANS.map(([name, span]) => el("button", { type: "button", "aria-pressed": String(span === this.span), onclick: () => this.choose(span) }, name));
    range.replaceChildren(...this.buttons);
  }

  choose(span) {
    this.span = span;
    SPANS.forEach(([, one], n) => this.buttons[n].setAttribute("aria-pressed", String(one === span)));
    this.draw(this.past);
  }

  draw(past) {
    this.past = past;
    if (!past) return;
    const points = past.parts(this.span, POINTS);
    for (const chart of this.charts) chart.draw(points, this.span);
  }
}
