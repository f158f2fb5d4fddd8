//! Tests of the oracle against everything but itself: given results, quadrature, finite differences, an ODE solver.

mod attention;
#[cfg(feature = "cases")]
mod cases;
mod efla;

/// `count` numbers, uniform in ±`size`.
fn random(rng: &mut fastrand::Rng, count: usize, size: f64) -> Vec<f64> {
    (0..count).map(|_| size * (2.0 * rng.f64() - 1.0)).collect()
}

/// max|got − want| ≤ tolerance · max|want|, with −∞ matched exactly.
#[track_caller]
fn assert_close(what: &str, got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let finite = want.iter().filter(|x| x.is_finite());
    let largest = finite.fold(0.0f64, |largest, x| largest.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        let same = got == want || (got - want).abs() <= tolerance * largest;
        assert!(same, "{what}: element {at} is {got:e}, not {want:e}; tensor up to {largest:e}");
    }
}

/// ∂loss/∂x of every element by differences of fourth order, from above only where `one_sided(x)`.
fn differences(x: &[f64], one_sided: impl Fn(f64) -> bool, loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let mut moved = x.to_vec();
    let mut at = |index: usize, step: f64| {
        moved[index] = x[index] + step;
        let loss = loss(&moved);
        moved[index] = x[index];
        loss
    };
    let difference = |index: usize| {
        let stencil: &[(f64, f64)] = match one_sided(x[index]) {
            true => &[(0.0, -25.0), (1.0, 48.0), (2.0, -36.0), (3.0, 16.0), (4.0, -3.0)],
            false => &[(-2.0, 1.0), (-1.0, -8.0), (1.0, 8.0), (2.0, -1.0)],
        };
        let h = 1e-3;
        stencil.iter().map(|&(step, weight)| weight * at(index, step * h)).sum::<f64>() / (12.0 * h)
    };
    (0..x.len()).map(difference).collect()
}
