// What the backward kernels of attention share: from logits and d_out·v to the gradients of the logits.
//
// With p = e^{a − lse} (so that sums are already divided by Z), g_n = d_out·v_n − D and, per segment i of length Δ,
// M = Δ ∫ s(1−s) e^{a(s)} ds, segment i gives
//
//     d_a_i     += M g_{i−1} + (R − M) g_i          w_i     += R
//     d_a_{i−1} += (L − M) g_{i−1} + M g_i          w_{i−1} += L          d_Δ_i += (L g_{i−1} + R g_i) / Δ
//
// R − M and L − M come from polynomials of their own, so nothing cancels at any step size. For ordinary attention
// d_a = p g and w = p.

const MINUS_INFINITY: u32 = 0xff800000u;

// What the row's integral needs of the forward pass.
struct Row {
    // Nodes seen; last < first if the row contributes nothing.
    range: vec2<i32>,
    lse: f32,
    // D = Σ_c d_out_c out_c − d_lse.
    correction: f32,
    // The row returned the value of its only node.
    lone: bool,
}

fn load_row(task: Task, row: u32) -> Row {
    let range = visible_nodes(task.place, row);
    if range.y < range.x {
        return Row(range, 0.0, 0.0, false);
    }
    let at = params.rows + 2u * flat_row(task, row);
    let lse = packed(at);
    let lone = CONTINUOUS == 1u && range.x == range.y;
    if bitcast<u32>(lse) == MINUS_INFINITY {
        return Row(select(vec2(0, -1), range, lone), 0.0, 0.0, lone);
    }
    return Row(range, lse, packed(at + 1u), lone);
}

// e^{a − lse}. lse lies below the logits of active segments by up to ln Δ, 87 for the shortest. Nodes without one may lie
// farther above it. Not `min`, which would lose a NaN.
fn node_weights(a: vec4<f32>, lse: vec4<f32>) -> vec4<f32> {
    return nan_exp(select(a - lse, vec4(88.0), a - lse > vec4(88.0)));
}

fn d_out_rows(place: Place, head: u32) -> Rows {
    let base = params.d_out.x + place.batch * params.d_out.y + head * params.d_out.z + place.query0 * params.d_out.w;
    return Rows(base, place.queries);
}

// 4 columns of a row of d_out, 0 past the end.
fn load_d_out(rows: Rows, row: u32, column: u32) -> vec4<f32> {
    if row >= rows.count {
        return vec4(0.0);
    }
    return d_out_load4(rows.base + row * params.d_out.w, column, params.value_dim);
}

struct SegmentIntegrals {
    left: vec4<f32>,
    right: vec4<f32>,
    mixed: vec4<f32>,
    left_square: vec4<f32>,
    right_square: vec4<f32>,
}

// ∫ (1−s) e^a, ∫ s e^a, ∫ s(1−s) e^a, ∫ (1−s)² e^a, ∫ s² e^a over 4 segments of length 1, from δ = a1 − a0 and e^a at
// either end. P and N are minimax polynomials of the tails of the exponential series.
fn segment_integrals(delta: vec4<f32>, p0: vec4<f32>, p1: vec4<f32>) -> SegmentIntegrals {
    let far = abs(delta) >= vec4(2.5);
    let d = select(delta, vec4(0.0), far);
    let y = d * d;
    let even = 4.166666791e-2
        + y * (1.388887176e-3 + y * (2.480382864e-5 + y * (2.745587153e-7 + y * 2.272922961e-9)));
    let odd = 8.333333768e-3
        + y * (1.984125847e-4 + y * (2.755881951e-6 + y * (2.498447316e-8 + y * 1.729147381e-10)));
    let third = 1.0 / 6.0 + y * odd;
    let s0 = third + d * even;
    let s1 = third - d * even;
    let x = abs(d);
    let mixed = min(p0, p1) * (1.0 / 6.0 + x * (1.0 / 6.0 + (x - 2.0) * (even + x * odd)));

    let f = select(vec4(3.0), delta, far);
    let r = 1.0 / f;
    let far_left = (p1 - p0 * (1.0 + f)) * r * r;
    let far_right = (p0 - p1 * (1.0 - f)) * r * r;
    return SegmentIntegrals(
        select(p0 * (0.5 + d * s0), far_left, far),
        select(p1 * (0.5 - d * s1), far_right, far),
        select(mixed, ((f - 2.0) * p1 + (f + 2.0) * p0) * r * r * r, far),
        select(2.0 * p0 * s0, (2.0 * far_left - p0) * r, far),
        select(2.0 * p1 * s1, (p1 - 2.0 * far_right) * r, far),
    );
}

// Of d_k and d_v: nodes of a key/value head that a workgroup has.
fn node_task(index: u32) -> Task {
    let block = index % params.node_blocks;
    let head = index / params.node_blocks;
    if RAGGED == 1u {
        let entry = params.node_table + 2u * block;
        return Task(place_of(table[entry]), head, table[entry + 1u]);
    }
    return Task(place_of(head / params.kv_heads), head % params.kv_heads, block);
}

// First and last row that see one of the nodes: their last node is at or past the first of these, their first one not past
// the last.
fn row_reach(place: Place, first: i32, last: i32) -> vec2<i32> {
    let rows = i32(place.queries);
    if params.causal == 0u {
        return vec2(0, rows - 1);
    }
    let alignment = i32(place.keys) - rows;
    return vec2(max(0, first - 1 - alignment), min(rows - 1, last - 1 - alignment + params.window));
}

// How many tiles of rows those are.
fn row_tiles(reach: vec2<i32>, tile: u32) -> u32 {
    return (u32(max(reach.y - reach.x + 1, 0)) + tile - 1u) / tile;
}
