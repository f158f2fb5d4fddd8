// efla_backward_read for software adapters: a workgroup is one subgroup, sums stay in registers (lanes.wgsl says why);
// without decay:
//
//     queries:            w = scale (dO Sᵀ + lower_incl(dO V_newᵀ) K̂)
//     keys (with KEYS):   w −= c (Y Sᵀ + strict_lower(Y V_newᵀ) K̂)

const READ: u32 = 0u;
const UPDATE: u32 = 1u;
const STATE: u32 = 2u;
const KEY: u32 = 3u;
const SCORES: u32 = 4u;

// First row of the state that is multiplied.
var<private> key0: u32;

// `reader` is dO, or Y in the workspace.
fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == READ {
        if KEYS == 1u {
            return reader_load4((row0 + row) * params.value_dim, column, params.value_dim);
        }
        let token = min(token0 + row, place.tokens - 1u);
        let base = params.d_out.x + place.batch * params.d_out.y + place.value_head * params.d_out.z
            + (place.first + token) * params.d_out.w;
        return select(reader_load4(base, column, params.value_dim), vec4(0.0), token0 + row >= place.tokens);
    }
    if part == UPDATE {
        return u[((row0 + row) * params.value_dim + column) / 4u];
    }
    if part == STATE {
        return load_state(key0 + row, column);
    }
    return load_unit_key(place, token0 + row, column);
}

fn left_columns(part: u32, j: u32) -> mat4x4<f32> {
    return load_scores(j);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) own_lane: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= chunk_count() {
        return;
    }
    enter(place_of_chunk(index), index, own_lane);
    var nodes = chunk_rows();
    var sums: Sums;
    dots(&sums, READ, rows, UPDATE, &nodes, params.value_dim);
    store_scores(&sums);

    var factor = vec4(params.scale);
    if KEYS == 1u {
        factor = -vec4(
            load_gate(place, token0 + rows.x).y,
            load_gate(place, token0 + rows.y).y,
            load_gate(place, token0 + rows.z).y,
            load_gate(place, token0 + rows.w).y,
        );
    }
    let w_at = (row0 + rows) * key_vectors();
    for (key0 = 0u; key0 < params.key_dim; key0 += COLUMNS) {
        dots(&sums, READ, rows, STATE, &nodes, params.value_dim);
        add_product(&sums, SCORES, KEY, CHUNK, key0, select(LOWER, STRICT_LOWER, KEYS == 1u));
//# for c in 8
        if key0 + 4u * $c < params.key_dim {
            let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
            let at = w_at + key0 / 4u + $c;
//# for r in x y z w
            if KEYS == 1u {
                w[at.$r] += factor.$r * by_row[at_$r];
            } else {
                w[at.$r] = factor.$r * by_row[at_$r];
            }
//# end
        }
//# end
    }
}
