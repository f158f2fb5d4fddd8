// Step 2 of attention_forward.wgsl, the weights of a tile's logits, one invocation a row; and what a row ends with.
//
// A kernel keeps the logits in workgroup memory, 4 nodes a vector, and defines load_logits(row, c) and
// store_weights(row, c, weights).

// The identity of max over finite numbers. Whether a row has seen anything is a count, not a value.
const LOWEST: f32 = -3.4028234e38;

// What a row carries from tile to tile.
struct Row {
    largest: f32,
    sum: f32,
    // Active segments, or tokens, seen.
    seen: u32,
    // The last logit and the last right weight.
    logit: f32,
    weight: f32,
}

fn largest(x: vec4<f32>) -> f32 {
    return max(max(x.x, x.y), max(x.z, x.w));
}

fn count(x: vec4<bool>) -> u32 {
    return dot(select(vec4(0u), vec4(1u), x), vec4(1u));
}

// The nodes of those a row sees that a split has; neighbours share the node between their segments.
fn split_nodes(place: Place, row: u32, split: i32) -> vec2<i32> {
    let range = visible_nodes(place, row);
    if SPLIT == 0u {
        return range;
    }
    let first = split * params.split_nodes;
    return vec2(max(range.x, first), min(range.y, first + params.split_nodes - 1 + LAG));
}

// A row's place among those of all splits and heads.
fn partial_row(task: Task, row: u32, split: i32) -> u32 {
    return u32(split) * params.batch * params.heads * params.queries + flat_row(task, row);
}

// Replaces the logits of row `at` of a tile by weights; returns the factor on what was summed so far. The row sees the
// nodes `own`, the first of the tile is node0.
fn weigh(place: Place, at: u32, own: vec2<i32>, node0: i32, carried: ptr<function, Row>) -> f32 {
    // Segment n is active if the row sees nodes n − 1 and n and it has a length; an ordinary token if seen.
    let first_active = own.x + LAG;
    var tile_max = LOWEST;
    var tile_active = 0u;
    var left = (*carried).logit;
    for (var c = 0u; c < BLOCK_K / 4u; c++) {
        let a = load_logits(at, c);
        let node = node0 + i32(4u * c) + vec4(0, 1, 2, 3);
        var live = (node >= vec4(first_active)) & (node <= vec4(own.y));
        var top = a;
        if CONTINUOUS == 1u {
            live = live & (load_intervals(place, node.x) > vec4(0.0));
            top = max(a, vec4(left, a.xyz));
        }
        tile_max = max(tile_max, largest(select(vec4(LOWEST), top, live)));
        tile_active += count(live);
        left = a.w;
    }
    var row_max = (*carried).largest;
    var factor = 1.0;
    if tile_active > 0u {
        if (*carried).seen > 0u {
            let new_max = max(row_max, tile_max);
            factor = exp(row_max - new_max);
            row_max = new_max;
        } else {
            row_max = tile_max;
        }
        (*carried).seen += tile_active;
    }

    var tile_sum = 0.0;
    var pending = (*carried).weight * factor;
    left = (*carried).logit;
    // No end of an active segment lies above the maximum; the others may, and are not used.
    var p_left = exp(min(left - row_max, 0.0));
    for (var c = 0u; c < BLOCK_K / 4u; c++) {
        let a = load_logits(at, c);
        let node = node0 + i32(4u * c) + vec4(0, 1, 2, 3);
        var weight: vec4<f32>;
        if CONTINUOUS == 0u {
            let seen = (node >= vec4(own.x)) & (node <= vec4(own.y));
            weight = select(vec4(0.0), nan_exp(select(vec4(0.0), a - row_max, seen)), seen);
        } else {
            let delta_t = load_intervals(place, node.x);
            let live = (node >= vec4(first_active)) & (node <= vec4(own.y)) & (delta_t > vec4(0.0));
            let p = exp(min(a - row_max, vec4(0.0)));
            let unit = segment_weights(a - vec4(left, a.xyz), vec4(p_left, p.xyz), p);
            let right = select(vec4(0.0), delta_t * unit.right, live);
            weight = select(vec4(0.0), delta_t * unit.left, live) + vec4(pending, right.xyz);
            pending = right.w;
            left = a.w;
            p_left = p.w;
        }
        tile_sum += weight.x + weight.y + weight.z + weight.w;
        store_weights(at, c, weight);
    }
    (*carried).largest = row_max;
    (*carried).sum = (*carried).sum * factor + tile_sum;
    (*carried).logit = left;
    (*carried).weight = pending;
    return factor;
}

// Writes the lse of a row; returns its integral Z, 0 where it has none.
fn end_row(task: Task, row: u32, split: i32, carried: Row) -> f32 {
    let place = task.place;
    if row < place.queries {
        // A constant that is not finite is an error in WGSL; a variable's bits are not.
        var lse_bits = 0xff800000u;
        if carried.seen > 0u {
            lse_bits = bitcast<u32>(carried.largest + nan_log(carried.sum));
        }
        if SPLIT == 1u {
            workspace[params.lse_partial + partial_row(task, row, split)] = bitcast<f32>(lse_bits);
        } else if params.has_lse == 1u {
            let base = params.lse.x + place.batch * params.lse.y + task.head * params.lse.z;
            lse[base + (place.query0 + row) * params.lse.w] = bitcast<f32>(lse_bits);
        }
    }
    return select(0.0, carried.sum, carried.seen > 0u);
}

// Writes 4 columns of the out of a row, whose sums over its nodes they are and whose integral is Z.
fn store_out(task: Task, row: u32, split: i32, values: Nodes, column: u32, sums: vec4<f32>, integral: f32) {
    let place = task.place;
    let nodes = visible_nodes(place, row);
    var result = vec4(0.0);
    if CONTINUOUS == 1u && nodes.x == nodes.y {
        // One node and no segment: the limit of a shrinking interval.
        if SPLIT == 0u || nodes.x / params.split_nodes == split {
            result = load_v(values, nodes.x, column);
        }
    } else {
        // Not `integral != 0.0`, which is false for a NaN: rows that see one must not look like rows of 0.
        result = select(sums / integral, vec4(0.0), integral == 0.0);
    }
    if SPLIT == 0u {
        let base = params.out.x + place.batch * params.out.y + task.head * params.out.z;
        out_store4(base + (place.query0 + row) * params.out.w, column, params.value_dim, result);
        return;
    }
    let partial = params.out_partial + partial_row(task, row, split) * params.value_dim;
    for (var c = 0u; c < 4u && column + c < params.value_dim; c++) {
        workspace[partial + column + c] = result[c];
    }
}
