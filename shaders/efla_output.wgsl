// EFLA, pass 3 of 3, all chunks in parallel:
//
//     O = scale (Q S + P V_new)  [C, D_k] x [D_k, D_v] + [C, C] x [C, D_v]
//     P = lower_incl(Q K̂ᵀ)  [C, D_k] x [D_k, C]
//
// with S the state before the chunk and V_new from pass 2. With DECAY diag(G) Q S and P = lower_incl(D ∘ QK̂ᵀ).

// Products: P, whose left side is also that of Q S; then P V_new.
const SCORES: u32 = 0u;
const UPDATES: u32 = 1u;

fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    return load_query(tile.place, tile.token0 + row, column);
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
    let place = tile.place;
    multiply_rows(tile, SCORES, params.key_dim, LOWER);

    let out_base = params.out.x + place.batch * params.out.y + place.value_head * params.out.z;
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
        add_triangle(tile, LOWER, &sums);

        let column = value0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let token = tile.token0 + 4u * tile.y + r;
            if token < place.tokens {
                out_store4(out_base + (place.first + token) * params.out.w, column, params.value_dim, sums[r]);
            }
        }
    }
}
