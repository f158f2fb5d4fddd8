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
// The backward pass also needs the rates
//
//     (α, h, h|k|, |k| ∂α/∂β)        h = λ ∂α/∂λ        exact: h = βxφ̄′(x), ∂α/∂β = e^{−x}
//
// with φ̄′ = −e^{−x} φ₂(x) near 0. h|k| stands for itself because λ overflows for keys that |k| does not.
//
// With DECAY the state also decays, by κ = −log_decay over the same unit of time:
//
//     S ← e^{−κ} (I − γ k̂k̂ᵀ) S + c' k̂ vᵀ        c' = α'|k|        α' = βφ̄(y), y = x + κ
//
// with the other integrators' polynomials at y too. Then c, α and ∂α/∂β above are those of writing, marked by a prime
// wherever the two differ, h' = βxφ̄′(y), ∂α'/∂β = e^{−y} − κφ̄′(y) and −∂α'/∂κ = −βφ̄′(y) come besides, and what is left
// of the chunk's start at the token and of the token at the chunk's end: (κ, G, E, 1 − G), see efla_tile.wgsl.

const THREADS: u32 = 64u;
const EXACT: u32 = 0u;
const RUNGE_KUTTA_2: u32 = 2u;
// From here on κ counts as infinite: the state is wiped out and, by exact steps, nothing written.
const WIPED: f32 = 1e18;

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

// κ of a token; base is that of its sequence.
fn load_kappa(base: u32, token: u32) -> f32 {
    let kappa = -log_decay[base + token * params.log_decay.w];
    // Not `min`, which would lose a NaN.
    return select(kappa, WIPED, kappa > WIPED);
}

// What one token does, for x = β|k|² and a decay by κ: with DECAY κ = 0 tells what it erases, its own κ what it writes.
struct Step {
    // With κ = 0 only.
    gamma: f32,
    c: f32,
    alpha: f32,
    // λ ∂α/∂λ, and for κ = 0 times |k|
    h: f32,
    h_size: f32,
    // ∂α/∂β and −∂α/∂κ, times |k|
    by_beta: f32,
    by_decay: f32,
}

fn step_of(strength: f32, size: f32, x: f32, kappa: f32) -> Step {
    var result: Step;
    let y = x + kappa;
    if params.integrator != EXACT {
        // What stands for φ̄(y), φ̄′(y) and φ̄(y) + yφ̄′(y).
        var factor = 1.0;
        var slope = 0.0;
        var whole = 1.0;
        if params.integrator == RUNGE_KUTTA_2 {
            factor = 1.0 - 0.5 * y;
            slope = -0.5;
            whole = 1.0 - y;
        } else if params.integrator > RUNGE_KUTTA_2 {
            factor = 1.0 - y * (0.5 - y * (1.0 / 6.0 - y * (1.0 / 24.0)));
            slope = -0.5 + y * (1.0 / 3.0 - y * 0.125);
            whole = 1.0 - y * (1.0 - y * (0.5 - y * (1.0 / 6.0)));
        }
        result.gamma = x * factor;
        result.c = strength * size * factor;
        result.alpha = strength * factor;
        result.h = strength * x * slope;
        result.h_size = result.h * size;
        result.by_beta = (whole - kappa * slope) * size;
        result.by_decay = -strength * size * slope;
        return result;
    }
    if DECAY == 1u && kappa == WIPED {
        return result;
    }
    // Beyond, e is 0 either way, and x may be infinite. Not `min`, which would lose a NaN.
    let e = nan_exp(vec4(-select(y, 200.0, y > 200.0))).x;
    if abs(y) < 1.5 {
        let square = vec4(y * y);
        let phi_2 = phi_even(square).x + y * phi_odd(square).x;
        let phi = e * (1.0 + y * phi_2);
        result.gamma = x * phi;
        result.c = strength * size * phi;
        result.alpha = strength * phi;
        result.h = -strength * x * e * phi_2;
        result.h_size = result.h * size;
        result.by_beta = (e + kappa * e * phi_2) * size;
        result.by_decay = strength * size * e * phi_2;
        return result;
    }
    // y²φ̄′(y)
    let over = e * (1.0 + min(y, 200.0)) - 1.0;
    if DECAY == 1u && abs(x) <= kappa {
        let r = 1.0 / y;
        result.alpha = strength * (1.0 - e) * r;
        result.c = result.alpha * size;
        result.h = strength * x * r * over * r;
        result.by_beta = (e - kappa * r * over * r) * size;
        result.by_decay = -strength * r * over * r * size;
        return result;
    }
    // y/(β|k|), where both may be infinite.
    var z = size;
    result.by_beta = e * size;
    if DECAY == 1u {
        let more = kappa / size / strength;
        z += more;
        result.by_beta -= more / z / (z * strength) * over;
        result.by_decay = -over / z / (z * strength) / size;
    }
    result.gamma = 1.0 - e;
    result.c = (1.0 - e) / z;
    result.alpha = result.c / size;
    result.h = over / z / z;
    result.h_size = over / size;
    return result;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    // Where sequences are packed and chunks matter, rows are those of whole chunks.
    let rows = select(token_count(), chunk_count() * CHUNK, RAGGED == 1u);
    if i >= rows {
        return;
    }
    var place: Place;
    var token: u32;
    if RAGGED == 1u {
        place = place_of_chunk(i / CHUNK);
        token = i - place.chunk0 * CHUNK;
        if token >= place.tokens {
            return;
        }
    } else {
        place = place_of(i / params.tokens);
        token = i % params.tokens;
    }
    let batch = place.batch;
    let head = place.head;
    // In the tensors, and among all tokens.
    let position = place.first + token;
    let flat = place.flat + token;

    let key_square = square_k(params.k.x + batch * params.k.y + head * params.k.z + position * params.k.w);
    let key_norm = key_square.x * sqrt(key_square.y);
    let key_divisor = select(key_norm, 1.0, key_norm == 0.0);
    var query_divisor = 1.0;
    if params.normalize_q == 1u {
        let query_square = square_q(params.q.x + batch * params.q.y + head * params.q.z + position * params.q.w);
        let norm = query_square.x * sqrt(query_square.y);
        query_divisor = select(norm, 1.0, norm == 0.0);
    }
    let strength = beta[params.beta.x + batch * params.beta.y + place.value_head * params.beta.z + position * params.beta.w];
    var size = key_norm;
    var x = strength * key_square.x * key_square.x * key_square.y;
    if params.normalize_k == 1u {
        size = select(1.0, 0.0, key_norm == 0.0);
        x = strength * size;
    }

    let erase = step_of(strength, size, x, 0.0);
    var write = erase;
    if DECAY == 1u {
        let base = params.log_decay.x + batch * params.log_decay.y + place.value_head * params.log_decay.z
            + place.first * params.log_decay.w;
        let kappa = load_kappa(base, token);
        write = step_of(strength, size, x, kappa);
        let first = token / CHUNK * CHUNK;
        // In 4 parts: rounding of a long sum of equal numbers may go one way.
        var before = vec4(0.0);
        var behind = vec4(0.0);
        for (var other = first; other < min(first + CHUNK, place.tokens); other++) {
            let kappa = load_kappa(base, other);
            if other <= token {
                before[other % 4u] += kappa;
            } else {
                behind[other % 4u] += kappa;
            }
        }
        let past = (before.x + before.y) + (before.z + before.w);
        let e = nan_exp(vec4(-past)).x;
        let square = vec4(past * past);
        let decay = 4u * (token_count() + flat);
        gates[decay] = kappa;
        gates[decay + 1u] = e;
        gates[decay + 2u] = exp(-((behind.x + behind.y) + (behind.z + behind.w)));
        // Past 1 only its being more than ½ matters.
        gates[decay + 3u] = select(1.0 - e, past * e * (1.0 + past * (phi_even(square).x + past * phi_odd(square).x)), past < 1.0);
        if params.with_rates == 1u {
            gates[plane_at(ERASE_C, place, token)] = erase.c;
            gates[plane_at(ERASE_BY_BETA, place, token)] = erase.by_beta;
            gates[plane_at(DECAY_BY_WRITE, place, token)] = write.by_decay;
        }
    }
    gates[4u * flat] = erase.gamma;
    gates[4u * flat + 1u] = write.c;
    gates[4u * flat + 2u] = key_divisor;
    gates[4u * flat + 3u] = query_divisor;
    if params.with_rates == 1u {
        let rates = rates_at(place, token);
        gates[rates] = write.alpha;
        gates[rates + 1u] = write.h;
        gates[rates + 2u] = erase.h_size;
        gates[rates + 3u] = write.by_beta;
    }
}
