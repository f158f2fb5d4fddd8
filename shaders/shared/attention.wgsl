// What the attention kernels share: which nodes a row sees, and loads of 4 columns of a tensor at a time.
//
// LAG is 1 for continuous attention, whose segments join two nodes, 0 for ordinary attention (CONTINUOUS = 0).

const SINK_FIRST: u32 = 1u;
const SINK_GIVEN: u32 = 2u;
const LAG: i32 = i32(CONTINUOUS);

// Columns staged at a time, as vectors of 4; one more a row, so that rows start in different memory banks.
const STAGE: u32 = BLOCK_K / 4u;
const PITCH: u32 = STAGE + 1u;
const THREADS: u32 = BLOCK_Q * BLOCK_K / 16u;

// First and last node that a row sees; last < first: none.
fn visible_nodes(row: u32) -> vec2<i32> {
    if row >= params.queries {
        return vec2(0, -1);
    }
    let last = select(i32(params.keys), i32(row + 1u) + params.alignment, params.causal == 1u);
    if params.sink == SINK_FIRST && last < 1 {
        return vec2(0, -1);
    }
    return vec2(max(params.first_node, last - params.window), last);
}

// 4 columns of a query row times scale, 0 past the end.
fn load_q(base: u32, row: u32, column: u32) -> vec4<f32> {
    if row >= params.queries {
        return vec4(0.0);
    }
    return q_load4(base + row * params.q.w, column, params.head_dim) * params.scale;
}

// 4 columns of node 0 that was packed into the workspace, 0 past the end or if no such node is given.
fn load_sink(base: u32, column: u32, end: u32) -> vec4<f32> {
    if params.sink != SINK_GIVEN {
        return vec4(0.0);
    }
    let columns = column + vec4(0u, 1u, 2u, 3u);
    let at = base + min(columns, vec4(end - 1u));
    return select(
        vec4(0.0),
        vec4(workspace[at.x], workspace[at.y], workspace[at.z], workspace[at.w]),
        columns < vec4(end),
    );
}

// 4 columns of a node's key, 0 past the end.
fn load_k(base: u32, sink_base: u32, node: i32, column: u32) -> vec4<f32> {
    if node > i32(params.keys) {
        return vec4(0.0);
    }
    if node >= 1 || (params.sink == SINK_FIRST && params.keys > 0u) {
        return k_load4(base + u32(max(node, 1) - 1) * params.k.w, column, params.head_dim);
    }
    return load_sink(sink_base, column, params.head_dim);
}

// 4 columns of a node's value, 0 past the end.
fn load_v(base: u32, sink_base: u32, node: i32, column: u32) -> vec4<f32> {
    if node > i32(params.keys) {
        return vec4(0.0);
    }
    if node >= 1 || (params.sink == SINK_FIRST && params.keys > 0u) {
        return v_load4(base + u32(max(node, 1) - 1) * params.v.w, column, params.value_dim);
    }
    return load_sink(sink_base, column, params.value_dim);
}

// Lengths of the segments that end in 4 nodes.
fn load_intervals(base: u32, node: i32) -> vec4<f32> {
    if params.has_intervals == 0u {
        return vec4(1.0);
    }
    let at = base + vec4<u32>(clamp(node + vec4(0, 1, 2, 3), vec4(1), vec4(i32(params.keys))) - 1);
    return vec4(workspace[at.x], workspace[at.y], workspace[at.z], workspace[at.w]);
}

// Σ w v over the 4 nodes from `node` that lie in the range seen.
fn seen_sum(
    w: vec4<f32>,
    node: i32,
    range: vec2<i32>,
    v0: vec4<f32>,
    v1: vec4<f32>,
    v2: vec4<f32>,
    v3: vec4<f32>,
) -> vec4<f32> {
    let nodes = node + vec4(0, 1, 2, 3);
    let seen = (nodes >= vec4(range.x)) & (nodes <= vec4(range.y));
    let zero = vec4(0.0);
    return select(zero, w.x * v0, seen.x) + select(zero, w.y * v1, seen.y)
        + select(zero, w.z * v2, seen.z) + select(zero, w.w * v3, seen.w);
}
