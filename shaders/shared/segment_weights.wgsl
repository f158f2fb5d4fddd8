// The weights that a segment gives its two nodes.

struct SegmentWeights {
    left: vec4<f32>,
    right: vec4<f32>,
}

// φ₂ weights of 4 segments of length 1: δ = a1 − a0, p = e^{a − m} at either end. Where δ is not small they come from the
// segment's mean weight m, (m − p0)/δ and (p1 − m)/δ. What the branch not taken makes, a NaN perhaps, is selected away.
fn segment_weights(delta: vec4<f32>, p0: vec4<f32>, p1: vec4<f32>) -> SegmentWeights {
    let far = abs(delta) >= vec4(1.5);
    let y = delta * delta;
    let even = phi_even(y);
    let odd = delta * phi_odd(y);
    let r = 1.0 / delta;
    let mean = (p1 - p0) * r;
    return SegmentWeights(
        select(p0 * (even + odd), (mean - p0) * r, far),
        select(p1 * (even - odd), (p1 - mean) * r, far),
    );
}
