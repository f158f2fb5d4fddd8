//! Where the jobs meet the library: the two operators on the chosen device and in float64, and the comparison.
//!
//! TEMPORARY INSIDES: until the GPU host layer and the float64 reference exist, plain loops stand in, float32 for the
//! device and float64 for the reference. They cover what the main job asks and no more: one head, not causal, no
//! sink; EFLA without normalisation. Everything outside this file only uses its public items.

use continuous_attention::{AttentionConfig, AttentionShape, EflaConfig, EflaShape, Integrator, Method, Result};

/// What the user asked to compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// wgpu's adapter; the reference when there is none.
    #[default]
    Gpu,
    /// float64 on the CPU.
    Reference,
}

/// The device that the jobs run on.
pub struct Engine {
    adapter: String,
}

impl Engine {
    /// Opens `device`; `adapter` is a name or an index, as `info` lists them.
    pub fn open(device: Device, adapter: Option<&str>) -> Result<Engine> {
        let adapter = match device {
            Device::Gpu => format!("stand-in loop in float32 (adapter {})", adapter.unwrap_or("not chosen")),
            Device::Reference => "float64 reference on the CPU".to_string(),
        };
        Ok(Engine { adapter })
    }

    /// One line that says what the results were computed on.
    pub fn adapter(&self) -> &str {
        &self.adapter
    }

    /// Attention on the device: out and lse.
    pub fn attention(
        &self,
        config: &AttentionConfig,
        shape: &AttentionShape,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        intervals: Option<&[f32]>,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok(single::attention(config, shape, q, k, v, intervals))
    }

    /// EFLA on the device, from a zero state: out and final_state.
    pub fn efla(
        &self,
        config: &EflaConfig,
        shape: &EflaShape,
        q: &[f32],
        k: &[f32],
        v: &[f32],
        beta: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok(single::efla(config, shape, q, k, v, beta))
    }
}

/// Attention in float64: out and lse.
pub fn reference_attention(
    config: &AttentionConfig,
    shape: &AttentionShape,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    intervals: Option<&[f64]>,
) -> Result<(Vec<f64>, Vec<f64>)> {
    Ok(double::attention(config, shape, q, k, v, intervals))
}

/// EFLA in float64, from a zero state: out and final_state.
pub fn reference_efla(
    config: &EflaConfig,
    shape: &EflaShape,
    q: &[f64],
    k: &[f64],
    v: &[f64],
    beta: &[f64],
) -> Result<(Vec<f64>, Vec<f64>)> {
    Ok(double::efla(config, shape, q, k, v, beta))
}

/// Limit on the relative rms error of a float32 forward pass.
pub const FORWARD_LIMIT: f64 = 2e-6;

/// How far one result is from float64.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was computed, for people.
    pub name: String,
    /// rms(err)/rms(ref).
    pub rms: f64,
    /// max|err|/max|ref|.
    pub max: f64,
    /// `rms` must not exceed it, `max` not ten times it.
    pub limit: f64,
    /// Whether both hold; a NaN never does.
    pub pass: bool,
}

/// Compares a result with float64.
pub fn compare(name: String, got: &[f32], reference: &[f64], limit: f64) -> Check {
    let errors: Vec<f64> = got.iter().zip(reference).map(|(&x, y)| x as f64 - y).collect();
    let rms = |x: &[f64]| (x.iter().map(|x| x * x).sum::<f64>() / x.len().max(1) as f64).sqrt();
    let max =
        |x: &[f64]| x.iter().fold(0.0, |m: f64, x| if m.is_nan() || x.is_nan() { f64::NAN } else { m.max(x.abs()) });
    let relative = |err: f64, of: f64| if err == 0.0 { 0.0 } else { err / of };
    let (rms, max) = (relative(rms(&errors), rms(reference)), relative(max(&errors), max(reference)));
    Check { name, rms, max, limit, pass: got.len() == reference.len() && rms <= limit && max <= 10.0 * limit }
}

/// Compares lse, whose error counts relative to max(1, |lse|).
pub fn compare_lse(name: String, got: &[f32], reference: &[f64], limit: f64) -> Check {
    let unit = |y: f64| y.abs().max(1.0);
    let got: Vec<f32> = got.iter().zip(reference).map(|(&x, &y)| (1.0 + (x as f64 - y) / unit(y)) as f32).collect();
    compare(name, &got, &vec![1.0; reference.len()], limit)
}

macro_rules! stand_in {
    ($module:ident, $float:ident) => {
        mod $module {
            use super::*;

            /// (e^x − 1 − x)/x².
            fn phi2(x: $float) -> $float {
                if x.abs() >= 1.5 {
                    return (x.exp() - 1.0 - x) / (x * x);
                }
                (2..22).rev().fold(0.0, |sum, j| (sum + 1.0) * if j > 2 { x / j as $float } else { 0.5 })
            }

            pub fn attention(
                config: &AttentionConfig,
                shape: &AttentionShape,
                q: &[$float],
                k: &[$float],
                v: &[$float],
                intervals: Option<&[$float]>,
            ) -> (Vec<$float>, Vec<$float>) {
                let (d, dv, n) = (config.head_dim, config.value_dim, shape.keys);
                let (mut out, mut lse) = (Vec::new(), Vec::new());
                for (row, q) in q.chunks(d).enumerate() {
                    let start = row / shape.queries * n;
                    let logit = |k: &[$float]| q.iter().zip(k).map(|(q, k)| q * k).sum::<$float>();
                    let scale = config.scale() as $float;
                    let a: Vec<$float> = k[start * d..(start + n) * d].chunks(d).map(|k| scale * logit(k)).collect();
                    let max = a.iter().fold($float::NEG_INFINITY, |m, &a| m.max(a));
                    let p: Vec<$float> = a.iter().map(|a| (a - max).exp()).collect();
                    let mut w = vec![0.0; n];
                    match config.method {
                        Method::Softmax => w.copy_from_slice(&p),
                        Method::Continuous => (1..n).for_each(|i| {
                            let (length, step) = (intervals.map_or(1.0, |x| x[start + i]), a[i] - a[i - 1]);
                            // The larger end carries the exponential, so that nothing overflows.
                            let far = step.abs() >= 1.5;
                            let left = (p[i] - p[i - 1] * (1.0 + step)) / (step * step);
                            let right = (p[i - 1] - p[i] * (1.0 - step)) / (step * step);
                            w[i - 1] += length * if far { left } else { p[i - 1] * phi2(step) };
                            w[i] += length * if far { right } else { p[i] * phi2(-step) };
                        }),
                    }
                    let sum: $float = w.iter().sum();
                    let value = |c| (0..n).map(|i| w[i] * v[(start + i) * dv + c]).sum::<$float>() / sum;
                    out.extend((0..dv).map(value));
                    lse.push(max + sum.ln());
                }
                (out, lse)
            }

            pub fn efla(
                config: &EflaConfig,
                shape: &EflaShape,
                q: &[$float],
                k: &[$float],
                v: &[$float],
                beta: &[$float],
            ) -> (Vec<$float>, Vec<$float>) {
                let (d, dv) = (config.key_dim, config.value_dim);
                let mut state = vec![0.0; d * dv];
                let mut out = Vec::new();
                for t in 0..shape.tokens {
                    let (q, k, v) = (&q[t * d..][..d], &k[t * d..][..d], &v[t * dv..][..dv]);
                    let x = beta[t] * k.iter().map(|k| k * k).sum::<$float>();
                    let factor = match config.integrator {
                        Integrator::Exact if x == 0.0 => 1.0,
                        Integrator::Exact => -(-x).exp_m1() / x,
                        Integrator::Euler => 1.0,
                        Integrator::RungeKutta2 => 1.0 - x / 2.0,
                        Integrator::RungeKutta4 => 1.0 - x / 2.0 + x * x / 6.0 - x * x * x / 24.0,
                    };
                    for c in 0..dv {
                        let read = |state: &[$float], key: &[$float]| {
                            key.iter().enumerate().map(|(i, key)| state[i * dv + c] * key).sum::<$float>()
                        };
                        let step = beta[t] * factor * (v[c] - read(&state, k));
                        (0..d).for_each(|i| state[i * dv + c] += step * k[i]);
                        out.push(config.scale() as $float * read(&state, q));
                    }
                }
                (out, state)
            }
        }
    };
}

stand_in!(single, f32);
stand_in!(double, f64);
