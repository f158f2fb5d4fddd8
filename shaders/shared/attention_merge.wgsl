// What a merge of partial results and its gradients share: one row's weights, and which lanes work on which row.
//
// A side whose lse is −∞ is empty. Its bits tell; nothing is computed with infinities.

const THREADS: u32 = 64u;
// Invocations that share a row, 4 columns each at a time.
const LANES: u32 = 8u;

struct Place {
    batch: u32,
    head: u32,
    query: u32,
    // 4 · lane
    column: u32,
    is_used: bool,
}

fn place_of(workgroup: u32, thread: u32) -> Place {
    let row = workgroup * (THREADS / LANES) + thread / LANES;
    let head = row / params.queries;
    return Place(
        head / params.heads,
        head % params.heads,
        row % params.queries,
        4u * (thread % LANES),
        row < params.rows,
    );
}

// First element of a row of a tensor, given its first element and its strides.
fn base_of(tensor: vec4<u32>, place: Place) -> u32 {
    return tensor.x + place.batch * tensor.y + place.head * tensor.z + place.query * tensor.w;
}

fn is_empty(lse: f32) -> bool {
    return bitcast<u32>(lse) == 0xff800000u;
}

struct Weights {
    a: f32,
    b: f32,
    lse: f32,
}

// e^{lse_a − lse}, e^{lse_b − lse} and lse = ln(e^{lse_a} + e^{lse_b}). Of no use if a side is empty.
fn weigh(lse_a: f32, lse_b: f32) -> Weights {
    let a = select(lse_a, 0.0, is_empty(lse_a));
    let b = select(lse_b, 0.0, is_empty(lse_b));
    // Not `max`, which would lose a NaN.
    let is_a = a >= b;
    let top = select(b, a, is_a);
    let gap = select(a, b, is_a) - top;
    // Beyond, e^gap is 0 either way.
    let e = nan_exp(vec4(select(gap, -200.0, gap < -200.0))).x;
    let larger = 1.0 / (1.0 + e);
    return Weights(select(e, 1.0, is_a) * larger, select(1.0, e, is_a) * larger, top + nan_log(1.0 + e));
}
