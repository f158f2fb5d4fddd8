//! When a float32 result counts as equal to its float64 reference.
//!
//! A tensor passes if rms(err)/rms(ref) is within a limit and max|err| within 10 × that limit × max|ref|. See
//! [`compare`] for what always fails, [`limit`] for the limits.

use crate::tensor::DType;

/// What kind of tensor is judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Quantity {
    /// out, lse, final_state.
    Forward,
    /// Any gradient but those of beta and log_decay.
    Gradient,
    /// d_beta and d_log_decay: a number a token, the difference of nearly equal sums.
    BetaGradient,
}

/// The limit on the relative rms error of a kernel whose q, k, v are stored as `dtype`, the reference having been fed
/// the same rounded inputs. For attention, multiply by [`attention_factor`].
pub fn limit(quantity: Quantity, dtype: DType) -> f64 {
    match (dtype, quantity) {
        (DType::F32, Quantity::Forward) => 2e-6,
        (DType::F32, Quantity::Gradient) => 5e-6,
        (DType::F32, Quantity::BetaGradient) => 2e-5,
        (DType::F16, Quantity::Forward) => 1e-3,
        (DType::F16, Quantity::Gradient | Quantity::BetaGradient) => 2e-3,
        (DType::BF16, Quantity::Forward) => 8e-3,
        (DType::BF16, Quantity::Gradient | Quantity::BetaGradient) => 1.5e-2,
    }
}

/// max(1, max|a|/8): a logit's own rounding is of size ε·|a|, which widens every limit of attention. `largest_logit` is
/// what [`attention::largest_logit`](super::attention::largest_logit) returns.
pub fn attention_factor(largest_logit: f64) -> f64 {
    (largest_logit / 8.0).max(1.0)
}

/// What errors are measured against.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scale {
    /// The tensor's own rms and largest element.
    Tensor,
    /// max(1, |lse|), element by element: a logarithm near 0 is not a small quantity. References of −∞ are allowed.
    Lse,
}

/// The outcome of [`compare`].
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Relative rms error.
    pub rms: f64,
    /// Relative largest error, allowed to be 10 × `limit`.
    pub max: f64,
    /// The limit it was judged by.
    pub limit: f64,
    /// Why the tensor fails, if it does.
    pub failure: Option<String>,
}

impl Comparison {
    /// Whether the tensor counts as right.
    pub fn passed(&self) -> bool {
        self.failure.is_none()
    }
}

/// Judges `got` against `want`.
///
/// Fails on: another length; a NaN in either; an infinity in `got`; any non-finite reference, save −∞ with
/// [`Scale::Lse`], which must be matched exactly and is then left out; with [`Scale::Tensor`] and an all-zero
/// reference, anything that is not exactly zero. Two empty tensors are equal.
pub fn compare(got: &[f32], want: &[f64], limit: f64, scale: Scale) -> Comparison {
    let fail = |failure: String| Comparison { rms: f64::NAN, max: f64::NAN, limit, failure: Some(failure) };
    if got.len() != want.len() {
        return fail(format!("{} elements, not {}", got.len(), want.len()));
    }
    if limit.is_nan() {
        return fail("the limit is NaN".into());
    }
    let mut judged = Vec::with_capacity(want.len());
    for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
        let got = f64::from(got);
        let masked = scale == Scale::Lse && want == f64::NEG_INFINITY;
        if masked && got == want {
            continue;
        }
        if !got.is_finite() || !want.is_finite() {
            return fail(format!("element {at} is {got}, not {want}"));
        }
        judged.push((at, got, want));
    }
    let largest = judged.iter().fold(0.0f64, |largest, (_, _, want)| largest.max(want.abs()));
    if scale == Scale::Tensor && largest == 0.0 {
        return match judged.iter().find(|(_, got, _)| *got != 0.0) {
            Some((at, got, _)) => fail(format!("element {at} is {got:e}, but all of the reference is 0")),
            None => Comparison { rms: 0.0, max: 0.0, limit, failure: None },
        };
    }
    let unit = |want: f64| match scale {
        Scale::Tensor => largest,
        Scale::Lse => want.abs().max(1.0),
    };
    let [mut errors, mut references, mut max] = [0.0f64; 3];
    let mut worst = 0;
    for (index, &(_, got, want)) in judged.iter().enumerate() {
        let error = (got - want).abs() / unit(want);
        errors += error * error;
        references += match scale {
            Scale::Tensor => (want / largest) * (want / largest),
            Scale::Lse => 1.0,
        };
        if error > max {
            (max, worst) = (error, index);
        }
    }
    let rms = if judged.is_empty() { 0.0 } else { (errors / references).sqrt() };
    let failure = (rms > limit || max > 10.0 * limit).then(|| {
        let (at, got, want) = judged[worst];
        let bounds = format!("rms {rms:.3e} (limit {limit:.3e}), max {max:.3e} (limit {:.3e})", 10.0 * limit);
        format!("{bounds}: element {at} is {got:e}, not {want:e}")
    });
    Comparison { rms, max, limit, failure }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: f64 = 2e-6;

    /// 40 rows of 25 values of mixed size, and the same rounded to f32.
    fn sample() -> (Vec<f32>, Vec<f64>) {
        let mut random = fastrand::Rng::with_seed(1);
        let want: Vec<f64> = (0..1000).map(|_| (random.f64() - 0.5) * 100f64.powf(random.f64())).collect();
        (want.iter().map(|&x| x as f32).collect(), want)
    }

    fn passes(got: &[f32], want: &[f64], scale: Scale) -> bool {
        compare(got, want, LIMIT, scale).passed()
    }

    #[test]
    fn accepts_what_differs_by_rounding() {
        let (got, want) = sample();
        for scale in [Scale::Tensor, Scale::Lse] {
            let comparison = compare(&got, &want, LIMIT, scale);
            assert!(comparison.passed(), "{comparison:?}");
            assert!(comparison.rms > 0.0 && comparison.rms < 1e-7 && comparison.max < 1e-7, "{comparison:?}");
            assert!(passes(&[], &[], scale));
        }
        let tiny: Vec<f64> = want.iter().map(|x| x * 1e-30).collect();
        let got: Vec<f32> = tiny.iter().map(|&x| x as f32).collect();
        assert!(passes(&got, &tiny, Scale::Tensor));
    }

    #[test]
    fn rejects_one_wrong_element() {
        let (got, want) = sample();
        let (mut got, want) = (got.repeat(50), want.repeat(50));
        let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
        got[17] += (15.0 * LIMIT * largest) as f32;
        let comparison = compare(&got, &want, LIMIT, Scale::Tensor);
        // The rms alone would not notice it.
        assert!(comparison.rms < LIMIT && comparison.max > 10.0 * LIMIT, "{comparison:?}");
        assert!(comparison.failure.is_some_and(|failure| failure.contains("element 17 ")));
        let (mut got, want) = sample();
        got[999] += got[999].abs().max(1.0) * 1e-4;
        assert!(!passes(&got, &want, Scale::Lse));
    }

    #[test]
    fn rejects_what_is_not_a_number() {
        for scale in [Scale::Tensor, Scale::Lse] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let (mut got, want) = sample();
                got[0] = bad;
                assert!(!passes(&got, &want, scale));
            }
            for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
                let (got, mut want) = sample();
                want[999] = bad;
                assert!(!passes(&got, &want, scale));
            }
            for both in [f32::NAN, f32::INFINITY] {
                assert!(!passes(&[1.0, both], &[1.0, f64::from(both)], scale));
            }
        }
        assert!(!passes(&[f32::NAN], &[0.0], Scale::Tensor));
        assert!(!compare(&[1.0], &[1.0], f64::NAN, Scale::Tensor).passed());
    }

    #[test]
    fn minus_infinity_is_matched_exactly_and_left_out() {
        let masked = f64::NEG_INFINITY;
        assert!(passes(&[f32::NEG_INFINITY, 3.0], &[masked, 3.0], Scale::Lse));
        assert!(passes(&[f32::NEG_INFINITY; 2], &[masked; 2], Scale::Lse));
        assert!(!passes(&[-1e30, 3.0], &[masked, 3.0], Scale::Lse));
        assert!(!passes(&[f32::MIN, 3.0], &[masked, 3.0], Scale::Lse));
        assert!(!passes(&[f32::INFINITY, 3.0], &[masked, 3.0], Scale::Lse));
        assert!(!passes(&[f32::NEG_INFINITY, 3.1], &[masked, 3.0], Scale::Lse));
        assert!(!passes(&[f32::NEG_INFINITY, f32::NEG_INFINITY], &[masked, 3.0], Scale::Lse));
        assert!(!passes(&[f32::NEG_INFINITY], &[masked], Scale::Tensor));
    }

    #[test]
    fn zeros_must_be_exact() {
        assert!(passes(&[0.0, -0.0], &[0.0, 0.0], Scale::Tensor));
        assert!(!passes(&[0.0, f32::from_bits(1)], &[0.0, 0.0], Scale::Tensor));
        // A logarithm of 0 is a value like any other.
        assert!(passes(&[1e-8], &[0.0], Scale::Lse));
        assert!(!passes(&[1e-3], &[0.0], Scale::Lse));
    }

    #[test]
    fn rejects_another_length() {
        let (got, want) = sample();
        assert!(!passes(&got[1..], &want, Scale::Tensor));
        assert!(!passes(&[], &want, Scale::Tensor));
        assert!(!passes(&got, &[], Scale::Lse));
    }

    #[test]
    fn rejects_a_scaled_tensor_and_swapped_rows() {
        for scale in [Scale::Tensor, Scale::Lse] {
            let (got, want) = sample();
            let scaled: Vec<f32> = got.iter().map(|x| x * (1.0 + 1e-4)).collect();
            assert!(!passes(&scaled, &want, scale));
            let zeros = vec![0.0; want.len()];
            assert!(!passes(&zeros, &want, scale));
            let mut swapped = got.clone();
            let (first, second) = swapped.split_at_mut(25);
            first.swap_with_slice(&mut second[..25]);
            assert!(!passes(&swapped, &want, scale));
        }
    }

    #[test]
    fn limits_grow_with_the_logits() {
        assert_eq!(attention_factor(3.0), 1.0);
        assert_eq!(attention_factor(80.0), 10.0);
        assert!(limit(Quantity::Forward, DType::F32) < limit(Quantity::BetaGradient, DType::F32));
        assert_eq!(limit(Quantity::Gradient, DType::BF16), 1.5e-2);
    }
}
