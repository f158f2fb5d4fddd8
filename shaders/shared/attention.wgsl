// What the attention kernels share: whose rows and nodes a workgroup has, which nodes a row sees, and loads of 4 columns
// of a tensor at a time.
//
// LAG is 1 for continuous attention, whose segments join two nodes, 0 for ordinary attention (CONTINUOUS = 0).
// With RAGGED sequences have lengths of their own, and where they lie stands in `table`, which the host wrote: 6 words a
// sequence as in Place, then (sequence, block) of every block of rows and of every block of nodes.

const SINK_FIRST: u32 = 1u;
const SINK_GIVEN: u32 = 2u;
const LAG: i32 = i32(CONTINUOUS);

// A sequence: its batch in the tensors, its number (that of its sink), its first row and token, how many it has, and how
// many tokens its part of the tensors has room for.
struct Place {
    batch: u32,
    sequence: u32,
    query0: u32,
    queries: u32,
    key0: u32,
    keys: u32,
    room: u32,
}

// Rows of a head of a sequence that a workgroup has; or nodes of a key/value head.
struct Task {
    place: Place,
    head: u32,
    block: u32,
}

fn place_of(sequence: u32) -> Place {
    if RAGGED == 1u {
        let at = 6u * sequence;
        return Place(table[at], sequence, table[at + 1u], table[at + 2u], table[at + 3u], table[at + 4u], table[at + 5u]);
    }
    return Place(sequence, sequence, 0u, params.queries, 0u, params.keys, params.keys);
}

fn row_task(index: u32) -> Task {
    let block = index % params.row_blocks;
    let head = index / params.row_blocks;
    if RAGGED == 1u {
        let entry = params.row_table + 2u * block;
        return Task(place_of(table[entry]), head, table[entry + 1u]);
    }
    // The last rows see most nodes: they start first.
    return Task(place_of(head / params.heads), head % params.heads, params.row_blocks - 1u - block);
}

// A row's place among those of all heads, as in a dense lse.
fn flat_row(task: Task, row: u32) -> u32 {
    return (task.place.batch * params.heads + task.head) * params.queries + task.place.query0 + row;
}

// First and last node that a row sees; last < first: none.
fn visible_nodes(place: Place, row: u32) -> vec2<i32> {
    if row >= place.queries {
        return vec2(0, -1);
    }
    let keys = i32(place.keys);
    let last = select(keys, i32(row + 1u) + keys - i32(place.queries), params.causal == 1u);
    if params.sink == SINK_FIRST && last < 1 {
        return vec2(0, -1);
    }
    return vec2(max(params.first_node, last - params.window), last);
}

// Of tiles from node `first` to `last` those of this dispatch: where the first begins, and the last node. A dispatch does
// params.steps of them, from params.first_step on; what a workgroup that has tiles to come leaves stands at params.left.
fn stretch(first: i32, last: i32, tile: u32) -> vec2<i32> {
    let start = first + i32(params.first_step * tile);
    return vec2(start, min(last, start + i32(params.steps * tile) - 1));
}

// Whether a workgroup did all tiles in earlier dispatches.
fn has_ended(start: i32, last: i32) -> bool {
    return params.first_step > 0u && start > last;
}

// What was packed into the workspace; the kernels define `packed`, since they declare the workspace differently.
fn packed4(at: vec4<u32>) -> vec4<f32> {
    return vec4(packed(at.x), packed(at.y), packed(at.z), packed(at.w));
}

// Where rows of a head lie.
struct Rows {
    base: u32,
    count: u32,
}

fn q_rows(place: Place, head: u32) -> Rows {
    let base = params.q.x + place.batch * params.q.y + head * params.q.z + place.query0 * params.q.w;
    return Rows(base, place.queries);
}

// 4 columns of a query row times scale, 0 past the end.
fn load_q(rows: Rows, row: u32, column: u32) -> vec4<f32> {
    if row >= rows.count {
        return vec4(0.0);
    }
    return q_load4(rows.base + row * params.q.w, column, params.head_dim) * params.scale;
}

// Where the nodes of a key/value head lie: its tokens, and node 0 if that was given and packed into the workspace.
struct Nodes {
    base: u32,
    sink: u32,
    keys: u32,
}

fn k_nodes(place: Place, kv_head: u32) -> Nodes {
    let base = params.k.x + place.batch * params.k.y + kv_head * params.k.z + place.key0 * params.k.w;
    let sink = params.packed_sink_k + place.sequence * params.sink_k_stride + kv_head * params.head_dim;
    return Nodes(base, sink, place.keys);
}

fn v_nodes(place: Place, kv_head: u32) -> Nodes {
    let base = params.v.x + place.batch * params.v.y + kv_head * params.v.z + place.key0 * params.v.w;
    let sink = params.packed_sink_v + place.sequence * params.sink_v_stride + kv_head * params.value_dim;
    return Nodes(base, sink, place.keys);
}

// Which token's key and value a node has, counted from 0; −1: none.
fn token_of(nodes: Nodes, node: i32) -> i32 {
    if node > i32(nodes.keys) || (node < 1 && params.sink != SINK_FIRST) || nodes.keys == 0u {
        return -1;
    }
    return max(node, 1) - 1;
}

// 4 columns of a node's key, 0 past the end.
fn load_k(nodes: Nodes, node: i32, column: u32) -> vec4<f32> {
    let token = token_of(nodes, node);
    if token >= 0 {
        return k_load4(nodes.base + u32(token) * params.k.w, column, params.head_dim);
    }
    return load_sink(nodes.sink, node, column, params.head_dim);
}

// 4 columns of a node's value, 0 past the end.
fn load_v(nodes: Nodes, node: i32, column: u32) -> vec4<f32> {
    let token = token_of(nodes, node);
    if token >= 0 {
        return v_load4(nodes.base + u32(token) * params.v.w, column, params.value_dim);
    }
    return load_sink(nodes.sink, node, column, params.value_dim);
}

// 4 columns of node 0 if it was given, else 0.
fn load_sink(base: u32, node: i32, column: u32, end: u32) -> vec4<f32> {
    if params.sink != SINK_GIVEN || node > 0 {
        return vec4(0.0);
    }
    let columns = column + vec4(0u, 1u, 2u, 3u);
    let at = base + min(columns, vec4(end - 1u));
    return select(vec4(0.0), packed4(at), columns < vec4(end));
}

// Lengths of the segments that end in 4 nodes.
fn load_intervals(place: Place, node: i32) -> vec4<f32> {
    if params.has_intervals == 0u || place.keys == 0u {
        return vec4(1.0);
    }
    let base = params.packed_intervals + place.batch * params.keys + place.key0;
    let at = base + vec4<u32>(clamp(node + vec4(0, 1, 2, 3), vec4(1), vec4(i32(place.keys))) - 1);
    return packed4(at);
}
