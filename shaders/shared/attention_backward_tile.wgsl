// Tiles of the backward kernels of attention that stage them in workgroup memory.

// [BLOCK_Q][columns]: rows of q or d_out; also what segments' lengths get; in the second products rows of k, too.
var<workgroup> stage: array<vec4<f32>, max(BLOCK_Q, BLOCK_K) * PITCH>;
// [BLOCK_K][columns] of k, then of v; then [BLOCK_Q][BLOCK_K]: d_out·v, then the weights w.
var<workgroup> values: array<vec4<f32>, max(BLOCK_Q, BLOCK_K) * PITCH>;
// [BLOCK_Q][BLOCK_K]: logits, then their gradients.
var<workgroup> scores: array<vec4<f32>, BLOCK_Q * PITCH>;
// Nodes each row sees; none if it has no integral.
var<workgroup> ranges: array<vec2<i32>, BLOCK_Q>;

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
            let p = node_weights(a, vec4(row.lse));
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
