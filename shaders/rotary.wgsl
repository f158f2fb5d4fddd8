// Rotary position embedding: at position p pair i of a row turns by θ = p · base^(−2i/r),
//
//     (x_a, x_b) → (x_a cos θ − x_b sin θ, x_a sin θ + x_b cos θ)
//
// and by −θ for the gradient. Angles are counted in turns modulo 1, as 32-bit fractions. A frequency is a 64-bit
// fraction of a turn per unit of position, so that its product with a position is exact modulo 1 but for the last digit:
// a large position costs no accuracy. Sine and cosine are polynomials on an eighth of a turn, since WGSL promises an
// absolute error of 2⁻¹¹ for its own, and nothing beyond half a turn.
//
// A row lies within one workgroup, 4 columns of it are one invocation's. All of it is read before any of it is written:
// out may be x.

const THREADS: u32 = 64u;

// Elements of the rows, and (cos θ, sin θ) of their pairs: 2 an invocation.
var<workgroup> elements: array<f32, 4u * THREADS>;
var<workgroup> directions: array<vec2<f32>, 2u * THREADS>;

// The upper 32 bits of a · b.
fn multiply_high(a: u32, b: u32) -> u32 {
    let a0 = a & 0xffffu;
    let a1 = a >> 16u;
    let b0 = b & 0xffffu;
    let b1 = b >> 16u;
    let middle = a1 * b0 + ((a0 * b0) >> 16u);
    return a1 * b1 + (middle >> 16u) + ((a0 * b1 + (middle & 0xffffu)) >> 16u);
}

// (whole + part/2³²) times the frequency of a pair, in turns modulo 1. Frequencies are stored as digits of 16 bits, the
// lowest first, which a float holds exactly.
fn turn_of(whole: u32, part: u32, pair: u32) -> u32 {
    let low = u32(frequencies[4u * pair]) | (u32(frequencies[4u * pair + 1u]) << 16u);
    let high = u32(frequencies[4u * pair + 2u]) | (u32(frequencies[4u * pair + 3u]) << 16u);
    return whole * high + multiply_high(whole, low) + multiply_high(part, high);
}

// (cos θ, sin θ).
fn direction_of(turn: u32) -> vec2<f32> {
    // Whole quarters of a turn, and up to an eighth on either side of them; 2π/2³² radians is one step.
    let quarters = (turn + 0x20000000u) >> 30u;
    let angle = f32(bitcast<i32>(turn - (quarters << 30u))) * 1.4629180792671596e-9;
    let y = angle * angle;
    let sine = angle + angle * y * (-1.6666654611e-1 + y * (8.3321608736e-3 - y * 1.9515295891e-4));
    let cosine = 1.0 - 0.5 * y + y * y * (4.166664568298827e-2 - y * (1.388731625493765e-3 - y * 2.443315711809948e-5));
    let half_turned = select(vec2(cosine, sine), vec2(-cosine, -sine), quarters >= 2u);
    return select(half_turned, vec2(-half_turned.y, half_turned.x), (quarters & 1u) == 1u);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let rows = THREADS / params.quads;
    let quad = thread % params.quads;
    let row = workgroup_index(workgroup, workgroups) * rows + thread / params.quads;
    let is_used = thread < rows * params.quads && row < params.rows;
    let token = row % params.tokens;
    let head = row / params.tokens % params.heads;
    let batch = row / params.tokens / params.heads;
    let out_base = params.out.x + batch * params.out.y + head * params.out.z + token * params.out.w;
    let column = 4u * quad;
    var own = vec4(0.0);
    if is_used {
        if params.in_place == 1u {
            own = out_load4(out_base, column, params.dim);
        } else {
            let x_base = params.x.x + batch * params.x.y + head * params.x.z + token * params.x.w;
            own = x_load4(x_base, column, params.dim);
        }
        for (var c = 0u; c < 4u; c++) {
            elements[4u * thread + c] = own[c];
        }

        var whole = params.offset + token;
        var part = 0u;
        var is_backwards = params.inverse == 1u;
        var is_known = true;
        if params.has_positions == 1u {
            let position = positions[params.positions.x + batch * params.positions.y + token * params.positions.z];
            // Finite and below 2³²; by bits, since comparisons need not tell a NaN.
            is_known = (bitcast<u32>(position) & 0x7fffffffu) < 0x4f800000u;
            let size = select(0.0, abs(position), is_known);
            whole = u32(floor(size));
            part = u32((size - floor(size)) * 4294967296.0);
            is_backwards = is_backwards != (position < 0.0);
        }
        for (var i = 0u; i < 2u; i++) {
            let pair = 2u * quad + i;
            var direction = vec2(1.0, 0.0);
            if 2u * pair < params.rotary_dim {
                let turn = turn_of(whole, part, pair);
                direction = direction_of(select(turn, 0u - turn, is_backwards));
            }
            if !is_known {
                // A constant NaN is an error in WGSL; a variable's bits are not.
                var nan = 0x7fc00000u;
                direction = vec2(bitcast<f32>(nan));
            }
            directions[2u * thread + i] = direction;
        }
    }
    workgroupBarrier();
    if !is_used {
        return;
    }

    let first = thread - quad;
    var result = own;
    for (var c = 0u; c < 4u; c++) {
        let at = column + c;
        if at < params.rotary_dim {
            var pair = at / 2u;
            var is_b = at % 2u == 1u;
            var other = at ^ 1u;
            if params.half_split == 1u {
                let half = params.rotary_dim / 2u;
                is_b = at >= half;
                pair = select(at, at - half, is_b);
                other = select(at + half, at - half, is_b);
            }
            let direction = directions[2u * first + pair];
            let across = direction.y * elements[4u * first + other];
            result[c] = direction.x * own[c] + select(-across, across, is_b);
        }
    }
    out_store4(out_base, column, params.dim, result);
}
