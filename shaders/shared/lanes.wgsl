// Products of tiles held in registers, for kernels whose workgroup is one subgroup: no workgroup memory, no barriers.
//
// Software adapters want it so: a barrier turns each invocation into a coroutine there, and a load costs as much as a
// dozen multiplications. Every operand is loaded once, by one lane, and handed to the others by a broadcast, which costs
// as much as a multiplication.
//
// A lane has 4 rows, as the components of vectors; a tile has TILE nodes, which lie in GROUPS groups of one a lane.
// A kernel says what it multiplies by defining load(part, address, column) -> 4 columns of what starts at the address, 0
// past its end. `part` is a constant: only what it stands for is compiled.

const ROWS: u32 = 4u * LANES;

// [TILE nodes] of the lane's rows.
alias Tile = array<vec4<f32>, TILE>;
// Of the lane's node of every group.
alias Addresses = array<u32, GROUPS>;

// 4 columns of 4 rows: column c of the result is the rows' column c.
fn load_rows(part: u32, rows: vec4<u32>, column: u32) -> mat4x4<f32> {
    return transpose(mat4x4(
        load(part, rows.x, column),
        load(part, rows.y, column),
        load(part, rows.z, column),
        load(part, rows.w, column),
    ));
}

// tile ← rows x nodesᵀ  [ROWS, columns] x [columns, TILE]
fn dots(
    tile: ptr<function, Tile>,
    row_part: u32,
    rows: vec4<u32>,
    node_part: u32,
    nodes: ptr<function, Addresses>,
    columns: u32,
) {
//# for n in TILE
    (*tile)[$n] = vec4(0.0);
//# end
    // Never without columns: a loop that asks at its end spares masked rounds.
    var column = 0u;
    loop {
        let left = load_rows(row_part, rows, column);
//# for g in GROUPS
        let right$g = load(node_part, (*nodes)[$g], column);
//# for lane in LANES
        {
            let right = subgroupBroadcast(right$g, $laneu);
            let sum = left[0] * right.x + left[1] * right.y + left[2] * right.z + left[3] * right.w;
            (*tile)[$g * LANES + $lane] += sum;
        }
//# end
//# end
        continuing {
            column += 4u;
            break if column >= columns;
        }
    }
}
