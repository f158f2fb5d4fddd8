// Runs something on the GPU and in float64, and compares.

import { judge } from "./continuous_attention.js";

/** Kinds of calls whose kernels are compiled. */
const warm = new Set();

/**
 * @param kind a word for the kernels it takes: the first call of a kind compiles them and is not timed
 * @param onGpu makes a promise of results, an object of Float32Arrays
 * @param inFloat64 makes a promise of the same as Float64Arrays
 * @param tensor name of the result that is judged
 */
export async function measure({ name, kind, tensor, factor, onGpu, inFloat64 }) {
  if (!warm.has(kind)) await onGpu();
  warm.add(kind);
  const start = performance.now();
  const got = await onGpu();
  const between = performance.now();
  const want = await inFloat64();
  const end = performance.now();
  const { passed, max, limit, failure } = await judge(got[tensor], want[tensor], { factor });
  const check = { name, passed, failure, max, allowed: 10 * limit, gpu: between - start, reference: end - between };
  return { got, want, check };
}
