// What stands among the states.

// 4 columns of a row of the chunk's state, 0 past the last row.
fn load_state(row: u32, column: u32) -> vec4<f32> {
    let at = (state0 + min(row, params.key_dim - 1u)) * params.value_dim + column;
    return select(vec4(0.0), states[at / 4u], vec4(row < params.key_dim));
}

// The matrix of a chunk, behind the running states: column j of the lane's rows. A lane reads what it wrote itself.
fn score_at(j: u32) -> u32 {
    let states_end = (chunk_count() + params.value_sequences) * params.key_dim * value_vectors();
    return states_end + (row0 + j) * LANES + lane;
}

fn store_scores(scores: ptr<function, Sums>) {
//# for n in TILE
    states[score_at($n)] = (*scores)[$n];
//# end
}

fn load_scores(j: u32) -> mat4x4<f32> {
    let at = score_at(j);
    return mat4x4(states[at], states[at + LANES], states[at + 2u * LANES], states[at + 3u * LANES]);
}
