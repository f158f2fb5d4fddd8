// What both backward kernels of attention share: from logits and d_out·v to the gradients of the logits.
//
// With p = e^{a − lse} (so that sums are already divided by Z), g_n = d_out·v_n − D and, per segment i of length Δ,
// M = Δ ∫ s(1−s) e^{a(s)} ds, segment i gives
//
//     d_a_i     += M g_{i−1} + (R − M) g_i          w_i     += R
//     d_a_{i−1} += (L − M) g_{i−1} + M g_i          w_{i−1} += L          d_Δ_i += (L g_{i−1} + R g_i) / Δ
//
// R − M and L − M come from polynomials of their own, so nothing cancels at any step size. For ordinary attention
// d_a = p g and w = p.

// [BLOCK_Q][columns]: rows of q or d_out; also what segments' lengths get; in the second products rows of k, too.
var<workgroup> stage: array<vec4<f32>, max(BLOCK_Q, BLOCK_K) * PITCH>;
// [BLOCK_K][columns] of k, then of v; then [BLOCK_Q][BLOCK_K]: d_out·v, then the weights w.
var<workgroup> values: array<vec4<f32>, max(BLOCK_Q, BLOCK_K) * PITCH>;
// [BLOCK_Q][BLOCK_K]: logits, then their gradients.
var<workgroup> scores: array<vec4<f32>, BLOCK_Q * PITCH>;
// Nodes each row sees; none if it has no integral.
var<workgroup> ranges: array<vec2<i32>, BLOCK_Q>;

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
    let lse = workspace[at];
    let lone = CONTINUOUS == 1u && range.x == range.y;
    if bitcast<u32>(lse) == MINUS_INFINITY {
        return Row(select(vec2(0, -1), range, lone), 0.0, 0.0, lone);
    }
    return Row(range, lse, workspace[at + 1u], lone);
}

// e^{a − lse}. lse lies below the logits of active segments by up to ln Δ, 87 for the shortest. Nodes without one may lie
// farther above it. Not `min`, which would lose a NaN.
fn node_weights(a: vec4<f32>, lse: f32) -> vec4<f32> {
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

// scores ← logits [BLOCK_Q, D] x [D, BLOCK_K] of rows row0.. and nodes node0.., values ← d_out·v [BLOCK_Q, D_v] x
// [D_v, BLOCK_K]; both may be read when it returns. An invocation has 4 rows x 4 nodes.
fn multiply(thread: u32, row0: u32, node0: i32, q_rows: Rows, k_nodes: Nodes, v_nodes: Nodes, d_out_rows: Rows) {
    let x = thread % STAGE;
    let y = thread / STAGE;
    var logits: array<vec4<f32>, 4>;
    var d_weights: array<vec4<f32>, 4>;
    for (var i = 0u; i < 4u; i++) {
        logits[i] = vec4(0.0);
        d_weights[i] = vec4(0.0);
    }
    for (var s = 0u; s < KEY_STAGES; s++) {
        workgroupBarrier();
        for (var i = thread; i < BLOCK_Q * STAGE; i += THREADS) {
            let column = 4u * (s * STAGE + i % STAGE);
            stage[i / STAGE * PITCH + i % STAGE] = load_q(q_rows, row0 + i / STAGE, column);
        }
        for (var i = thread; i < BLOCK_K * STAGE; i += THREADS) {
            let column = 4u * (s * STAGE + i % STAGE);
            values[i / STAGE * PITCH + i % STAGE] = load_k(k_nodes, node0 + i32(i / STAGE), column);
        }
        workgroupBarrier();
        for (var c = 0u; c < STAGE; c++) {
            let k0 = values[(4u * x) * PITCH + c];
            let k1 = values[(4u * x + 1u) * PITCH + c];
            let k2 = values[(4u * x + 2u) * PITCH + c];
            let k3 = values[(4u * x + 3u) * PITCH + c];
            for (var i = 0u; i < 4u; i++) {
                let q_i = stage[(4u * y + i) * PITCH + c];
                logits[i] += vec4(dot(q_i, k0), dot(q_i, k1), dot(q_i, k2), dot(q_i, k3));
            }
        }
    }
    for (var s = 0u; s < VALUE_STAGES; s++) {
        workgroupBarrier();
        for (var i = thread; i < BLOCK_Q * STAGE; i += THREADS) {
            let column = 4u * (s * STAGE + i % STAGE);
            stage[i / STAGE * PITCH + i % STAGE] = load_d_out(d_out_rows, row0 + i / STAGE, column);
        }
        for (var i = thread; i < BLOCK_K * STAGE; i += THREADS) {
            let column = 4u * (s * STAGE + i % STAGE);
            values[i / STAGE * PITCH + i % STAGE] = load_v(v_nodes, node0 + i32(i / STAGE), column);
        }
        workgroupBarrier();
        for (var c = 0u; c < STAGE; c++) {
            let v0 = values[(4u * x) * PITCH + c];
            let v1 = values[(4u * x + 1u) * PITCH + c];
            let v2 = values[(4u * x + 2u) * PITCH + c];
            let v3 = values[(4u * x + 3u) * PITCH + c];
            for (var i = 0u; i < 4u; i++) {
                let d_i = stage[(4u * y + i) * PITCH + c];
                d_weights[i] += vec4(dot(d_i, v0), dot(d_i, v1), dot(d_i, v2), dot(d_i, v3));
            }
        }
    }
    workgroupBarrier();
    for (var i = 0u; i < 4u; i++) {
        scores[(4u * y + i) * PITCH + x] = logits[i];
        values[(4u * y + i) * PITCH + x] = d_weights[i];
    }
    workgroupBarrier();
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

// What a row carries from node to node.
struct Carry {
    logit: f32,
    p: f32,
    g: f32,
    // What the last node has so far of d_a and w.
    change: f32,
    weight: f32,
}

// Replaces the logits of a row of the tile by their gradients and d_out·v by the weights. Both are complete for a node
// only when the segment to its right is known, so position t of the tile then belongs to node node0 − LAG + t.
// Segments before `first_segment` are left out. Lengths get their part in `stage`, at the segment's right node.
fn weigh_row(
    slot: u32,
    place: Place,
    row: Row,
    node0: i32,
    first_segment: i32,
    lengths: bool,
    carry: ptr<function, Carry>,
) {
    for (var c = 0u; c < STAGE; c++) {
        let at = slot * PITCH + c;
        let a = scores[at];
        let g = values[at] - row.correction;
        let node = node0 + i32(4u * c) + vec4(0, 1, 2, 3);
        if CONTINUOUS == 0u {
            let seen = (node >= vec4(row.range.x)) & (node <= vec4(row.range.y));
            let p = select(vec4(0.0), nan_exp(select(vec4(0.0), a - row.lse, seen)), seen);
            scores[at] = select(vec4(0.0), p * g, seen);
            values[at] = p;
        } else {
            let p = node_weights(a, row.lse);
            let a0 = vec4((*carry).logit, a.xyz);
            let p0 = vec4((*carry).p, p.xyz);
            let g0 = vec4((*carry).g, g.xyz);
            let length = load_intervals(place, node.x);
            let seen = (node > vec4(row.range.x)) & (node <= vec4(row.range.y)) & (node >= vec4(first_segment));
            let live = seen & (length > vec4(0.0));
            let zero = vec4(0.0);
            let s = segment_integrals(a - a0, p0, p);
            let left_change = select(zero, length * (s.left_square * g0 + s.mixed * g), live);
            let right_change = select(zero, length * (s.mixed * g0 + s.right_square * g), live);
            let left = select(zero, length * s.left, live);
            let right = select(zero, length * s.right, live);
            scores[at] = left_change + vec4((*carry).change, right_change.xyz);
            var weight = left + vec4((*carry).weight, right.xyz);
            if row.lone {
                weight = select(zero, vec4(1.0), node - 1 == vec4(row.range.x));
            }
            values[at] = weight;
            if lengths {
                stage[at] = select(zero, s.left * g0 + s.right * g, seen);
            }
            *carry = Carry(a.w, p.w, g.w, right_change.w, right.w);
        }
    }
}
