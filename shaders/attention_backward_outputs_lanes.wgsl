// attention_backward_outputs for software adapters: a workgroup is one subgroup, a lane has 4 rows, tiles stay in
// registers (lanes.wgsl says why).

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
    let tiles = stretch(lowest.x, highest.y, TILE);
    if has_ended(tiles.x, highest.y) {
        return;
    }
    let row = row0 + 4u * lane;
    let own = load_lane_rows(task, row);
    let q_at = row_addresses(q_rows(place, task.head), row, params.q.w);
    let d_out_at = row_addresses(d_out_rows(place, task.head), row, params.d_out.w);

    // Of the last node: logit, p, d_out·v.
    var left = vec4(0.0);
    var p_left = vec4(0.0);
    var d_left = vec4(0.0);
    var sum = vec4(0.0);
    let left_at = params.left / 4u + 4u * (index * LANES + lane);
    if params.first_step > 0u {
        left = workspace[left_at];
        p_left = workspace[left_at + 1u];
        d_left = workspace[left_at + 2u];
        sum = workspace[left_at + 3u];
    }
    var logits: Tile;
    var d_weights: Tile;
    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(TILE)) {
        var keys = node_addresses(k_of_head, node0, lane, params.k.w);
        var values = node_addresses(v_of_head, node0, lane, params.v.w);
        dots(&logits, Q, q_at, K, &keys, params.head_dim);
        dots(&d_weights, D_OUT, d_out_at, V, &values, params.value_dim);
        var tile_sum = vec4(0.0);
//# for g in GROUPS
        let intervals$g = load_interval(place, node0 + i32($g * LANES + lane));
//# for lane in LANES
        {
            let a = logits[$g * LANES + $lane];
            let d = d_weights[$g * LANES + $lane];
            let node = vec4(node0 + i32($g * LANES + $lane));
            if CONTINUOUS == 0u {
                let live = (node >= own.ranges.first) & (node <= own.ranges.last);
                tile_sum += select(vec4(0.0), nan_exp(select(vec4(0.0), a - own.lse, live)) * d, live);
            } else {
                var length = 1.0;
                if INTERVALS == 1u {
                    length = subgroupBroadcast(intervals$g, $laneu);
                }
                let live = (node > own.ranges.first) & (node <= own.ranges.last) & vec4(length > 0.0);
                let p = node_weights(a, own.lse);
                let s = segment_integrals(a - left, p_left, p);
                tile_sum += select(vec4(0.0), length * (s.left * d_left + s.right * d), live);
                left = a;
                p_left = p;
                d_left = d;
            }
        }
//# end
//# end
        sum += tile_sum;
    }

    if tiles.y < highest.y {
        workspace[left_at] = left;
        workspace[left_at + 1u] = p_left;
        workspace[left_at + 2u] = d_left;
        workspace[left_at + 3u] = sum;
        return;
    }
    var rest = row;
//# for r in x y z w
    if rest < place.queries {
        let at = params.rows + 2u * flat_row(task, rest) + 1u;
        workspace[at / 4u][at % 4u] += sum.$r;
    }
    rest++;
//# end
}
