// Places from the engines down, each with how full it is, and what moves between them now.

import { $, el, rows, show, style, svg, text } from "./dom.js";
import { mean, placeName, sum } from "./figures.js";
import { bytes, many, number, percent, rate, seconds, whole } from "./format.js";

// A dash a second at 1 MB/s, faster with the logarithm, so that slow and fast can be told apart.
const pace = (perSecond, unit) => `${Math.max(0.25, 1.6 - 0.45 * Math.log10(1 + perSecond / unit)).toFixed(2)}s`;

function arrow(down) {
  const run = svg("path", { class: "run", d: down ? "M12 4V34" : "M32 36V6" });
  const tip = svg("path", { class: "tip", d: down ? "M6 28L12 35L18 28" : "M26 12L32 5L38 12" });
  return [run, tip];
}

function flowRow() {
  const [down, downTip] = arrow(true);
  const [up, upTip] = arrow(false);
  const [downText, upText] = [el("span", { class: "down" }), el("span", { class: "up" })];
  const row = el("div", { class: "flow" }, downText, svg("svg", { viewBox: "0 0 44 40", "aria-hidden": "true" }, down, downTip, up, upTip), upText);
  row.parts = { down, up, downText, upText };
  return row;
}

function move(line, told, words, perSecond, unit) {
  const on = perSecond > 0;
  line.classList.toggle("moving", on);
  if (on) style(line, "--pace", pace(perSecond, unit));
  told.classList.toggle("on", on);
  text(told, words);
}

function placeRow(place) {
  const bar = el("div");
  const [name, size, facts, trouble] = [el("b"), el("span"), el("span"), el("span", { class: "bad" })];
  const meter = el("div", { class: "meter", role: "meter", "aria-valuemin": "0", "aria-valuemax": "100" }, bar);
  const flow = flowRow();
  const row = el("div", { class: "place" }, flow, el("div", { class: "name" }, name, size), meter, el("div", { class: "facts" }, facts, trouble));
  row.parts = { bar, name, size, facts, trouble, meter, flow: flow.parts };
  return row;
}

// `stats` may be undefined: nothing is open yet.
// Where the tokens of all prompts came from so far.
function drawOrigins(stats, colours) {
  const host = $("origins");
  const all = stats ? { ...stats.requests.reused_tokens, computed: stats.requests.computed_tokens } : {};
  show(host, sum(all) > 0);
  if (!sum(all)) return;
  const named = Object.entries(all).filter(([, tokens]) => tokens > 0);
  rows($("origins-bar"), named, ([name]) => name, () => el("div"), (bar, [name, tokens]) => {
    style(bar, "width%", (100 * tokens) / sum(all));
    style(bar, "background", `var(${colours.get(name) || "--none"})`);
  });
  rows($("origins-keys"), named, ([name]) => name, () => el("li", {}, el("i"), el("span")), (row, [name, tokens]) => {
    style(row.firstChild, "background", `var(${colours.get(name) || "--none"})`);
    text(row.lastChild, `${placeName(name)} ${percent(tokens / sum(all))}`);
  });
  $("origins-bar").setAttribute("aria-label", named.map(([name, tokens]) => `${placeName(name)} ${percent(tokens / sum(all))}`).join(", "));
}

export function drawPlaces(stats, lately, colours) {
  const host = $("places");
  if (!host.querySelector(".engines")) {
    host.append(el("div", { class: "place engines" }, el("div", { class: "name" }, el("b", {}, "Engines"), el("span", { id: "engines-now" }))));
  }
  text($("engines-now"), stats ? `${many(stats.requests.requests, "request")}, ${many(stats.leases, "lease")} held` : "none has opened the store yet");
  rows(host, stats ? places(stats) : [], (place) => place.name, placeRow, (row, place) => {
    const parts = row.parts;
    const share = place.cap ? place.used / place.cap : null;
    text(parts.name, place.title);
    text(parts.size, place.cap ? `${bytes(place.used)} of ${bytes(place.cap)}` : `${bytes(place.used)}, no cap`);
    style(parts.bar, "width%", share === null ? (place.used ? 100 : 0) : Math.max(100 * share, place.used ? 0.6 : 0));
    style(parts.bar, "background", `var(${colours.get(place.name) || "--none"})`);
    parts.meter.setAttribute("aria-label", `${place.title}: how full`);
    parts.meter.setAttribute("aria-valuenow", String(Math.round(100 * (share || 0))));
    text(parts.facts, place.facts);
    text(parts.trouble, place.trouble);
    show(parts.trouble, Boolean(place.trouble));
    if (place.name === "ram") engineFlow(parts.flow, stats, lately);
    else tierFlow(parts.flow, lately && lately.places[place.name], lately);
  });
  drawOrigins(stats, colours);
}

function places(stats) {
  const keep = stats.slots * stats.slot_bytes;
  const ram = {
    name: "ram", title: "RAM", used: stats.ram_blocks * stats.slot_bytes, cap: keep,
    facts: `${many(stats.ram_blocks, "block")} of ${bytes(stats.slot_bytes)}, ${stats.pins} pinned, ${whole(stats.ram_evictions)} evicted`, trouble: "",
  };
  return [ram, ...stats.tiers.map((tier) => ({
    name: tier.name, title: tier.name, used: tier.used_bytes, cap: tier.cap_bytes,
    facts: `${many(tier.blocks, "block")}, ${whole(tier.left.capacity)} evicted${reading(tier)}${waiting(tier)}`,
    trouble: tier.breaker === "closed" ? "" : `breaker ${tier.breaker}: left alone after faults`,
  }))];
}

function reading(tier) {
  const taken = mean(tier.reads);
  return taken === null ? "" : `, a read takes ${seconds(taken)}`;
}

function waiting(tier) {
  const parts = [];
  if (tier.pending_writes) parts.push(`${many(tier.pending_writes, "write")} wait`);
  if (tier.pending_reads) parts.push(`${many(tier.pending_reads, "read")} wait`);
  return parts.length ? `, ${parts.join(", ")}` : "";
}

function engineFlow(flow, stats, lately) {
  const per = (name) => (lately && lately.totals[name] !== null && lately.totals[name] !== undefined ? lately.totals[name] / lately.seconds : null);
  const [stored, reused] = [per("stored"), per("reused_tokens")];
  move(flow.down, flow.downText, stored === null ? "–" : `${number(stored, 2)} blocks/s stored`, stored || 0, 1);
  move(flow.up, flow.upText, reused === null ? "–" : `${number(reused, 3)} tokens/s reused`, reused || 0, 256);
}

function tierFlow(flow, added, lately) {
  const per = (name) => (added && added[name] !== null && added[name] !== undefined ? added[name] / lately.seconds : null);
  const [written, read] = [per("written_bytes"), per("read_bytes")];
  move(flow.down, flow.downText, written === null ? "–" : `${rate(written)} written`, written || 0, 1e6);
  move(flow.up, flow.upText, read === null ? "–" : `${rate(read)} read`, read || 0, 1e6);
}
