// EFLA backward, all chunks in parallel: what a chunk's dO means for its updates and for the state before it, as far as
// it depends on nothing outside the chunk.
//
//     u = scale · lower_incl(QK̂ᵀ)ᵀ dO  [C, C] x [C, D_v]        states = scale · QᵀdO  [D_k, C] x [C, D_v]
//
// With DECAY lower_incl(D ∘ QK̂ᵀ) and (diag(G) Q)ᵀdO.
// The first is the part of dV_new from within the chunk, the second a part of the gradient of the state before it.
// Rows of the matrix are updates i, columns are queries r ≥ i.

fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    return load_unit_key(tile.place, tile.token0 + row, column);
}

fn load_right(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    return load_query(tile.place, tile.token0 + row, column);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= chunk_count() {
        return;
    }
    let tile = tile_of(index, thread);
    multiply_rows(tile, 0u, params.key_dim, UPPER);

    for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let row = i / VECTORS;
            right[row * PITCH + i % VECTORS] =
                load_d_out(tile.place, tile.token0 + row, value0 + 4u * (i % VECTORS));
        }
        workgroupBarrier();
        var sums = mat4x4<f32>();
        add_triangle(tile, UPPER, &sums);
        let column = value0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let at = (tile.row0 + 4u * tile.y + r) * params.value_dim + column;
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                u[at + c] = sums[r][c];
            }
        }

        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            workgroupBarrier();
            for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
                let row = i / VECTORS;
                var query = load_query(tile.place, tile.token0 + row, column0 + 4u * (i % VECTORS));
                if DECAY == 1u {
                    query *= load_decay(tile.place, tile.token0 + row).y;
                }
                left[row * PITCH + i % VECTORS] = query;
            }
            workgroupBarrier();
            // 4 rows of the state at a time; with chunks of 64 half of the invocations have none.
            for (var rows = tile.y; rows < VECTORS; rows += BLOCKS) {
                var outer = mat4x4<f32>();
                for (var j = 0u; j < CHUNK; j++) {
                    let q_j = left[j * PITCH + rows];
                    let value = right[j * PITCH + tile.x];
                    outer += mat4x4(q_j.x * value, q_j.y * value, q_j.z * value, q_j.w * value);
                }
                for (var r = 0u; r < 4u; r++) {
                    let d = column0 + 4u * rows + r;
                    let at = (tile.state0 + d) * params.value_dim + column;
                    for (var c = 0u; c < 4u && d < params.key_dim && column + c < params.value_dim; c++) {
                        states[at + c] = outer[r][c];
                    }
                }
            }
        }
    }
}
