// attention_backward_dq for software adapters: a workgroup is one subgroup, a lane has 4 rows, tiles stay in registers
// (lanes.wgsl says why). The steps and the arithmetic are those of attention_backward_dq.wgsl.

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= params.row_tasks {
        return;
    }
    let task = row_task(index);
    let place = task.place;
    let k_of_head = k_nodes(place, task.head / params.group);
    let v_of_head = v_nodes(place, task.head / params.group);

    let row0 = task.block * ROWS;
    let lowest = visible_nodes(place, row0);
    let highest = visible_nodes(place, min(row0 + ROWS, place.queries) - 1u);
    let last_node = highest.y + LAG;
    let tiles = stretch(lowest.x, last_node, TILE);
    if has_ended(tiles.x, last_node) {
        return;
    }
    let row = row0 + 4u * lane;
    let own = load_lane_rows(task, row);
    let first = own.ranges.first;
    let last = own.ranges.last;
    let q_at = row_addresses(q_rows(place, task.head), row, params.q.w);
    let d_out_at = row_addresses(d_out_rows(place, task.head), row, params.d_out.w);
    let vectors = (params.head_dim + 3u) / 4u;
    let sums = params.sums / 4u + (index * ROWS + 4u * lane + vec4(0u, 1u, 2u, 3u)) * vectors;

    // Of the last node: logit, p, g, and what it has so far of d_a.
    var left = vec4(0.0);
    var p_left = vec4(0.0);
    var g_left = vec4(0.0);
    var pending = vec4(0.0);
    let left_at = params.left / 4u + 4u * (index * LANES + lane);
    if params.first_step > 0u {
        left = workspace[left_at];
        p_left = workspace[left_at + 1u];
        g_left = workspace[left_at + 2u];
        pending = workspace[left_at + 3u];
    } else {
        clear_sums(sums, params.head_dim);
    }
    var logits: Tile;
    var d_weights: Tile;
    var seen: Mask;

    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(TILE)) {
        // 1.
        var keys = node_addresses(k_of_head, node0, lane, params.k.w);
        var values = node_addresses(v_of_head, node0, lane, params.v.w);
        dots(&logits, Q, q_at, K, &keys, params.head_dim);
        dots(&d_weights, D_OUT, d_out_at, V, &values, params.value_dim);

        // 2.
//# for g in GROUPS
        let intervals$g = load_interval(place, node0 + i32($g * LANES + lane));
//# for lane in LANES
        {
            let a = logits[$g * LANES + $lane];
            let g = d_weights[$g * LANES + $lane] - own.correction;
            let node = vec4(node0 + i32($g * LANES + $lane));
            if CONTINUOUS == 0u {
                let live = (node >= first) & (node <= last);
                let p = nan_exp(select(vec4(0.0), a - own.lse, live));
                logits[$g * LANES + $lane] = select(vec4(0.0), p * g, live);
            } else {
                var length = 1.0;
                if INTERVALS == 1u {
                    length = subgroupBroadcast(intervals$g, $laneu);
                }
                let live = (node > first) & (node <= last) & vec4(length > 0.0);
                let p = node_weights(a, own.lse);
                let s = segment_integrals(a - left, p_left, p);
                let change = select(vec4(0.0), length * (s.left_square * g_left + s.mixed * g), live);
                logits[$g * LANES + $lane] = change + pending;
                pending = select(vec4(0.0), length * (s.mixed * g_left + s.right_square * g), live);
                left = a;
                p_left = p;
                g_left = g;
            }
            let at = node - LAG;
            seen[$g * LANES + $lane] = (at >= first) & (at <= last);
        }
//# end
//# end

        // 3. A tile is whole if every row sees every node of it.
        let value0 = node0 - LAG;
        let whole = value0 >= highest.x && value0 + i32(TILE) - 1 <= lowest.y;
        keys = node_addresses(k_of_head, value0, lane, params.k.w);
        apply(&logits, whole, &seen, K, &keys, params.head_dim, vec4(1.0), sums);
    }

    if tiles.y < last_node {
        workspace[left_at] = left;
        workspace[left_at + 1u] = p_left;
        workspace[left_at + 2u] = g_left;
        workspace[left_at + 3u] = pending;
        return;
    }
    var rest = row;
//# for r in x y z w
    // Rows without an integral get 0, whatever the keys hold.
    finish(task, rest, last.$r >= first.$r + LAG, sums.$r);
    rest++;
//# end
}

fn finish(task: Task, row: u32, has_integral: bool, sums: u32) {
    let place = task.place;
    if row >= place.queries {
        return;
    }
    let base = params.d_q.x + place.batch * params.d_q.y + task.head * params.d_q.z
        + (place.query0 + row) * params.d_q.w;
    for (var column = 0u; column < params.head_dim; column += 4u) {
        let result = select(vec4(0.0), params.scale * workspace[sums + column / 4u], has_integral);
        d_q_store4(base, column, params.head_dim, result);
    }
}
