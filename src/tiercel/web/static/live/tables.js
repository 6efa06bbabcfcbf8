// What prompts share, who uses it, faults, the last requests. Rows are kept and updated in place.

import { $, el, rows, show, style, text } from "./dom.js";
import { NONE, ago, bytes, many, seconds, whole } from "./format.js";
import { placeName, sum } from "./figures.js";

const ROWS = matchMedia("(max-width: 860px)").matches ? 6 : 12;
const opened = new Set();

// At most a screenful, until somebody asks for all.
function some(host, items, ...how) {
  let list = host.querySelector(".rows");
  if (!list) {
    list = el("div", { class: "rows" });
    const more = el("button", { type: "button", class: "small more", onclick: () => { opened.has(host.id) ? opened.delete(host.id) : opened.add(host.id); host.again(); } });
    host.append(el("p", { class: "none" }), list, more);
  }
  const [none, more] = [host.querySelector(".none"), host.querySelector(".more")];
  host.again = () => {
    rows(list, opened.has(host.id) ? items : items.slice(0, ROWS), ...how);
    show(more, items.length > ROWS);
    text(more, opened.has(host.id) ? "Show fewer" : `Show all ${items.length}`);
  };
  host.again();
  return { list, none };
}

function head(list, kind, ...names) {
  if (list.querySelector(".titles")) return;
  list.prepend(el("div", { class: `row titles ${kind}` }, ...names.map(([name, number]) => el("span", number ? { class: "number" } : {}, name))));
}

function stackOf(parts, colours, what) {
  const all = sum(parts);
  const told = Object.entries(parts).map(([name, count]) => `${placeName(name)} ${what(count)}`).join(", ");
  return { all, told, bars: Object.entries(parts).filter(([, count]) => count > 0).map(([name, count]) => [name, (100 * count) / all, colours.get(name) || "--none"]) };
}

function drawStack(node, parts, colours, what) {
  const { told, bars } = stackOf(parts, colours, what);
  if (node.dataset.told === told) return;
  node.dataset.told = told;
  node.title = told;
  node.setAttribute("aria-label", told || "nothing");
  node.replaceChildren(...bars.map(([, share, colour]) => el("div", { "width%": share })).map((bar, n) => {
    style(bar, "background", `var(${bars[n][2]})`);
    return bar;
  }));
}

const stack = () => el("div", { class: "stack", role: "img" });
const button = (name, act) => el("button", { type: "button", class: "small", onclick: act }, name);
const whose = (scope) => [scope.model || "not known yet", ...(scope.adapter ? [`adapter ${scope.adapter.slice(0, 8)}`] : [])].join(", ");
const tenant = (scope) => (scope.salt ? `tenant ${scope.salt}` : "no salt");

export function drawPrefixes(told, colours, act) {
  const scopes = new Map((told.scopes || []).map((scope) => [scope.tag, scope]));
  const items = told.prefixes || [];
  const { list, none } = some($("prefixes"), items, (node) => node.prefix, (made) => {
    const parts = { branch: el("span", { class: "branch", "aria-hidden": "true" }, "└"), code: el("code"), many: el("span", { class: "many" }), model: el("span"), tenant: el("span", { class: "soft" }), blocks: el("span", { class: "number", "data-name": "blocks" }), size: el("span", { class: "number", "data-name": "size" }), stack: stack() };
    const row = el("div", { class: "row prefix" },
      el("div", { class: "key" }, parts.branch, parts.code, parts.many),
      el("div", { class: "name whose" }, parts.model, parts.tenant), parts.blocks, parts.size, parts.stack,
      el("div", { class: "buttons" },
        button("Prefetch", () => act("prefetch", row.item)), button("Pin", () => act("pin", row.item)), button("More…", () => act("more", row.item))));
    row.parts = parts;
    row.item = made;
    return row;
  }, (row, node) => {
    row.item = node;
    const { parts } = row;
    const scope = scopes.get(node.tag) || { model: "", salt: "" };
    style(row, "--level", String(Math.min(node.level, 6)));
    show(parts.branch, node.level > 0);
    text(parts.code, node.prefix);
    text(parts.many, node.branches > 1 ? `${node.branches} go on` : "");
    text(parts.model, whose(scope));
    text(parts.tenant, tenant(scope));
    text(parts.blocks, whole(node.length));
    text(parts.size, bytes(largest(node.nbytes)));
    drawStack(parts.stack, node.blocks, colours, (count) => many(count, "block"));
  });
  head(list, "prefix", ["Prefix"], ["Model and tenant"], ["Blocks", 1], ["Size", 1], ["Where"], [""]);
  show(list, items.length > 0);
  show(none, items.length === 0);
  text(none, "No prompts of two blocks or more yet.");
  text($("prefixes-count"), items.length ? `${many(items.length, "run")} shown` : "");
}

// A block may lie in several places at once; it is as large in each.
const largest = (nbytes) => Math.max(0, ...Object.values(nbytes));

export function drawScopes(told, colours, act) {
  const items = told.scopes || [];
  const { list, none } = some($("scopes"), items, (scope) => scope.tag, (made) => {
    const parts = { model: el("span"), tenant: el("span", { class: "soft" }), stack: stack(), sizes: el("span", { class: "soft" }) };
    const row = el("div", { class: "row scope" }, el("div", { class: "name" }, parts.model, parts.tenant), el("div", { class: "held" }, parts.stack, parts.sizes),
      el("div", { class: "buttons" }, button("Clear…", () => act("clear", row.item))));
    row.parts = parts;
    row.item = made;
    return row;
  }, (row, scope) => {
    row.item = scope;
    text(row.parts.model, whose(scope));
    text(row.parts.tenant, tenant(scope));
    text(row.parts.sizes, Object.entries(scope.nbytes).map(([place, held]) => `${placeName(place)} ${bytes(held)}`).join(" · "));
    drawStack(row.parts.stack, scope.nbytes, colours, bytes);
  });
  head(list, "scope", ["Model and tenant"], ["Bytes held"], [""]);
  show(list, items.length > 0);
  show(none, items.length === 0 || told.more_scopes > 0);
  text(none, items.length === 0 ? "Nothing is stored." : `${many(told.more_scopes, "smaller one")} not shown.`);
}

export function drawFaults(told, now) {
  const items = told.faults || [];
  const { list, none } = some($("faults"), items, (fault) => `${fault.tier}.${fault.kind}`, () => {
    const parts = { what: el("span"), text: el("span", { class: "soft" }), times: el("span", { class: "times" }), when: el("span", { class: "soft" }) };
    const row = el("div", { class: "row fault" }, el("div", { class: "name" }, parts.what, parts.text), el("div", { class: "number" }, parts.times, " ", parts.when));
    row.parts = parts;
    return row;
  }, (row, fault) => {
    text(row.parts.what, `${fault.tier ? `${fault.tier}: ` : ""}${fault.kind}`);
    text(row.parts.text, fault.text);
    text(row.parts.times, `${whole(fault.count)} ×`);
    text(row.parts.when, ago(fault.at_s, now));
  });
  show(list, items.length > 0);
  show(none, items.length === 0);
  text(none, told.stats ? "None since the store opened." : NONE);
}

const DID = { load: "loaded", split: "part loaded", recompute: "computed", miss: "not found" };

function tokensBy(one) {
  return { ...one.reused_tokens, computed: one.computed_tokens };
}

export function drawDecisions(told, colours, now) {
  const items = told.decisions || [];
  const { list, none } = some($("decisions"), items, (one) => one.number, () => {
    const parts = { when: el("span", { class: "soft" }), tokens: el("span", { class: "number", "data-name": "prompt" }), stack: stack(), did: el("span", { class: "badge" }), ttft: el("span", { class: "number", "data-name": "first token" }), saved: el("span", { class: "number", "data-name": "saved" }), why: el("div", { class: "why" }) };
    const row = el("div", { class: "row decision" }, parts.when, parts.tokens, parts.stack, el("span", {}, parts.did), parts.ttft, parts.saved, parts.why);
    row.parts = parts;
    return row;
  }, (row, one) => {
    const { parts } = row;
    const bad = one.outcome && one.outcome !== "answered";
    text(parts.when, ago(one.at_s, now));
    text(parts.tokens, `${whole(one.prompt_tokens)} tokens`);
    drawStack(parts.stack, tokensBy(one), new Map([...colours, ["computed", "--none"]]), (count) => many(count, "token"));
    text(parts.did, bad ? one.outcome : DID[one.action] || one.action);
    parts.did.className = `badge ${bad ? one.outcome : one.action}`;
    text(parts.ttft, seconds(one.took.ttft_s));
    text(parts.saved, seconds(one.saved_s));
    text(parts.why, `${one.engine ? `${one.engine}: ` : ""}${one.reason}`);
  });
  head(list, "decision", ["When"], ["Prompt", 1], ["Tokens from"], ["Done"], ["First token", 1], ["Saved", 1]);
  show(list, items.length > 0);
  show(none, items.length === 0);
  text(none, "No engine has reported a request yet.");
}

// What the colours of the bars stand for.
export function drawKeys(host, colours, named) {
  const told = [...colours].filter(([name]) => named.includes(name)).map(([name, colour]) => `${name}${colour}`).join();
  if (host.dataset.told === told) return;
  host.dataset.told = told;
  host.replaceChildren(...named.map((name) => {
    const patch = el("i");
    style(patch, "background", `var(${colours.get(name) || "--none"})`);
    return el("li", {}, patch, placeName(name));
  }));
}
