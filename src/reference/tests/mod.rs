//! Tests of the oracle against everything but itself: given results, quadrature, finite differences, an ODE solver.

mod attention;
#[cfg(feature = "cases")]
mod cases;
mod efla;
mod rotary;

/// `count` numbers, uniform in ±`size`.
fn random(rng: &mut fastrand::Rng, count: usize, size: f64) -> Vec<f64> {
    (0..count).map(|_| size * (2.0 * rng.f64() - 1.0)).collect()
}

/// Tokens of `[2, heads, tokens, width]` one after another, as `[1, heads, 2·tokens, width]`; a `row` is tokens·width.
fn one_after_another(x: &[f64], heads: usize, row: usize) -> Vec<f64> {
    let head = |head: usize| [&x[head * row..][..row], &x[(heads + head) * row..][..row]].concat();
    (0..heads).flat_map(head).collect()
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

/// As [`assert_close`] for [`differences`], whose own rounding is absolute, of the size of 1e-10.
#[track_caller]
fn assert_near(what: &str, got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{what}: length");
    let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    for (at, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= 1e-8 * largest + 1e-9, "{what}: element {at} is {got:e}, not {want:e}");
    }
}

/// ∂loss/∂x of every element by differences of sixth order, from above only where `one_sided(x)`.
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
            true => &[(0., -147.), (1., 360.), (2., -450.), (3., 400.), (4., -225.), (5., 72.), (6., -10.)],
            false => &[(-3., -1.), (-2., 9.), (-1., -45.), (1., 45.), (2., -9.), (3., 1.)],
        };
        let h = if one_sided(x[index]) { 2e-4 } else { 1e-3 };
        stencil.iter().map(|&(step, weight)| weight * at(index, step * h)).sum::<f64>() / (60.0 * h)
    };
    (0..x.len()).map(difference).collect()
}
