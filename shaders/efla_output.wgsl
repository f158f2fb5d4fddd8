// EFLA, pass 3 of 3, all chunks in parallel:
//
//     O = scale (Q S + P V_new)   [C, D_k] x [D_k, D_v] + [C, C] x [C, D_v]        P = lower_incl(Q K̂ᵀ)  [C, D_k] x [D_k, C]
//
// with S the state before the chunk and V_new from pass 2. An invocation has 4 rows x 4 columns of a product.

const THREADS: u32 = CHUNK / 4u * VECTORS;
const BLOCKS: u32 = CHUNK / 4u;
const WIDE: u32 = (BLOCKS + VECTORS - 1u) / VECTORS;
const OTHER_ROWS: u32 = max(CHUNK, COLUMNS);

var<workgroup> q_stage: array<vec4<f32>, CHUNK * PITCH>;
// K̂ [C][COLUMNS], then S [COLUMNS][COLUMNS], then V_new [C][COLUMNS].
var<workgroup> stage: array<vec4<f32>, OTHER_ROWS * PITCH>;
// P, transposed: [column][rows 4i..4i+3].
var<workgroup> matrix: array<vec4<f32>, CHUNK * BLOCKS>;

// 4 columns of a query times scale (and over its norm, if asked for).
fn load_q(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= params.tokens || column >= params.key_dim {
        return vec4(0.0);
    }
    let base = params.q.x + place.batch * params.q.y + place.head * params.q.z + token * params.q.w;
    let end = params.key_dim - 1u;
    let c = column + vec4(0u, 1u, 2u, 3u);
    let at = base + min(c, vec4(end));
    let x = vec4(q[at.x], q[at.y], q[at.z], q[at.w]) / load_gate(place, token).w;
    return select(vec4(0.0), params.scale * x, c <= vec4(end));
}

// 4 columns of a row of a dense [_, value_dim] range: states if `from_states`, else V_new.
fn load_dense(from_states: bool, row: u32, column: u32) -> vec4<f32> {
    if column >= params.value_dim {
        return vec4(0.0);
    }
    let end = params.value_dim - 1u;
    let c = column + vec4(0u, 1u, 2u, 3u);
    let at = row * params.value_dim + min(c, vec4(end));
    var x: vec4<f32>;
    if from_states {
        x = vec4(states[at.x], states[at.y], states[at.z], states[at.w]);
    } else {
        x = vec4(u[at.x], u[at.y], u[at.z], u[at.w]);
    }
    return select(vec4(0.0), x, c <= vec4(end));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = workgroup_index(workgroup, workgroups);
    if index >= params.chunks * params.batch * params.value_heads {
        return;
    }
    let chunk = index % params.chunks;
    let place = place_of(index / params.chunks);
    let token0 = chunk * CHUNK;
    let row0 = (place.sequence * params.chunks + chunk) * CHUNK;
    let state0 = (place.sequence * params.chunks + chunk) * params.key_dim;
    let x = thread % VECTORS;
    let y = thread / VECTORS;

    var product: array<vec4<f32>, 4u * WIDE>;
    for (var i = 0u; i < 4u * WIDE; i++) {
        product[i] = vec4(0.0);
    }
    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let row = i / VECTORS;
            let column = column0 + 4u * (i % VECTORS);
            q_stage[row * PITCH + i % VECTORS] = load_q(place, token0 + row, column);
            stage[row * PITCH + i % VECTORS] = load_unit_key(place, token0 + row, column);
        }
        workgroupBarrier();
        for (var n = 0u; n < WIDE; n++) {
            let block = x + VECTORS * n;
            if block <= y {
                for (var c = 0u; c < VECTORS; c++) {
                    let q0 = q_stage[(4u * y) * PITCH + c];
                    let q1 = q_stage[(4u * y + 1u) * PITCH + c];
                    let q2 = q_stage[(4u * y + 2u) * PITCH + c];
                    let q3 = q_stage[(4u * y + 3u) * PITCH + c];
                    for (var j = 0u; j < 4u; j++) {
                        let k_j = stage[(4u * block + j) * PITCH + c];
                        product[4u * n + j] += vec4(dot(q0, k_j), dot(q1, k_j), dot(q2, k_j), dot(q3, k_j));
                    }
                }
            }
        }
    }
    let rows = 4u * y + vec4(0u, 1u, 2u, 3u);
    for (var n = 0u; n < WIDE; n++) {
        let block = x + VECTORS * n;
        for (var j = 0u; j < 4u && block < BLOCKS; j++) {
            let column = 4u * block + j;
            matrix[column * BLOCKS + y] = select(vec4(0.0), product[4u * n + j], rows >= vec4(column));
        }
    }

    let out_base = params.out.x + place.batch * params.out.y + place.value_head * params.out.z;
    for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
        var sum0 = vec4(0.0);
        var sum1 = vec4(0.0);
        var sum2 = vec4(0.0);
        var sum3 = vec4(0.0);
        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            workgroupBarrier();
            for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
                let row = i / VECTORS;
                q_stage[row * PITCH + i % VECTORS] = load_q(place, token0 + row, column0 + 4u * (i % VECTORS));
            }
            for (var i = thread; i < COLUMNS * VECTORS; i += THREADS) {
                let row = column0 + i / VECTORS;
                var value = vec4(0.0);
                if row < params.key_dim {
                    value = load_dense(true, state0 + row, value0 + 4u * (i % VECTORS));
                }
                stage[i / VECTORS * PITCH + i % VECTORS] = value;
            }
            workgroupBarrier();
            for (var d = 0u; d < VECTORS; d++) {
                let s0 = stage[(4u * d) * PITCH + x];
                let s1 = stage[(4u * d + 1u) * PITCH + x];
                let s2 = stage[(4u * d + 2u) * PITCH + x];
                let s3 = stage[(4u * d + 3u) * PITCH + x];
                let q0 = q_stage[(4u * y) * PITCH + d];
                let q1 = q_stage[(4u * y + 1u) * PITCH + d];
                let q2 = q_stage[(4u * y + 2u) * PITCH + d];
                let q3 = q_stage[(4u * y + 3u) * PITCH + d];
                sum0 += q0.x * s0 + q0.y * s1 + q0.z * s2 + q0.w * s3;
                sum1 += q1.x * s0 + q1.y * s1 + q1.z * s2 + q1.w * s3;
                sum2 += q2.x * s0 + q2.y * s1 + q2.z * s2 + q2.w * s3;
                sum3 += q3.x * s0 + q3.y * s1 + q3.z * s2 + q3.w * s3;
            }
        }
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            stage[i / VECTORS * PITCH + i % VECTORS] =
                load_dense(false, row0 + i / VECTORS, value0 + 4u * (i % VECTORS));
        }
        workgroupBarrier();
        for (var j = 0u; j < 4u * y; j++) {
            let p_j = matrix[j * BLOCKS + y];
            let value = stage[j * PITCH + x];
            sum0 += p_j.x * value;
            sum1 += p_j.y * value;
            sum2 += p_j.z * value;
            sum3 += p_j.w * value;
        }
        // On the diagonal the zeros above it are selected: a later token's NaN may not reach a row.
        for (var r = 0u; r < 4u; r++) {
            let p_j = matrix[(4u * y + r) * BLOCKS + y];
            let value = stage[(4u * y + r) * PITCH + x];
            sum0 += select(vec4(0.0), p_j.x * value, r == 0u);
            sum1 += select(vec4(0.0), p_j.y * value, r <= 1u);
            sum2 += select(vec4(0.0), p_j.z * value, r <= 2u);
            sum3 += p_j.w * value;
        }
        var sums = array<vec4<f32>, 4>(sum0, sum1, sum2, sum3);
        let column = value0 + 4u * x;
        for (var r = 0u; r < 4u && token0 + 4u * y + r < params.tokens; r++) {
            let at = out_base + (token0 + 4u * y + r) * params.out.w + column;
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                out[at + c] = sums[r][c];
            }
        }
    }
}
