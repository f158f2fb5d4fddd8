// What the chunk kernels of EFLA share: where a workgroup is, its tokens' gates, staged tiles of k̂.
//
// A chunk has CHUNK tokens; the rows past the last token have γ = c = 0 and k̂ = 0 and so change nothing.
// Tiles are staged COLUMNS columns at a time, as rows of vectors of 4.

const COLUMNS: u32 = 32u;
const VECTORS: u32 = COLUMNS / 4u;

// Where the state comes from: zeros unless one of these.
const STATE_INITIAL: u32 = 1u;
const STATE_IN_PLACE: u32 = 2u;

struct Place {
    batch: u32,
    head: u32,
    value_head: u32,
    // batch * value_heads + value_head
    sequence: u32,
}

fn place_of(sequence: u32) -> Place {
    let value_head = sequence % params.value_heads;
    return Place(sequence / params.value_heads, value_head / params.group, value_head, sequence);
}

// (γ, c, divisor of k, divisor of q) of a token.
fn load_gate(place: Place, token: u32) -> vec4<f32> {
    if token >= params.tokens {
        return vec4(0.0, 0.0, 1.0, 1.0);
    }
    let at = 4u * (place.sequence * params.tokens + token);
    return vec4(gates[at], gates[at + 1u], gates[at + 2u], gates[at + 3u]);
}

// Of the backward pass: (α, h, h|k|, |k| ∂α/∂β) of a token, see efla_gates.
fn rates_at(place: Place, token: u32) -> u32 {
    return 4u * ((params.batch * params.value_heads + place.sequence) * params.tokens + token);
}

fn load_rates(place: Place, token: u32) -> vec4<f32> {
    if token >= params.tokens {
        return vec4(0.0);
    }
    let at = rates_at(place, token);
    return vec4(gates[at], gates[at + 1u], gates[at + 2u], gates[at + 3u]);
}

// 4 columns of a row of `dim`, the last one again past its end: always inside the row.
fn clamped(column: u32, dim: u32) -> vec4<u32> {
    return min(column + vec4(0u, 1u, 2u, 3u), vec4(dim - 1u));
}

// What was loaded from `clamped` columns, 0 past the end of the row.
fn within(value: vec4<f32>, column: u32, dim: u32) -> vec4<f32> {
    return select(vec4(0.0), value, column + vec4(0u, 1u, 2u, 3u) < vec4(dim));
}
