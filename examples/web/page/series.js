// Where the numbers come from: a series is { times, values, unit, clock, period }, times rising.

/** Weekly CO₂ from 1990 on. */
export async function co2() {
  const response = await fetch("mauna_loa_weekly_co2.csv");
  if (!response.ok) throw new Error(`mauna_loa_weekly_co2.csv: ${response.status}`);
  const { times, values } = parse(await response.text());
  const from = times.findIndex((time) => time >= 1990);
  return { times: times.slice(from), values: values.slice(from), unit: "ppm", clock: "year", period: 1 };
}

/** Two waves and a step, 500 samples over 10 units of time. */
export function wave() {
  const times = Array.from({ length: 500 }, (_, i) => i / 50);
  const values = times.map((t) => Math.sin(2 * Math.PI * t) + 0.5 * Math.sin(0.9 * t) + (t < 6 ? 0 : 1.5));
  return { times, values, unit: "", clock: "time", period: 1 };
}

/** What stands in a text, see `parse`. */
export function own(text) {
  const { times, values } = parse(text);
  if (times.length < 8) throw new Error(`numbers: got ${times.length} samples, needed at least 8`);
  if (times.length > 2000) throw new Error(`numbers: got ${times.length} samples, needed at most 2000`);
  return { times, values, unit: "", clock: "time", period: (times.at(-1) - times[0]) / 4 };
}

/**
 * Lines of `time, value` or `value`, separated by commas, semicolons, tabs or blanks. A time is a number, or a date as
 * yyyymmdd or yyyy-mm-dd, which becomes a fractional year. Lines that start with a letter or # are headings; a line
 * without a value is a gap.
 */
export function parse(text) {
  const times = [];
  const values = [];
  for (const [index, line] of text.split(/\r?\n/).entries()) {
    if (/^\s*($|[#\p{L}])/u.test(line)) continue;
    const bad = (needed) => new Error(`line ${index + 1}: got “${line.trim().slice(0, 40)}”, needed ${needed}`);
    const fields = line.trim().split(/\s*[,;\t]\s*|\s+/);
    if (fields.length > 1 && fields[1] === "") continue;
    const time = fields.length > 1 ? moment(fields[0]) : times.length;
    const value = Number(fields.length > 1 ? fields[1] : fields[0]);
    if (!Number.isFinite(time) || !Number.isFinite(value)) throw bad("time, value");
    if (times.length && time <= times.at(-1)) throw bad("a later time than the line before");
    times.push(time);
    values.push(value);
  }
  return { times, values };
}

/** A number, or a date as a fractional year: the part of the year that has passed when that day begins. */
function moment(text) {
  const date = /^(\d{4})(-?)(\d\d)\2(\d\d)$/.exec(text);
  if (!date) return Number(text);
  const [year, month, day] = [date[1], date[3], date[4]].map(Number);
  const start = Date.UTC(year, 0, 1);
  return year + (Date.UTC(year, month - 1, day) - start) / (Date.UTC(year + 1, 0, 1) - start);
}

/** Part of a series. `kept` is the part that remains, of the season's rest or of the second half where `how` says so. */
export function thin(series, how, kept) {
  const random = generator(1);
  const middle = (series.times[0] + series.times.at(-1)) / 2;
  const step = Math.max(1, Math.round(1 / kept));
  const keep = (time, index) => {
    const draw = random();
    const phase = (time / series.period) % 1;
    if (how === "uniform") return index % step === 0;
    if (how === "sparse") return time < middle || index % step === 0;
    if (how === "season") return (phase >= 0.2 && phase < 0.6) || draw < kept;
    return draw < kept;
  };
  let indices = [...series.times.keys()].filter((index) => keep(series.times[index], index));
  // Something has to be left to smooth.
  if (indices.length < 4) indices = [0, 1, 2, 3].map((i) => Math.round((i / 3) * (series.times.length - 1)));
  return {
    ...series,
    times: indices.map((index) => series.times[index]),
    values: indices.map((index) => series.values[index]),
  };
}

/** Random numbers in [0, 1) that are the same every time (mulberry32). */
function generator(seed) {
  let state = seed;
  return () => {
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 2 ** 32;
  };
}
