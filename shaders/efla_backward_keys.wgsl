// EFLA backward, all chunks in parallel: what a token's key writes. With dS' the gradient of the state after the chunk,
// X [C, D_v] the updates over |k| and s from efla_backward_values,
//
//     w = scale · lower_incl(dO Xᵀ)ᵀ Q + X dS'ᵀ − strict_lower(Y Xᵀ)ᵀ (γK̂) + s k̂
//
//     [C, C] x [C, D_k] + [C, D_v] x [D_v, D_k] + [C, C] x [C, D_k],  the matrices [C, D_v] x [D_v, C]
//
// which is a value head's part of d_k but for the term −c·SY that efla_backward_read adds.
// With DECAY the matrices are taken times D, X dS'ᵀ becomes diag(E) X dS'ᵀ, and d_log_decay of token t gets what the
// state after the chunk has of the tokens before t: Σ_{j<t} f_j, f_j = E_j |k_j| k̂_j·(dS' X_j).
// Rows of a matrix are writers i, columns the later tokens r that read what i wrote: by their query, or by their key.

// Who reads: queries (r ≥ i), then keys (r > i).
const QUERIES: u32 = 0u;
const KEYS: u32 = 1u;
// What their matrix is multiplied with: Q or −γK̂.
const DIRECTIONS: u32 = 2u;

fn load_left(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    // X stands behind Y.
    let at = params.found + (tile.row0 + row) * params.value_dim + clamped(column, params.value_dim);
    return within(vec4(y[at.x], y[at.y], y[at.z], y[at.w]), column, params.value_dim);
}

fn load_right(tile: Tile, part: u32, row: u32, column: u32) -> vec4<f32> {
    let token = tile.token0 + row;
    switch part {
        case QUERIES: {
            return load_d_out(tile.place, token, column);
        }
        case KEYS: {
            let at = (tile.row0 + row) * params.value_dim + clamped(column, params.value_dim);
            return within(vec4(y[at.x], y[at.y], y[at.z], y[at.w]), column, params.value_dim);
        }
        case DIRECTIONS: {
            return load_query(tile.place, token, column);
        }
        default: {
            return -load_gate(tile.place, token).x * load_unit_key(tile.place, token, column);
        }
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
    // f of rows 4y.. over this invocation's columns.
    var written = vec4(0.0);
    for (var readers = 0u; readers < 2u; readers++) {
        let mask = select(UPPER, STRICT_UPPER, readers == KEYS);
        multiply_rows(tile, readers, params.value_dim, mask);
        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            var sums = mat4x4<f32>();
            for (var value0 = 0u; value0 < params.value_dim && readers == KEYS; value0 += COLUMNS) {
                workgroupBarrier();
                stage_left(tile, readers, value0);
                stage_state(tile, column0, value0);
                workgroupBarrier();
                add_product_transposed(tile, &sums);
            }
            if DECAY == 1u && readers == KEYS {
                scale_rows(&sums, row_decays(tile)[1]);
                for (var r = 0u; r < 4u; r++) {
                    let key = load_unit_key(tile.place, tile.token0 + 4u * tile.y + r, column0 + 4u * tile.x);
                    written[r] += dot(key, sums[r]);
                }
            }
            workgroupBarrier();
            stage_right(tile, DIRECTIONS + readers, column0);
            workgroupBarrier();
            add_triangle(tile, mask, &sums);

            let column = column0 + 4u * tile.x;
            for (var r = 0u; r < 4u; r++) {
                let row = 4u * tile.y + r;
                let token = tile.token0 + row;
                let at = (tile.row0 + row) * params.key_dim + column;
                var value = sums[r];
                if readers == KEYS {
                    value += load_rates(tile.place, token).y * load_unit_key(tile.place, token, column);
                }
                for (var c = 0u; c < 4u && column + c < params.key_dim; c++) {
                    if readers == KEYS {
                        value[c] += w[at + c];
                    }
                    w[at + c] = value[c];
                }
            }
        }
    }
    if DECAY == 1u {
        sum_columns(tile, written);
        if thread < CHUNK && tile.token0 + thread < tile.place.tokens {
            var sum = 0.0;
            for (var j = 0u; j < thread; j++) {
                // |k| as the gates have it; where k = 0 it says 1, but there f = 0.
                let size = select(load_gate(tile.place, tile.token0 + j).z, 1.0, params.normalize_k == 1u);
                sum += size * left[j / 4u][j % 4u];
            }
            gates[plane_at(DECAY_BY_END, tile.place, tile.token0 + thread)] = sum;
        }
    }
}
