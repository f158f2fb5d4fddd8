// EFLA backward, last step of d_q and (with KEYS) d_k: the sum over the value heads that read a query or key, in a
// fixed order, then the gradient through its norm if it was normalised,
//
//     d_x = (d − x̂(x̂·d))/|x|, and 0 for x = 0.
//
// A row has ROW_THREADS invocations, which take 4 of its columns in turn.

// 4 columns of the sum over the value heads' parts.
fn sum_parts(part0: u32, group: u32, rows: u32, column: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var g = 0u; g < group; g++) {
        let at = part0 + g * rows * params.key_dim + clamped(column, params.key_dim);
        sum += vec4(w[at.x], w[at.y], w[at.z], w[at.w]);
    }
    return within(sum, column, params.key_dim);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS / ROW_THREADS + thread / ROW_THREADS;
    let heads = params.heads;
    // Without value heads nothing was computed, and the sum is 0.
    let group = select(params.group, 0u, params.value_sequences == 0u);
    // Rows are those of whole chunks.
    let rows = params.chunks * CHUNK;
    let in_grid = i < params.batch * heads * rows;
    let of_head = select(0u, i / rows, in_grid);
    let row = select(0u, i % rows, in_grid);
    let head = of_head % heads;
    let batch = of_head / heads;
    // Of the first value head that reads the query or key.
    let sequence = batch * params.value_heads + head * params.group;
    let chunk = sequence * params.chunks + row / CHUNK;
    let place = place_of_chunk(chunk);
    let token = (chunk - place.chunk0) * CHUNK + row % CHUNK;
    let exists = in_grid && token < place.tokens;
    let position = place.first + token;
    let part0 = (sequence * rows + row) * params.key_dim;
    let x_layout = select(params.q, params.k, KEYS == 1u);
    let d_x_layout = select(params.d_q, params.d_k, KEYS == 1u);
    let x_at = x_layout.x + batch * x_layout.y + head * x_layout.z + position * x_layout.w;
    let d_x_at = d_x_layout.x + batch * d_x_layout.y + head * d_x_layout.z + position * d_x_layout.w;
    // A loop over columns runs not at all for a row that does not exist.
    let end = select(0u, params.key_dim, exists);

    let normalized = select(params.normalize_q, params.normalize_k, KEYS == 1u) == 1u && group > 0u;
    var divisor = 1.0;
    var along = 0.0;
    var is_zero = false;
    if normalized {
        if exists {
            divisor = gates[4u * (place.flat + token) + select(3u, 2u, KEYS == 1u)];
        }
        // x̂·d and x̂·x̂.
        var partial = vec2(0.0);
        for (var d = 4u * (thread % ROW_THREADS); d < end; d += 4u * ROW_THREADS) {
            let unit = x_load4(x_at, d, params.key_dim) / divisor;
            partial += vec2(dot(unit, sum_parts(part0, group, rows, d)), dot(unit, unit));
        }
        let sum = row_sum(thread, vec3(partial, 0.0));
        // x̂·x̂ is 1 but for the norm's own rounding, which must not leave a part along x.
        is_zero = sum.y == 0.0;
        along = sum.x / select(sum.y, 1.0, is_zero);
    }
    for (var d = 4u * (thread % ROW_THREADS); d < end; d += 4u * ROW_THREADS) {
        var value = sum_parts(part0, group, rows, d);
        if normalized {
            let unit = x_load4(x_at, d, params.key_dim) / divisor;
            value = select((value - unit * along) / divisor, vec4(0.0), is_zero);
        }
        d_x_store4(d_x_at, d, params.key_dim, value);
    }
}
