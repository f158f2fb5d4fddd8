// EFLA, pass 1 of 3, all chunks in parallel: the part of a chunk that does not depend on the state before it.
//
// With K̂ the chunk's unit keys and γ, c its gates (rows are tokens, C = CHUNK):
//
//     A = strict_lower(diag(γ) K̂K̂ᵀ)  [C, D_k] x [D_k, C]        T = (I + A)⁻¹ by forward substitution
//     W = T diag(γ) K̂  [C, C] x [C, D_k]                        U = T diag(c) V  [C, C] x [C, D_v]
//
// For the exact integrator no entry of A or T exceeds 1, however large or unequal the keys are.
// W and U go to the workspace, padded to whole chunks: w [B, H_v, chunks·C, D_k], u [B, H_v, chunks·C, D_v].
// An invocation has 4 rows x 4 columns of a product.
//
// With DECAY token t sees what token j wrote through D_{tj} and the state before the chunk through G_t (efla_tile.wgsl):
//
//     A = strict_lower(D ∘ diag(γ) K̂K̂ᵀ)        W = T diag(γ G) K̂
//
// With REVERSE it prepares the backward scan, which solves with the transpose (efla_state.wgsl says what for):
//
//     w = −TᵀK̂  [C, C] x [C, D_k]        u ← Tᵀu  [C, C] x [C, D_v]        with DECAY w = −Tᵀ diag(E) K̂

const THREADS: u32 = CHUNK / 4u * VECTORS;
// 4-column blocks of the C x C product that an invocation has.
const WIDE: u32 = (BLOCKS + VECTORS - 1u) / VECTORS;

var<workgroup> left: array<vec4<f32>, CHUNK * PITCH>;

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
    let place = place_of_chunk(index);
    let token0 = (index - place.chunk0) * CHUNK;
    let row0 = index * CHUNK;
    let x = thread % VECTORS;
    let y = thread / VECTORS;

    // K̂K̂ᵀ: columns 4(x + VECTORS·n)... of rows 4y...
    var product: array<vec4<f32>, 4u * WIDE>;
    for (var i = 0u; i < 4u * WIDE; i++) {
        product[i] = vec4(0.0);
    }
    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let row = i / VECTORS;
            left[row * PITCH + i % VECTORS] = load_unit_key(place, token0 + row, column0 + 4u * (i % VECTORS));
        }
        workgroupBarrier();
        for (var n = 0u; n < WIDE; n++) {
            let block = x + VECTORS * n;
            if block < BLOCKS && select(block <= y, block >= y, REVERSE == 1u) {
                for (var c = 0u; c < VECTORS; c++) {
                    let r0 = left[(4u * y) * PITCH + c];
                    let r1 = left[(4u * y + 1u) * PITCH + c];
                    let r2 = left[(4u * y + 2u) * PITCH + c];
                    let r3 = left[(4u * y + 3u) * PITCH + c];
                    for (var j = 0u; j < 4u; j++) {
                        let k_j = left[(4u * block + j) * PITCH + c];
                        product[4u * n + j] += vec4(dot(r0, k_j), dot(r1, k_j), dot(r2, k_j), dot(r3, k_j));
                    }
                }
            }
        }
    }
    let rows = 4u * y + vec4(0u, 1u, 2u, 3u);
    let gammas = vec4(
        load_gate(place, token0 + rows.x).x,
        load_gate(place, token0 + rows.y).x,
        load_gate(place, token0 + rows.z).x,
        load_gate(place, token0 + rows.w).x,
    );
    if DECAY == 1u {
        stage_kappas(place, token0, thread);
    }
    for (var n = 0u; n < WIDE; n++) {
        let block = x + VECTORS * n;
        if DECAY == 1u && block < BLOCKS && select(block <= y, block >= y, REVERSE == 1u) {
            let decay = decays(y, block);
            product[4u * n] *= decay[0];
            product[4u * n + 1u] *= decay[1];
            product[4u * n + 2u] *= decay[2];
            product[4u * n + 3u] *= decay[3];
        }
        for (var j = 0u; j < 4u && block < BLOCKS; j++) {
            let column = 4u * block + j;
            if REVERSE == 1u {
                let gamma = load_gate(place, token0 + column).x;
                matrix[column * BLOCKS + y] = select(vec4(0.0), gamma * product[4u * n + j], rows < vec4(column));
            } else {
                matrix[column * BLOCKS + y] = select(vec4(0.0), gammas * product[4u * n + j], rows > vec4(column));
            }
        }
    }
    invert(thread);

    // W and U, COLUMNS columns at a time: first those of K̂, then those of V.
    let key_stages = (params.key_dim + COLUMNS - 1u) / COLUMNS;
    let value_stages = (params.value_dim + COLUMNS - 1u) / COLUMNS;
    for (var s = 0u; s < key_stages + value_stages; s++) {
        let is_key = s < key_stages;
        let column0 = COLUMNS * select(s - key_stages, s, is_key);
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let token = token0 + i / VECTORS;
            let column = column0 + 4u * (i % VECTORS);
            let gate = load_gate(place, token);
            var value: vec4<f32>;
            if REVERSE == 1u {
                if is_key {
                    value = -load_unit_key(place, token, column);
                } else {
                    value = load_u(row0 + i / VECTORS, column);
                }
            } else if is_key {
                value = gate.x * load_unit_key(place, token, column);
            } else {
                value = gate.y * load_v(place, token, column);
            }
            if DECAY == 1u && is_key {
                let decay = load_decay(place, token);
                value *= select(decay.y, decay.z, REVERSE == 1u);
            }
            left[i / VECTORS * PITCH + i % VECTORS] = value;
        }
        // Behind it u may be overwritten: all of these columns are staged.
        storageBarrier();
        workgroupBarrier();
        var sum0 = vec4(0.0);
        var sum1 = vec4(0.0);
        var sum2 = vec4(0.0);
        var sum3 = vec4(0.0);
        let end = select(4u * y + 4u, CHUNK, REVERSE == 1u);
        for (var j = select(0u, 4u * y, REVERSE == 1u); j < end; j++) {
            let t_j = matrix[j * BLOCKS + y];
            let value = left[j * PITCH + x];
            let kept = select(rows >= vec4(j), rows <= vec4(j), vec4(REVERSE == 1u));
            sum0 += select(vec4(0.0), t_j.x * value, kept.x);
            sum1 += select(vec4(0.0), t_j.y * value, kept.y);
            sum2 += select(vec4(0.0), t_j.z * value, kept.z);
            sum3 += select(vec4(0.0), t_j.w * value, kept.w);
        }
        var sums = array<vec4<f32>, 4>(sum0, sum1, sum2, sum3);
        let column = column0 + 4u * x;
        let dim = select(params.value_dim, params.key_dim, is_key);
        for (var r = 0u; r < 4u; r++) {
            let at = (row0 + 4u * y + r) * dim + column;
            for (var c = 0u; c < 4u && column + c < dim; c++) {
                if is_key {
                    w[at + c] = sums[r][c];
                } else {
                    u[at + c] = sums[r][c];
                }
            }
        }
    }
}
