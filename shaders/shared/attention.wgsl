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
    if row >= params.queries || column >= params.head_dim {
        return vec4(0.0);
    }
    let start = base + row * params.q.w;
    let end = params.head_dim - 1u;
    let c = column + vec4(0u, 1u, 2u, 3u);
    let at = start + min(c, vec4(end));
    let x = vec4(q[at.x], q[at.y], q[at.z], q[at.w]) * params.scale;
    return select(vec4(0.0), x, c <= vec4(end));
}

// 4 columns of a node's key, 0 past the end.
fn load_k(base: u32, sink_base: u32, node: i32, column: u32) -> vec4<f32> {
    if node > i32(params.keys) || column >= params.head_dim {
        return vec4(0.0);
    }
    let end = params.head_dim - 1u;
    let c = column + vec4(0u, 1u, 2u, 3u);
    var x = vec4(0.0);
    if node >= 1 || (params.sink == SINK_FIRST && params.keys > 0u) {
        let at = base + u32(max(node, 1) - 1) * params.k.w + min(c, vec4(end));
        x = vec4(k[at.x], k[at.y], k[at.z], k[at.w]);
    } else if params.sink == SINK_GIVEN {
        let at = sink_base + min(c, vec4(end));
        x = vec4(workspace[at.x], workspace[at.y], workspace[at.z], workspace[at.w]);
    }
    return select(vec4(0.0), x, c <= vec4(end));
}

// 4 columns of a node's value, 0 past the end.
fn load_v(base: u32, sink_base: u32, node: i32, column: u32) -> vec4<f32> {
    if node > i32(params.keys) || column >= params.value_dim {
        return vec4(0.0);
    }
    let end = params.value_dim - 1u;
    let c = column + vec4(0u, 1u, 2u, 3u);
    var x = vec4(0.0);
    if node >= 1 || (params.sink == SINK_FIRST && params.keys > 0u) {
        let at = base + u32(max(node, 1) - 1) * params.v.w + min(c, vec4(end));
        x = vec4(v[at.x], v[at.y], v[at.z], v[at.w]);
    } else if params.sink == SINK_GIVEN {
        let at = sink_base + min(c, vec4(end));
        x = vec4(workspace[at.x], workspace[at.y], workspace[at.z], workspace[at.w]);
    }
    return select(vec4(0.0), x, c <= vec4(end));
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
