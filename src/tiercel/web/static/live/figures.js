// Figures from what was told: differences of totals, never guesses. A sample is {at_s, epoch, totals, places}.

const HOUR_S = 3600;

export class Past {
  constructor() {
    this.samples = [];
  }

  // The server's hour, by column; what came over the stream since is kept.
  load(told) {
    const pick = (table, at) => Object.fromEntries(Object.entries(table).map(([name, column]) => [name, column[at]]));
    const old = told.at_s.map((at_s, at) => ({
      at_s,
      epoch: told.epoch[at],
      totals: pick(told.totals, at),
      places: Object.fromEntries(Object.entries(told.places).map(([place, table]) => [place, pick(table, at)])),
    }));
    const first = this.samples.length ? this.samples[0].at_s : Infinity;
    this.samples = [...old.filter((sample) => sample.at_s < first), ...this.samples];
  }

  add(sample) {
    const last = this.samples[this.samples.length - 1];
    if (last && sample.at_s <= last.at_s) return;
    this.samples.push(sample);
    const from = sample.at_s - HOUR_S - 60;
    if (this.samples[0].at_s < from) this.samples = this.samples.filter((one) => one.at_s >= from);
  }

  // The latest sample at or before a time; null before the first.
  before(at_s) {
    let [low, high] = [0, this.samples.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.samples[middle].at_s <= at_s) low = middle + 1;
      else high = middle;
    }
    return low ? this.samples[low - 1] : null;
  }

  // What was added to totals in the last `span_s` seconds, per second: {totals, places, seconds} or null.
  lately(span_s) {
    const last = this.samples[this.samples.length - 1];
    if (!last) return null;
    let first = this.before(last.at_s - span_s);
    if (!first || first.epoch !== last.epoch) first = this.samples.find((one) => one.epoch === last.epoch);
    return first && first !== last ? difference(first, last) : null;
  }

  // The last `span_s` seconds in `count` parts, oldest first: {at_s, added} with null where nothing is known.
  parts(span_s, count) {
    const last = this.samples[this.samples.length - 1];
    if (!last) return [];
    const step = span_s / count;
    // Parts end at round times, so that a figure does not change while it moves to the left.
    const end = Math.ceil(last.at_s / step) * step;
    return Array.from({ length: count }, (_, at) => {
      const [from, until] = [end - (count - at) * step, end - (count - at - 1) * step];
      const [first, second] = [this.before(from), this.before(until)];
      const known = first && second && second.at_s > from && first.epoch === second.epoch && second !== first && from - first.at_s < 10 + step;
      return { at_s: until, added: known ? difference(first, second) : null };
    });
  }
}

function difference(first, last) {
  const minus = (old, now) => Object.fromEntries(Object.entries(now || {}).map(([name, value]) => {
    const before = (old || {})[name];
    return [name, value === null || value === undefined || before === null || before === undefined ? null : value - before];
  }));
  return {
    seconds: last.at_s - first.at_s,
    totals: minus(first.totals, last.totals),
    places: Object.fromEntries(Object.keys(last.places).map((place) => [place, minus(first.places[place], last.places[place])])),
  };
}

export const ratio = (part, all) => (all > 0 && part !== null && part !== undefined ? part / all : null);

// Mean of a histogram that tells {counts, sum_s}; null while it saw nothing.
export function mean(histogram) {
  if (!histogram) return null;
  const count = histogram.counts.reduce((sum, one) => sum + one, 0);
  return count ? histogram.sum_s / count : null;
}

export const sum = (table) => Object.values(table || {}).reduce((all, one) => all + one, 0);

// Every place a block may lie in, fastest first, with its colour.
const COLOURS = ["--disk", "--tier-2", "--tier-3", "--none"];
export function palette(stats) {
  const found = new Map([["engine", "--hbm"], ["ram", "--ram"]]);
  (stats ? stats.tiers : []).forEach((tier, at) => found.set(tier.name, COLOURS[Math.min(at, COLOURS.length - 1)]));
  return found;
}

export const placeName = (place) => (place === "ram" ? "RAM" : place);
