//! The scalar functions of both operators, to within a few float64 roundings at every argument.
//!
//! All of them are moments of an exponential over one segment. Written from its *higher* end, with x ≥ 0 the fall of
//! the logit along it, such a moment is ∫₀¹ (1−t)ᵃ tᵇ e^{−xt} dt: never above 1, so nothing overflows however steep the
//! segment is. [`Moments`] holds the three from which the rest follow by adding positive numbers.

/// ∫₀¹ (1−t)² e^{−xt} dt and its siblings, for x ≥ 0. "Near" is the end t = 0, where the exponential is 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Moments {
    /// ∫₀¹ (1−t)² e^{−xt} dt.
    pub near_square: f64,
    /// ∫₀¹ t(1−t) e^{−xt} dt = φ₂'(−x).
    pub cross: f64,
    /// ∫₀¹ t² e^{−xt} dt.
    pub far_square: f64,
}

impl Moments {
    /// The moments at `x`, which must not be negative.
    ///
    /// Below 4 they are e^{−x} times a power series with positive terms only,
    /// ∫₀¹ uᵃ(1−u)ᵇ e^{xu} du = Σ_k x^k/k! · (k+a)! b!/(k+a+b+1)!; from 4 on the closed forms lose nothing.
    pub fn new(x: f64) -> Self {
        if x < 4.0 {
            let [mut near, mut cross, mut far] = [0.0; 3];
            let mut term = 1.0 / 6.0; // x^k/(k+3)!
            let mut k = 0.0;
            loop {
                let largest = (k + 1.0) * (k + 2.0) * term;
                near += largest;
                cross += (k + 1.0) * term;
                far += 2.0 * term;
                if largest <= 1e-18 * near {
                    break;
                }
                k += 1.0;
                term *= x / (k + 3.0);
            }
            let e = (-x).exp();
            Moments { near_square: e * near, cross: e * cross, far_square: e * far }
        } else {
            let (r, e) = (1.0 / x, (-x).exp());
            Moments {
                near_square: r * (1.0 - 2.0 * r + 2.0 * r * r * (1.0 - e)),
                cross: r * r * (1.0 - 2.0 * r + (1.0 + 2.0 * r) * e),
                far_square: r * (2.0 * r * r - e * (1.0 + 2.0 * r + 2.0 * r * r)),
            }
        }
    }

    /// ∫₀¹ (1−t) e^{−xt} dt = φ₂(−x), the weight of the higher end.
    pub fn near(&self) -> f64 {
        self.near_square + self.cross
    }

    /// ∫₀¹ t e^{−xt} dt = e^{−x} φ₂(x), the weight of the lower end.
    pub fn far(&self) -> f64 {
        self.far_square + self.cross
    }
}

/// eˣ·y for 0 ≤ y ≤ 1, also where eˣ alone overflows.
fn exp_times(x: f64, y: f64) -> f64 {
    if x > 2000.0 {
        return f64::INFINITY; // no moment falls faster than 1/x³
    }
    let half = (x / 2.0).exp();
    half * y * half
}

/// φ₂(x) = (eˣ − 1 − x)/x² = ∫₀¹ (1−s) e^{xs} ds, φ₂(0) = ½.
pub fn phi2(x: f64) -> f64 {
    let moments = Moments::new(x.abs());
    if x > 0.0 { exp_times(x, moments.far()) } else { moments.near() }
}

/// φ₂'(x) = ((x−2)eˣ + x + 2)/x³ = ∫₀¹ s(1−s) e^{xs} ds, φ₂'(0) = ⅙.
pub fn phi2_derivative(x: f64) -> f64 {
    let moments = Moments::new(x.abs());
    if x > 0.0 { exp_times(x, moments.cross) } else { moments.cross }
}

/// φ̄(x) = (1 − e^{−x})/x = ∫₀¹ e^{−xs} ds, φ̄(0) = 1.
pub fn phi_bar(x: f64) -> f64 {
    if x == 0.0 { 1.0 } else { -(-x).exp_m1() / x }
}

/// φ̄'(x) = (e^{−x}(1+x) − 1)/x² = −∫₀¹ s e^{−xs} ds, φ̄'(0) = −½.
pub fn phi_bar_derivative(x: f64) -> f64 {
    let moments = Moments::new(x.abs());
    if x < 0.0 { -exp_times(-x, moments.near()) } else { -moments.far() }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// x, φ₂, φ₂', φ̄, φ̄', each the float64 nearest to the definition evaluated with 120 digits.
    const EXACT: [[f64; 5]; 45] = include!("tests/phi_values.in");

    fn close(got: f64, want: f64, eps: f64) -> bool {
        got == want || (got - want).abs() <= eps * f64::EPSILON * want.abs()
    }

    #[test]
    fn values_of_high_precision() {
        for &[x, phi2_x, phi2_derivative_x, phi_bar_x, phi_bar_derivative_x] in &EXACT {
            assert!(close(phi2(x), phi2_x, 8.0), "phi2({x}) = {:e}, not {phi2_x:e}", phi2(x));
            let got = phi2_derivative(x);
            assert!(close(got, phi2_derivative_x, 8.0), "phi2'({x}) = {got:e}, not {phi2_derivative_x:e}");
            assert!(close(phi_bar(x), phi_bar_x, 4.0), "phi_bar({x}) = {:e}, not {phi_bar_x:e}", phi_bar(x));
            let got = phi_bar_derivative(x);
            assert!(close(got, phi_bar_derivative_x, 8.0), "phi_bar'({x}) = {got:e}, not {phi_bar_derivative_x:e}");
        }
    }

    #[test]
    fn limits() {
        assert_eq!((phi2(0.0), phi2_derivative(0.0)), (0.5, 1.0 / 6.0));
        assert_eq!((phi_bar(0.0), phi_bar_derivative(0.0)), (1.0, -0.5));
        assert_eq!((phi2(1e9), phi2_derivative(1e9), phi_bar(1e300)), (f64::INFINITY, f64::INFINITY, 1e-300));
        assert!(close(phi2(-1e9), (1e9 - 1.0) / 1e18, 4.0));
        assert!(phi2(f64::NAN).is_nan() && phi_bar_derivative(f64::NAN).is_nan());
    }

    #[test]
    fn series_and_closed_form_meet() {
        let (below, above) = (Moments::new(4f64.next_down()), Moments::new(4.0));
        assert!(close(below.near_square, above.near_square, 8.0));
        assert!(close(below.cross, above.cross, 8.0));
        assert!(close(below.far_square, above.far_square, 8.0));
    }

    /// Σ of the three squares is ∫ e^{−xt} dt = φ̄(x): (1−t)² + 2t(1−t) + t² = 1.
    #[test]
    fn moments_add_up() {
        for step in 0..4000 {
            let x = 1e-3 * 1.005f64.powi(step);
            let Moments { near_square, cross, far_square } = Moments::new(x);
            assert!(close(near_square + 2.0 * cross + far_square, phi_bar(x), 8.0), "x = {x}");
        }
    }
}
