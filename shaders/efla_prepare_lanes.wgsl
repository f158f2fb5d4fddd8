// efla_prepare for software adapters: a workgroup is one subgroup, the chunk's matrix A stays in registers (lanes.wgsl
// says why). W = (I + A)⁻¹ diag(γ) K̂ and U = (I + A)⁻¹ diag(c) V come by forward substitution, 4 columns at a time; with
// REVERSE by back substitution with Aᵀ.

const KEY: u32 = 0u;

fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    return load_unit_key(place, token0 + row, column);
}

// Column n of the matrix, row n of x final: what row n gives to the others.
fn eliminate(x: ptr<function, mat4x4<f32>>, column: vec4<f32>, final_row: vec4<f32>, kept: vec4<bool>) {
//# for c in 4
    (*x)[$c] -= select(vec4(0.0), column * final_row[$c], kept);
//# end
}

// x ← (I + matrix)⁻¹ x, whose columns are 4 columns of the lane's rows.
fn solve(matrix: ptr<function, Sums>, x: ptr<function, mat4x4<f32>>) {
    if REVERSE == 0u {
//# for l in LANES
//# for r in x y z w
        {
            let own = vec4((*x)[0].$r, (*x)[1].$r, (*x)[2].$r, (*x)[3].$r);
            let n = 4u * $l + at_$r;
            eliminate(x, (*matrix)[4u * $l + at_$r], subgroupBroadcast(own, $lu), rows > vec4(n));
        }
//# end
//# end
    } else {
//# for l in 7 6 5 4 3 2 1 0
//# for r in w z y x
        {
            let own = vec4((*x)[0].$r, (*x)[1].$r, (*x)[2].$r, (*x)[3].$r);
            let n = 4u * $l + at_$r;
            eliminate(x, (*matrix)[4u * $l + at_$r], subgroupBroadcast(own, $lu), rows < vec4(n));
        }
//# end
//# end
    }
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
    var matrix: Sums;
    dots(&matrix, KEY, rows, KEY, &nodes, params.key_dim);
    let gate0 = load_gate(place, token0 + rows.x);
    let gate1 = load_gate(place, token0 + rows.y);
    let gate2 = load_gate(place, token0 + rows.z);
    let gate3 = load_gate(place, token0 + rows.w);
    let gammas = vec4(gate0.x, gate1.x, gate2.x, gate3.x);
    let writes = vec4(gate0.y, gate1.y, gate2.y, gate3.y);
//# for l in LANES
//# for r in x y z w
    {
        let n = vec4(4u * $l + at_$r);
        let product = matrix[4u * $l + at_$r];
        if REVERSE == 0u {
            matrix[4u * $l + at_$r] = select(vec4(0.0), gammas * product, rows > n);
        } else {
            matrix[4u * $l + at_$r] = select(vec4(0.0), subgroupBroadcast(gammas.$r, $lu) * product, rows < n);
        }
    }
//# end
//# end
    let w_at = (row0 + rows) * key_vectors();
    for (var column = 0u; column < params.key_dim; column += 4u) {
        var x = load_rows(KEY, rows, column);
        let factor = select(gammas, vec4(-1.0), REVERSE == 1u);
        x = mat4x4(factor * x[0], factor * x[1], factor * x[2], factor * x[3]);
        solve(&matrix, &x);
        let by_row = transpose(x);
        let at = w_at + column / 4u;
//# for r in x y z w
        w[at.$r] = by_row[at_$r];
//# end
    }
    let u_at = (row0 + rows) * value_vectors();
    for (var column = 0u; column < params.value_dim; column += 4u) {
        let at = u_at + column / 4u;
        var x: mat4x4<f32>;
        if REVERSE == 1u {
            x = transpose(mat4x4(u[at.x], u[at.y], u[at.z], u[at.w]));
        } else {
            x = transpose(mat4x4(
                load_v(place, token0 + rows.x, column),
                load_v(place, token0 + rows.y, column),
                load_v(place, token0 + rows.z, column),
                load_v(place, token0 + rows.w, column),
            ));
            x = mat4x4(writes * x[0], writes * x[1], writes * x[2], writes * x[3]);
        }
        solve(&matrix, &x);
        let by_row = transpose(x);
//# for r in x y z w
        u[at.$r] = by_row[at_$r];
//# end
    }
}
