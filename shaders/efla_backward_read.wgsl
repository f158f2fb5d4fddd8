// EFLA backward, all chunks in parallel: what reading the state means for the reader. A token's query reads the state
// after it, its key the state before it; S is the state before the chunk, V_new [C, D_v] are the chunk's updates.
//
//     queries:            w = scale (dO Sᵀ + lower_incl(dO V_newᵀ) K̂)
//     keys (with KEYS):   w −= c (Y Sᵀ + strict_lower(Y V_newᵀ) K̂)
//
//     [C, D_v] x [D_v, D_k] + [C, C] x [C, D_k],  the matrix [C, D_v] x [D_v, C]
//
// The first is a value head's part of d_Q, the second completes its part of d_k; w is padded to whole chunks.

// Products: the matrix, whose left side is also that of the product with Sᵀ; then matrix x K̂.
const SCORES: u32 = 0u;
const DIRECTIONS: u32 = 1u;

// `rows` is dO, or Y in the workspace.
fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    let place = tile.place;
    var base = (tile.row0 + row) * params.value_dim;
    if KEYS == 0u {
        if tile.token0 + row >= params.tokens {
            return vec4(0.0);
        }
        base = params.d_out.x + place.batch * params.d_out.y + place.value_head * params.d_out.z
            + (tile.token0 + row) * params.d_out.w;
    }
    return rows_load4(base, column, params.value_dim);
}

fn load_right(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == DIRECTIONS {
        return load_unit_key(tile.place, tile.token0 + row, column);
    }
    return load_u(tile.row0 + row, column);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = workgroup_index(workgroup, workgroups);
    if index >= chunk_count() {
        return;
    }
    let tile = tile_of(index, thread);
    let mask = select(LOWER, STRICT_LOWER, KEYS == 1u);
    multiply_rows(tile, SCORES, params.value_dim, mask);

    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        var sums = mat4x4<f32>();
        for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
            workgroupBarrier();
            stage_left(tile, SCORES, value0);
            stage_state(tile, column0, value0);
            workgroupBarrier();
            add_product_transposed(tile, &sums);
        }
        workgroupBarrier();
        stage_right(tile, DIRECTIONS, column0);
        workgroupBarrier();
        add_triangle(tile, mask, &sums);

        let column = column0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let row = 4u * tile.y + r;
            let factor = select(params.scale, -load_gate(tile.place, tile.token0 + row).y, KEYS == 1u);
            let at = (tile.row0 + row) * params.key_dim + column;
            for (var c = 0u; c < 4u && column + c < params.key_dim; c++) {
                var value = factor * sums[r][c];
                if KEYS == 1u {
                    value += w[at + c];
                }
                w[at + c] = value;
            }
        }
    }
}
