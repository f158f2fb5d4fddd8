//! The smoothed CO2 curve from seasonally thinned samples, by ordinary and by continuous attention.
//!
//! A Gaussian kernel smoother of bandwidth h is an attention with D = 2. With q = [t/h², −1/(2h²)] and
//! k = [tᵢ, tᵢ²] the logit is q·k = −(t − tᵢ)²/(2h²) + t²/(2h²), and the last term cancels in the softmax.
//!
//! Ordinary softmax counts samples: where one season keeps more of them, the curve leans towards that season. The
//! integral over time, with `intervals` = time between kept samples, does not.

use crate::co2::Sample;
use crate::engine::Engine;
use crate::exact;
use crate::judge::{Check, Limits};
use continuous_attention::case::{Case, CaseTensor, Layout, Operation};
use continuous_attention::reference::compare::attention_factor;
use continuous_attention::{AttentionConfig, AttentionShape, DType, Lengths, Method, Result, Sink};

/// Bandwidth h of the Gaussian, in years.
pub const BANDWIDTH: f64 = 0.7;
/// Fractions of the other season that are kept, in the order of the table.
pub const KEPT: [f64; 4] = [1.0, 0.5, 0.2, 0.1];
/// Query points, evenly spaced from `FIRST` to `LAST` years after the first sample.
const QUERIES: usize = 400;
const FIRST: f64 = 3.0;
const LAST: f64 = 40.0;
/// Query points per batch entry. Each entry has its own origin of time, the middle of its points. With one origin for
/// all, t²/(2h²) reaches 1,600: float32 logits would be off by 1e-4. Sixteen points span 1.4 years = 2h, so that no
/// logit exceeds ½ and those that carry weight stay small.
const BLOCK: usize = 16;
/// Samples of this part of each calendar year are all kept.
const SEASON: std::ops::Range<f64> = 0.2..0.6;
/// In the last row other seeds give 0.2 to 0.45 ppm for continuous and 1.45 to 1.6 ppm for ordinary attention.
const SEED: u64 = 1;

/// What the job found.
pub struct Smoothing {
    /// One row per entry of [`KEPT`].
    pub rows: Vec<Row>,
    /// Calendar years of the query points.
    pub years: Vec<f64>,
    /// Continuous attention on every sample, ppm: what the others are measured against.
    pub full: Vec<f64>,
    /// Every device result against float64.
    pub checks: Vec<Check>,
}

/// The two estimates from one thinned series.
pub struct Row {
    /// Fraction of the other season that was kept.
    pub kept: f64,
    /// The samples that were kept.
    pub samples: Vec<Sample>,
    /// Ordinary attention, ppm at each query point.
    pub softmax: Vec<f64>,
    /// Continuous attention, ppm at each query point.
    pub continuous: Vec<f64>,
    /// rms difference from [`Smoothing::full`], ppm.
    pub softmax_rmse: f64,
    /// rms difference from [`Smoothing::full`], ppm.
    pub continuous_rmse: f64,
}

/// Runs the job on `engine`; `progress` hears of every step.
pub fn run(engine: &Engine, series: &[Sample], progress: &mut dyn FnMut(&str)) -> Result<Smoothing> {
    let start = series[0].year;
    let step = (LAST - FIRST) / (QUERIES - 1) as f64;
    let years: Vec<f64> = (0..QUERIES).map(|i| start + FIRST + i as f64 * step).collect();
    let mut result = Smoothing { rows: Vec::new(), years, full: Vec::new(), checks: Vec::new() };
    for kept in KEPT {
        let samples = thin(series, kept);
        progress(&format!("smoothing from {} of {} samples", samples.len(), series.len()));
        let inputs = Inputs::new(&samples, &result.years);
        let softmax = inputs.smooth(engine, Method::Softmax, kept, &mut result.checks)?;
        let continuous = inputs.smooth(engine, Method::Continuous, kept, &mut result.checks)?;
        if result.full.is_empty() {
            result.full = continuous.clone();
        }
        let (softmax_rmse, continuous_rmse) = (rmse(&softmax, &result.full), rmse(&continuous, &result.full));
        result.rows.push(Row { kept, samples, softmax, continuous, softmax_rmse, continuous_rmse });
    }
    Ok(result)
}

/// Keeps all of one season and about `kept` of the rest. A sample kept at 0.1 is kept at 0.2 as well.
fn thin(series: &[Sample], kept: f64) -> Vec<Sample> {
    let mut rng = fastrand::Rng::with_seed(SEED);
    let keep = |sample: &&Sample| {
        let draw = rng.f64();
        SEASON.contains(&sample.year.rem_euclid(1.0)) || draw < kept
    };
    series.iter().filter(keep).copied().collect()
}

/// The tensors of one call, [B, 1, …]: one batch entry per block of query points, each with all samples.
struct Inputs {
    shape: AttentionShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    intervals: Vec<f32>,
    /// Subtracted from the values, which are then small numbers around 0.
    mean: f64,
}

impl Inputs {
    fn new(samples: &[Sample], years: &[f64]) -> Inputs {
        let h2 = BANDWIDTH * BANDWIDTH;
        let mean = samples.iter().map(|s| s.ppm).sum::<f64>() / samples.len() as f64;
        let (batch, keys) = (years.len() / BLOCK, samples.len());
        let shape = AttentionShape { batch, heads: 1, kv_heads: 1, queries: BLOCK, keys };
        let (mut q, mut k, mut v, mut intervals) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for block in years.chunks_exact(BLOCK) {
            let origin = (block[0] + block[BLOCK - 1]) / 2.0;
            q.extend(block.iter().map(|t| t - origin).flat_map(|t| [(t / h2) as f32, (-0.5 / h2) as f32]));
            k.extend(samples.iter().map(|s| s.year - origin).flat_map(|t| [t as f32, (t * t) as f32]));
            v.extend(samples.iter().map(|s| (s.ppm - mean) as f32));
            // Without a sink the integral starts at sample 1: the first entry is unused.
            intervals.push(0.0);
            intervals.extend(samples.windows(2).map(|pair| (pair[1].year - pair[0].year) as f32));
        }
        Inputs { shape, q, k, v, intervals, mean }
    }

    /// The curve at all query points in ppm; the device result is checked on the way.
    fn smooth(&self, engine: &Engine, method: Method, kept: f64, checks: &mut Vec<Check>) -> Result<Vec<f64>> {
        let case = self.case(method);
        let got = engine.compute(&case)?;
        let factor = attention_factor(self.largest_logit());
        let limits = Limits { factor, unjudged: None };
        let name = match method {
            Method::Softmax => "ordinary",
            Method::Continuous => "continuous",
        };
        let name = |tensor: &str| format!("{name}, {} % kept: {tensor}", 100.0 * kept);
        checks.extend(Check::all(&got, &exact::compute(&case)?, &limits, name));
        Ok(got["out"].values.iter().map(|&x| f64::from(x) + self.mean).collect())
    }

    fn case(&self, method: Method) -> Case {
        let config = AttentionConfig {
            head_dim: 2,
            value_dim: 1,
            method,
            sink: Sink::None,
            causal: false,
            scale: Some(1.0),
            ..AttentionConfig::default()
        };
        let AttentionShape { batch, queries, keys, .. } = self.shape;
        let mut inputs = vec![
            ("q", vec![batch, 1, queries, 2], &self.q),
            ("k", vec![batch, 1, keys, 2], &self.k),
            ("v", vec![batch, 1, keys, 1], &self.v),
        ];
        if method == Method::Continuous {
            inputs.push(("intervals", vec![batch, keys], &self.intervals));
        }
        let tensor = |(name, shape, values): (&str, _, &Vec<f32>)| {
            (name.to_string(), CaseTensor { dtype: DType::F32, shape, values: values.clone() })
        };
        let (lengths, layout) = (Lengths::Full, Layout::default());
        let operation = Operation::Attention { config, shape: self.shape, lengths, layout };
        let inputs = inputs.into_iter().map(tensor).collect();
        Case { file: "CO2 series".into(), operation, inputs, expected: Default::default() }
    }

    /// max|a| over the logits that carry weight: stricter than the library's rule, which takes all that a row sees.
    /// Samples decades away (a = −2000) would widen the limit two hundred times; but below the row's maximum by 25, all
    /// of them together weigh less than half an ulp.
    fn largest_logit(&self) -> f64 {
        let mut largest: f64 = 0.0;
        for (row, q) in self.q.chunks_exact(2).enumerate() {
            let keys = &self.k[row / BLOCK * self.shape.keys * 2..][..self.shape.keys * 2];
            let logit = |k: &[f32]| q[0] as f64 * k[0] as f64 + q[1] as f64 * k[1] as f64;
            let top = keys.chunks_exact(2).map(logit).fold(f64::NEG_INFINITY, f64::max);
            largest = keys.chunks_exact(2).map(logit).filter(|a| *a > top - 25.0).fold(largest, |m, a| m.max(a.abs()));
        }
        largest
    }
}

fn rmse(x: &[f64], y: &[f64]) -> f64 {
    (x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f64>() / x.len() as f64).sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::co2;
    use crate::engine::Device;

    #[test]
    fn thinning_keeps_one_season_and_is_nested() {
        let series = co2::series().unwrap();
        assert_eq!(thin(&series, 1.0), series);
        let (tenth, fifth) = (thin(&series, 0.1), thin(&series, 0.2));
        assert!(tenth.iter().all(|s| fifth.contains(s)));
        let in_season = |samples: &[Sample]| samples.iter().filter(|s| SEASON.contains(&s.year.fract())).count();
        assert_eq!(in_season(&tenth), in_season(&series));
    }

    #[test]
    fn blocks_cover_all_query_points() {
        assert_eq!(QUERIES % BLOCK, 0);
    }

    #[test]
    fn the_known_table_comes_out() {
        let engine = Engine::open(Device::Reference, None).unwrap();
        let result = run(&engine, &co2::series().unwrap(), &mut |_| {}).unwrap();
        // Measured once in float64 with another random subset.
        let known = [(0.080, 0.0), (0.549, 0.025), (1.147, 0.114), (1.485, 0.264)];
        for (row, (softmax, continuous)) in result.rows.iter().zip(known) {
            assert!((row.softmax_rmse / softmax - 1.0).abs() < 0.1, "{} {}", row.kept, row.softmax_rmse);
            assert!(
                (row.continuous_rmse - continuous).abs() <= 0.4 * continuous,
                "{} {}",
                row.kept,
                row.continuous_rmse
            );
        }
        for check in result.checks {
            assert!(check.passed(), "{check:?}");
        }
    }
}
