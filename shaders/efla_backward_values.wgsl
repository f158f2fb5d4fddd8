// EFLA backward, per token and value head: the gradients that need only what the token's key found in the state,
// P = Sᵀk̂ of the state before the token, and Y. Per row,
//
//     d_v = c Y        d_β = ∂α/∂β |k| (v − |k| P)·Y        s = 2 (h v − h|k| P)·Y        X = αv − cP
//
// X is the token's update over |k|, right at k = 0 too; s is how d_k grows along k̂ because α depends on λ = |k|². The
// factors come from efla_gates; they are applied before the sum over columns, so that it does not subtract two large
// numbers. X replaces P in `found`, s replaces h among the rates.
// With DECAY, where what belongs to writing has a prime,
//
//     d_v = c'Y    d_β = |k| (∂α'/∂β v − |k| ∂α/∂β P)·Y    s = 2 (h'v − h|k| P)·Y    X = α'v − α|k| P
//
// and d_log_decay has the part −|k| ∂α'/∂κ v·Y, which replaces its factor.
// A row has ROW_THREADS invocations, which take 4 of its columns in turn.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS / ROW_THREADS + thread / ROW_THREADS;
    // Rows are those of whole chunks.
    let in_grid = i < chunk_count() * CHUNK;
    let place = place_of_chunk(select(0u, i / CHUNK, in_grid));
    let token = i - place.chunk0 * CHUNK;
    let exists = in_grid && token < place.tokens;
    var gate = vec4(0.0);
    var rates = vec4(0.0);
    if exists {
        gate = load_gate(place, token);
        rates = load_rates(place, token);
    }
    // |k|² ∂α/∂β, α|k| and the factor of the part of d_log_decay
    var erase = vec3(0.0);
    // |k| as the gates have it. Where k = 0 it says 1, but there P = 0.
    let size = select(gate.z, 1.0, params.normalize_k == 1u);
    if DECAY == 0u {
        erase = vec3(rates.w * size, gate.y, 0.0);
    } else if exists {
        erase = vec3(
            gates[plane_at(ERASE_BY_BETA, place, token)] * size,
            gates[plane_at(ERASE_C, place, token)],
            gates[plane_at(DECAY_BY_WRITE, place, token)],
        );
    }
    let row0 = i * params.value_dim;
    let v0 = params.v.x + place.batch * params.v.y + place.value_head * params.v.z + (place.first + token) * params.v.w;
    let d_v0 = params.d_v.x + place.batch * params.d_v.y + place.value_head * params.d_v.z + (place.first + token) * params.d_v.w;
    // d_β, s/2 and the part of d_log_decay.
    var sum = vec3(0.0);
    // A loop over columns runs not at all for a row that does not exist.
    for (var c = 4u * (thread % ROW_THREADS); c < select(0u, params.value_dim, exists); c += 4u * ROW_THREADS) {
        let at = row0 + clamped(c, params.value_dim);
        let y_c = within(vec4(y[at.x], y[at.y], y[at.z], y[at.w]), c, params.value_dim);
        let v_c = v_load4(v0, c, params.value_dim);
        let p = within(vec4(found[at.x], found[at.y], found[at.z], found[at.w]), c, params.value_dim);
        sum += vec3(
            dot(y_c, rates.w * v_c - erase.x * p),
            dot(y_c, rates.y * v_c - rates.z * p),
            erase.z * dot(y_c, v_c),
        );
        d_v_store4(d_v0, c, params.value_dim, gate.y * y_c);
        let update = rates.x * v_c - erase.y * p;
        for (var i = 0u; i < 4u && c + i < params.value_dim; i++) {
            found[row0 + c + i] = update[i];
        }
    }
    sum = row_sum(thread, sum);
    if exists && thread % ROW_THREADS == 0u {
        d_beta[params.d_beta.x + place.batch * params.d_beta.y + place.value_head * params.d_beta.z
            + (place.first + token) * params.d_beta.w] = sum.x;
        gates[rates_at(place, token) + 1u] = 2.0 * sum.y;
        if DECAY == 1u {
            gates[plane_at(DECAY_BY_WRITE, place, token)] = sum.z;
        }
    }
}
