// Continuous attention and EFLA on WebGPU, for any web app: Float32Arrays in and out, promises.
//
//     import { create } from "./continuous_attention.js";
//     const engine = await create();
//     const { out, lse } = await engine.attention({ q, k, v, headDim: 64, valueDim: 64, heads: 4 });
//     const { out, finalState } = await engine.efla({ q, k, v, beta, keyDim: 64, valueDim: 64, heads: 4 });
//
// Tensors are dense and row-major, in the shapes README.md lists. What is wrong with a call comes as an Error: its
// message names the argument, what it got and what it needed; its `kind` is "argument", "limit", "no adapter" or "gpu".

import init, * as wasm from "./continuous_attention_wasm.js";

let loaded;

/** Loads the module once. The float64 reference needs no more; `create` does it by itself. */
export function load() {
  loaded ??= init();
  return loaded;
}

/**
 * Opens the GPU.
 * @returns {Promise<ContinuousAttention>}
 * @throws Error with kind "no adapter" where the browser has no WebGPU.
 */
export async function create() {
  await load();
  const engine = await wasm.Engine.open();
  // Rust's side hears the description only, which most browsers leave empty.
  const { description, vendor, architecture } = (await navigator.gpu.requestAdapter())?.info ?? {};
  return new ContinuousAttention(engine, description || [vendor, architecture].filter(Boolean).join(" "));
}

/** Both operators on one GPU. Calls may overlap. */
export class ContinuousAttention {
  #engine;

  constructor(engine, adapter) {
    this.#engine = engine;
    /** What the browser tells about the GPU: often little, sometimes nothing. */
    this.adapter = adapter;
  }

  /**
   * Continuous softmax attention, or ordinary attention with `method: "softmax"`.
   * @returns {Promise<{out: Float32Array, lse: Float32Array}>}
   */
  attention(call) {
    return this.#engine.attention(call);
  }

  /**
   * What every token weighs in row `row` of head `head` of entry `batchEntry` of the batch. What is missing from a sum
   * of 1 is the sink's.
   * @returns {Promise<{weights: Float32Array}>}
   */
  attentionWeights(call) {
    return this.#engine.attentionWeights(call);
  }

  /**
   * EFLA, or DeltaNet with `integrator: "euler"`.
   * @returns {Promise<{out: Float32Array, finalState: Float32Array}>}
   */
  efla(call) {
    return this.#engine.efla(call);
  }
}

/**
 * As `attention` in float64, without a GPU; also the largest logit that any row sees.
 * @returns {Promise<{out: Float64Array, lse: Float64Array, largestLogit: number}>}
 */
export async function referenceAttention(call) {
  await load();
  return wasm.referenceAttention(call);
}

/**
 * As `attentionWeights` in float64.
 * @returns {Promise<{weights: Float64Array, largestLogit: number}>}
 */
export async function referenceAttentionWeights(call) {
  await load();
  return wasm.referenceAttentionWeights(call);
}

/**
 * As `efla` in float64.
 * @returns {Promise<{out: Float64Array, finalState: Float64Array}>}
 */
export async function referenceEfla(call) {
  await load();
  return wasm.referenceEfla(call);
}

/**
 * Whether results count as equal to those of the reference, by the rule of the library's own tests: relative rms error
 * at most `limit` = 2e-6 · factor, relative largest error at most ten times that. Attention's factor is
 * max(1, largestLogit / 8), since a logit's own rounding grows with it. `lse: true` judges by max(1, |lse|).
 * @returns {Promise<{passed: boolean, rms: number, max: number, limit: number, failure: ?string}>}
 */
export async function judge(got, want, { factor = 1, lse = false } = {}) {
  await load();
  return wasm.judge(got, want, factor, lse);
}
