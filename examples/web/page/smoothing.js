// Smoothing as attention. Every point of the curve is an entry of the batch with one query, and has its own origin of
// time: with u = (tᵢ − t)/h, k = [u, u²] and q = [0, −½], the logit is −u²/2, a Gaussian of bandwidth h, and float32
// logits are exact to rounding however long the series.

import { referenceAttention, referenceAttentionWeights } from "./continuous_attention.js";
import { measure } from "./measure.js";

/** Points of a curve. */
export const POINTS = 160;

/** Times of the points. */
export function points(series) {
  const [first, last] = [series.times[0], series.times.at(-1)];
  return Array.from({ length: POINTS }, (_, i) => first + ((last - first) * i) / (POINTS - 1));
}

/** The arguments of one call: attention at `times` over the samples. */
function call(samples, mean, bandwidth, sink, method, times) {
  const keys = samples.times.length;
  const u = (sample, time) => (sample - time) / bandwidth;
  const gaps = samples.times.slice(1).map((time, i) => (time - samples.times[i]) / bandwidth);
  // The segment in front of sample 1, where there is one, is as long as the others on average.
  const intervals = [average(gaps), ...gaps];
  return {
    q: Float32Array.from(times.flatMap(() => [0, -0.5])),
    k: Float32Array.from(times.flatMap((time) => samples.times.flatMap((t) => [u(t, time), u(t, time) ** 2]))),
    v: Float32Array.from(times.flatMap(() => samples.values.map((value) => value - mean))),
    batch: times.length,
    headDim: 2,
    valueDim: 1,
    scale: 1,
    causal: false,
    method,
    ...(method === "continuous" && { sink, intervals: Float32Array.from(times.flatMap(() => intervals)) }),
  };
}

/**
 * The factor on the limits: they grow with the largest logit of those that carry weight. Below a row's maximum by 25, all
 * of them together weigh less than a rounding error.
 */
function factor({ k, batch }) {
  const keys = k.length / 2 / batch;
  let largest = 0;
  for (let row = 0; row < batch; row++) {
    const logits = Array.from({ length: keys }, (_, i) => -k[2 * (row * keys + i) + 1] / 2);
    const top = Math.max(...logits);
    for (const logit of logits) if (logit > top - 25) largest = Math.max(largest, -logit);
  }
  return Math.max(1, largest / 8);
}

const average = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** Both curves through `samples`, and the one through all of `series`. */
export async function smooth(engine, series, samples, { bandwidth, sink }) {
  const mean = average(samples.values);
  const times = points(series);
  const checks = [];
  const curve = async (name, of, sink, method) => {
    const arguments_ = call(of, mean, bandwidth, sink, method, times);
    const { got, check } = await measure({
      name,
      kind: `curve ${method}`,
      tensor: "out",
      factor: factor(arguments_),
      onGpu: () => engine.attention(arguments_),
      inFloat64: () => referenceAttention(arguments_),
    });
    checks.push(check);
    return Array.from(got.out, (value) => value + mean);
  };
  const ordinary = await curve("ordinary attention", samples, "none", "softmax");
  const continuous = await curve("continuous attention", samples, sink, "continuous");
  const full = await curve("continuous, every sample", series, "none", "continuous");
  const [ordinaryError, continuousError] = [rms(ordinary, full), rms(continuous, full)];
  return { times, ordinary, continuous, full, ordinaryError, continuousError, checks };
}

/** What every sample weighs at one point of the curve. */
export async function weigh(engine, series, samples, { bandwidth, sink, row }) {
  const mean = average(samples.values);
  const time = points(series)[row];
  const checks = [];
  const weights = async (name, method) => {
    const arguments_ = call(samples, mean, bandwidth, sink, method, [time]);
    const { got, check } = await measure({
      name,
      kind: `weights ${method}`,
      tensor: "weights",
      factor: factor(arguments_),
      onGpu: () => engine.attentionWeights(arguments_),
      inFloat64: () => referenceAttentionWeights(arguments_),
    });
    checks.push(check);
    return Array.from(got.weights);
  };
  const ordinary = await weights("weights of the row, ordinary", "softmax");
  const continuous = await weights("weights of the row, continuous", "continuous");
  return { time, ordinary, continuous, checks };
}

function rms(x, y) {
  return Math.sqrt(average(x.map((value, i) => (value - y[i]) ** 2)));
}
