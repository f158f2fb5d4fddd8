// The weights that a segment gives its two nodes.

struct SegmentWeights {
    left: vec4<f32>,
    right: vec4<f32>,
}

// φ₂ weights of 4 segments of length 1: δ = a1 − a0, p = e^{a − m} at either end. Either branch gets an argument of
// its own domain, so that the one not taken makes no NaN.
fn segment_weights(delta: vec4<f32>, p0: vec4<f32>, p1: vec4<f32>) -> SegmentWeights {
    let far = abs(delta) >= vec4(1.5);
    let near_delta = select(delta, vec4(0.0), far);
    let y = near_delta * near_delta;
    let even = phi_even(y);
    let odd = near_delta * phi_odd(y);
    let far_delta = select(vec4(3.0), delta, far);
    let r = 1.0 / far_delta;
    return SegmentWeights(
        select(p0 * (even + odd), (p1 - p0 * (1.0 + far_delta)) * r * r, far),
        select(p1 * (even - odd), (p0 - p1 * (1.0 - far_delta)) * r * r, far),
    );
}
