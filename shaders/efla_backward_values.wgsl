// EFLA backward, all chunks in parallel: what a token finds in the state, and the gradients that need only that.
//
//     P = K̂S + strict_lower(K̂K̂ᵀ) V_new  [C, D_k] x [D_k, D_v] + [C, C] x [C, D_v]        X = diag(α)V − diag(c)P
//
// P is Sᵀk̂ of the state before each token, X the token's update over |k| (right at k = 0 too). From Y, per row,
//
//     d_v = c Y        d_β = ∂α/∂β |k| (v − |k| P)·Y        s = 2 (h v − h|k| P)·Y
//
// s is how d_k grows along k̂ because α depends on λ = |k|². The factors come from efla_gates; they are applied before
// the sum over columns, so that it does not subtract two large numbers.
// X replaces V_new in u, s replaces h among the rates.

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

fn load_y(row: u32, column: u32) -> vec4<f32> {
    let at = row * params.value_dim + clamped(column, params.value_dim);
    return within(vec4(y[at.x], y[at.y], y[at.z], y[at.w]), column, params.value_dim);
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
    let place = tile.place;
    multiply_rows(tile, SCORES, params.key_dim, STRICT_LOWER);

    // Per row of this invocation, over its columns.
    var d_betas = vec4(0.0);
    var alongs = vec4(0.0);
    let d_v_base = params.d_v.x + place.batch * params.d_v.y + place.value_head * params.d_v.z;
    for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
        var found = mat4x4<f32>();
        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            workgroupBarrier();
            stage_left(tile, SCORES, column0);
            stage_state(tile, column0, value0);
            workgroupBarrier();
            add_product(tile, &found);
        }
        workgroupBarrier();
        stage_right(tile, UPDATES, value0);
        // Behind it u may be overwritten: all of these columns are staged.
        storageBarrier();
        workgroupBarrier();
        add_triangle(tile, STRICT_LOWER, &found);

        let column = value0 + 4u * tile.x;
        for (var r = 0u; r < 4u; r++) {
            let row = 4u * tile.y + r;
            let token = tile.token0 + row;
            let gate = load_gate(place, token);
            let rates = load_rates(place, token);
            // |k| as the gates have it. Where k = 0 it says 1, but there P = 0.
            let size = select(gate.z, 1.0, params.normalize_k == 1u);
            let y_row = load_y(tile.row0 + row, column);
            let v_row = load_v(place, token, column);
            d_betas[r] += dot(y_row, rates.w * v_row - rates.w * size * found[r]);
            alongs[r] += dot(y_row, rates.y * v_row - rates.z * found[r]);
            let x_row = rates.x * v_row - gate.y * found[r];
            let d_v_row = gate.y * y_row;
            let u_at = (tile.row0 + row) * params.value_dim + column;
            let d_v_at = d_v_base + token * params.d_v.w + column;
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                u[u_at + c] = x_row[c];
                if token < params.tokens {
                    d_v[d_v_at + c] = d_v_row[c];
                }
            }
        }
    }

    // Both sums over all columns, through the memory that staged them.
    workgroupBarrier();
    for (var r = 0u; r < 4u; r++) {
        left[(4u * tile.y + r) * PITCH + tile.x] = vec4(d_betas[r], alongs[r], 0.0, 0.0);
    }
    workgroupBarrier();
    let token = tile.token0 + thread;
    if thread < CHUNK && token < params.tokens {
        var sum = vec4(0.0);
        for (var x = 0u; x < VECTORS; x++) {
            sum += left[thread * PITCH + x];
        }
        d_beta[params.d_beta.x + place.batch * params.d_beta.y + place.value_head * params.d_beta.z
            + token * params.d_beta.w] = sum.x;
        gates[rates_at(place, token) + 1u] = 2.0 * sum.y;
    }
}
