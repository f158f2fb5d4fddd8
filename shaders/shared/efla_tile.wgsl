// What the chunk kernels of EFLA share: where a workgroup is, its tokens' gates, staged tiles of k̂.
//
// A chunk has CHUNK tokens; the rows past the last token have γ = c = 0 and k̂ = 0 and so change nothing.
// Tiles are staged COLUMNS columns at a time, as rows of vectors of 4.
//
// What efla_gates writes of N = B·H_v·T tokens stands in `gates`, one array behind the other:
//
//     [N, 4]  (γ, c, divisor of k, divisor of q)
//     [N, 4]  with DECAY: (κ, G, E, 1 − G) by how much the state decays, what is left at the token of the state before
//             the chunk, and what is left at the end of the chunk of what the token writes
//     [N, 4]  backward: (α', h', h|k|, |k| ∂α'/∂β), where a prime tells what belongs to writing from what belongs to
//             erasing; without decay the two are the same
//     [6, N]  backward with DECAY: α|k|, |k| ∂α/∂β, four parts of d_log_decay
//     then, with DECAY, what efla_backward_replay finds to pass through every chunk

const COLUMNS: u32 = 32u;
const VECTORS: u32 = COLUMNS / 4u;

// Where the state comes from: zeros unless one of these.
const STATE_INITIAL: u32 = 1u;
const STATE_IN_PLACE: u32 = 2u;

const GATE_ELEMENTS: u32 = 4u + 4u * DECAY;

// A value head of a sequence.
struct Place {
    // Of the tensors, and of the states; they differ where sequences are packed.
    batch: u32,
    sequence: u32,
    head: u32,
    value_head: u32,
    // Its tokens in the tensors; its first one among those of all value heads; its first chunk among all.
    first: u32,
    tokens: u32,
    flat: u32,
    chunk0: u32,
}

// With RAGGED the host wrote to `table` the first token, the tokens and the first chunk of every sequence, then the
// sequence of every chunk.
fn place_of(index: u32) -> Place {
    let sequence = index / params.value_heads;
    let value_head = index % params.value_heads;
    let head = value_head / params.group;
    if RAGGED == 1u {
        let first = table[3u * sequence];
        let tokens = table[3u * sequence + 1u];
        let chunk0 = value_head * params.chunks + table[3u * sequence + 2u];
        return Place(0u, sequence, head, value_head, first, tokens, value_head * params.tokens + first, chunk0);
    }
    return Place(sequence, sequence, head, value_head, 0u, params.tokens, index * params.tokens, index * params.chunks);
}

// Chunks of all value heads; those of a value head stand together.
fn chunk_count() -> u32 {
    return params.chunks * params.batch * params.value_heads;
}

fn place_of_chunk(index: u32) -> Place {
    let of_value_head = index / params.chunks;
    if RAGGED == 1u {
        return place_of(table[params.chunk_table + index % params.chunks] * params.value_heads + of_value_head);
    }
    return place_of(of_value_head);
}

fn token_count() -> u32 {
    return params.batch * params.value_heads * params.tokens;
}

// (γ, c, divisor of k, divisor of q) of a token.
fn load_gate(place: Place, token: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0, 0.0, 1.0, 1.0);
    }
    let at = 4u * (place.flat + token);
    return vec4(gates[at], gates[at + 1u], gates[at + 2u], gates[at + 3u]);
}

// (κ, G, E, 1 − G) of a token.
fn load_decay(place: Place, token: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0, 1.0, 1.0, 0.0);
    }
    let at = 4u * (token_count() + place.flat + token);
    return vec4(gates[at], gates[at + 1u], gates[at + 2u], gates[at + 3u]);
}

// Whether a state S that decays becomes S − (1 − G) S, since the rounding of G itself, the same for all of S and perhaps
// for every chunk, would add up. What decays fast is multiplied: the difference would lose what is left.
fn is_slow(decay: vec4<f32>) -> bool {
    return decay.w < 0.5;
}

// Of the backward pass: (α', h', h|k|, |k| ∂α'/∂β) of a token, see efla_gates.
fn rates_at(place: Place, token: u32) -> u32 {
    return GATE_ELEMENTS * token_count() + 4u * (place.flat + token);
}

fn load_rates(place: Place, token: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0);
    }
    let at = rates_at(place, token);
    return vec4(gates[at], gates[at + 1u], gates[at + 2u], gates[at + 3u]);
}

const ERASE_C: u32 = 0u;
const ERASE_BY_BETA: u32 = 1u;
// The four parts of d_log_decay: what comes by the token's own write (before efla_backward_values its factor
// |k| ∂α'/∂log_decay), by queries, by the state after the chunk, by keys.
const DECAY_BY_WRITE: u32 = 2u;
const DECAY_BY_QUERIES: u32 = 3u;
const DECAY_BY_END: u32 = 4u;
const DECAY_BY_KEYS: u32 = 5u;

// Of the backward pass with DECAY: one of these of a token.
fn plane_at(plane: u32, place: Place, token: u32) -> u32 {
    return (GATE_ELEMENTS + 4u + plane) * token_count() + place.flat + token;
}

// α|k| of a token: c is that of writing.
fn load_erase_c(place: Place, token: u32) -> f32 {
    if DECAY == 0u {
        return load_gate(place, token).y;
    }
    if token >= place.tokens {
        return 0.0;
    }
    return gates[plane_at(ERASE_C, place, token)];
}

// What passes through a chunk in a block of value columns: PASSED parts of a sum.
const PASSED: u32 = 8u;

fn passed_at(part: u32) -> u32 {
    return (GATE_ELEMENTS + 10u) * token_count() + PASSED * part;
}

// 4 columns of a row of `dim`, the last one again past its end: always inside the row.
fn clamped(column: u32, dim: u32) -> vec4<u32> {
    return min(column + vec4(0u, 1u, 2u, 3u), vec4(dim - 1u));
}

// What was loaded from `clamped` columns, 0 past the end of the row.
fn within(value: vec4<f32>, column: u32, dim: u32) -> vec4<f32> {
    return select(vec4(0.0), value, column + vec4(0u, 1u, 2u, 3u) < vec4(dim));
}
