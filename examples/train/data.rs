//! The CO2 series as sequences to learn from: what the model is shown, what it must say, what it is measured against.

use crate::co2::Sample;
use fastrand::Rng;
use std::f64::consts::TAU;
use std::ops::Range;

/// Numbers that describe a reading to the model.
pub const FEATURES: usize = 11;
/// Share of the series, at its end, that no training touches.
const HELD_OUT: f64 = 0.2;
/// How often each held-out reading is predicted, after a different part of the past was left out.
const THINNINGS: u64 = 8;

/// The series and the scales that make numbers of order 1 of it, all taken from its training part.
pub struct Data {
    samples: Vec<Sample>,
    /// Date of the first held-out reading.
    pub split: f64,
    /// Root mean square change from one kept reading to the next, ppm.
    pub change: f64,
    /// Mean time between kept readings, years.
    gap: f64,
    /// Mean rise, ppm a year.
    trend: f64,
}

/// Successive readings: at each but the last, the next one is to be predicted.
pub struct Window {
    samples: Vec<Sample>,
    /// Positions whose predictions count.
    counted: Range<usize>,
}

/// Windows of equal length T as the model reads them.
pub struct Batch {
    /// `[B, T, FEATURES]`.
    pub features: Vec<f32>,
    /// `[B, T]`: the time since the reading before, in mean gaps.
    pub intervals: Vec<f32>,
    /// `[B, T]`: the change to the next reading, in units of [`Data::change`]: always saying 0 costs about 1.
    pub targets: Vec<f32>,
    /// `[B, T]`: whether the prediction counts.
    pub counted: Vec<bool>,
}

impl Data {
    pub fn new(samples: Vec<Sample>) -> Data {
        let split = samples[((1.0 - HELD_OUT) * samples.len() as f64) as usize].year;
        let mut data = Data { samples, split, change: 1.0, gap: 1.0, trend: 0.0 };
        let pairs: Vec<[Sample; 2]> = data.training_pairs();
        let mean = |value: &dyn Fn(&[Sample; 2]) -> f64| pairs.iter().map(value).sum::<f64>() / pairs.len() as f64;
        let change = mean(&|[a, b]| (b.ppm - a.ppm).powi(2)).sqrt();
        let gap = mean(&|[a, b]| b.year - a.year);
        let trend = mean(&|[a, b]| b.ppm - a.ppm) / gap;
        (data.change, data.gap, data.trend) = (change, gap, trend);
        data
    }

    fn training_part(&self) -> &[Sample] {
        &self.samples[..self.samples.partition_point(|sample| sample.year < self.split)]
    }

    /// Neighbouring readings of the thinned training part.
    fn training_pairs(&self) -> Vec<[Sample; 2]> {
        let thinned = |seed| thin(self.training_part(), Rng::with_seed(1000 + seed)).collect::<Vec<_>>();
        (0..THINNINGS).flat_map(|seed| pairs(&thinned(seed)).collect::<Vec<_>>()).collect()
    }

    /// Random windows of the training part, each thinned anew.
    pub fn training_batch(&self, rng: &mut Rng, batch: usize, tokens: usize) -> Batch {
        let part = self.training_part();
        let mut windows = Vec::new();
        while windows.len() < batch {
            let samples: Vec<Sample> = thin(&part[rng.usize(..part.len())..], rng.fork()).take(tokens + 1).collect();
            // One that runs into the held-out part is drawn again.
            if samples.len() == tokens + 1 {
                windows.push(Window { samples, counted: 0..tokens });
            }
        }
        self.batch(&windows)
    }

    /// Windows that predict every held-out reading of some thinned series once, each from at least T/2 readings. The
    /// readings before it may be held-out ones too: by then they are past.
    pub fn held_out_windows(&self, tokens: usize) -> Vec<Window> {
        let mut windows = Vec::new();
        for seed in 0..THINNINGS {
            let thinned: Vec<Sample> = thin(&self.samples, Rng::with_seed(seed)).collect();
            let first = thinned.partition_point(|sample| sample.year < self.split);
            let mut end = thinned.len();
            while end > first {
                let start = end - tokens - 1;
                // Position i predicts reading start + i + 1.
                let counted = (tokens / 2).max(first.saturating_sub(start + 1))..tokens;
                end = start + 1 + counted.start;
                windows.push(Window { samples: thinned[start..start + tokens + 1].to_vec(), counted });
            }
        }
        windows
    }

    /// The windows in batches of one size; what is missing in the last counts for nothing.
    pub fn held_out_batches(&self, windows: &[Window], batch: usize, tokens: usize) -> Vec<Batch> {
        let padded = |windows: &[Window]| {
            let mut padded = self.batch(windows);
            padded.features.resize(batch * tokens * FEATURES, 0.0);
            padded.intervals.resize(batch * tokens, 0.0);
            padded.targets.resize(batch * tokens, 0.0);
            padded.counted.resize(batch * tokens, false);
            padded
        };
        windows.chunks(batch).map(padded).collect()
    }

    /// What the model is shown of the windows.
    fn batch(&self, windows: &[Window]) -> Batch {
        let mut batch = Batch { features: vec![], intervals: vec![], targets: vec![], counted: vec![] };
        for Window { samples, counted } in windows {
            let first = samples[0];
            for (position, pair) in pairs(samples).enumerate() {
                let [now, next] = pair;
                // The first reading has none before it: as if it had stayed the same for a mean gap.
                let before =
                    if position > 0 { samples[position - 1] } else { Sample { year: now.year - self.gap, ..now } };
                let (since_first, since_before) = (now.year - first.year, now.year - before.year);
                // Times count from the window's first reading: how long a year is is known, the season is not.
                let (sin, cos) = (TAU * since_first).sin_cos();
                // When the next reading is taken is known beforehand, what it says is not.
                let rises = rises(since_first, next.year - first.year);
                let features: [f64; FEATURES] = [
                    (now.ppm - first.ppm - self.trend * since_first) / 3.0,
                    (now.ppm - before.ppm) / self.change,
                    since_before / self.gap - 1.0,
                    since_first - 1.0,
                    sin,
                    cos,
                    rises[0] / self.gap - 1.0,
                    2.0 * rises[1],
                    2.0 * rises[2],
                    2.0 * rises[3],
                    2.0 * rises[4],
                ];
                batch.features.extend(features.map(|x| x as f32));
                batch.intervals.push((since_before / self.gap) as f32);
                batch.targets.push(((next.ppm - now.ppm) / self.change) as f32);
                batch.counted.push(counted.contains(&position));
            }
        }
        batch
    }

    /// Held-out rms error, ppm, of what needs no attention: repeating the last reading, and adding to it what a line
    /// and a yearly cycle, fitted by least squares to the training part, rise until the next.
    pub fn baselines(&self, windows: &[Window]) -> [(&'static str, f64); 2] {
        let rises = |[a, b]: &[Sample; 2]| rises(a.year, b.year);
        let training = self.training_pairs();
        let fit = least_squares(training.iter().map(|pair| (rises(pair), pair[1].ppm - pair[0].ppm)));
        let error = |predict: &dyn Fn(&[Sample; 2]) -> f64| {
            let counted = windows.iter().flat_map(|window| {
                let Range { start, end } = window.counted;
                pairs(&window.samples[start..=end])
            });
            rms(counted.map(|pair| predict(&pair) - (pair[1].ppm - pair[0].ppm)))
        };
        [
            ("repeat the last reading", error(&|_| 0.0)),
            ("add trend and season", error(&|pair| rises(pair).iter().zip(fit).map(|(rise, fit)| rise * fit).sum())),
        ]
    }
}

/// How much time, and the first two harmonics of the year, rise between two dates.
fn rises(from: f64, to: f64) -> [f64; 5] {
    let curve = |t: f64| [t, (TAU * t).sin(), (TAU * t).cos(), (2.0 * TAU * t).sin(), (2.0 * TAU * t).cos()];
    let (from, to) = (curve(from), curve(to));
    std::array::from_fn(|i| to[i] - from[i])
}

/// Root mean square.
pub fn rms(errors: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = errors.fold((0.0, 0), |(sum, count), error| (sum + error * error, count + 1));
    (sum / count as f64).sqrt()
}

fn pairs(samples: &[Sample]) -> impl Iterator<Item = [Sample; 2]> {
    samples.windows(2).map(|pair| [pair[0], pair[1]])
}

/// A badly kept station: stretches in which most weeks have a reading and stretches in which few have, about five
/// months each.
fn thin(samples: &[Sample], mut rng: Rng) -> impl Iterator<Item = Sample> {
    let mut busy = rng.bool();
    samples.iter().copied().filter(move |_| {
        busy ^= rng.f32() < 0.05;
        rng.f32() < if busy { 0.9 } else { 0.15 }
    })
}

/// The coefficients c that make Σ (y − c·x)² smallest.
fn least_squares<const N: usize>(rows: impl Iterator<Item = ([f64; N], f64)>) -> [f64; N] {
    let (mut a, mut b) = ([[0.0; N]; N], [0.0; N]);
    for (x, y) in rows {
        for i in 0..N {
            (0..N).for_each(|j| a[i][j] += x[i] * x[j]);
            b[i] += x[i] * y;
        }
    }
    // Gauss-Jordan elimination; a is symmetric and positive, so it needs no pivoting.
    for i in 0..N {
        for row in (0..N).filter(|&row| row != i) {
            let factor = a[row][i] / a[i][i];
            (0..N).for_each(|j| a[row][j] -= factor * a[i][j]);
            b[row] -= factor * b[i];
        }
    }
    std::array::from_fn(|i| b[i] / a[i][i])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::co2;

    fn data() -> Data {
        Data::new(co2::series().unwrap())
    }

    #[test]
    fn every_held_out_reading_is_predicted_once_a_thinning() {
        let (data, tokens) = (data(), 64);
        let mut predicted: Vec<f64> = Vec::new();
        for window in data.held_out_windows(tokens) {
            assert_eq!(window.samples.len(), tokens + 1);
            assert!(window.counted.start >= tokens / 2 && window.counted.end == tokens);
            predicted.extend(window.samples[window.counted.start + 1..].iter().map(|sample| sample.year));
        }
        let mut expected: Vec<f64> = (0..THINNINGS)
            .flat_map(|seed| thin(&data.samples, Rng::with_seed(seed)).collect::<Vec<_>>())
            .map(|sample| sample.year)
            .filter(|&year| year >= data.split)
            .collect();
        predicted.sort_by(f64::total_cmp);
        expected.sort_by(f64::total_cmp);
        assert_eq!(predicted, expected);
    }

    /// What is shown at a position does not depend on the readings to come, save on when the next is taken.
    #[test]
    fn no_position_sees_the_future() {
        let data = data();
        let thinned: Vec<Sample> = thin(&data.samples, Rng::with_seed(0)).take(9).collect();
        let mut changed = thinned.clone();
        changed[5].ppm += 100.0;
        let shown = |samples| data.batch(&[Window { samples, counted: 0..8 }]);
        let (a, b) = (shown(thinned), shown(changed));
        assert_eq!(a.features[..5 * FEATURES], b.features[..5 * FEATURES]);
        assert_ne!(a.features[5 * FEATURES..6 * FEATURES], b.features[5 * FEATURES..6 * FEATURES]);
        assert_eq!(a.intervals, b.intervals);
        assert_eq!(a.targets[..4], b.targets[..4]);
        assert_ne!(a.targets[4], b.targets[4]);
    }

    #[test]
    fn training_stays_before_the_split_and_scales_are_right() {
        let data = data();
        let batch = data.training_batch(&mut Rng::with_seed(1), 200, 32);
        assert!(data.training_part().iter().all(|sample| sample.year < data.split));
        let loss = rms(batch.targets.iter().map(|&x| f64::from(x)));
        let gap = batch.intervals.iter().sum::<f32>() / batch.intervals.len() as f32;
        assert!((loss - 1.0).abs() < 0.1 && (gap - 1.0).abs() < 0.2, "{loss} {gap}");
    }

    #[test]
    fn least_squares_finds_a_line() {
        let fit = least_squares((0..9).map(|i| ([1.0, i as f64], 3.0 - 0.5 * i as f64)));
        assert!((fit[0] - 3.0).abs() < 1e-12 && (fit[1] + 0.5).abs() < 1e-12);
    }
}
