// Numbers as people read them. What is not known is an en dash, never a zero.

export const NONE = "–";
const unknown = (value) => value === null || value === undefined || !Number.isFinite(value);

export function number(value, digits = 3) {
  if (unknown(value)) return NONE;
  return Number(value.toPrecision(digits)).toLocaleString("en-US", { maximumFractionDigits: 6 });
}

export const whole = (value) => (unknown(value) ? NONE : Math.round(value).toLocaleString("en-US"));

export function short(value) {
  if (unknown(value)) return NONE;
  for (const [unit, size] of [["G", 1e9], ["M", 1e6], ["k", 1e4]]) {
    if (value >= size) return `${number(value / (unit === "k" ? 1e3 : size))} ${unit}`;
  }
  return whole(value);
}

export const percent = (value) => (unknown(value) ? NONE : `${Math.round(value * 100)} %`);

export function bytes(value) {
  if (unknown(value)) return NONE;
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${number(value / size)} ${unit}`;
  }
  return `${number(value)} B`;
}

export const rate = (value) => (unknown(value) ? NONE : value === 0 ? "0" : value < 1e3 ? `${number(value)} B/s` : value < 1e6 ? `${number(value / 1e3)} kB/s` : value < 1e9 ? `${number(value / 1e6)} MB/s` : `${number(value / 1e9)} GB/s`);

// A time that something took.
export function seconds(value) {
  if (unknown(value)) return NONE;
  if (value < 0.9995) return `${number(value * 1e3, 2)} ms`;
  return value < 100 ? `${number(value)} s` : span(value);
}

// A time that adds up: the two largest units.
export function span(value) {
  if (unknown(value)) return NONE;
  if (value < 60) return `${number(value, value < 10 ? 2 : 3)} s`;
  const all = Math.round(value);
  const [days, hours, minutes, rest] = [Math.floor(all / 86400), Math.floor(all / 3600) % 24, Math.floor(all / 60) % 60, all % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return `${minutes} min ${rest} s`;
}

export function ago(at, now) {
  if (unknown(at)) return NONE;
  const gone = Math.max(0, now - at);
  if (gone < 2) return "now";
  if (gone < 60) return `${Math.floor(gone)} s ago`;
  if (gone < 3600) return `${Math.floor(gone / 60)} min ago`;
  return gone < 86400 ? `${Math.floor(gone / 3600)} h ago` : `${Math.floor(gone / 86400)} d ago`;
}

export const clock = (at) => new Date(at * 1000).toLocaleTimeString("en-GB");
export const many = (count, one, more = `${one}s`) => `${whole(count)} ${count === 1 ? one : more}`;
