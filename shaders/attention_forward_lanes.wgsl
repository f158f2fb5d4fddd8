// attention_forward for software adapters: a workgroup is one subgroup, a lane has 4 rows, tiles stay in registers
// (lanes.wgsl says why). The steps and the arithmetic are those of attention_forward.wgsl, whose head explains them; the
// sums of values stand in the workspace, since registers can't be indexed by a variable.

// The identity of max over finite numbers. Whether a row has seen anything is a flag, not a value.
const LOWEST: f32 = -3.4028234e38;

fn load(part: u32, address: u32, column: u32) -> vec4<f32> {
    if part == Q {
        return q_vector(address + column) * params.scale;
    }
    // The keys of tiles are tokens': node 0 stands before the first tile.
    if part == K {
        return k_vector(address + column);
    }
    if CONTINUOUS == 0u {
        return v_vector(address + column);
    }
    return load_v_at(address, column);
}

// Logits of the lane's rows with one node.
fn logits_of(rows: vec4<u32>, node: u32) -> vec4<f32> {
    var sum = vec4(0.0);
    for (var column = 0u; column < params.head_dim; column += 4u) {
        let q = load_rows(Q, rows, column);
        let k = load_k_at(node, column);
        sum += q[0] * k.x + q[1] * k.y + q[2] * k.z + q[3] * k.w;
    }
    return sum;
}

// What a row has come to.
struct RowEnd {
    // Where its sums start.
    sums: u32,
    row_max: f32,
    // The integral Z, if the row has one.
    sum: f32,
    has_integral: bool,
    // The pending weight, of a node that the row may see, and that node's value.
    pending: f32,
    sees_last: bool,
    last_value: u32,
    // Whether it sees one node only, and that node's value.
    lone: bool,
    lone_value: u32,
}

fn finish(task: Task, row: u32, end: RowEnd) {
    let place = task.place;
    if row >= place.queries {
        return;
    }
    if params.has_lse == 1u {
        // A constant that is not finite is an error in WGSL; a variable's bits are not.
        var bits = 0xff800000u;
        if end.has_integral {
            bits = bitcast<u32>(end.row_max + nan_log(end.sum));
        }
        let base = params.lse.x + place.batch * params.lse.y + task.head * params.lse.z;
        lse[base + (place.query0 + row) * params.lse.w] = bitcast<f32>(bits);
    }
    let base = params.out.x + place.batch * params.out.y + task.head * params.out.z
        + (place.query0 + row) * params.out.w;
    for (var column = 0u; column < params.value_dim; column += 4u) {
        var sums = workspace[end.sums + column / 4u];
        if CONTINUOUS == 1u {
            sums += select(vec4(0.0), end.pending * load_v_at(end.last_value, column), vec4(end.sees_last));
        }
        // Not `sum != 0.0`, which is false for a NaN: rows that see one must not look like rows of 0.
        var result = select(sums / end.sum, vec4(0.0), !end.has_integral || end.sum == 0.0);
        if end.lone {
            // No segment: the limit of a shrinking interval.
            result = load_v_at(end.lone_value, column);
        }
        out_store4(base, column, params.value_dim, result);
    }
}

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
    let q_of_head = q_rows(place, task.head);
    let k_of_head = k_nodes(place, task.head / params.group);
    let v_of_head = v_nodes(place, task.head / params.group);

    let row0 = task.block * ROWS;
    // Both ends never decrease with the row.
    let lowest = visible_nodes(place, row0);
    let highest = visible_nodes(place, min(row0 + ROWS, place.queries) - 1u);
    // Tiles begin behind the first node, whose logit is carried into them, and end with the weight of the last one still
    // pending: as many as without segments.
    let tiles = stretch(lowest.x + LAG, highest.y, TILE);
    if has_ended(tiles.x, highest.y) {
        return;
    }
    let row = row0 + 4u * lane;
    let own = row_ranges(place, row);
    let rows = row_addresses(q_of_head, row, params.q.w);
    let vectors = (params.value_dim + 3u) / 4u;
    let sums = params.sums / 4u + (index * ROWS + 4u * lane + vec4(0u, 1u, 2u, 3u)) * vectors;

    var row_max = vec4(0.0);
    var row_sum = vec4(0.0);
    var row_active = vec4(false);
    var carried_logit = vec4(0.0);
    var carried_weight = vec4(0.0);
    let left_at = params.left / 4u + 5u * (index * LANES + lane);
    if params.first_step > 0u {
        row_max = workspace[left_at];
        row_sum = workspace[left_at + 1u];
        row_active = workspace[left_at + 2u] > vec4(0.0);
        carried_logit = workspace[left_at + 3u];
        carried_weight = workspace[left_at + 4u];
    } else {
        clear_sums(sums, params.value_dim);
        if CONTINUOUS == 1u {
            carried_logit = logits_of(rows, node_address(k_of_head, lowest.x, params.k.w));
        }
    }
    var end = lowest.x;
    var tile: Tile;
    var seen: Mask;

    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(TILE)) {
        // 1. Logits.
        var keys = token_addresses(k_of_head, node0, lane, params.k.w);
        dots(&tile, Q, rows, K, &keys, params.head_dim);

        // 2. Weights. Segment n is active if the row sees nodes n − 1 and n and it has a length; an ordinary token if
        // seen.
        let first_active = own.first + LAG;
        var tile_max = vec4(LOWEST);
        var tile_active = vec4(false);
        var left = carried_logit;
//# for g in GROUPS
        let intervals$g = load_interval(place, node0 + i32($g * LANES + lane));
//# for lane in LANES
        {
            let a = tile[$g * LANES + $lane];
            let node = vec4(node0 + i32($g * LANES + $lane));
            var live = (node >= first_active) & (node <= own.last);
            var top = a;
            if CONTINUOUS == 1u {
                top = max(a, left);
            }
            if INTERVALS == 1u {
                live = live & vec4(subgroupBroadcast(intervals$g, $laneu) > 0.0);
            }
            tile_max = max(tile_max, select(vec4(LOWEST), top, live));
            tile_active = tile_active | live;
            left = a;
        }
//# end
//# end
        let new_max = select(row_max, select(tile_max, max(row_max, tile_max), row_active), tile_active);
        let factor = select(vec4(1.0), exp(row_max - new_max), tile_active & row_active);
        row_max = new_max;
        row_active = row_active | tile_active;

        var tile_sum = vec4(0.0);
        var pending = carried_weight * factor;
        left = carried_logit;
        // No end of an active segment lies above the maximum; the others may, and are not used.
        var p_left = exp(min(left - row_max, vec4(0.0)));
//# for g in GROUPS
//# for lane in LANES
        {
            let a = tile[$g * LANES + $lane];
            let node = vec4(node0 + i32($g * LANES + $lane));
            var weight: vec4<f32>;
            if CONTINUOUS == 0u {
                let live = (node >= own.first) & (node <= own.last);
                weight = select(vec4(0.0), nan_exp(select(vec4(0.0), a - row_max, live)), live);
            } else {
                var live = (node >= first_active) & (node <= own.last);
                let p = exp(min(a - row_max, vec4(0.0)));
                var unit = segment_weights(a - left, p_left, p);
                if INTERVALS == 1u {
                    let delta_t = subgroupBroadcast(intervals$g, $laneu);
                    live = live & vec4(delta_t > 0.0);
                    unit = SegmentWeights(delta_t * unit.left, delta_t * unit.right);
                }
                weight = select(vec4(0.0), unit.left, live) + pending;
                pending = select(vec4(0.0), unit.right, live);
                left = a;
                p_left = p;
            }
            tile_sum += weight;
            tile[$g * LANES + $lane] = weight;
            let value = node - LAG;
            seen[$g * LANES + $lane] = (value >= own.first) & (value <= own.last);
        }
//# end
//# end
        row_sum = row_sum * factor + tile_sum;
        carried_logit = left;
        carried_weight = pending;
        end = node0 + i32(TILE) - 1;

        // 3. Sums of values. A tile is whole if every row sees every node of it.
        let value0 = node0 - LAG;
        let whole = value0 >= highest.x && value0 + i32(TILE) - 1 <= lowest.y;
        var values: Addresses;
        if CONTINUOUS == 1u {
            values = node_addresses(v_of_head, value0, lane, params.v.w);
        } else {
            values = token_addresses(v_of_head, value0, lane, params.v.w);
        }
        apply(&tile, whole, &seen, V, &values, params.value_dim, factor, sums);
    }

    if tiles.y < highest.y {
        workspace[left_at] = row_max;
        workspace[left_at + 1u] = row_sum;
        workspace[left_at + 2u] = select(vec4(0.0), vec4(1.0), row_active);
        workspace[left_at + 3u] = carried_logit;
        workspace[left_at + 4u] = carried_weight;
        return;
    }
    row_sum += carried_weight;
    let last_value = node_address(v_of_head, end, params.v.w);
    var rest = row;
//# for r in x y z w
    {
        let row_end = RowEnd(
            sums.$r,
            row_max.$r,
            row_sum.$r,
            row_active.$r,
            carried_weight.$r,
            CONTINUOUS == 1u && end >= own.first.$r && end <= own.last.$r,
            last_value,
            CONTINUOUS == 1u && own.first.$r == own.last.$r,
            node_address(v_of_head, own.first.$r, params.v.w),
        );
        finish(task, rest, row_end);
        rest++;
    }
//# end
}
