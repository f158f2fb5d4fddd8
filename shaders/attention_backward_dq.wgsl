// Attention, backward: d_q = scale Σ_n d_a_n k_n. Logits are recomputed from q and k.
//
// A workgroup owns BLOCK_Q rows of one head and walks tiles of BLOCK_K nodes, as the forward pass does:
//   1. logits [BLOCK_Q, D] x [D, BLOCK_K] and d_out·v [BLOCK_Q, D_v] x [D_v, BLOCK_K];
//   2. gradients of the logits, one invocation a row;
//   3. d_q += [BLOCK_Q, BLOCK_K] x [BLOCK_K, D].

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= params.row_tasks {
        return;
    }
    let task = row_task(index);
    let place = task.place;
    let q_of_head = q_rows(place, task.head);
    let k_of_head = k_nodes(place, task.head / params.group);
    let v_of_head = v_nodes(place, task.head / params.group);
    let d_out_of_head = d_out_rows(place, task.head);

    let row0 = task.block * BLOCK_Q;
    let lowest = visible_nodes(place, row0);
    let highest = visible_nodes(place, min(row0 + BLOCK_Q, place.queries) - 1u);
    let last = highest.y + LAG;
    let tiles = stretch(lowest.x, last, BLOCK_K);
    if has_ended(tiles.x, last) {
        return;
    }
    var own = Row(vec2(0, -1), 0.0, 0.0, false);
    if thread < BLOCK_Q {
        own = load_row(task, row0 + thread);
        ranges[thread] = own.range;
    }
    var carry = Carry(0.0, 0.0, 0.0, 0.0, 0.0);
    let x = thread % STAGE;
    let y = thread / STAGE;
    var sums: array<vec4<f32>, 4u * KEY_STAGES>;
    for (var i = 0u; i < 4u * KEY_STAGES; i++) {
        sums[i] = vec4(0.0);
    }
    let left_at = params.left + (index * THREADS + thread) * (16u * KEY_STAGES + 4u);
    if params.first_step > 0u {
        for (var i = 0u; i < 4u * KEY_STAGES; i++) {
            sums[i] = take_up(left_at + 4u * i);
        }
        let left = take_up(left_at + 16u * KEY_STAGES);
        carry = Carry(left.x, left.y, left.z, left.w, 0.0);
    }

    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(BLOCK_K)) {
        // 1.
        multiply(thread, row0, node0, q_of_head, k_of_head, v_of_head, d_out_of_head);

        // 2.
        if thread < BLOCK_Q {
            weigh_row(thread, place, own, node0, 0, false, &carry);
        }

        // 3. A tile is whole if every row sees every node of it.
        let value0 = node0 - LAG;
        let whole = value0 >= highest.x && value0 + i32(BLOCK_K) - 1 <= lowest.y;
        for (var s = 0u; s < KEY_STAGES; s++) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_K * STAGE; i += THREADS) {
                let column = 4u * (s * STAGE + i % STAGE);
                stage[i / STAGE * PITCH + i % STAGE] = load_k(k_of_head, value0 + i32(i / STAGE), column);
            }
            workgroupBarrier();
            var tile: array<vec4<f32>, 4>;
            for (var i = 0u; i < 4u; i++) {
                tile[i] = vec4(0.0);
            }
            for (var c = 0u; c < STAGE; c++) {
                let k0 = stage[(4u * c) * PITCH + x];
                let k1 = stage[(4u * c + 1u) * PITCH + x];
                let k2 = stage[(4u * c + 2u) * PITCH + x];
                let k3 = stage[(4u * c + 3u) * PITCH + x];
                for (var i = 0u; i < 4u; i++) {
                    let d = scores[(4u * y + i) * PITCH + c];
                    if whole {
                        tile[i] += d.x * k0 + d.y * k1 + d.z * k2 + d.w * k3;
                    } else {
                        tile[i] += seen_sum(d, value0 + i32(4u * c), ranges[4u * y + i], k0, k1, k2, k3);
                    }
                }
            }
            for (var i = 0u; i < 4u; i++) {
                sums[4u * s + i] += tile[i];
            }
        }
    }

    if tiles.y < last {
        for (var i = 0u; i < 4u * KEY_STAGES; i++) {
            leave(left_at + 4u * i, sums[i]);
        }
        leave(left_at + 16u * KEY_STAGES, vec4(carry.logit, carry.p, carry.g, carry.change));
        return;
    }
    // `ranges`, where no tile was walked.
    workgroupBarrier();
    let base = params.d_q.x + place.batch * params.d_q.y + task.head * params.d_q.z;
    for (var i = 0u; i < 4u; i++) {
        let row = row0 + 4u * y + i;
        if row >= place.queries {
            break;
        }
        for (var s = 0u; s < KEY_STAGES; s++) {
            let column = 4u * (s * STAGE + x);
            // Rows without an integral get 0, whatever the keys hold.
            let has_integral = ranges[4u * y + i].y >= ranges[4u * y + i].x + LAG;
            let result = select(vec4(0.0), params.scale * sums[4u * s + i], has_integral);
            d_q_store4(base + (place.query0 + row) * params.d_q.w, column, params.head_dim, result);
        }
    }
}
