// EFLA backward, all chunks in parallel: what a token's key finds in the state before it. With S the state before the
// chunk and V_new [C, D_v] the chunk's updates,
//
//     found = P = K̂S + strict_lower(K̂K̂ᵀ) V_new  [C, D_k] x [D_k, D_v] + [C, C] x [C, D_v]
//
// With DECAY it finds it after the token's decay: P = diag(G) K̂S + strict_lower(D ∘ K̂K̂ᵀ) V_new.

// Products: the matrix, whose left side is also that of K̂S; then matrix x V_new.
const SCORES: u32 = 0u;
const UPDATES: u32 = 1u;

fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    return load_unit_key(tile.place, tile.token0 + row, column);
}

fn load_right(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == SCORES {
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
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= chunk_count() {
        return;
    }
    let tile = tile_of(index, thread);
    multiply_rows(tile, SCORES, params.key_dim, STRICT_LOWER);

    for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
        var sums = mat4x4<f32>();
        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            workgroupBarrier();
            stage_left(tile, SCORES, column0);
            stage_state(tile, column0, value0);
            workgroupBarrier();
            add_product(tile, &sums);
        }
        if DECAY == 1u {
            scale_rows(&sums, row_decays(tile)[0]);
        }
        workgroupBarrier();
        stage_right(tile, UPDATES, value0);
        workgroupBarrier();
        add_triangle(tile, STRICT_LOWER, &sums);

        let column = value0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let at = (tile.row0 + 4u * tile.y + r) * params.value_dim + column;
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                found[at + c] = sums[r][c];
            }
        }
    }
}
