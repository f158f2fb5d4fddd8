// efla_prepare.wgsl on matrix units (shared/matrix.wgsl), for k and v of f16:
//
//     A = strict_lower(D ∘ diag(γ) K̂K̂ᵀ)        T = (I + A)⁻¹        W = T diag(γ G) K̂        U = T diag(c) V
//
// Products of f16 are summed in f32. Each subgroup has 16 rows of the chunk.
//   1. K Kᵀ [C, D_k] x [D_k, C] of the keys as they are; norms, gates and decays come after, in f32;
//   2. T in f32;
//   3. W = X K [C, C] x [C, D_k] with X = T diag(γ G / |k|), and U = X V [C, C] x [C, D_v] with X = T diag(c).
//
// W and U go into the state, of f32, so no product may be coarser than f32. Keys and values are f16 as they come. Each
// is multiplied by a power of 2, at least 1, that brings its token's largest element near 2¹⁴: nothing is lost, and a
// token's column of X, divided by the same, says how much the token matters. A row of X is divided by a power of 2 near
// its largest element, multiplied by 2¹⁴ and taken apart into x = x' + x'' of two f16: 22 bits of elements down to 2⁻¹⁶
// of the row's largest, of others what is above 2⁻³⁹ of it. A row of X depends on no later token.
// Of like keys final_state errs by 1.5e-6, where efla_prepare.wgsl makes that 9.8e-7 at most; the limit is 2e-6.
//
// A later token's NaN must not reach a row: elements of K and V that are not finite are staged as 0, and the rows that
// see them get their products afterwards.

const SUBGROUPS: u32 = CHUNK / 16u;
const THREADS: u32 = SUBGROUPS * SUBGROUP;
const LEFT_ROWS: u32 = CHUNK;
// Keys, then X' and X''.
const LEFT_COLUMNS: u32 = 2u * CHUNK;
// Keys or values.
const RIGHT_ROWS: u32 = CHUNK;
// Vectors of 4 columns of a [C, 32] product that an invocation has.
const OWN: u32 = CHUNK * VECTORS / THREADS;

const OPERAND_SCALE: f32 = 16384.0;

// κ of tokens 4i..4i+3, for efla_decay.wgsl.
var<workgroup> left: array<vec4<f32>, CHUNK / 4u>;
var<workgroup> token_gate: array<vec4<f32>, CHUNK>;
// What a token's key or value is multiplied with, and what its column of T is.
var<workgroup> token_scale: array<f32, CHUNK>;
var<workgroup> token_factor: array<f32, CHUNK>;
// What a row of X is divided by.
var<workgroup> row_scale: array<f32, CHUNK>;
// Bits of the tokens that are not finite somewhere in the columns staged. One word is used.
var<workgroup> unusual: array<atomic<u32>, 4>;

// 4 columns, 0 past the end of the sequence and of the row.
fn load_raw_value(place: Place, token: u32, column: u32) -> vec4<f16> {
    if token >= place.tokens || column >= params.value_dim {
        return vec4<f16>();
    }
    let row = place.first + token;
    let base = params.v.x + place.batch * params.v.y + place.value_head * params.v.z + row * params.v.w;
    return v[(base + column) / 4u];
}

fn load_right(place: Place, is_key: bool, token: u32, column: u32) -> vec4<f32> {
    if is_key {
        return vec4<f32>(load_raw_key(place, token, column));
    }
    return vec4<f32>(load_raw_value(place, token, column));
}

// An element of T times its token's factor.
fn load_factor(row: u32, column: u32) -> f32 {
    return matrix[column * BLOCKS + row / 4u][row % 4u] * token_factor[column];
}

// `sum` and the products with what is not finite, of the tokens up to `row`.
fn add_unusual(
    sum: vec4<f32>,
    tokens: u32,
    place: Place,
    is_key: bool,
    token0: u32,
    row: u32,
    column: u32,
) -> vec4<f32> {
    var result = sum;
    for (var j = 0u; j <= row; j++) {
        if ((tokens >> j) & 1u) == 1u {
            let value = load_right(place, is_key, token0 + j, column);
            let weight = f32(left_halves[row * LEFT_PITCH + j]);
            result = select(result, result + weight * value, not_finite(value));
        }
    }
    return result;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
    @builtin(subgroup_id) subgroup: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= chunk_count() {
        return;
    }
    let place = place_of_chunk(index);
    let token0 = (index - place.chunk0) * CHUNK;
    let row0 = index * CHUNK;
    let own_row = SIDE * matrix_subgroup(subgroup, thread);
    if thread == 0u {
        atomicStore(&unusual[0], 0u);
    }
    if thread < CHUNK {
        token_gate[thread] = load_gate(place, token0 + thread);
    }

    // 1. K Kᵀ.
    var sum0 = SumMatrix();
    var sum1 = SumMatrix();
    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let column = 4u * (i % VECTORS);
            let key = load_raw_key(place, token0 + i / VECTORS, column0 + column);
            stage_left(i / VECTORS, column, key);
            stage_right(i / VECTORS, column, key);
        }
        workgroupBarrier();
        for (var step = 0u; step < COLUMNS; step += SIDE) {
            let keys = left_matrix(own_row, step);
            sum0 = multiply_add(keys, right_transposed(0u, step), sum0);
            sum1 = multiply_add(keys, right_transposed(SIDE, step), sum1);
        }
    }
    store_product(sum0, own_row, 0u);
    store_product(sum1, own_row, SIDE);
    if DECAY == 1u {
        stage_kappas(place, token0, thread);
    }
    workgroupBarrier();

    // A, 4 x 4 elements an invocation.
    for (var i = thread; i < BLOCKS * BLOCKS; i += THREADS) {
        let y = i / BLOCKS;
        let block = i % BLOCKS;
        let rows = 4u * y + vec4(0u, 1u, 2u, 3u);
        var decay = mat4x4(vec4(1.0), vec4(1.0), vec4(1.0), vec4(1.0));
        if DECAY == 1u && block <= y {
            decay = decays(y, block);
        }
        for (var j = 0u; j < 4u; j++) {
            let column = 4u * block + j;
            var scores = decay[j];
            for (var r = 0u; r < 4u; r++) {
                let gate = token_gate[4u * y + r];
                let cosine = product[(4u * y + r) * PRODUCT_PITCH + column] / (gate.z * token_gate[column].z);
                scores[r] *= gate.x * cosine;
            }
            matrix[column * BLOCKS + y] = select(vec4(0.0), scores, rows > vec4(column));
        }
    }

    // 2. T.
    invert(thread);

    // 3. W, then U.
    for (var side = 0u; side < 2u; side++) {
        let is_key = side == 0u;
        let dim = select(params.value_dim, params.key_dim, is_key);
        workgroupBarrier();
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            var top = vec4(0.0);
            for (var column = 4u * (i % VECTORS); column < dim; column += COLUMNS) {
                top = max(top, sizes(load_right(place, is_key, token0 + i / VECTORS, column)));
            }
            product[i / VECTORS * PRODUCT_PITCH + i % VECTORS] = max(max(top.x, top.y), max(top.z, top.w));
        }
        workgroupBarrier();
        if thread < CHUNK {
            let tops = max(load_product(thread, 0u), load_product(thread, 1u));
            let top = max(max(tops.x, tops.y), max(tops.z, tops.w));
            let scale = max(1.0, OPERAND_SCALE / powers_of_two(vec4(top)).x);
            let gate = token_gate[thread];
            var factor = gate.y;
            if is_key {
                factor = gate.x / gate.z;
                if DECAY == 1u {
                    factor = gate.x * load_decay(place, token0 + thread).y / gate.z;
                }
            }
            token_scale[thread] = scale;
            // A token of zeros doesn't matter.
            token_factor[thread] = factor * select(1.0 / scale, 0.0, top == 0.0);
        }
        workgroupBarrier();
        if thread < CHUNK {
            var top = 0.0;
            for (var j = 0u; j <= thread; j++) {
                top = max(top, sizes(vec4(load_factor(thread, j))).x);
            }
            row_scale[thread] = powers_of_two(vec4(top)).x;
        }
        workgroupBarrier();
        for (var i = thread; i < CHUNK * CHUNK; i += THREADS) {
            let row = i / CHUNK;
            let column = i % CHUNK;
            let factor = load_factor(row, column) / row_scale[row] * OPERAND_SCALE;
            let kept = select(0.0, factor, column <= row);
            let rounded = f16(kept);
            left_halves[row * LEFT_PITCH + column] = rounded;
            left_halves[row * LEFT_PITCH + CHUNK + column] = f16(kept - f32(rounded));
        }
        for (var column0 = 0u; column0 < dim; column0 += COLUMNS) {
            workgroupBarrier();
            for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
                let token = i / VECTORS;
                let column = 4u * (i % VECTORS);
                let value = load_right(place, is_key, token0 + token, column0 + column);
                let hidden = not_finite(value);
                if any(hidden) {
                    atomicOr(&unusual[0], 1u << token);
                }
                stage_right(token, column, vec4<f16>(select(value, vec4(0.0), hidden) * token_scale[token]));
            }
            workgroupBarrier();
            let tokens = atomicLoad(&unusual[0]);
            sum0 = SumMatrix();
            sum1 = SumMatrix();
            for (var step = 0u; step < CHUNK; step += SIDE) {
                let factors = left_matrix(own_row, step);
                let rest = left_matrix(own_row, CHUNK + step);
                sum0 = multiply_add(factors, right_matrix(step, 0u), sum0);
                sum1 = multiply_add(factors, right_matrix(step, SIDE), sum1);
                sum0 = multiply_add(rest, right_matrix(step, 0u), sum0);
                sum1 = multiply_add(rest, right_matrix(step, SIDE), sum1);
            }
            store_product(sum0, own_row, 0u);
            store_product(sum1, own_row, SIDE);
            workgroupBarrier();
            if thread == 0u {
                atomicStore(&unusual[0], 0u);
            }
            for (var i = 0u; i < OWN; i++) {
                let own = i * THREADS + thread;
                let row = own / VECTORS;
                let column = column0 + 4u * (own % VECTORS);
                var sum = load_product(row, own % VECTORS);
                if tokens != 0u {
                    sum = add_unusual(sum, tokens, place, is_key, token0, row, column);
                }
                sum = sum / OPERAND_SCALE * row_scale[row];
                let at = (row0 + row) * dim + column;
                for (var c = 0u; c < 4u && column < dim; c++) {
                    if is_key {
                        w[at + c] = sum[c];
                    } else {
                        u[at + c] = sum[c];
                    }
                }
            }
        }
    }
}
