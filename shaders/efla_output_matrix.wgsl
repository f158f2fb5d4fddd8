// efla_output.wgsl on matrix units (shared/matrix.wgsl), for q, k and out of f16:
//
//     O = scale (Q S + P V_new)        P = lower_incl(Q K̂ᵀ)        with DECAY diag(G) Q S and lower_incl(D ∘ QK̂ᵀ)
//
// Products of f16 are summed in f32. Each subgroup has 16 rows of the chunk.
//   1. Q Kᵀ [C, D_k] x [D_k, C] of the inputs as they are; norms and decays come after, in f32;
//   2. Q S [C, D_k] x [D_k, D_v], where a column of S is divided by a power of 2 near its largest element;
//   3. P V_new [C, C] x [C, D_v], where a token's V_new is divided by such a power, a_j, which P is multiplied with:
//      with b_t the largest a_j of the tokens up to t, no P_tj a_j / (|q_t| b_t) exceeds 1. No token depends on a
//      later one.
// What is at most 1 (or 2) is multiplied by 2¹³ on top, so that elements down to 2⁻²⁷ of the largest keep 11 bits.
//
// One rounding to f16 is too coarse: of like keys each update takes back the one before, and the errors of all add up
// while the sum does not (1.3e-3 of out, against 2e-4). So S, V_new and P become x = x' + x'' of two f16, 22 bits, and
// what they multiply all but x'' y''. Both halves fit into workgroup memory for chunks of 32, not of 64.
//
// efla_state does without matrix units: what it multiplies is the state, of f32 and carried on from chunk to chunk.
//
// A later token's NaN must not reach a row: elements of V_new that are not finite are staged as 0, and the rows that
// see them get their products afterwards.

const SUBGROUPS: u32 = CHUNK / 16u;
const THREADS: u32 = SUBGROUPS * SUBGROUP;
const LEFT_ROWS: u32 = CHUNK;
// Queries, then P' and P''.
const LEFT_COLUMNS: u32 = 32u + 2u * CHUNK;
const SCORES: u32 = 32u;
// Keys; S' and S''; V_new' and V_new''.
const RIGHT_ROWS: u32 = 2u * max(CHUNK, COLUMNS);
// Vectors of 4 columns of a [C, 32] product that an invocation has.
const OWN: u32 = CHUNK * VECTORS / THREADS;

const OPERAND_SCALE: f32 = 8192.0;

// κ of tokens 4i..4i+3, for efla_decay.wgsl.
var<workgroup> left: array<vec4<f32>, CHUNK / 4u>;
// Of every token |q_t|, a_t and b_t.
var<workgroup> query_norm: array<f32, CHUNK>;
var<workgroup> token_scale: array<f32, CHUNK>;
var<workgroup> row_bound: array<f32, CHUNK>;
// What the columns of S are divided by.
var<workgroup> column_scale: array<vec4<f32>, VECTORS>;
// Bits of the tokens whose V_new is not finite somewhere in the columns staged. One word is used.
var<workgroup> unusual: array<atomic<u32>, 4>;

// 4 columns, 0 past the end of the sequence and of the row.
fn load_raw_query(place: Place, token: u32, column: u32) -> vec4<f16> {
    if token >= place.tokens || column >= params.key_dim {
        return vec4<f16>();
    }
    let base = params.q.x + place.batch * params.q.y + place.head * params.q.z + (place.first + token) * params.q.w;
    return q[(base + column) / 4u];
}

// 4 columns of a row of all states [B, H_v, chunks, D_k, D_v].
fn load_state(row: u32, column: u32) -> vec4<f32> {
    let at = row * params.value_dim + clamped(column, params.value_dim);
    return within(vec4(states[at.x], states[at.y], states[at.z], states[at.w]), column, params.value_dim);
}

// x' where it belongs, x'' `rest` rows further down.
fn stage_split(row: u32, rest: u32, column: u32, value: vec4<f32>) {
    let rounded = vec4<f16>(value);
    stage_right(row, column, rounded);
    stage_right(rest + row, column, vec4<f16>(value - vec4<f32>(rounded)));
}

fn stage_queries(place: Place, token0: u32, column0: u32, thread: u32) {
    for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
        let column = 4u * (i % VECTORS);
        stage_left(i / VECTORS, column, load_raw_query(place, token0 + i / VECTORS, column0 + column));
    }
}

// `sum` and the products with the elements of V_new that are not finite, of the tokens up to `row`.
fn add_unusual(sum: vec4<f32>, tokens: u32, row: u32, row0: u32, column: u32) -> vec4<f32> {
    var result = sum;
    for (var j = 0u; j <= row; j++) {
        if ((tokens >> j) & 1u) == 1u {
            let value = load_u(row0 + j, column);
            let weight = f32(left_halves[row * LEFT_PITCH + SCORES + j]);
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
    let state0 = index * params.key_dim;
    let own_row = SIDE * matrix_subgroup(subgroup, thread);
    if thread == 0u {
        atomicStore(&unusual[0], 0u);
    }

    // 1. Q Kᵀ, 16 columns a matrix; |q_t| on the way.
//# for n in TILES
    var scores$n = SumMatrix();
//# end
    var square = 0.0;
    for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
        workgroupBarrier();
        stage_queries(place, token0, column0, thread);
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let column = 4u * (i % VECTORS);
            stage_right(i / VECTORS, column, load_raw_key(place, token0 + i / VECTORS, column0 + column));
        }
        workgroupBarrier();
        if thread < CHUNK {
            for (var c = 0u; c < COLUMNS; c++) {
                let x = f32(left_halves[thread * LEFT_PITCH + c]);
                square += x * x;
            }
        }
        for (var step = 0u; step < COLUMNS; step += SIDE) {
            let queries = left_matrix(own_row, step);
//# for n in TILES
            scores$n = multiply_add(queries, right_transposed($nu * SIDE, step), scores$n);
//# end
        }
    }

    // a_t and b_t.
    for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
        var top = vec4(0.0);
        for (var column = 4u * (i % VECTORS); column < params.value_dim; column += COLUMNS) {
            top = max(top, sizes(load_u(row0 + i / VECTORS, column)));
        }
        product[i / VECTORS * PRODUCT_PITCH + i % VECTORS] = max(max(top.x, top.y), max(top.z, top.w));
    }
    workgroupBarrier();
    if thread < CHUNK {
        query_norm[thread] = select(sqrt(square), 1.0, square == 0.0);
        let top = max(load_product(thread, 0u), load_product(thread, 1u));
        let size = max(max(top.x, top.y), max(top.z, top.w));
        // A token of zeros doesn't matter.
        token_scale[thread] = select(powers_of_two(vec4(size)).x, 0x1p-126f, size == 0.0);
    }
    workgroupBarrier();
    if thread < CHUNK {
        var bound = 0.0;
        for (var j = 0u; j <= thread; j++) {
            bound = max(bound, token_scale[j]);
        }
        row_bound[thread] = bound;
    }
    if DECAY == 1u {
        stage_kappas(place, token0, thread);
    }

    // P, 4 x 4 elements an invocation.
//# for n in TILES
    workgroupBarrier();
    store_product(scores$n, own_row, 0u);
    workgroupBarrier();
    for (var i = thread; i < CHUNK; i += THREADS) {
        let y = i / 4u;
        let column0 = 4u * ($nu * 4u + i % 4u);
        var decay = mat4x4(vec4(1.0), vec4(1.0), vec4(1.0), vec4(1.0));
        if DECAY == 1u {
            decay = decays(y, column0 / 4u);
        }
        for (var j = 0u; j < 4u; j++) {
            let column = column0 + j;
            let key_norm = load_gate(place, token0 + column).z;
            for (var r = 0u; r < 4u; r++) {
                let row = 4u * y + r;
                let cosine = product[row * PRODUCT_PITCH + 4u * (i % 4u) + j] / (query_norm[row] * key_norm);
                let score = decay[j][r] * cosine * (token_scale[column] / row_bound[row]) * OPERAND_SCALE;
                let kept = select(0.0, score, column <= row);
                let rounded = f16(kept);
                let at = row * LEFT_PITCH + SCORES + column;
                left_halves[at] = rounded;
                left_halves[at + CHUNK] = f16(kept - f32(rounded));
            }
        }
    }
//# end

    let out_base = params.out.x + place.batch * params.out.y + place.value_head * params.out.z;
    for (var value0 = 0u; value0 < params.value_dim; value0 += COLUMNS) {
        // 2. Q S.
        workgroupBarrier();
        var top = vec4(0.0);
        for (var d = thread / VECTORS; d < params.key_dim; d += THREADS / VECTORS) {
            top = max(top, sizes(load_state(state0 + d, value0 + 4u * (thread % VECTORS))));
        }
        for (var c = 0u; c < 4u; c++) {
            product[thread / VECTORS * PRODUCT_PITCH + 4u * (thread % VECTORS) + c] = top[c];
        }
        workgroupBarrier();
        if thread < VECTORS {
            for (var i = 0u; i < THREADS / VECTORS; i++) {
                top = max(top, load_product(i, thread));
            }
            column_scale[thread] = powers_of_two(top);
        }
        var sum0 = SumMatrix();
        var sum1 = SumMatrix();
        for (var column0 = 0u; column0 < params.key_dim; column0 += COLUMNS) {
            workgroupBarrier();
            stage_queries(place, token0, column0, thread);
            for (var i = thread; i < COLUMNS * VECTORS; i += THREADS) {
                let d = column0 + i / VECTORS;
                let x = i % VECTORS;
                var value = vec4(0.0);
                if d < params.key_dim {
                    value = load_state(state0 + d, value0 + 4u * x) / column_scale[x] * OPERAND_SCALE;
                }
                stage_split(i / VECTORS, COLUMNS, 4u * x, value);
            }
            workgroupBarrier();
            for (var step = 0u; step < COLUMNS; step += SIDE) {
                let queries = left_matrix(own_row, step);
                sum0 = multiply_add(queries, right_matrix(step, 0u), sum0);
                sum1 = multiply_add(queries, right_matrix(step, SIDE), sum1);
                sum0 = multiply_add(queries, right_matrix(COLUMNS + step, 0u), sum0);
                sum1 = multiply_add(queries, right_matrix(COLUMNS + step, SIDE), sum1);
            }
        }
        store_product(sum0, own_row, 0u);
        store_product(sum1, own_row, SIDE);
        workgroupBarrier();
        // Vector i is that at i·THREADS + thread.
        var sums: array<vec4<f32>, OWN>;
        for (var i = 0u; i < OWN; i++) {
            let at = i * THREADS + thread;
            sums[i] = load_product(at / VECTORS, at % VECTORS) / OPERAND_SCALE * column_scale[at % VECTORS];
            if DECAY == 1u {
                sums[i] *= load_decay(place, token0 + at / VECTORS).y;
            }
        }

        // 3. P V_new.
        for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
            let token = i / VECTORS;
            let column = 4u * (i % VECTORS);
            let value = load_u(row0 + token, value0 + column);
            let hidden = not_finite(value);
            if any(hidden) {
                atomicOr(&unusual[0], 1u << token);
            }
            let scaled = select(value, vec4(0.0), hidden) / token_scale[token] * OPERAND_SCALE;
            stage_split(token, CHUNK, column, scaled);
        }
        workgroupBarrier();
        let tokens = atomicLoad(&unusual[0]);
        sum0 = SumMatrix();
        sum1 = SumMatrix();
        for (var step = 0u; step < CHUNK; step += SIDE) {
            let scores = left_matrix(own_row, SCORES + step);
            let rest = left_matrix(own_row, SCORES + CHUNK + step);
            sum0 = multiply_add(scores, right_matrix(step, 0u), sum0);
            sum1 = multiply_add(scores, right_matrix(step, SIDE), sum1);
            sum0 = multiply_add(scores, right_matrix(CHUNK + step, 0u), sum0);
            sum1 = multiply_add(scores, right_matrix(CHUNK + step, SIDE), sum1);
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
            let at = i * THREADS + thread;
            let row = at / VECTORS;
            let column = value0 + 4u * (at % VECTORS);
            var sum = load_product(row, at % VECTORS);
            if tokens != 0u {
                sum = add_unusual(sum, tokens, row, row0, column);
            }
            let token = token0 + row;
            if token < place.tokens {
                let update = sum / (OPERAND_SCALE * OPERAND_SCALE) * row_bound[row] * query_norm[row];
                let result = params.scale * ((sums[i] + update) / load_gate(place, token).w);
                out_store4(out_base + (place.first + token) * params.out.w, column, params.value_dim, result);
            }
        }
    }
}
