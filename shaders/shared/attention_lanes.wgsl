// What the attention kernels of one subgroup a workgroup share: where rows and nodes lie.

// Which rows see the nodes.
alias Mask = array<vec4<bool>, TILE>;

fn packed(at: u32) -> f32 {
    return workspace[at / 4u][at % 4u];
}

const Q: u32 = 0u;
const K: u32 = 1u;
const V: u32 = 2u;
const D_OUT: u32 = 3u;

// An address that holds zeros; otherwise the highest bit says that it is one of the workspace.
const NOWHERE: u32 = 0xffffffffu;
const PACKED: u32 = 0x80000000u;

// Of 4 rows, the last one again past the end.
fn row_addresses(rows: Rows, row: u32, stride: u32) -> vec4<u32> {
    return rows.base + min(row + vec4(0u, 1u, 2u, 3u), vec4(rows.count - 1u)) * stride;
}

fn node_address(nodes: Nodes, node: i32, stride: u32) -> u32 {
    let token = token_of(nodes, node);
    if token >= 0 {
        return nodes.base + u32(token) * stride;
    }
    return select(NOWHERE, PACKED | nodes.sink, GIVEN == 1u && node == 0);
}

// Of the lane's nodes of a tile, which are tokens; of nodes that do not exist some token's.
fn token_addresses(nodes: Nodes, node0: i32, lane: u32, stride: u32) -> Addresses {
    var addresses: Addresses;
//# for g in GROUPS
    let token$g = clamp(node0 + i32($g * LANES + lane), 1, max(i32(nodes.keys), 1)) - 1;
    addresses[$g] = nodes.base + u32(token$g) * stride;
//# end
    return addresses;
}

// Of the lane's nodes of a tile.
fn node_addresses(nodes: Nodes, node0: i32, lane: u32, stride: u32) -> Addresses {
    var addresses: Addresses;
//# for g in GROUPS
    addresses[$g] = node_address(nodes, node0 + i32($g * LANES + lane), stride);
//# end
    return addresses;
}

// What was loaded from a node's address if that is a token's.
fn node_value(token: vec4<f32>, address: u32, column: u32, end: u32) -> vec4<f32> {
    if GIVEN == 1u && address >= PACKED {
        return load_sink(address - PACKED, 0, column, end);
    }
    return select(token, vec4(0.0), address >= PACKED);
}

fn load_k_at(address: u32, column: u32) -> vec4<f32> {
    let token = k_vector(select(address, 0u, address >= PACKED) + column);
    return node_value(token, address, column, params.head_dim);
}

fn load_v_at(address: u32, column: u32) -> vec4<f32> {
    let token = v_vector(select(address, 0u, address >= PACKED) + column);
    return node_value(token, address, column, params.value_dim);
}

// Length of the segment that ends in a node.
fn load_interval(place: Place, node: i32) -> f32 {
    if INTERVALS == 0u || place.keys == 0u {
        return 1.0;
    }
    let base = params.packed_intervals + place.batch * params.keys + place.key0;
    return packed(base + u32(clamp(node, 1, i32(place.keys)) - 1));
}

// Which nodes each of a lane's rows sees.
struct Ranges {
    first: vec4<i32>,
    last: vec4<i32>,
}

fn row_ranges(place: Place, row: u32) -> Ranges {
    let x = visible_nodes(place, row);
    let y = visible_nodes(place, row + 1u);
    let z = visible_nodes(place, row + 2u);
    let w = visible_nodes(place, row + 3u);
    return Ranges(vec4(x.x, y.x, z.x, w.x), vec4(x.y, y.y, z.y, w.y));
}

// Sums of rows in the workspace, a vector of 4 columns at a time; `rows` are the first vectors of the lane's rows.
fn clear_sums(rows: vec4<u32>, columns: u32) {
    for (var c = 0u; 4u * c < columns; c++) {
//# for r in x y z w
        workspace[rows.$r + c] = vec4(0.0);
//# end
    }
}

fn add_sums(rows: vec4<u32>, column: u32, factor: vec4<f32>, change: mat4x4<f32>) {
    let by_row = transpose(change);
    let at = rows + column / 4u;
    workspace[at.x] = workspace[at.x] * factor.x + by_row[0];
    workspace[at.y] = workspace[at.y] * factor.y + by_row[1];
    workspace[at.z] = workspace[at.z] * factor.z + by_row[2];
    workspace[at.w] = workspace[at.w] * factor.w + by_row[3];
}

// sums ← factor sums + tile x nodes  [ROWS, TILE] x [TILE, columns], whose every row sees every node if `whole`.
fn apply(
    tile: ptr<function, Tile>,
    whole: bool,
    seen: ptr<function, Mask>,
    part: u32,
    nodes: ptr<function, Addresses>,
    columns: u32,
    factor: vec4<f32>,
    sums: vec4<u32>,
) {
    // Two loops, one of which has no rounds: a software adapter runs both sides of an `if`.
    for (var column = select(columns, 0u, whole); column < columns; column += 4u) {
        var change = mat4x4<f32>();
//# for g in GROUPS
        let node$g = load(part, (*nodes)[$g], column);
//# for lane in LANES
        {
            let node = subgroupBroadcast(node$g, $laneu);
            let weight = (*tile)[$g * LANES + $lane];
            change += mat4x4(weight * node.x, weight * node.y, weight * node.z, weight * node.w);
        }
//# end
//# end
        add_sums(sums, column, factor, change);
    }
    // What a row doesn't see is left out, not multiplied by 0.
    for (var column = select(0u, columns, whole); column < columns; column += 4u) {
        var change = mat4x4<f32>();
//# for g in GROUPS
        let node$g = load(part, (*nodes)[$g], column);
//# for lane in LANES
        {
            let node = subgroupBroadcast(node$g, $laneu);
            let weight = (*tile)[$g * LANES + $lane];
            let kept = (*seen)[$g * LANES + $lane];
            change += mat4x4(
                select(vec4(0.0), weight * node.x, kept),
                select(vec4(0.0), weight * node.y, kept),
                select(vec4(0.0), weight * node.z, kept),
                select(vec4(0.0), weight * node.w, kept),
            );
        }
//# end
//# end
        add_sums(sums, column, factor, change);
    }
}
