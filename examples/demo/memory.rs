//! EFLA as a streaming associative memory: each reading is written under a key made of its date, then the memory is
//! asked for the next date's reading.
//!
//! The rule that writes a reading solves dS/dτ = −β k kᵀ S + β k vᵀ over one unit of time. How well it is solved shows
//! as keys get longer, since x = β|k|² is the size of the step: the exact solution holds for every x, Euler's
//! (DeltaNet) and the second-order Runge-Kutta step only up to x = 2, the fourth-order one up to 2.785.

use crate::co2::Sample;
use crate::engine::{Engine, Tensors};
use crate::exact;
use crate::judge::{Check, Limits};
use continuous_attention::case::{Case, CaseTensor, Layout, Operation};
use continuous_attention::reference::efla;
use continuous_attention::{DType, EflaConfig, EflaShape, Integrator, Result};
use std::f64::consts::TAU;

/// The integrators and their names, in the order of table and figure.
pub const INTEGRATORS: [(Integrator, &str); 4] = [
    (Integrator::Exact, "EFLA (exact)"),
    (Integrator::Euler, "DeltaNet (Euler)"),
    (Integrator::RungeKutta2, "RK2"),
    (Integrator::RungeKutta4, "RK4"),
];
/// Key scales s. Keys and queries are both multiplied by s, so that the prediction needs no rescaling.
pub const SCALES: [f64; 7] = [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0];
/// Write strength. With |k| = s it puts x = 0.6 s² at 2.4 for s = 2, between the limits of RK2 and RK4.
pub const BETA: f64 = 0.6;
/// Length of a key.
const FEATURES: usize = 8;
/// Predictions that don't count yet: the first two years.
const BURN_IN: usize = 104;
/// A state this many times larger than the largest value has diverged.
const BLOWN_UP: f64 = 1e6;

/// What the job found.
pub struct Memory {
    /// One per integrator and key scale, scales innermost.
    pub cells: Vec<Cell>,
    /// rms error of the prediction "same as the last reading", ppm.
    pub persistence: f64,
    /// Every device result against float64.
    pub checks: Vec<Check>,
}

/// One integrator at one key scale.
#[derive(Debug, Clone, Copy)]
pub struct Cell {
    pub integrator: Integrator,
    pub scale: f64,
    /// rms error of the one-step prediction in ppm; none if the state diverged.
    pub rmse: Option<f64>,
}

/// Runs the job on `engine`; `progress` hears of every step.
pub fn run(engine: &Engine, series: &[Sample], progress: &mut dyn FnMut(&str)) -> Result<Memory> {
    let mut result = Memory { cells: Vec::new(), persistence: persistence(series), checks: Vec::new() };
    for (integrator, name) in INTEGRATORS {
        progress(&format!("associative memory: {name}, {} key scales", SCALES.len()));
        for scale in SCALES {
            let cell = remember(engine, series, integrator, scale, name, &mut result.checks)?;
            result.cells.push(cell);
        }
    }
    Ok(result)
}

impl Memory {
    /// The cell of one integrator and key scale.
    pub fn cell(&self, integrator: Integrator, scale: f64) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.integrator == integrator && cell.scale == scale)
    }
}

fn remember(
    engine: &Engine,
    series: &[Sample],
    integrator: Integrator,
    scale: f64,
    name: &str,
    checks: &mut Vec<Check>,
) -> Result<Cell> {
    let config = EflaConfig { key_dim: FEATURES, value_dim: 1, integrator, scale: Some(1.0), ..EflaConfig::default() };
    let inputs = Inputs::new(series, scale);
    let diverged = inputs.divergence(&config)?;
    let tokens = diverged.unwrap_or(inputs.tokens());

    let case = inputs.case(&config, tokens);
    let got = engine.compute(&case)?;
    let until = if diverged.is_some() { format!(", to reading {tokens} where it diverged") } else { String::new() };
    let name = |tensor: &str| format!("{name}, key scale {scale}{until}: {tensor}");
    // A diverging memory multiplies its rounding errors as well.
    let factor = if diverged.is_some() { 10.0 } else { 1.0 };
    let limits = Limits { factor, unjudged: None };
    checks.extend(Check::all(&got, &exact::compute(&case)?, &limits, name));

    let out = &got["out"].values;
    let errors =
        out.iter().zip(&series[1..]).map(|(&o, next)| inputs.mean + inputs.deviation * f64::from(o) - next.ppm);
    Ok(Cell { integrator, scale, rmse: diverged.is_none().then(|| rms(errors.skip(BURN_IN))) })
}

/// q, k [1, 1, T, FEATURES], v [1, 1, T, 1], beta [1, 1, T] for all readings but the last, which is only predicted.
struct Inputs {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    mean: f64,
    deviation: f64,
}

impl Inputs {
    fn new(series: &[Sample], scale: f64) -> Inputs {
        let mean = series.iter().map(|s| s.ppm).sum::<f64>() / series.len() as f64;
        let deviation = rms(series.iter().map(|s| s.ppm - mean));
        let keys: Vec<f32> = series.iter().flat_map(|s| key(s.year).map(|x| (scale * x) as f32)).collect();
        let written = &series[..series.len() - 1];
        Inputs {
            // o_t reads the state after reading t was written, so asking for the key of t + 1 predicts t + 1.
            q: keys[FEATURES..].to_vec(),
            k: keys[..written.len() * FEATURES].to_vec(),
            v: written.iter().map(|s| ((s.ppm - mean) / deviation) as f32).collect(),
            beta: vec![BETA as f32; written.len()],
            mean,
            deviation,
        }
    }

    fn tokens(&self) -> usize {
        self.v.len()
    }

    /// The call on the first `tokens` readings, from an empty memory.
    fn case(&self, config: &EflaConfig, tokens: usize) -> Case {
        let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens };
        let tensor = |name: &str, shape: &[usize], values: &[f32]| {
            (name.to_string(), CaseTensor { dtype: DType::F32, shape: shape.to_vec(), values: values.to_vec() })
        };
        let inputs = Tensors::from([
            tensor("q", &[1, 1, tokens, FEATURES], &self.q[..tokens * FEATURES]),
            tensor("k", &[1, 1, tokens, FEATURES], &self.k[..tokens * FEATURES]),
            tensor("v", &[1, 1, tokens, 1], &self.v[..tokens]),
            tensor("beta", &[1, 1, tokens], &self.beta[..tokens]),
        ]);
        let operation = Operation::Efla { config: *config, shape, cu_seqlens: None, layout: Layout::default() };
        Case { file: "CO2 series".into(), operation, inputs, expected: Default::default() }
    }

    /// The number of readings after which the float64 state has blown up, if it ever does.
    fn divergence(&self, config: &EflaConfig) -> Result<Option<usize>> {
        let bound = BLOWN_UP * self.v.iter().fold(0.0, |m: f64, &v| m.max(f64::from(v).abs()));
        let [q, k, v, beta] = [&self.q, &self.k, &self.v, &self.beta].map(|x| widen(x));
        let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 1 };
        let mut state = vec![0.0; FEATURES];
        for token in 0..self.tokens() {
            let key = token * FEATURES..(token + 1) * FEATURES;
            let inputs = efla::Inputs {
                q: &q[key.clone()],
                k: &k[key],
                v: &v[token..=token],
                beta: &beta[token..=token],
                log_decay: None,
                initial_state: Some(&state),
            };
            state = efla::forward(config, &shape, &inputs)?.final_state;
            if state.iter().any(|s| s.is_nan() || s.abs() > bound) {
                return Ok(Some(token + 1));
            }
        }
        Ok(None)
    }
}

/// The features of a date as a key of length 1: level, slow trend, and three harmonics of the year.
fn key(year: f64) -> [f64; FEATURES] {
    let trend = (year - 1980.0) / 22.0;
    let wave = |n: f64| (TAU * n * year).sin_cos();
    let ((s1, c1), (s2, c2), (s3, c3)) = (wave(1.0), wave(2.0), wave(3.0));
    let features = [1.0, trend, s1, c1, s2, c2, s3, c3];
    let length = features.iter().map(|x| x * x).sum::<f64>().sqrt();
    features.map(|x| x / length)
}

/// The rms error of repeating the last reading.
fn persistence(series: &[Sample]) -> f64 {
    rms(series.windows(2).map(|pair| pair[0].ppm - pair[1].ppm).skip(BURN_IN))
}

fn rms(x: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = x.fold((0.0, 0), |(sum, count), x| (sum + x * x, count + 1));
    (sum / count.max(1) as f64).sqrt()
}

fn widen(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::co2;
    use crate::engine::Device;

    #[test]
    fn keys_have_length_one() {
        for year in [1958.24, 1980.0, 2001.9] {
            assert!((key(year).iter().map(|x| x * x).sum::<f64>() - 1.0).abs() < 1e-12);
        }
    }

    #[test]
    fn each_integrator_breaks_where_it_stops_contracting() {
        let engine = Engine::open(Device::Reference, None).unwrap();
        let result = run(&engine, &co2::series().unwrap(), &mut |_| {}).unwrap();
        for cell in &result.cells {
            let x = BETA * cell.scale * cell.scale;
            let holds = match cell.integrator {
                Integrator::Exact => true,
                Integrator::Euler | Integrator::RungeKutta2 => x <= 2.0,
                Integrator::RungeKutta4 => x <= 2.785,
            };
            assert_eq!(cell.rmse.is_some(), holds, "{cell:?}");
        }
        for check in &result.checks {
            assert!(check.passed(), "{check:?}");
        }
        // At its best the memory predicts better than the last reading does.
        assert!(result.cell(Integrator::Exact, 1.0).unwrap().rmse.unwrap() < result.persistence);
    }
}
