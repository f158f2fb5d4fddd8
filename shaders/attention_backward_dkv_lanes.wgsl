// attention_backward_dkv for software adapters: a workgroup is one subgroup, tiles stay in registers (lanes.wgsl says
// why). The steps and the arithmetic are those of attention_backward_dkv.wgsl, but here a lane has 4 nodes, and a tile's
// other side are TILE query rows; neighbouring nodes are those of neighbouring lanes.

const OWN: u32 = ROWS - 2u * CONTINUOUS;

// Of nodes: x of the lane after, w of the lane before. Past the ends they are never used.
fn shifted_left(x: vec4<f32>, lane: u32) -> vec4<f32> {
    return vec4(x.yzw, subgroupShuffle(x.x, (lane + 1u) % LANES));
}

fn shifted_right(x: vec4<f32>, lane: u32) -> vec4<f32> {
    return vec4(subgroupShuffle(x.w, (lane + LANES - 1u) % LANES), x.xyz);
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) lane: u32,
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

    let own_first = i32(task.block * OWN);
    let own_last = min(own_first + i32(OWN) - 1, i32(place.room));
    let node0 = own_first - LAG;
    let reach = row_reach(place, own_first, own_last);
    // A step is a tile of rows of one of the heads.
    let tiles = row_tiles(reach, TILE);
    let steps = tiles * params.group;
    if has_ended(i32(params.first_step), i32(steps) - 1) {
        return;
    }
    let end = min(params.first_step + params.steps, steps);
    let nodes = node0 + i32(4u * lane) + vec4(0, 1, 2, 3);
    let k_at = vec4(
        node_address(k_of_head, nodes.x, params.k.w),
        node_address(k_of_head, nodes.y, params.k.w),
        node_address(k_of_head, nodes.z, params.k.w),
        node_address(k_of_head, nodes.w, params.k.w),
    );
    let v_at = vec4(
        node_address(v_of_head, nodes.x, params.v.w),
        node_address(v_of_head, nodes.y, params.v.w),
        node_address(v_of_head, nodes.z, params.v.w),
        node_address(v_of_head, nodes.w, params.v.w),
    );
    let length = load_intervals(place, nodes.x);

    let slots = index * ROWS + 4u * lane + vec4(0u, 1u, 2u, 3u);
    let key_vectors = (params.head_dim + 3u) / 4u;
    let value_vectors = (params.value_dim + 3u) / 4u;
    let d_keys = params.sums / 4u + slots * key_vectors;
    let d_values = params.sums / 4u + params.node_tasks * ROWS * key_vectors + slots * value_vectors;
    // Of the segments that end in the nodes.
    var d_length = vec4(0.0);
    let left_at = params.left / 4u + index * LANES + lane;
    if params.first_step > 0u {
        d_length = workspace[left_at];
    } else {
        clear_sums(d_keys, params.head_dim);
        clear_sums(d_values, params.value_dim);
    }
    var logits: Tile;
    var d_weights: Tile;
    var seen: Mask;

    for (var step = params.first_step; step < end; step++) {
        let head = kv_head * params.group + step / max(tiles, 1u);
        let q_of_head = q_rows(place, head);
        let d_out_of_head = d_out_rows(place, head);
        let row0 = u32(reach.x) + step % max(tiles, 1u) * TILE;
        var whole = true;
        var queries: Addresses;
        var d_outs: Addresses;
//# for g in GROUPS
        let own_row$g = row0 + $g * LANES + lane;
        let own$g = load_row(Task(place, head, 0u), own_row$g);
        queries[$g] = q_of_head.base + min(own_row$g, place.queries - 1u) * params.q.w;
        d_outs[$g] = d_out_of_head.base + min(own_row$g, place.queries - 1u) * params.d_out.w;
        whole = whole && own$g.range.x <= node0 && own$g.range.y >= node0 + i32(ROWS) - 1;
//# end
        whole = subgroupAll(whole);

        // 1.
        dots(&logits, K, k_at, Q, &queries, params.head_dim);
        dots(&d_weights, V, v_at, D_OUT, &d_outs, params.value_dim);

        // 2. The segment into the tile's first node is another workgroup's.
        var tile_length = vec4(0.0);
//# for g in GROUPS
//# for lane in LANES
        {
            let first = vec4(subgroupBroadcast(own$g.range.x, $laneu));
            let last = vec4(subgroupBroadcast(own$g.range.y, $laneu));
            let lse = vec4(subgroupBroadcast(own$g.lse, $laneu));
            let a = logits[$g * LANES + $lane];
            let g = d_weights[$g * LANES + $lane] - subgroupBroadcast(own$g.correction, $laneu);
            if CONTINUOUS == 0u {
                let live = (nodes >= first) & (nodes <= last);
                let p = select(vec4(0.0), nan_exp(select(vec4(0.0), a - lse, live)), live);
                logits[$g * LANES + $lane] = select(vec4(0.0), p * g, live);
                d_weights[$g * LANES + $lane] = p;
            } else {
                let inside = (nodes > first) & (nodes <= last) & (nodes > vec4(node0));
                let live = inside & (length > vec4(0.0));
                let p = node_weights(a, lse);
                let g0 = shifted_right(g, lane);
                let s = segment_integrals(a - shifted_right(a, lane), shifted_right(p, lane), p);
                let change = select(vec4(0.0), length * (s.left_square * g0 + s.mixed * g), live);
                let left = select(vec4(0.0), length * s.left, live);
                logits[$g * LANES + $lane] = shifted_left(change, lane)
                    + select(vec4(0.0), length * (s.mixed * g0 + s.right_square * g), live);
                let weight = shifted_left(left, lane) + select(vec4(0.0), length * s.right, live);
                // A row of one node has no segment: it returned its value.
                d_weights[$g * LANES + $lane] = select(
                    weight,
                    select(vec4(0.0), vec4(1.0), nodes == first),
                    vec4(subgroupBroadcast(u32(own$g.lone), $laneu) == 1u),
                );
                tile_length += select(vec4(0.0), s.left * g0 + s.right * g, inside);
            }
            seen[$g * LANES + $lane] = (nodes >= first) & (nodes <= last);
        }
//# end
//# end
        d_length += tile_length;

        // 3. Rows that have no integral, or don't see the node, are left out, not multiplied by 0.
        apply(&d_weights, whole, &seen, D_OUT, &d_outs, params.value_dim, vec4(1.0), d_values);
//# for g in GROUPS
//# for lane in LANES
        // A row of one node has no segment: only its value gets something.
        seen[$g * LANES + $lane] = seen[$g * LANES + $lane] & vec4(subgroupBroadcast(u32(own$g.lone), $laneu) == 0u);
//# end
//# end
        apply(&logits, whole, &seen, Q, &queries, params.head_dim, vec4(1.0), d_keys);
    }

    if end < steps {
        workspace[left_at] = d_length;
        return;
    }
    // Nodes 0 and 1 are neighbours of one lane; what stands before the first is never looked at.
    var before = vec2(d_keys.x, d_values.x);
//# for r in x y z w
    finish(place, kv_head, nodes.$r, own_first, own_last, vec2(d_keys.$r, d_values.$r), before, d_length.$r);
    before = vec2(d_keys.$r, d_values.$r);
//# end
}

fn put(at: u32, value: f32) {
    workspace[at / 4u][at % 4u] = value;
}

// Writes what a node gets; its sums and those of the node before start at `sums` and `before` (keys, values).
fn finish(
    place: Place,
    kv_head: u32,
    node: i32,
    own_first: i32,
    own_last: i32,
    sums: vec2<u32>,
    before: vec2<u32>,
    d_length: f32,
) {
    if node < own_first || node > own_last {
        return;
    }
    if params.has_d_intervals == 1u && node > 0 {
        let at = params.d_intervals_partial + (place.batch * params.kv_heads + kv_head) * params.keys + place.key0;
        put(at + u32(node - 1), d_length);
    }
    if node == 0 && params.sink != SINK_GIVEN {
        return;
    }
    let sinks = place.sequence * params.kv_heads + kv_head;
    let both = node == 1 && params.sink == SINK_FIRST;
    let k_base = params.d_k.x + place.batch * params.d_k.y + kv_head * params.d_k.z + place.key0 * params.d_k.w;
    for (var column = 0u; column < params.head_dim; column += 4u) {
        let result = workspace[sums.x + column / 4u] + select(vec4(0.0), workspace[before.x + column / 4u], both);
        if node > 0 {
            d_k_store4(k_base + u32(node - 1) * params.d_k.w, column, params.head_dim, result);
        } else {
            for (var c = 0u; c < 4u && column + c < params.head_dim; c++) {
                put(params.d_sink_k_partial + sinks * params.head_dim + column + c, result[c]);
            }
        }
    }
    let v_base = params.d_v.x + place.batch * params.d_v.y + kv_head * params.d_v.z + place.key0 * params.d_v.w;
    for (var column = 0u; column < params.value_dim; column += 4u) {
        let result = workspace[sums.y + column / 4u] + select(vec4(0.0), workspace[before.y + column / 4u], both);
        if node > 0 {
            d_v_store4(v_base + u32(node - 1) * params.d_v.w, column, params.value_dim, result);
        } else {
            for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
                put(params.d_sink_v_partial + sinks * params.value_dim + column + c, result[c]);
            }
        }
    }
}
