// attention_forward.wgsl on matrix units (shared/matrix.wgsl), for q, k and v of f16.
//
// A workgroup owns BLOCK_Q rows, whose queries stay in workgroup memory, each of its subgroups 16 of them. Of every
// tile of BLOCK_K nodes:
//   1. logits [16, D] x [D, BLOCK_K] of the f16 inputs as they are, summed in f32; the scale comes after;
//   2. weights, in f32 as there. Those of a row are divided by the row's largest in the tile and multiplied by 2¹⁵,
//      since intervals may be of any magnitude: so rounded to f16, all down to 2⁻²⁹ of the largest keep 11 bits;
//   3. out [16, BLOCK_K] x [BLOCK_K, D_v], 32 columns at a time, summed in f32 from zero for every tile and added to
//      the running sums, with what step 2 divided by taken back.
//
// The lse and the integral that out is divided by are those of the weights before they were rounded.
//
// What a row doesn't see must not reach it, and 0 · NaN is NaN: values that are not finite are staged as 0, and the
// rows that see such a node get its products afterwards. All else that is not finite stays in its row or column of a
// product.

const VECTORS: u32 = BLOCK_K / 4u;
const SUBGROUPS: u32 = BLOCK_Q / 16u;
const THREADS: u32 = SUBGROUPS * SUBGROUP;
const LEFT_ROWS: u32 = BLOCK_Q;
// Queries, then weights.
const LEFT_COLUMNS: u32 = 32u * HEAD_STAGES + 32u;
const WEIGHTS: u32 = 32u * HEAD_STAGES;
const RIGHT_ROWS: u32 = BLOCK_K;
// Vectors of 4 columns of a product that an invocation sums.
const OWN: u32 = BLOCK_Q * VECTORS / THREADS;

const WEIGHT_SCALE: f32 = 32768.0;
// A row's largest weight is at least this, or its weights do not count: reciprocals of subnormals are infinite.
const LEAST: f32 = 1.2e-38;

// Per row: factor on what was summed so far; at the end the integral Z, 0 where the row has none.
var<workgroup> row_factor: array<f32, BLOCK_Q>;
// Per row: its largest weight in the tile.
var<workgroup> row_largest: array<f32, BLOCK_Q>;
// Bit n: node n of the tile has a value that is not finite among the columns staged. One word is used.
var<workgroup> unusual: array<atomic<u32>, 4>;

fn packed(at: u32) -> f32 {
    return workspace[at];
}

// 4 columns, 0 past the end of a row. Halves become floats and halves again as they were.
fn q_load4(base: u32, column: u32, end: u32) -> vec4<f32> {
    return select(vec4(0.0), vec4<f32>(q[(base + min(column, end - 4u)) / 4u]), column < end);
}

fn k_load4(base: u32, column: u32, end: u32) -> vec4<f32> {
    return select(vec4(0.0), vec4<f32>(k[(base + min(column, end - 4u)) / 4u]), column < end);
}

fn v_load4(base: u32, column: u32, end: u32) -> vec4<f32> {
    return select(vec4(0.0), vec4<f32>(v[(base + min(column, end - 4u)) / 4u]), column < end);
}

fn load_logits(row: u32, c: u32) -> vec4<f32> {
    return load_product(row, c) * params.scale;
}

fn store_weights(row: u32, c: u32, weights: vec4<f32>) {
    let at = row * PRODUCT_PITCH + 4u * c;
    product[at] = weights.x;
    product[at + 1u] = weights.y;
    product[at + 2u] = weights.z;
    product[at + 3u] = weights.w;
}

// `sum` and the products with the values that are not finite, of the nodes that a row (the workgroup's `row`) sees.
fn add_unusual(
    sum: vec4<f32>,
    nodes: u32,
    row: u32,
    value0: i32,
    range: vec2<i32>,
    values: Nodes,
    column: u32,
) -> vec4<f32> {
    var result = sum;
    for (var n = 0u; n < BLOCK_K; n++) {
        let node = value0 + i32(n);
        if ((nodes >> n) & 1u) == 1u && node >= range.x && node <= range.y {
            let value = load_v(values, node, column);
            let weight = f32(left_halves[row * LEFT_PITCH + WEIGHTS + n]);
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
    if index >= params.row_tasks * params.splits {
        return;
    }
    let split = i32(index / params.row_tasks);
    let task = row_task(index % params.row_tasks);
    let place = task.place;
    let q_of_head = q_rows(place, task.head);
    let k_of_head = k_nodes(place, task.head / params.group);
    let v_of_head = v_nodes(place, task.head / params.group);

    let row0 = task.block * BLOCK_Q;
    // Both ends never decrease with the row.
    let lowest = split_nodes(place, row0, split);
    let highest = split_nodes(place, min(row0 + BLOCK_Q, place.queries) - 1u, split);

    // Of the row that this invocation weighs (the first BLOCK_Q invocations have one).
    let own = split_nodes(place, row0 + thread, split);
    var carried = Row();

    // The subgroup's first row of the block.
    let own_row = SIDE * matrix_subgroup(subgroup, thread);
    for (var i = thread; i < BLOCK_Q * VECTORS * HEAD_STAGES; i += THREADS) {
        let row = i / (VECTORS * HEAD_STAGES);
        let column = 4u * (i % (VECTORS * HEAD_STAGES));
        var query = vec4(0.0);
        if row0 + row < q_of_head.count {
            query = q_load4(q_of_head.base + (row0 + row) * params.q.w, column, params.head_dim);
        }
        stage_left(row, column, vec4<f16>(query));
    }
    if thread == 0u {
        atomicStore(&unusual[0], 0u);
    }
    // Of vector i, at i·THREADS + thread in a block of 32 columns.
    var sums: array<vec4<f32>, OWN * VALUE_STAGES>;
    for (var i = 0u; i < OWN * VALUE_STAGES; i++) {
        sums[i] = vec4(0.0);
    }

    for (var node0 = lowest.x; node0 - LAG <= highest.y; node0 += i32(BLOCK_K)) {
        // 1. Logits.
        var logits0 = SumMatrix();
        var logits1 = SumMatrix();
        for (var column0 = 0u; column0 < 32u * HEAD_STAGES; column0 += 32u) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_K * VECTORS; i += THREADS) {
                let column = 4u * (i % VECTORS);
                let key = load_k(k_of_head, node0 + i32(i / VECTORS), column0 + column);
                stage_right(i / VECTORS, column, vec4<f16>(key));
            }
            workgroupBarrier();
            for (var step = 0u; step < 32u; step += SIDE) {
                let queries = left_matrix(own_row, column0 + step);
                logits0 = multiply_add(queries, right_transposed(0u, step), logits0);
                logits1 = multiply_add(queries, right_transposed(SIDE, step), logits1);
            }
        }
        store_product(logits0, own_row, 0u);
        store_product(logits1, own_row, SIDE);
        workgroupBarrier();

        // 2. Weights.
        if thread < BLOCK_Q {
            row_factor[thread] = weigh(place, thread, own, node0, &carried);
            var top = 0.0;
            for (var c = 0u; c < VECTORS; c++) {
                top = max(top, largest(abs(load_product(thread, c))));
            }
            top = select(top, 1.0, top < LEAST);
            row_largest[thread] = top;
            for (var c = 0u; c < VECTORS; c++) {
                stage_left(thread, WEIGHTS + 4u * c, vec4<f16>(load_product(thread, c) / top * WEIGHT_SCALE));
            }
        }

        // 3. Sums of values.
        let value0 = node0 - LAG;
        for (var stage = 0u; stage < VALUE_STAGES; stage++) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_K * VECTORS; i += THREADS) {
                let column = 4u * (i % VECTORS);
                let value = load_v(v_of_head, value0 + i32(i / VECTORS), 32u * stage + column);
                let hidden = not_finite(value);
                if any(hidden) {
                    atomicOr(&unusual[0], 1u << (i / VECTORS));
                }
                stage_right(i / VECTORS, column, vec4<f16>(select(value, vec4(0.0), hidden)));
            }
            workgroupBarrier();
            let nodes = atomicLoad(&unusual[0]);
            var sum0 = SumMatrix();
            var sum1 = SumMatrix();
            for (var step = 0u; step < BLOCK_K; step += SIDE) {
                let weights = left_matrix(own_row, WEIGHTS + step);
                sum0 = multiply_add(weights, right_matrix(step, 0u), sum0);
                sum1 = multiply_add(weights, right_matrix(step, SIDE), sum1);
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
                var sum = load_product(row, at % VECTORS);
                if nodes != 0u {
                    let range = split_nodes(place, row0 + row, split);
                    let column = 32u * stage + 4u * (at % VECTORS);
                    sum = add_unusual(sum, nodes, row, value0, range, v_of_head, column);
                }
                let last = stage * OWN + i;
                sums[last] = sums[last] * row_factor[row] + sum / WEIGHT_SCALE * row_largest[row];
            }
        }
        workgroupBarrier();
    }

    if thread < BLOCK_Q {
        row_factor[thread] = end_row(task, row0 + thread, split, carried);
    }
    workgroupBarrier();
    for (var stage = 0u; stage < VALUE_STAGES; stage++) {
        for (var i = 0u; i < OWN; i++) {
            let at = i * THREADS + thread;
            let row = at / VECTORS;
            if row0 + row < place.queries {
                let column = 32u * stage + 4u * (at % VECTORS);
                store_out(task, row0 + row, split, v_of_head, column, sums[stage * OWN + i], row_factor[row]);
            }
        }
    }
}
