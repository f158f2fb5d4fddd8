// EFLA backward, all chunks in parallel: what reading the state means for the reader. A token's query reads the state
// after it, its key the state before it; S is the state before the chunk, V_new [C, D_v] are the chunk's updates.
//
//     queries:            w = scale (dO Sᵀ + lower_incl(dO V_newᵀ) K̂)
//     keys (with KEYS):   w −= c (Y Sᵀ + strict_lower(Y V_newᵀ) K̂)
//
//     [C, D_v] x [D_v, D_k] + [C, C] x [C, D_k],  the matrix [C, D_v] x [D_v, C]
//
// With DECAY, and P = D ∘ lower_incl(dO V_newᵀ) or D ∘ strict_lower(Y V_newᵀ):
//
//     queries:            w = scale (diag(G) dO Sᵀ + P K̂)        R = scale Q
//     keys:               w −= α|k| (diag(G) Y Sᵀ + P K̂)         R = −γK̂
//
// The second factor R of what a reader s takes from a writer j, and from S, is for d_log_decay: a decay between the two
// takes its share of all of that. With E = P ∘ RK̂ᵀ and e_s = R_s·(the row of the product with Sᵀ), d_log_decay of
// token t gets
//
//     Σ_{s≥t, j<t} E_{sj} + Σ_{s≥t} e_s
//
// by queries and by keys; and, here by keys, what passes through the chunk. Sums of products, no differences: where a
// strong decay leaves nothing, nothing comes out.
//
// The first is a value head's part of d_Q, the second completes its part of d_k; w is padded to whole chunks.

// Products: the matrix, whose left side is also that of the product with Sᵀ; then matrix x K̂; RK̂ᵀ.
const SCORES: u32 = 0u;
const DIRECTIONS: u32 = 1u;
const READERS: u32 = 2u;

// `rows` is dO, or Y in the workspace.
fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    let place = tile.place;
    if part == READERS {
        if KEYS == 0u {
            return load_query(place, tile.token0 + row, column);
        }
        return -load_gate(place, tile.token0 + row).x * load_unit_key(place, tile.token0 + row, column);
    }
    var base = (tile.row0 + row) * params.value_dim;
    if KEYS == 0u {
        if tile.token0 + row >= place.tokens {
            return vec4(0.0);
        }
        base = params.d_out.x + place.batch * params.d_out.y + place.value_head * params.d_out.z
            + (place.first + tile.token0 + row) * params.d_out.w;
    }
    return rows_load4(base, column, params.value_dim);
}

fn load_right(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == SCORES {
        return load_u(tile.row0 + row, column);
    }
    return load_unit_key(tile.place, tile.token0 + row, column);
}

// From e of this invocation's rows and columns. Where a token reads itself E has what is never used.
fn add_decay_gradient(tile: Tile, index: u32, taken: vec4<f32>) {
    var product: Wide;
    rows_product(tile, READERS, params.key_dim, false, &product);
    for (var n = 0u; n < WIDE; n++) {
        let block = tile.x + VECTORS * n;
        for (var j = 0u; j < 4u && block <= tile.y; j++) {
            matrix[(4u * block + j) * BLOCKS + tile.y] *= product[4u * n + j];
        }
    }
    sum_columns(tile, taken);
    // Column t ← e_s + Σ_{j<t} E_{sj}, for 4 readers s an invocation.
    if tile.thread < BLOCKS {
        var sum = left[tile.thread];
        if KEYS == 1u && tile.thread == BLOCKS - 1u {
            // What passes through the chunk is read behind all of its tokens.
            for (var i = 0u; i < PASSED * params.state_blocks; i++) {
                sum.w += gates[passed_at(index * params.state_blocks) + i];
            }
        }
        for (var t = 0u; t < 4u * tile.thread + 4u; t++) {
            let at = t * BLOCKS + tile.thread;
            let own = matrix[at];
            matrix[at] = sum;
            sum += own;
        }
    }
    workgroupBarrier();
    let t = tile.thread;
    if t < CHUNK && tile.token0 + t < tile.place.tokens {
        var sum = vec4(0.0);
        for (var block = t / 4u; block < BLOCKS; block++) {
            let readers = 4u * block + vec4(0u, 1u, 2u, 3u);
            sum += select(vec4(0.0), matrix[t * BLOCKS + block], readers >= vec4(t));
        }
        let plane = select(DECAY_BY_QUERIES, DECAY_BY_KEYS, KEYS == 1u);
        gates[plane_at(plane, tile.place, tile.token0 + t)] = (sum.x + sum.y) + (sum.z + sum.w);
    }
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
    let mask = select(LOWER, STRICT_LOWER, KEYS == 1u);
    multiply_rows(tile, SCORES, params.value_dim, mask);

    // e of rows 4y.. over this invocation's columns.
    var taken = vec4(0.0);
    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        var sums = mat4x4<f32>();
        for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
            workgroupBarrier();
            stage_left(tile, SCORES, value0);
            stage_state(tile, column0, value0);
            workgroupBarrier();
            add_product_transposed(tile, &sums);
        }
        if DECAY == 1u {
            scale_rows(&sums, row_decays(tile)[0]);
            for (var r = 0u; r < 4u; r++) {
                taken[r] += dot(load_left(tile, READERS, 4u * tile.y + r, column0 + 4u * tile.x), sums[r]);
            }
        }
        workgroupBarrier();
        stage_right(tile, DIRECTIONS, column0);
        workgroupBarrier();
        add_triangle(tile, mask, &sums);

        let column = column0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let row = 4u * tile.y + r;
            var factor = params.scale;
            if KEYS == 1u {
                factor = -load_erase_c(tile.place, tile.token0 + row);
            }
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
    if DECAY == 1u {
        add_decay_gradient(tile, index, taken);
    }
}
