// Attention, backward: d_k_n = scale Σ_rows d_a_n q, d_v_n = Σ_rows w_n d_out, and what sinks and intervals get.
//
// A workgroup owns OWN nodes of one key/value head and walks all rows of its query heads that see one of them, in
// tiles of BLOCK_Q rows: sums over a group of heads need no atomics. The tile of BLOCK_K nodes has a neighbour more
// on either side of the nodes owned (for continuous attention), whose logits are computed again:
//   1. logits [BLOCK_Q, D] x [D, BLOCK_K] and d_out·v [BLOCK_Q, D_v] x [D_v, BLOCK_K];
//   2. gradients of the logits and weights, one invocation a row;
//   3. d_v += [BLOCK_K, BLOCK_Q] x [BLOCK_Q, D_v] and d_k += [BLOCK_K, BLOCK_Q] x [BLOCK_Q, D].
//
// Gradients of node 0 (per batch) and of the intervals (per head) go to the workspace, to be summed by `reduce`.

const OWN: u32 = BLOCK_K - 2u * CONTINUOUS;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= params.node_tasks {
        return;
    }
    let task = node_task(index);
    let place = task.place;
    let kv_head = task.head;
    let k_of_head = k_nodes(place, kv_head);
    let v_of_head = v_nodes(place, kv_head);
    let lengths = params.has_d_intervals == 1u;

    let own_first = i32(task.block * OWN);
    let own_last = min(own_first + i32(OWN) - 1, i32(place.room));
    let node0 = own_first - LAG;
    let reach = row_reach(place, own_first, own_last);
    // A step is a tile of rows of one of the heads.
    let tiles = row_tiles(reach, BLOCK_Q);
    let steps = tiles * params.group;
    if has_ended(i32(params.first_step), i32(steps) - 1) {
        return;
    }
    let end = min(params.first_step + params.steps, steps);

    let x = thread % STAGE;
    let y = thread / STAGE;
    // Nodes 4y.. of the tile as `weigh_row` leaves it.
    let value0 = node0 - LAG;
    let nodes = value0 + i32(4u * y) + vec4(0, 1, 2, 3);
    var d_keys: array<vec4<f32>, 4u * KEY_STAGES>;
    var d_values: array<vec4<f32>, 4u * VALUE_STAGES>;
    for (var i = 0u; i < 4u * KEY_STAGES; i++) {
        d_keys[i] = vec4(0.0);
    }
    for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
        d_values[i] = vec4(0.0);
    }
    // Of the segment that ends in node node0 + thread.
    var d_length = 0.0;
    let left_at = params.left + (index * THREADS + thread) * (16u * (KEY_STAGES + VALUE_STAGES) + 4u);
    if params.first_step > 0u {
        for (var i = 0u; i < 4u * KEY_STAGES; i++) {
            d_keys[i] = take_up(left_at + 4u * i);
        }
        for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
            d_values[i] = take_up(left_at + 16u * KEY_STAGES + 4u * i);
        }
        d_length = workspace[left_at + 16u * (KEY_STAGES + VALUE_STAGES)];
    }

    for (var step = params.first_step; step < end; step++) {
        let head = kv_head * params.group + step / max(tiles, 1u);
        let q_of_head = q_rows(place, head);
        let d_out_of_head = d_out_rows(place, head);
        let row0 = u32(reach.x) + step % max(tiles, 1u) * BLOCK_Q;
        var own = Row(vec2(0, -1), 0.0, 0.0, false);
        workgroupBarrier();
        if thread < BLOCK_Q {
            own = load_row(Task(place, head, 0u), row0 + thread);
            ranges[thread] = own.range;
        }

        // 1.
        multiply(thread, row0, node0, q_of_head, k_of_head, v_of_head, d_out_of_head);

        // 2. The segment into the tile's first node is another workgroup's.
        if thread < BLOCK_Q {
            var carry = Carry(0.0, 0.0, 0.0, 0.0, 0.0);
            weigh_row(thread, place, own, node0, node0 + 1, lengths, &carry);
        }
        if lengths {
            workgroupBarrier();
            if thread < BLOCK_K {
                var sum = 0.0;
                for (var r = 0u; r < BLOCK_Q; r++) {
                    sum += stage[r * PITCH + thread / 4u][thread % 4u];
                }
                d_length += sum;
            }
        }

        // 3. Rows that have no integral, or don't see the node, are left out, not multiplied by 0.
        for (var s = 0u; s < VALUE_STAGES; s++) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_Q * STAGE; i += THREADS) {
                let column = 4u * (s * STAGE + i % STAGE);
                stage[i / STAGE * PITCH + i % STAGE] = load_d_out(d_out_of_head, row0 + i / STAGE, column);
            }
            workgroupBarrier();
            var tile: array<vec4<f32>, 4>;
            for (var i = 0u; i < 4u; i++) {
                tile[i] = vec4(0.0);
            }
            for (var r = 0u; r < BLOCK_Q; r++) {
                let d = stage[r * PITCH + x];
                let w = values[r * PITCH + y];
                let seen = (nodes >= vec4(ranges[r].x)) & (nodes <= vec4(ranges[r].y));
                tile[0] += select(vec4(0.0), w.x * d, seen.x);
                tile[1] += select(vec4(0.0), w.y * d, seen.y);
                tile[2] += select(vec4(0.0), w.z * d, seen.z);
                tile[3] += select(vec4(0.0), w.w * d, seen.w);
            }
            for (var i = 0u; i < 4u; i++) {
                d_values[4u * s + i] += tile[i];
            }
        }
        for (var s = 0u; s < KEY_STAGES; s++) {
            workgroupBarrier();
            for (var i = thread; i < BLOCK_Q * STAGE; i += THREADS) {
                let column = 4u * (s * STAGE + i % STAGE);
                stage[i / STAGE * PITCH + i % STAGE] = load_q(q_of_head, row0 + i / STAGE, column);
            }
            workgroupBarrier();
            var tile: array<vec4<f32>, 4>;
            for (var i = 0u; i < 4u; i++) {
                tile[i] = vec4(0.0);
            }
            for (var r = 0u; r < BLOCK_Q; r++) {
                let q_r = stage[r * PITCH + x];
                let d = scores[r * PITCH + y];
                // A row of one node has no segment: only its value gets something.
                let segment = vec4(CONTINUOUS == 0u || ranges[r].x < ranges[r].y);
                let seen = (nodes >= vec4(ranges[r].x)) & (nodes <= vec4(ranges[r].y)) & segment;
                tile[0] += select(vec4(0.0), d.x * q_r, seen.x);
                tile[1] += select(vec4(0.0), d.y * q_r, seen.y);
                tile[2] += select(vec4(0.0), d.z * q_r, seen.z);
                tile[3] += select(vec4(0.0), d.w * q_r, seen.w);
            }
            for (var i = 0u; i < 4u; i++) {
                d_keys[4u * s + i] += tile[i];
            }
        }
    }

    if end < steps {
        for (var i = 0u; i < 4u * KEY_STAGES; i++) {
            leave(left_at + 4u * i, d_keys[i]);
        }
        for (var i = 0u; i < 4u * VALUE_STAGES; i++) {
            leave(left_at + 16u * KEY_STAGES + 4u * i, d_values[i]);
        }
        workspace[left_at + 16u * (KEY_STAGES + VALUE_STAGES)] = d_length;
        return;
    }

    // Nodes 0 and 1 are neighbours of one invocation.
    let sinks = place.sequence * params.kv_heads + kv_head;
    for (var i = 0u; i < 4u; i++) {
        let node = nodes[i];
        if node < own_first || node > own_last || (node == 0 && params.sink != SINK_GIVEN) {
            continue;
        }
        for (var s = 0u; s < KEY_STAGES; s++) {
            let column = 4u * (s * STAGE + x);
            var result = d_keys[4u * s + i];
            if node == 1 && params.sink == SINK_FIRST {
                result += d_keys[4u * s + i - 1u];
            }
            if node > 0 {
                let base = params.d_k.x + place.batch * params.d_k.y + kv_head * params.d_k.z + place.key0 * params.d_k.w;
                d_k_store4(base + u32(node - 1) * params.d_k.w, column, params.head_dim, result);
                continue;
            }
            for (var c = 0u; c < 4u && column + c < params.head_dim; c++) {
                workspace[params.d_sink_k_partial + sinks * params.head_dim + column + c] = result[c];
            }
        }
        for (var s = 0u; s < VALUE_STAGES; s++) {
            let column = 4u * (s * STAGE + x);
            var result = d_values[4u * s + i];
            if node == 1 && params.sink == SINK_FIRST {
                result += d_values[4u * s + i - 1u];
            }
            if node > 0 {
                let base = params.d_v.x + place.batch * params.d_v.y + kv_head * params.d_v.z + place.key0 * params.d_v.w;
                d_v_store4(base + u32(node - 1) * params.d_v.w, column, params.value_dim, result);
                continue;
            }
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                workspace[params.d_sink_v_partial + sinks * params.value_dim + column + c] = result[c];
            }
        }
    }
    let node = node0 + i32(thread);
    if lengths && thread < BLOCK_K && node >= max(own_first, 1) && node <= own_last {
        let first = params.d_intervals_partial + (place.batch * params.kv_heads + kv_head) * params.keys + place.key0;
        workspace[first + u32(node - 1)] = d_length;
    }
}
