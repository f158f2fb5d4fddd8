// Per token and value head what the update of the state needs: with |k| the key's norm, λ = |k|², x = βλ,
// φ̄(x) = (1 − e^{−x})/x and k̂ = k/|k| (0 for k = 0), the exact step is
//
//     S ← (I − γ k̂k̂ᵀ) S + c k̂ vᵀ        γ = αλ = xφ̄(x) = 1 − e^{−x}        c = α|k| = β|k|φ̄(x)
//
// Euler and Runge–Kutta steps replace φ̄ by 1, 1 − x/2 and 1 − x/2 + x²/6 − x³/24. Neither an epsilon nor expm1: near 0
// φ̄ = e^{−x}(1 + x φ₂(x)).
//
// One invocation a token. Writes (γ, c, divisor of k, divisor of q) to gates [B, H_v, T, 4]; a divisor is the norm, or
// 1 where the norm is 0 or must not divide.
//
// The backward pass also needs, behind them as another [B, H_v, T, 4], the rates
//
//     (α, h, h|k|, |k| ∂α/∂β)        h = λ ∂α/∂λ        exact: h = βxφ̄′(x), ∂α/∂β = e^{−x}
//
// with φ̄′ = −e^{−x} φ₂(x) near 0. h|k| stands for itself because λ overflows for keys that |k| does not.

const THREADS: u32 = 64u;
const EXACT: u32 = 0u;
const RUNGE_KUTTA_2: u32 = 2u;

// The power of 2 at or below a length, by which vectors are scaled: 1e-30 and 1e30 both have a norm, and no component
// is rounded. Its inverse stays a normal number. 0 for a length that is 0 or denormal.
fn power_of_two(length: f32) -> f32 {
    return min(bitcast<f32>(bitcast<u32>(length) & 0x7f800000u), 8.507059e37);
}

// (power of 2, |k/power|²); (0, 0) for k = 0. Summed in 4 parts: x = β|k|² decides how much is forgotten, and
// Runge–Kutta steps amplify its rounding.
fn square_k(base: u32) -> vec2<f32> {
    var tops = vec4(0.0);
    for (var i = 0u; i < params.key_dim; i += 4u) {
        tops = max(tops, abs(k_load4(base, i, params.key_dim)));
    }
    let power = power_of_two(max(max(tops.x, tops.y), max(tops.z, tops.w)));
    if power == 0.0 {
        return vec2(0.0);
    }
    let scale = 1.0 / power;
    var sum = vec4(0.0);
    for (var i = 0u; i < params.key_dim; i += 4u) {
        let x = k_load4(base, i, params.key_dim) * scale;
        sum += x * x;
    }
    return vec2(power, (sum.x + sum.y) + (sum.z + sum.w));
}

// The same of a query.
fn square_q(base: u32) -> vec2<f32> {
    var tops = vec4(0.0);
    for (var i = 0u; i < params.key_dim; i += 4u) {
        tops = max(tops, abs(q_load4(base, i, params.key_dim)));
    }
    let power = power_of_two(max(max(tops.x, tops.y), max(tops.z, tops.w)));
    if power == 0.0 {
        return vec2(0.0);
    }
    let scale = 1.0 / power;
    var sum = vec4(0.0);
    for (var i = 0u; i < params.key_dim; i += 4u) {
        let x = q_load4(base, i, params.key_dim) * scale;
        sum += x * x;
    }
    return vec2(power, (sum.x + sum.y) + (sum.z + sum.w));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    if i >= params.batch * params.value_heads * params.tokens {
        return;
    }
    let token = i % params.tokens;
    let value_head = i / params.tokens % params.value_heads;
    let batch = i / params.tokens / params.value_heads;
    let head = value_head / params.group;

    let key_square = square_k(params.k.x + batch * params.k.y + head * params.k.z + token * params.k.w);
    let key_norm = key_square.x * sqrt(key_square.y);
    let key_divisor = select(key_norm, 1.0, key_norm == 0.0);
    var query_divisor = 1.0;
    if params.normalize_q == 1u {
        let query_square = square_q(params.q.x + batch * params.q.y + head * params.q.z + token * params.q.w);
        let norm = query_square.x * sqrt(query_square.y);
        query_divisor = select(norm, 1.0, norm == 0.0);
    }
    let strength = beta[params.beta.x + batch * params.beta.y + value_head * params.beta.z + token * params.beta.w];
    var size = key_norm;
    var x = strength * key_square.x * key_square.x * key_square.y;
    if params.normalize_k == 1u {
        size = select(1.0, 0.0, key_norm == 0.0);
        x = strength * size;
    }

    var gamma: f32;
    var c: f32;
    var alpha: f32;
    var h: f32;
    var h_size: f32;
    var alpha_by_beta: f32;
    if params.integrator == EXACT {
        // Beyond, e is 0 either way, and x may be infinite. Not `min`, which would lose a NaN.
        let e = exp(-select(x, 200.0, x > 200.0));
        if abs(x) < 1.5 {
            let y = vec4(x * x);
            let phi_2 = phi_even(y).x + x * phi_odd(y).x;
            let phi = e * (1.0 + x * phi_2);
            gamma = x * phi;
            c = strength * size * phi;
            alpha = strength * phi;
            h = -strength * x * e * phi_2;
            h_size = h * size;
        } else {
            gamma = 1.0 - e;
            c = (1.0 - e) / size;
            alpha = c / size;
            h_size = (e * (1.0 + min(x, 200.0)) - 1.0) / size;
            h = h_size / size;
        }
        alpha_by_beta = e;
    } else {
        var factor = 1.0;
        // dα/dx at β = 1
        var slope = 0.0;
        alpha_by_beta = 1.0;
        if params.integrator == RUNGE_KUTTA_2 {
            factor = 1.0 - 0.5 * x;
            slope = -0.5;
            alpha_by_beta = 1.0 - x;
        } else if params.integrator > RUNGE_KUTTA_2 {
            factor = 1.0 - x * (0.5 - x * (1.0 / 6.0 - x * (1.0 / 24.0)));
            slope = -0.5 + x * (1.0 / 3.0 - x * 0.125);
            alpha_by_beta = 1.0 - x * (1.0 - x * (0.5 - x * (1.0 / 6.0)));
        }
        gamma = x * factor;
        c = strength * size * factor;
        alpha = strength * factor;
        h = strength * x * slope;
        h_size = h * size;
    }
    gates[4u * i] = gamma;
    gates[4u * i + 1u] = c;
    gates[4u * i + 2u] = key_divisor;
    gates[4u * i + 3u] = query_divisor;
    if params.with_rates == 1u {
        let rates = 4u * (params.batch * params.value_heads * params.tokens + i);
        gates[rates] = alpha;
        gates[rates + 1u] = h;
        gates[rates + 2u] = h_size;
        gates[rates + 3u] = alpha_by_beta * size;
    }
}
