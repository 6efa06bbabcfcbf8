// The live page: what the server tells goes into figures, the figures into the page, once a second.

import { Charts } from "./charts.js";
import { $, el, show, text } from "./dom.js";
import { follow } from "./feed.js";
import { Past, mean, palette, sum } from "./figures.js";
import { drawPlaces } from "./flow.js";
import { NONE, ago, clock, many, number, percent, seconds, short, span } from "./format.js";
import { askToken, clear, steerPrefix, token } from "./steer.js";
import { drawDecisions, drawFaults, drawKeys, drawPrefixes, drawScopes } from "./tables.js";

const RECENT_S = 6; // what "now" means for flows: at least two samples of a server that is asked every two seconds
const past = new Past();
const charts = new Charts($("charts"), $("range"));
let latest = null;

// --- Tiles ------------------------------------------------------------------------------------------------
const TILES = {};
for (const [name, title, kind] of [["saved", "Prefill saved", "tile hero"], ["spent", "Spent on it", "tile"], ["reused", "Prompt tokens reused", "tile"], ["ttft", "First token when reused", "tile"]]) {
  const [value, below] = [el("b", {}, NONE), el("span", { class: "below" })];
  $("tiles").append(el("div", { class: kind, id: `tile-${name}` }, el("span", { class: "name" }, title), value, below));
  TILES[name] = (told, words) => { text(value, told); text(below, words); };
}

function tiles(stats) {
  const all = stats ? stats.requests : null;
  if (!all || !all.requests) {
    for (const set of Object.values(TILES)) set(NONE, "no request yet");
    return;
  }
  const gain = all.spent_s > 0 ? `${number(all.saved_s / all.spent_s, 2)} × what it cost` : "";
  TILES.saved(span(all.saved_s), all.unpriced ? `${many(all.unpriced, "request")} could not say` : gain);
  TILES.spent(span(all.spent_s), "requests waiting for the store");
  TILES.reused(percent(all.hit_rate), `${short(sum(all.reused_tokens))} of ${short(all.prompt_tokens)}, ${many(all.requests, "request")}`);
  const [store, none] = [mean(all.ttft.store), mean(all.ttft.none)];
  TILES.ttft(seconds(store), `${seconds(none)} when nothing was reused`);
}

// --- What is told -----------------------------------------------------------------------------------------
function tell(told) {
  if (told.source.up) latest = told;
  if (told.sample) past.add(told.sample);
  const { source } = told;
  document.body.dataset.state = source.up ? "live" : "away";
  show($("away"), !source.up);
  if (!source.up) {
    text($("link-text"), "Away, trying again");
    text($("away"), `${source.why || `${source.where} does not answer`}. ${latest ? `Figures are from ${clock(latest.at_s)}.` : ""}`);
    charts.draw(past);
    return;
  }
  show($("demo"), source.kind === "demo");
  const facts = [source.kind === "demo" ? "demo" : `${source.kind} ${source.where}`];
  if (source.clients !== undefined) facts.push(many(source.clients, "connection"));
  if (source.uptime_s !== undefined) facts.push(`up ${span(source.uptime_s)}`);
  text($("link-text"), facts.join(" · "));
  text($("footer"), `Tiercel ${source.version}. Figures since the store opened, as engines reported them; – is what nobody measured.`);
  draw(told);
}

function draw(told) {
  const colours = palette(told.stats);
  tiles(told.stats);
  drawPlaces(told.stats, past.lately(RECENT_S), colours);
  charts.draw(past);
  drawPrefixes(told, colours, steerPrefix);
  drawScopes(told, colours, (_, scope) => clear(scope));
  drawFaults(told, told.at_s);
  drawDecisions(told, colours, told.at_s);
  for (const id of ["prefixes", "scopes", "decisions"]) keys(id, told.stats, colours);
}

function keys(id, stats, colours) {
  if (!stats) return;
  let list = $(`${id}-keys`);
  if (!list) $(id).before(list = el("ul", { id: `${id}-keys`, class: "keys" }));
  const places = ["ram", ...stats.tiers.map((tier) => tier.name)];
  drawKeys(list, new Map([...colours, ["computed", "--none"]]), id === "decisions" ? ["engine", ...places, "computed"] : places);
}

function gone(why) {
  document.body.dataset.state = "away";
  text($("link-text"), "Away, trying again");
  text($("away"), `No answer: ${why}. ${latest ? `Figures are from ${clock(latest.at_s)}, ${ago(latest.at_s, Date.now() / 1000)}.` : ""}`);
  show($("away"), true);
}

$("clear-all").addEventListener("click", () => clear(null));
addEventListener("resize", () => charts.draw(past));
follow({
  tell, gone, token,
  past: (told) => { past.load(told); charts.draw(past); },
  refused: () => askToken(token() ? "This token is not the right one." : ""),
});
