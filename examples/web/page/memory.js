// EFLA as a streaming memory: each reading is written under a key made of its date, then the memory is asked for the
// next one. Keys and queries are both multiplied by a scale s, so that x = β|k|² = 0.6 s² while predictions keep
// their size.

import { referenceEfla } from "./continuous_attention.js";
import { measure } from "./measure.js";

export const BETA = 0.6;
/** Scales of the figure. */
export const SCALES = [0.25, 0.5, 1, 1.5, 2, 3, 4, 8, 16];
export const INTEGRATORS = { exact: "EFLA (exact)", euler: "DeltaNet (Euler)" };
const FEATURES = 8;
/** A prediction this many times larger than the largest value has diverged. */
const BLOWN_UP = 1e6;

/** A date as a key of length 1: level, slow trend, three harmonics of the period. */
function key(series, time) {
  const [first, last] = [series.times[0], series.times.at(-1)];
  const features = [1, (2 * time - first - last) / (last - first)];
  for (const n of [1, 2, 3]) {
    const angle = (2 * Math.PI * n * time) / series.period;
    features.push(Math.sin(angle), Math.cos(angle));
  }
  const length = Math.hypot(...features);
  return features.map((feature) => feature / length);
}

/** Readings as the memory sees them. */
function prepare(series) {
  const count = series.values.length;
  const mean = series.values.reduce((sum, value) => sum + value, 0) / count;
  const deviation = Math.sqrt(series.values.reduce((sum, value) => sum + (value - mean) ** 2, 0) / count) || 1;
  return {
    mean,
    deviation,
    keys: series.times.flatMap((time) => key(series, time)),
    values: series.values.slice(0, -1).map((value) => (value - mean) / deviation),
  };
}

/** One memory over the whole series: predictions until it diverges, if it does. */
async function remember(engine, series, prepared, integrator, scale, checks) {
  const { keys, values, mean, deviation } = prepared;
  const call = (tokens) => ({
    q: Float32Array.from(keys.slice(FEATURES, (tokens + 1) * FEATURES), (x) => scale * x),
    k: Float32Array.from(keys.slice(0, tokens * FEATURES), (x) => scale * x),
    v: Float32Array.from(values.slice(0, tokens)),
    beta: new Float32Array(tokens).fill(BETA),
    keyDim: FEATURES,
    valueDim: 1,
    scale: 1,
    integrator,
  });
  // Where it diverges float64 says; up to there float32 has to agree, though beyond x = 2 errors of rounding grow, too.
  const bound = BLOWN_UP * Math.max(...values.map(Math.abs));
  const whole = await referenceEfla(call(values.length));
  const end = whole.out.findIndex((out) => !(Math.abs(out) <= bound));
  const tokens = end < 0 ? values.length : end + 1;
  const arguments_ = call(tokens);
  const { got, check } = await measure({
    name: `${INTEGRATORS[integrator]}, scale ${Number(scale.toPrecision(3))}${end < 0 ? "" : `, diverges at ${tokens}`}`,
    kind: "efla",
    tensor: "out",
    factor: integrator === "euler" && BETA * scale ** 2 > 2 ? 10 : 1,
    onGpu: () => engine.efla(arguments_),
    inFloat64: () => referenceEfla(arguments_),
  });
  checks.push(check);
  const predictions = Array.from(got.out, (out) => mean + deviation * out);
  // The first fifth is for learning.
  const judged = [...predictions.keys()].filter((i) => i >= values.length / 5);
  const errors = judged.map((i) => predictions[i] - series.values[i + 1]);
  const error = Math.sqrt(errors.reduce((sum, error) => sum + error ** 2, 0) / errors.length);
  return { predictions, diverged: end >= 0, error: end < 0 ? error : null };
}

/** Both memories at one scale. */
export async function predict(engine, series, scale) {
  const prepared = prepare(series);
  const checks = [];
  const exact = await remember(engine, series, prepared, "exact", scale, checks);
  const euler = await remember(engine, series, prepared, "euler", scale, checks);
  return { times: series.times.slice(1), exact, euler, checks };
}

/** The errors of both at all scales, and the worst check of each. */
export async function sweep(engine, series) {
  const prepared = prepare(series);
  const result = { exact: [], euler: [], checks: [] };
  for (const integrator of Object.keys(INTEGRATORS)) {
    const checks = [];
    for (const scale of SCALES) {
      const { error } = await remember(engine, series, prepared, integrator, scale, checks);
      result[integrator].push(error);
    }
    const worst = checks.reduce((a, b) => (b.max / b.allowed > a.max / a.allowed ? b : a));
    const sum = (field) => checks.reduce((total, check) => total + check[field], 0);
    result.checks.push({
      ...worst,
      name: `${INTEGRATORS[integrator]}, worst of ${checks.length} scales`,
      passed: checks.every((check) => check.passed),
      gpu: sum("gpu") / checks.length,
      reference: sum("reference") / checks.length,
    });
  }
  return result;
}
