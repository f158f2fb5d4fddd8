// The functions behind both operators, without expm1, which WGSL lacks.
//
//   E(y) = (cosh √y − 1)/y = ½ + y/4! + y²/6! + …       O(y) = (sinh √y − √y)/(y√y) = 1/3! + y/5! + y²/7! + …
//
// as minimax polynomials on y < 2.25: φ₂(x) = (eˣ − 1 − x)/x² = E(x²) + x·O(x²).

fn phi_even(y: vec4<f32>) -> vec4<f32> {
    return 0.5 + y * (4.166666046e-2 + y * (1.388907316e-3 + y * (2.477831549e-5 + y * 2.874506322e-7)));
}

fn phi_odd(y: vec4<f32>) -> vec4<f32> {
    return 1.666666567e-1 + y * (8.333404548e-3 + y * (1.982523972e-4 + y * 2.870016260e-6));
}
