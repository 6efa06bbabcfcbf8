"use strict";
// The page: a form whose state is the query string, and results drawn from one plan.
// A plan comes from /api/plan, or, in the exported page, from `sheet()`, which Python printed into data.js.

const $ = (id) => document.getElementById(id);
const el = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "style") node.style.cssText = value; // the page's policy forbids the attribute, not the property
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};
const svg = (tag, attributes = {}, text = "") => {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text) node.textContent = text;
  return node;
};

// --- Form --------------------------------------------------------------------------------------------------
// kind: choice | number (with a slider). `unit` is shown; `suffix` is what the option's text needs.
const T = TIERCEL;
const same = (names) => Object.fromEntries(names.map((name) => [name, String(name)]));
const FORM = [
  ["Model", [
    { name: "model", label: "Model", choices: same(T.models) },
    { name: "weights-dtype", label: "Weights", choices: same(T.weights) },
    { name: "kv-dtype", label: "KV cache", choices: same(T.kv_dtypes) },
  ]],
  ["GPUs", [
    { name: "gpu", label: "Kind", choices: T.gpus },
    { name: "gpus", label: "Number", low: 1, high: 64, integer: true, log: true },
    { name: "tp", label: "Tensor parallel", choices: same(T.tp) },
    { name: "pp", label: "Pipeline parallel", choices: same(T.pp) },
    { name: "mfu", label: "Prefill MFU", low: 0.1, high: 0.9, step: 0.05 },
  ]],
  ["Traffic", [
    { name: "sessions", label: "Live sessions", low: 1, high: 100000, log: true, integer: true },
    { name: "context", label: "Prompt", unit: "tokens", low: 256, high: 131072, log: true, integer: true },
    { name: "new", label: "New in a turn", unit: "tokens", low: 1, high: 32768, log: true, integer: true },
    { name: "output", label: "Answer", unit: "tokens", low: 1, high: 8192, log: true, integer: true },
    { name: "turns", label: "Turns of a session", low: 1, high: 100, log: true, integer: true },
    { name: "idle", label: "One turn every", unit: "s", suffix: "s", low: 1, high: 86400, log: true },
    { name: "shared", label: "Prefix shared by all", unit: "tokens", low: 0, high: 32768, step: 256, integer: true },
  ]],
  ["Tiers, all hosts together", [
    { name: "host-ram", label: "RAM for KV", unit: "GiB", suffix: "GiB", low: 0, high: 16384, optional: "no limit", integer: true },
    { name: "disk", label: "Below RAM", choices: T.links },
    { name: "disk-rate", label: "Its rate", unit: "GB/s", suffix: "GB/s", low: 0.1, high: 400, optional: "as the table" },
  ]],
  ["Your prices", [
    { name: "gpu-price", label: "GPU, per hour", low: 0, high: 1e6, optional: "none", price: true },
    { name: "ram-price", label: "RAM, per GB and month", low: 0, high: 1e6, optional: "none", price: true },
    { name: "disk-price", label: "Disk, per GB and month", low: 0, high: 1e6, optional: "none", price: true },
    { name: "price-date", label: "As of", month: true },
  ]],
];
const FIELDS = Object.fromEntries(FORM.flatMap(([, fields]) => fields.map((field) => [field.name, field])));
const today = new Date().toISOString().slice(0, 7);

function build() {
  const form = $("form");
  for (const [title, fields] of FORM) {
    form.append(el("fieldset", {}, el("legend", {}, title), ...fields.map(control)));
  }
  const share = el("button", { type: "button", class: "primary" }, "Copy link");
  share.addEventListener("click", () => copy(location.href, share));
  const reset = el("button", { type: "button" }, "Start over");
  reset.addEventListener("click", () => { history.replaceState(null, "", location.pathname); read(); update(); });
  form.append(el("div", { class: "actions" }, share, reset));
  form.addEventListener("submit", (event) => event.preventDefault());
}

function control(field) {
  const id = `f-${field.name}`;
  const label = el("label", { for: id, title: T.help[field.name] || "" }, field.label);
  if (field.choices) {
    const select = el("select", { id });
    for (const [value, title] of Object.entries(field.choices)) select.append(el("option", { value }, title));
    select.addEventListener("change", () => update());
    return el("div", { class: field.name === "model" ? "field wide" : "field choice" }, label, select);
  }
  if (field.month) {
    const input = el("input", { id, type: "month", value: today, max: "2100-12" });
    input.addEventListener("input", () => update());
    return el("div", { class: "field" }, label, input);
  }
  const step = field.step || (field.integer ? 1 : "any");
  const input = el("input", { id, type: "number", min: field.low, step: field.integer ? 1 : "any", inputmode: "decimal" });
  if (field.optional) input.placeholder = field.optional;
  const row = el("div", { class: "field" }, label, el("div", { class: "unit" }, input, el("span", {}, field.unit || "")));
  input.addEventListener("input", () => { slide(field); update(); });
  if (field.optional) return row;
  const ends = field.log ? [0, 1000, 1] : [field.low, field.high, step];
  const range = el("input", { id: `${id}-range`, type: "range", min: ends[0], max: ends[1], step: ends[2], "aria-label": field.label });
  range.addEventListener("input", () => { input.value = fromSlider(field, Number(range.value)); tell(field); update(); });
  row.append(range);
  return row;
}

function fromSlider(field, position) {
  if (!field.log) return String(Number(position.toFixed(4)));
  const exact = field.low * (field.high / field.low) ** (position / 1000);
  const two = Number(exact.toPrecision(2));
  const near = 2 ** Math.round(Math.log2(exact));
  const value = field.unit === "tokens" && Math.abs(near / exact - 1) < 0.03 ? near : two;
  return String(Math.min(Math.max(Math.round(value), field.low), field.high));
}

function slide(field) {
  const range = $(`f-${field.name}-range`);
  if (!range) return;
  const value = Number($(`f-${field.name}`).value);
  range.value = field.log ? (1000 * Math.log(value / field.low)) / Math.log(field.high / field.low) : value;
  tell(field);
}

function tell(field) {
  $(`f-${field.name}-range`).setAttribute("aria-valuetext", `${$(`f-${field.name}`).value} ${field.unit || ""}`.trim());
}

// The form's state as the planner's options; only what differs from the defaults, so that links stay short.
function options() {
  const found = {};
  const date = $("f-price-date").value || today;
  for (const [name, field] of Object.entries(FIELDS)) {
    if (field.month) continue;
    const raw = $(`f-${name}`).value.trim();
    if (!raw) continue;
    found[name] = field.price ? `${raw}@${date}` : raw + (field.suffix || "");
  }
  return found;
}

function query(all) {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(all)) if (value !== T.defaults[name]) parameters.set(name, value);
  return parameters.toString();
}

function read() {
  const parameters = new URLSearchParams(location.search || location.hash.slice(1));
  for (const [name, field] of Object.entries(FIELDS)) {
    if (field.month) continue;
    let text = parameters.get(name) ?? T.defaults[name] ?? "";
    if (field.price && text.includes("@")) {
      $("f-price-date").value = text.split("@")[1].slice(0, 7);
      text = text.split("@")[0];
    }
    if (field.suffix && text.endsWith(field.suffix)) text = text.slice(0, -field.suffix.length);
    $(`f-${name}`).value = text;
    slide(field);
  }
}

// --- Planning -----------------------------------------------------------------------------------------------
let asked = 0;
let lastAsked = 0;
let timer = 0;

function update(now = false) {
  clearTimeout(timer);
  timer = setTimeout(refresh, now || T.static ? 0 : 120);
}

async function refresh() {
  const mine = ++asked;
  const all = options();
  const short = query(all);
  history.replaceState(null, "", location.pathname + (short ? (T.static ? "#" : "?") + short : ""));
  let plan;
  try {
    plan = T.static ? offlinePlan(all) : await servedPlan(all);
  } catch (error) {
    plan = { error: error instanceof TypeError ? "the server does not answer" : String(error.message || error) };
  }
  if (mine !== asked) return; // a later change is on its way
  show(plan);
  lastAsked = mine;
}

async function servedPlan(all) {
  const answer = await fetch(`api/plan?${new URLSearchParams(all)}`);
  return answer.json();
}

// The inputs of the sheet for the exported page: table look-ups, no arithmetic of its own.
function offlineInputs(all) {
  const data = T.offline;
  const model = data.models[all.model];
  const split = `${all.tp}x${all.pp}`;
  const table = model.kv[all["kv-dtype"]];
  if (!table) throw new Error(`kv-dtype: ${all["kv-dtype"]} does not exist for ${all.model}`);
  if (!table[split]) throw new Error(`tp ${all.tp}, pp ${all.pp} does not fit the heads or layers of ${all.model}`);
  const gpu = data.gpus[all.gpu];
  const link = data.links[all.disk];
  const given = (name, suffix) => (all[name] === undefined ? null : Number(all[name].slice(0, -suffix.length || undefined)));
  const price = (name) => (all[name] === undefined ? NaN : Number(all[name].split("@")[0]));
  const ram = given("host-ram", "GiB");
  const rate = given("disk-rate", "GB/s");
  const inputs = {
    ...model.same,
    ...Object.fromEntries(data.kv_inputs.map((name, i) => [name, table[split][i]])),
    ...Object.fromEntries(data.weight_inputs.map((name, i) => [name, model.weights[all["weights-dtype"]][i]])),
    compression: 1, gpus: Number(all.gpus), tp: Number(all.tp), pp: Number(all.pp), mfu: Number(all.mfu),
    gpu_flops: gpu.gpu_flops, hbm_bytes: gpu.hbm_bytes, hbm_bytes_per_s: gpu.hbm_bytes_per_s,
    hbm_use: Number(T.defaults["hbm-use"]), hbm_reserve_bytes: 2 * 2 ** 30, hbm_efficiency: data.hbm_efficiency,
    ram_bytes_per_s: gpu.ram.bytes_per_s, ram_latency_s: gpu.ram.latency_s,
    disk_bytes_per_s: rate === null ? link.bytes_per_s : rate * 1e9, disk_latency_s: link.latency_s,
    ram_limit_bytes: ram === null ? 1e18 : ram * 2 ** 30, disk_limit_bytes: 1e18,
    sessions: Number(all.sessions), context_tokens: Number(all.context), new_tokens: Number(all.new),
    output_tokens: Number(all.output), turns: Number(all.turns), idle_s: Number(all.idle.slice(0, -1)),
    shared_tokens: Number(all.shared), gpu_hour_price: price("gpu-price"),
    ram_gb_month_price: price("ram-price"), disk_gb_month_price: price("disk-price"),
  };
  checkInputs(inputs);
  return inputs;
}

function checkInputs(inputs) {
  for (const [name, [low, high]] of Object.entries(T.offline.bounds)) {
    if (name in inputs && !(inputs[name] >= low && inputs[name] <= high)) {
      throw new Error(`${name.replace(/_(bytes|tokens|s)$/, "")}: ${inputs[name]}; accepted: from ${low} to ${high}`);
    }
  }
  if (inputs.tp * inputs.pp > inputs.gpus) {
    throw new Error(`tp ${inputs.tp} x pp ${inputs.pp} needs ${inputs.tp * inputs.pp} GPUs; ${inputs.gpus} given`);
  }
  if (inputs.new_tokens > inputs.context_tokens) throw new Error(`new: ${inputs.new_tokens}; accepted: at most the prompt's ${inputs.context_tokens}`);
  if (inputs.shared_tokens >= inputs.context_tokens) throw new Error(`shared: ${inputs.shared_tokens}; accepted: less than the prompt's ${inputs.context_tokens}`);
}

function offlinePlan(all) {
  const inputs = offlineInputs(all);
  const found = sheet(inputs);
  const figures = Object.fromEntries(Object.entries(T.cells).map(([name, [unit, formula, assumptions]]) => {
    return [name, { value: Number.isFinite(found[name]) ? found[name] : null, unit, formula, assumptions }];
  }));
  const limit = T.max_tokens[all.model];
  const tokens = T.offline.break_even_tokens.filter((n) => !limit || n <= limit);
  const chosen = { ...T.offline.links[all.disk], bytes_per_s: inputs.disk_bytes_per_s };
  const others = Object.values(T.offline.links).filter((link) => link.name !== all.disk);
  const tiers = [T.offline.gpus[all.gpu].ram, chosen, ...others].map((link) => {
    const own = link.per === "gpu";
    const least = own ? found.ram_least_prefix : found.least_prefix(link.bytes_per_s, link.latency_s);
    const load = (n) => (own ? found.ram_load_s(n) : found.load_s(found.kv_bytes(n), link.bytes_per_s, link.latency_s));
    return { ...link, least_prefix_tokens: Number.isFinite(least) ? least : null, load_s: tokens.map(load) };
  });
  return {
    model: { name: all.model }, figures, warnings: offlineWarnings(found, all), strategies: null,
    break_even: {
      prefix_tokens: tokens, tiers, needed_bytes_per_s: tokens.map(found.breakeven_bytes_per_s),
      compute_s: tokens.map((n) => found.compute_s(n, 0)),
    },
  };
}

function offlineWarnings(found, all) {
  const told = [];
  const limit = T.max_tokens[all.model];
  if (limit && Number(all.context) > limit) told.push(`prompts of ${all.context} tokens are longer than the model's own limit of ${limit}`);
  if (found.hbm_kv_bytes < 0) told.push("the weights do not fit these GPUs; more tensor or pipeline parallel, or fewer bits");
  else if (found.hbm_sessions < 1) told.push("not one session fits GPU memory beside the weights");
  if (found.load_with > 1) told.push(`this traffic needs about ${Math.ceil(found.load_with * all.gpus)} GPUs even with tiers; ${all.gpus} given`);
  else if (found.load_without > 1) told.push(`without tiers this traffic needs about ${Math.ceil(found.load_without * all.gpus)} GPUs; ${all.gpus} given`);
  if (found.disk_gain_s <= 0) told.push(`loading from ${all.disk} is slower than computing; no disk is planned`);
  if (found.disk_load > T.offline.disk_load_most) told.push(`returning sessions would keep ${all.disk} ${percent(found.disk_load)} busy: they would queue; more RAM, or a faster rate`);
  return told;
}

// --- Results ------------------------------------------------------------------------------------------------
const number = (value, digits = 3) => (value === null || value === undefined ? "–" : Number(value.toPrecision(digits)).toLocaleString("en-US"));
function seconds(value) {
  if (value === null || value === undefined) return "–";
  return value < 0.9995 ? `${number(value * 1e3)} ms` : `${value.toLocaleString("en-US", { minimumFractionDigits: 2, maximumFractionDigits: 2 })} s`;
}
function span(value) {
  if (value === null) return "–";
  for (const [unit, length] of [["days", 86400], ["h", 3600], ["min", 60]]) if (value >= length) return `${number(value / length)} ${unit}`;
  return `${number(value)} s`;
}
function bytes(value) {
  if (value === null) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= size) return `${number(value / size, 4)} ${unit}`;
  }
  return `${number(value)} B`;
}
const percent = (value) => `${Math.round(value * 100)} %`;

function show(plan) {
  document.body.dataset.state = plan.error ? "error" : "ready";
  $("error").hidden = !plan.error;
  $("error").textContent = plan.error || "";
  $("output").classList.toggle("stale", Boolean(plan.error));
  if (plan.error) { $("status").textContent = ""; return; }
  const v = (name) => plan.figures[name].value;
  window.lastPlan = plan;
  $("status").textContent = `${plan.model.name}: first token after ${seconds(v("ttft_with_s"))} on average, ${seconds(v("ttft_without_s"))} without Tiercel.`;
  $("warnings").replaceChildren(...plan.warnings.map((text) => el("div", { class: "warning" }, text)));
  tiles(v);
  large(v);
  places(v);
  times(v);
  chart(plan, v);
  linkTable(plan);
  work(v);
  strategies(plan.strategies);
  start(plan);
  figures(plan);
}

function tiles(v) {
  const ratio = v("ttft_gain");
  const rows = [
    ["First token sooner, on average", `${number(ratio)} ×`, `${seconds(v("ttft_without_s"))} → ${seconds(v("ttft_with_s"))}`],
    ["Sooner when it returns from RAM", `${number(v("ttft_hit_gain"))} ×`, `${seconds(v("ttft_recompute_s"))} → ${seconds(v("ttft_ram_s"))}`],
    ["Sessions per GPU (compute)", number(v("sessions_per_gpu_with")), `${number(v("sessions_per_gpu_without"))} without`],
    ["KV of one session", bytes(v("session_kv_bytes")), `${number(v("hbm_sessions_per_gpu"))} fit each GPU`],
  ];
  $("tiles").replaceChildren(...rows.map(([name, value, below]) =>
    el("div", { class: "tile" }, el("span", { class: "name" }, name), el("b", {}, value), el("span", {}, below))));
}

function large(v) {
  const whole = (value) => (value === null ? "any number" : Math.floor(value).toLocaleString("en-US"));
  const rows = [
    ["KV per token", `${v("bytes_per_token").toLocaleString("en-US", { maximumFractionDigits: 1 })} B`],
    ["KV of one session", `${bytes(v("session_kv_bytes"))} = ${number(v("session_kv_bytes") / 1e9, 4)} GB`],
    ["Weights per GPU", bytes(v("rank_weight_bytes"))],
    ["KV memory per GPU", bytes(Math.max(v("hbm_kv_bytes"), 0))],
    ["Tokens that fit a replica", whole(v("hbm_tokens"))],
    ["KV outweighs the weights from", `${whole(v("overtake_tokens"))} tokens`],
  ];
  if (v("window_tokens")) rows.push(["In windowed layers", `${v("window_bytes_per_token").toLocaleString("en-US")} B × up to ${whole(v("window_tokens"))}`]);
  if (v("fixed_state_bytes")) rows.push(["Fixed state of a session", bytes(v("fixed_state_bytes"))]);
  pairs("large", rows);
}

function places(v) {
  const parts = [["HBM", "hbm", v("hbm_share")], ["RAM", "ram", v("ram_share")], ["Disk", "disk", v("disk_share")]];
  parts.push(["Nowhere: computed again", "none", Math.max(1 - parts.reduce((sum, part) => sum + part[2], 0), 0)]);
  const there = parts.filter((part) => part[2] > 0.0005);
  const text = there.map(([name, , share]) => `${name} ${percent(share)}`).join(", ");
  const stack = el("div", { class: "stack", role: "img", "aria-label": text });
  const legend = el("ul", { class: "legend" });
  for (const [name, color, share] of there) {
    stack.append(el("div", { style: `width:${share * 100}%;background:var(--${color})` }));
    legend.append(el("li", {}, el("i", { style: `background:var(--${color})` }), `${name} ${percent(share)}`));
  }
  $("places").replaceChildren(stack, legend);
  pairs("sizes", [
    ["All sessions' KV", bytes(v("working_set_bytes"))],
    ["Recommended RAM", bytes(v("ram_bytes"))],
    ["Recommended disk", v("disk_bytes") ? bytes(v("disk_bytes")) : "none"],
    ["New KV written", `${number(v("write_bytes_per_s") / 1e9)} GB/s`],
    ["Read from disk", `${number(v("disk_read_bytes_per_s") / 1e9)} GB/s, ${percent(v("disk_load"))} busy`],
  ]);
}

function pairs(id, rows) {
  $(id).replaceChildren(...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function times(v) {
  const rows = [
    ["Nothing cached", "ttft_recompute_s", "none"], ["Prefix in HBM", "ttft_hbm_s", "hbm"],
    ["Prefix in RAM", "ttft_ram_s", "ram"], ["Prefix on disk", "ttft_disk_s", "disk"],
    ["Mean without Tiercel", "ttft_without_s", "none"], ["Mean with Tiercel", "ttft_with_s", "accent"],
  ];
  const most = Math.max(...rows.map(([, name]) => v(name)));
  $("ttft").replaceChildren(...rows.flatMap(([title, name, color]) => [
    el("span", { class: "label" }, title),
    el("div", {}, el("div", { class: "bar", style: `width:${(100 * v(name)) / most}%;background:var(--${color})` })),
    el("span", { class: "value" }, seconds(v(name))),
  ]));
}

function work(v) {
  const rows = [
    ["GPU load without", percent(v("load_without"))], ["GPU load with", percent(v("load_with"))],
    ["GPU seconds per turn without", number(v("turn_busy_without_s"))], ["GPU seconds per turn with", number(v("turn_busy_with_s"))],
  ];
  if (v("cost_with") === null) rows.push(["Cost", "give all three prices"]);
  else rows.push(
    ["Cost per 1M tokens without", number(v("cost_without"))], ["Cost per 1M tokens with, tiers included", number(v("cost_with"))],
    ["Keep in RAM if it returns within", span(v("keep_ram_s"))], ["Keep on disk if it returns within", span(v("keep_disk_s"))],
  );
  pairs("work", rows);
}

function chart(plan, v) {
  const narrow = $("chart").clientWidth < 520;
  const [width, height, left, right, top, bottom] = narrow ? [380, 330, 40, 10, 10, 36] : [820, 330, 48, 20, 10, 38];
  const tokens = plan.break_even.prefix_tokens;
  const needed = plan.break_even.needed_bytes_per_s.map((rate) => rate / 1e9);
  const rates = plan.break_even.tiers.map((tier) => tier.bytes_per_s / 1e9);
  const x0 = Math.log2(tokens[0]), x1 = Math.log2(tokens[tokens.length - 1]) || x0 + 1;
  const y0 = Math.floor(Math.log10(Math.min(...needed, ...rates) * 0.8)), y1 = Math.ceil(Math.log10(Math.max(...needed, ...rates) * 1.2));
  const x = (n) => left + ((Math.log2(n) - x0) / (x1 - x0 || 1)) * (width - left - right);
  const y = (g) => top + ((y1 - Math.log10(g)) / (y1 - y0)) * (height - top - bottom);
  const plot = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-labelledby": "chart-title" });
  plot.append(svg("title", { id: "chart-title" }, `Bandwidth needed to beat computing: ${needed[0].toPrecision(3)} GB/s for ${tokens[0]} tokens, ${needed[needed.length - 1].toPrecision(3)} GB/s for ${tokens[tokens.length - 1]}`));
  for (let power = y0; power <= y1; power++) {
    plot.append(svg("line", { class: "grid", x1: left, x2: width - right, y1: y(10 ** power), y2: y(10 ** power) }));
    plot.append(svg("text", { x: left - 6, y: y(10 ** power) + 4, "text-anchor": "end" }, String(10 ** power)));
  }
  tokens.forEach((n, i) => {
    plot.append(svg("line", { class: "grid", x1: x(n), x2: x(n), y1: top, y2: height - bottom }));
    if (!narrow || i % 2 === 0) plot.append(svg("text", { x: x(n), y: height - bottom + 16, "text-anchor": "middle" }, n >= 1024 ? `${n / 1024}k` : String(n)));
  });
  plot.append(svg("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, "prefix, tokens (GB/s upwards)"));
  const line = tokens.map((n, i) => `${x(n)},${y(needed[i])}`).join(" ");
  plot.append(svg("polygon", { class: "area", points: `${x(tokens[0])},${top} ${line} ${x(tokens[tokens.length - 1])},${top}` }));
  const reused = v("reused_tokens");
  if (reused >= tokens[0] && reused <= tokens[tokens.length - 1]) {
    plot.append(svg("line", { class: "mark", x1: x(reused), x2: x(reused), y1: top, y2: height - bottom }));
    const end = x(reused) > width * 0.6;
    plot.append(svg("text", { class: "named", x: x(reused) + (end ? -5 : 5), y: height - bottom - 6, "text-anchor": end ? "end" : "start" }, "your reused prefix"));
  }
  const names = plan.break_even.tiers.map((tier, i) => [y(rates[i]), tier.title]).sort((a, b) => a[0] - b[0]);
  let last = -99;
  for (const [at, title] of names) {
    plot.append(svg("line", { class: "link", x1: left, x2: width - right, y1: at, y2: at }));
    const low = at - 4 < last + 13 ? at + 12 : at - 4; // two close lines: one name above, one below
    plot.append(svg("text", { class: "named", x: width - right - 4, y: low, "text-anchor": "end" }, title));
    last = low;
  }
  plot.append(svg("polyline", { class: "curve", points: line }));
  plot.append(svg("text", { class: "curve-name", x: x(tokens[0]) + 6, y: y(needed[0]) - 7 }, "needed"));
  $("chart").replaceChildren(plot);
}

function row(cells, tag = "td", attributes = {}) {
  return el("tr", attributes, ...cells.map((cell) => {
    const [text, name] = Array.isArray(cell) ? cell : [cell, ""];
    return el(tag, name ? { class: name } : {}, text);
  }));
}

function linkTable(plan) {
  const { prefix_tokens: tokens, tiers, compute_s: compute } = plan.break_even;
  const at = tokens.map((n, i) => [n, i]).filter(([n]) => [1024, 8192, 32768, 131072].includes(n));
  const head = ["", "Rate", ...at.map(([n]) => `${n / 1024}k`), "Loading wins from"];
  $("links").replaceChildren(
    row(head, "th"), row(["Compute", "", ...at.map(([, i]) => seconds(compute[i])), ""]),
    ...tiers.map((tier) => row([tier.title, `${number(tier.bytes_per_s / 1e9)} GB/s`, ...at.map(([, i]) => seconds(tier.load_s[i])),
      tier.least_prefix_tokens === null ? "never" : `${number(tier.least_prefix_tokens, 7)} token${tier.least_prefix_tokens === 1 ? "" : "s"}`])));
}

function strategies(rows) {
  $("strategies-card").hidden = !rows;
  if (!rows) return;
  const cost = rows.some((entry) => entry.cost_per_million !== null);
  const head = ["", "KV per token", "In HBM per GPU", "Held", "TTFT cold", "TTFT mean", "Sessions per GPU", ...(cost ? ["Per 1M"] : []), ["", "text"]];
  const there = rows.filter((entry) => entry.session_bytes !== null);
  $("strategies").replaceChildren(row(head, "th"), ...there.map((entry) => row([
    entry.name, bytes(entry.kv_bytes_per_token), number(entry.hbm_sessions_per_gpu), number(entry.sessions_held), seconds(entry.ttft_cold_s),
    seconds(entry.ttft_mean_s), number(entry.sessions_per_gpu), ...(cost ? [number(entry.cost_per_million)] : []), [entry.effect, "text"],
  ], "td", entry.name.startsWith("Tiercel") ? { class: "ours" } : {})));
  $("reasons").replaceChildren(...rows.filter((entry) => entry.session_bytes === null).map((entry) => el("li", {}, `${entry.name}: ${entry.reason}`)));
}

function start(plan) {
  const here = Boolean(plan.config_toml);
  $("toml").closest("article").hidden = !here;
  if (!here) return;
  $("toml").textContent = plan.config_toml.trim();
  $("vllm").textContent = plan.vllm_command;
  $("vllm-note").textContent = `Use it ${plan.vllm_note}.`;
}

function figures(plan) {
  const rows = Object.entries(plan.figures).map(([name, figure]) => {
    const code = el("code", {}, figure.formula);
    return row([name, figure.value === null ? "–" : number(figure.value, 6), [figure.unit, "text"], [code, "long"], [figure.assumptions, "long"]]);
  });
  $("figures").replaceChildren(row(["Name", "Value", ["Unit", "text"], ["Formula", "text"], ["Assumes", "text"]], "th"), ...rows);
}

async function copy(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed here";
  }
  setTimeout(() => { button.textContent = before; }, 1500);
}

$("tabs").hidden = T.static;
if (!T.live) $("tabs").querySelector("a").remove();
$("connect").hidden = T.static || T.live;
build();
read();
for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", () => copy($(button.dataset.copy).textContent, button));
$("footer").textContent = `Tiercel ${T.version}. Arithmetic on your inputs, no measurement. GPU and link figures: table of ${T.table_date}.`
  + (T.static ? " This copy works without a server; 'tiercel dashboard' also compares strategies and writes the configuration." : "");
addEventListener("popstate", () => { read(); update(true); });
addEventListener("hashchange", () => { read(); update(true); });
addEventListener("resize", () => { if (window.lastPlan) chart(window.lastPlan, (name) => window.lastPlan.figures[name].value); });
update(true);
