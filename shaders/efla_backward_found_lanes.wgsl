// efla_backward_found for software adapters: a workgroup is one subgroup, sums stay in registers (lanes.wgsl says why);
// without decay:
//
//     found = K̂S + strict_lower(K̂K̂ᵀ) V_new

const KEY: u32 = 0u;
const UPDATE: u32 = 1u;
const STATE: u32 = 2u;
const SCORES: u32 = 3u;

fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == KEY {
        return load_unit_key(place, token0 + row, column);
    }
    let inside = min(column, params.value_dim - 4u);
    if part == STATE {
        return load_state(row, inside);
    }
    return u[((row0 + row) * params.value_dim + inside) / 4u];
}

fn left_columns(part: u32, j: u32) -> mat4x4<f32> {
    if part == SCORES {
        return load_scores(j);
    }
    return load_rows(KEY, rows, j);
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
    dots(&sums, KEY, rows, KEY, &nodes, params.key_dim);
    store_scores(&sums);

    let found_at = (row0 + rows) * value_vectors();
    for (var column0 = 0u; column0 < params.value_dim; column0 += COLUMNS) {
        clear(&sums);
        add_product(&sums, KEY, STATE, params.key_dim, column0, ALL);
        add_product(&sums, SCORES, UPDATE, CHUNK, column0, STRICT_LOWER);
//# for c in 8
        if column0 + 4u * $c < params.value_dim {
            let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
            let at = found_at + column0 / 4u + $c;
//# for r in x y z w
            found[at.$r] = by_row[at_$r];
//# end
        }
//# end
    }
}
