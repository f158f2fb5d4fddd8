// efla_backward_output for software adapters: a workgroup is one subgroup, sums stay in registers (lanes.wgsl says why);
// without decay:
//
//     u = scale · lower_incl(QK̂ᵀ)ᵀ dO        states = scale · QᵀdO

const QUERY: u32 = 0u;
const KEY: u32 = 1u;
const D_OUT: u32 = 2u;
const SCORES: u32 = 3u;
// Q transposed, from row `query0` on.
const QUERIES: u32 = 4u;

var<private> query0: u32;

fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == QUERY {
        return load_query(place, token0 + row, column);
    }
    if part == KEY {
        return load_unit_key(place, token0 + row, column);
    }
    return load_d_out(place, token0 + row, min(column, params.value_dim - 4u));
}

fn query(row: u32) -> vec4<f32> {
    return load_query(place, token0 + row, query0 + 4u * lane);
}

fn left_columns(part: u32, j: u32) -> mat4x4<f32> {
    if part == SCORES {
        return load_scores(j);
    }
    return mat4x4(query(j), query(j + 1u), query(j + 2u), query(j + 3u));
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
    // Rows are updates, columns the queries that read them.
    dots(&sums, KEY, rows, QUERY, &nodes, params.key_dim);
    store_scores(&sums);

    let u_at = (row0 + rows) * value_vectors();
    for (var column0 = 0u; column0 < params.value_dim; column0 += COLUMNS) {
        clear(&sums);
        add_product(&sums, SCORES, D_OUT, CHUNK, column0, UPPER);
//# for c in 8
        if column0 + 4u * $c < params.value_dim {
            let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
            let at = u_at + column0 / 4u + $c;
//# for r in x y z w
            u[at.$r] = by_row[at_$r];
//# end
        }
//# end
        for (query0 = 0u; query0 < params.key_dim; query0 += CHUNK) {
            clear(&sums);
            add_product(&sums, QUERIES, D_OUT, CHUNK, column0, ALL);
            let d = query0 + rows;
            let states_at = (state0 + d) * value_vectors();
//# for c in 8
            if column0 + 4u * $c < params.value_dim {
                let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
                let at = states_at + column0 / 4u + $c;
//# for r in x y z w
                if d.$r < params.key_dim {
                    states[at.$r] = by_row[at_$r];
                }
//# end
            }
//# end
        }
    }
}
