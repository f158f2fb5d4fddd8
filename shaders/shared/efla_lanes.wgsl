// Products of one chunk by one subgroup (lanes.wgsl says why), of CHUNK = 4·LANES tokens: a lane has rows 4·lane.. of the
// chunk. Dimensions are whole vectors here, and `w`, `u`, `states` arrays of vectors.

// [COLUMNS] of the lane's rows.
alias Sums = Tile;

// Numbers of components, and of the halves of 8 columns.
const at_x: u32 = 0u;
const at_y: u32 = 1u;
const at_z: u32 = 2u;
const at_w: u32 = 3u;
const at_a: u32 = 0u;
const at_b: u32 = 4u;

var<private> lane: u32;
// The lane's rows of the chunk.
var<private> rows: vec4<u32>;
var<private> place: Place;
// First token; first row in the workspace, whose chunks are whole; first row of the chunk's state.
var<private> token0: u32;
var<private> row0: u32;
var<private> state0: u32;

fn enter(sequence: Place, chunk: u32, own_lane: u32) {
    lane = own_lane;
    rows = 4u * own_lane + vec4(0u, 1u, 2u, 3u);
    place = sequence;
    token0 = (chunk - sequence.chunk0) * CHUNK;
    row0 = chunk * CHUNK;
    state0 = chunk * params.key_dim;
}

fn key_vectors() -> u32 {
    return params.key_dim / 4u;
}

fn value_vectors() -> u32 {
    return params.value_dim / 4u;
}

// The lane's node of every group, as row numbers.
fn chunk_rows() -> Addresses {
    var addresses: Addresses;
//# for g in GROUPS
    addresses[$g] = $g * LANES + lane;
//# end
    return addresses;
}
