// 4 columns of a row of all states [B, H_v, chunks, D_k, D_v].
fn load_state(row: u32, column: u32) -> vec4<f32> {
    let at = row * params.value_dim + clamped(column, params.value_dim);
    return within(vec4(states[at.x], states[at.y], states[at.z], states[at.w]), column, params.value_dim);
}

// Rows and columns of the chunk's state: right ← S[row0.., column0..]  [COLUMNS, COLUMNS].
fn stage_state(tile: Tile, row0: u32, column0: u32) {
    for (var i = tile.thread; i < COLUMNS * VECTORS; i += THREADS) {
        let row = row0 + i / VECTORS;
        var value = vec4(0.0);
        if row < params.key_dim {
            value = load_state(tile.state0 + row, column0 + 4u * (i % VECTORS));
        }
        right[i / VECTORS * PITCH + i % VECTORS] = value;
    }
}
