// Continuous softmax attention, forward, in one pass (flash style); with CONTINUOUS = 0 ordinary softmax attention.
//
// Keys and values are linear between nodes; node 0 is the sink, node n the token n − 1. A row integrates
// e^{a(s)} v(s) over its segments. Segment i, of length Δ_i, runs from node i − 1 to node i; with δ = a_i − a_{i−1}:
//
//     left weight, to node i − 1:  L_i = Δ_i e^{a_{i−1}} φ₂(δ)     right weight, to node i:  R_i = Δ_i e^{a_i} φ₂(−δ)
//     w_n = R_n + L_{n+1}          out = Σ w_n v_n / Σ w_n         lse = ln Σ w_n
//
// A workgroup owns BLOCK_Q rows of one head and walks tiles of BLOCK_K nodes:
//   1. logits [BLOCK_Q, D] x [D, BLOCK_K], staged STAGE columns at a time; each invocation has 4 rows x 4 nodes;
//   2. weights, one invocation a row: running maximum, one exponential a logit, segment weights. A node's weight is
//      complete only when the segment to its right is known, so the weights of a tile belong to the nodes one
//      further left (LAG): from tile to tile a row carries the last logit and the last right weight;
//   3. out [BLOCK_Q, BLOCK_K] x [BLOCK_K, D_v], STAGE columns at a time, 4 rows x 4 columns an invocation, the sums
//      of a tile kept apart from the running ones so that rounding grows with the number of tiles, not of tokens.
//
// With SPLIT a workgroup has some of the nodes only, and its out and lse go to the workspace, for attention_combine.
//
// What a row doesn't see must not reach it, not even a NaN: inactive segments are selected away, and so are values in
// tiles that some row sees only in part.

var<workgroup> q_stage: array<vec4<f32>, BLOCK_Q * PITCH>;
// Keys, then values.
var<workgroup> kv_stage: array<vec4<f32>, BLOCK_K * PITCH>;
// Logits, then weights: [BLOCK_Q][BLOCK_K].
var<workgroup> scores: array<vec4<f32>, BLOCK_Q * PITCH>;
// Per row: factor on what was summed so far; at the end the integral Z, 0 where the row has none.
var<workgroup> row_factor: array<f32, BLOCK_Q>;

fn load_logits(row: u32, c: u32) -> vec4<f32> {
    return scores[row * PITCH + c];
}

fn store_weights(row: u32, c: u32, weights: vec4<f32>) {
    scores[row * PITCH + c] = weights;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
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

    let last = highest.y + LAG;
    let tiles = stretch(lowest.x, last, BLOCK_K);
    if has_ended(tiles.x, last) {
        return;
    }

    // Of the row that this invocation weighs (the first BLOCK_Q invocations have one).
    let own = split_nodes(place, row0 + thread, split);
    var carried = Row();

    // Of the 4 rows x 4 columns that this invocation sums: rows 4y.., columns 4x.. of every STAGE.
    let x = thread % STAGE;
    let y = thread / STAGE;
    let range0 = split_nodes(place, row0 + 4u * y, split);
    let range1 = split_nodes(place, row0 + 4u * y + 1u, split);
    let range2 = split_nodes(place, row0 + 4u * y + 2u, split);
    let range3 = split_nodes(place, row0 + 4u * y + 3u, split);
    var sums: array<vec4<f32>, 4u * VALUE_STAGES>;
    for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
        sums[i] = vec4(0.0);
    }
    let left_at = params.left + (index * THREADS + thread) * (16u * VALUE_STAGES + 8u);
    if params.first_step > 0u {
        for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
            sums[i] = take_up(left_at + 4u * i);
        }
        let of_row = take_up(left_at + 16u * VALUE_STAGES);
        let seen = u32(workspace[left_at + 16u * VALUE_STAGES + 4u]);
        carried = Row(of_row.x, of_row.y, seen, of_row.z, of_row.w);
    }

    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(BLOCK_K)) {
        // 1. Logits.
        var logits0 = vec4(0.0);
        var logits1 = vec4(0.0);
        var logits2 = vec4(0.0);
        var logits3 = vec4(0.0);
        for (var column0 = 0u; column0 < params.head_dim; column0 += 4u * STAGE) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_Q * STAGE; i += THREADS) {
                let column = column0 + 4u * (i % STAGE);
                q_stage[i / STAGE * PITCH + i % STAGE] = load_q(q_of_head, row0 + i / STAGE, column);
            }
            for (var i = thread; i < BLOCK_K * STAGE; i += THREADS) {
                let column = column0 + 4u * (i % STAGE);
                kv_stage[i / STAGE * PITCH + i % STAGE] = load_k(k_of_head, node0 + i32(i / STAGE), column);
            }
            workgroupBarrier();
            for (var c = 0u; c < STAGE; c++) {
                let k0 = kv_stage[(4u * x) * PITCH + c];
                let k1 = kv_stage[(4u * x + 1u) * PITCH + c];
                let k2 = kv_stage[(4u * x + 2u) * PITCH + c];
                let k3 = kv_stage[(4u * x + 3u) * PITCH + c];
                let q0 = q_stage[(4u * y) * PITCH + c];
                let q1 = q_stage[(4u * y + 1u) * PITCH + c];
                let q2 = q_stage[(4u * y + 2u) * PITCH + c];
                let q3 = q_stage[(4u * y + 3u) * PITCH + c];
                logits0 += vec4(dot(q0, k0), dot(q0, k1), dot(q0, k2), dot(q0, k3));
                logits1 += vec4(dot(q1, k0), dot(q1, k1), dot(q1, k2), dot(q1, k3));
                logits2 += vec4(dot(q2, k0), dot(q2, k1), dot(q2, k2), dot(q2, k3));
                logits3 += vec4(dot(q3, k0), dot(q3, k1), dot(q3, k2), dot(q3, k3));
            }
        }
        scores[(4u * y) * PITCH + x] = logits0;
        scores[(4u * y + 1u) * PITCH + x] = logits1;
        scores[(4u * y + 2u) * PITCH + x] = logits2;
        scores[(4u * y + 3u) * PITCH + x] = logits3;
        workgroupBarrier();

        // 2. Weights.
        if thread < BLOCK_Q {
            row_factor[thread] = weigh(place, thread, own, node0, &carried);
        }
        workgroupBarrier();

        // 3. Sums of values. A tile is whole if every row sees every node of it.
        let value0 = node0 - LAG;
        let whole = value0 >= highest.x && value0 + i32(BLOCK_K) - 1 <= lowest.y;
        let factor0 = row_factor[4u * y];
        let factor1 = row_factor[4u * y + 1u];
        let factor2 = row_factor[4u * y + 2u];
        let factor3 = row_factor[4u * y + 3u];
        for (var stage = 0u; stage < VALUE_STAGES; stage++) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_K * STAGE; i += THREADS) {
                let column = 4u * (stage * STAGE + i % STAGE);
                kv_stage[i / STAGE * PITCH + i % STAGE] = load_v(v_of_head, value0 + i32(i / STAGE), column);
            }
            workgroupBarrier();
            var sum0 = vec4(0.0);
            var sum1 = vec4(0.0);
            var sum2 = vec4(0.0);
            var sum3 = vec4(0.0);
            for (var c = 0u; c < STAGE; c++) {
                let w0 = scores[(4u * y) * PITCH + c];
                let w1 = scores[(4u * y + 1u) * PITCH + c];
                let w2 = scores[(4u * y + 2u) * PITCH + c];
                let w3 = scores[(4u * y + 3u) * PITCH + c];
                let v0 = kv_stage[(4u * c) * PITCH + x];
                let v1 = kv_stage[(4u * c + 1u) * PITCH + x];
                let v2 = kv_stage[(4u * c + 2u) * PITCH + x];
                let v3 = kv_stage[(4u * c + 3u) * PITCH + x];
                if whole {
                    sum0 += w0.x * v0 + w0.y * v1 + w0.z * v2 + w0.w * v3;
                    sum1 += w1.x * v0 + w1.y * v1 + w1.z * v2 + w1.w * v3;
                    sum2 += w2.x * v0 + w2.y * v1 + w2.z * v2 + w2.w * v3;
                    sum3 += w3.x * v0 + w3.y * v1 + w3.z * v2 + w3.w * v3;
                } else {
                    let node = value0 + i32(4u * c);
                    sum0 += seen_sum(w0, node, range0, v0, v1, v2, v3);
                    sum1 += seen_sum(w1, node, range1, v0, v1, v2, v3);
                    sum2 += seen_sum(w2, node, range2, v0, v1, v2, v3);
                    sum3 += seen_sum(w3, node, range3, v0, v1, v2, v3);
                }
            }
            sums[4u * stage] = sums[4u * stage] * factor0 + sum0;
            sums[4u * stage + 1u] = sums[4u * stage + 1u] * factor1 + sum1;
            sums[4u * stage + 2u] = sums[4u * stage + 2u] * factor2 + sum2;
            sums[4u * stage + 3u] = sums[4u * stage + 3u] * factor3 + sum3;
        }
        workgroupBarrier();
    }

    if tiles.y < last {
        for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
            leave(left_at + 4u * i, sums[i]);
        }
        leave(left_at + 16u * VALUE_STAGES, vec4(carried.largest, carried.sum, carried.logit, carried.weight));
        // Of the number only matters whether it is 0.
        workspace[left_at + 16u * VALUE_STAGES + 4u] = f32(min(carried.seen, 1u));
        return;
    }
    if thread < BLOCK_Q {
        row_factor[thread] = end_row(task, row0 + thread, split, carried);
    }
    workgroupBarrier();
    for (var r = 0u; r < 4u; r++) {
        let row = row0 + 4u * y + r;
        if row >= place.queries {
            break;
        }
        for (var stage = 0u; stage < VALUE_STAGES; stage++) {
            let column = 4u * (stage * STAGE + x);
            store_out(task, row, split, v_of_head, column, sums[4u * stage + r], row_factor[4u * y + r]);
        }
    }
}
