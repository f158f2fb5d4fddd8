// efla_backward_keys for software adapters: a workgroup is one subgroup, sums stay in registers (lanes.wgsl says why);
// without decay:
//
//     w = scale · lower_incl(dO Xᵀ)ᵀ Q + X dS'ᵀ − strict_lower(Y Xᵀ)ᵀ (γK̂) + s k̂

const WRITTEN: u32 = 0u;
const D_OUT: u32 = 1u;
const Y: u32 = 2u;
const STATE: u32 = 3u;
const QUERY: u32 = 4u;
const KEY: u32 = 5u;
const SCORES: u32 = 6u;

// First row of the state that is multiplied.
var<private> key0: u32;

fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == WRITTEN {
        // X stands behind Y.
        return y[(params.found + (row0 + row) * params.value_dim + column) / 4u];
    }
    if part == D_OUT {
        return load_d_out(place, token0 + row, column);
    }
    if part == Y {
        return y[((row0 + row) * params.value_dim + column) / 4u];
    }
    if part == STATE {
        return load_state(key0 + row, column);
    }
    if part == QUERY {
        return load_query(place, token0 + row, column);
    }
    return -load_gate(place, token0 + row).x * load_unit_key(place, token0 + row, column);
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
    let w_at = (row0 + rows) * key_vectors();
    // Rows are writers, columns the queries that read what they wrote.
    dots(&sums, WRITTEN, rows, D_OUT, &nodes, params.value_dim);
    store_scores(&sums);
    for (key0 = 0u; key0 < params.key_dim; key0 += COLUMNS) {
        dots(&sums, WRITTEN, rows, STATE, &nodes, params.value_dim);
        add_product(&sums, SCORES, QUERY, CHUNK, key0, UPPER);
//# for c in 8
        if key0 + 4u * $c < params.key_dim {
            let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
            let at = w_at + key0 / 4u + $c;
//# for r in x y z w
            w[at.$r] = by_row[at_$r];
//# end
        }
//# end
    }
    // Columns are the keys that read it.
    dots(&sums, WRITTEN, rows, Y, &nodes, params.value_dim);
    store_scores(&sums);
    let along = vec4(
        load_rates(place, token0 + rows.x).y,
        load_rates(place, token0 + rows.y).y,
        load_rates(place, token0 + rows.z).y,
        load_rates(place, token0 + rows.w).y,
    );
    for (key0 = 0u; key0 < params.key_dim; key0 += COLUMNS) {
        clear(&sums);
        add_product(&sums, SCORES, KEY, CHUNK, key0, STRICT_UPPER);
//# for c in 8
        if key0 + 4u * $c < params.key_dim {
            let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
            let at = w_at + key0 / 4u + $c;
//# for r in x y z w
            w[at.$r] += by_row[at_$r] + along.$r * load_unit_key(place, token0 + rows.$r, key0 + 4u * $c);
//# end
        }
//# end
    }
}
