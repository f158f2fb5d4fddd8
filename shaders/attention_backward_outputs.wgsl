// Attention, backward, where out was stored with 16 bits: its rounding would cost D = Σ_c d_out_c out_c more than the
// whole error budget. With w_n the weights over Z,
//
//     D += Σ_n w_n (d_out·v_n)
//
// A workgroup owns BLOCK_Q rows of one head and walks tiles of BLOCK_K nodes, as the forward pass does; one invocation
// sums a row. attention_backward_rows has left −d_lse there.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = workgroup_index(workgroup, workgroups);
    if index >= params.row_blocks * params.heads * params.batch {
        return;
    }
    let block = params.row_blocks - 1u - index % params.row_blocks;
    let head = (index / params.row_blocks) % params.heads;
    let batch = index / (params.row_blocks * params.heads);
    let kv_head = head / params.group;
    let q_base = params.q.x + batch * params.q.y + head * params.q.z;
    let k_base = params.k.x + batch * params.k.y + kv_head * params.k.z;
    let v_base = params.v.x + batch * params.v.y + kv_head * params.v.z;
    let d_out_base = params.d_out.x + batch * params.d_out.y + head * params.d_out.z;
    let sink_k = params.packed_sink_k + batch * params.sink_k_stride + kv_head * params.head_dim;
    let sink_v = params.packed_sink_v + batch * params.sink_v_stride + kv_head * params.value_dim;
    let intervals = params.packed_intervals + batch * params.keys;

    let row0 = block * BLOCK_Q;
    let lowest = visible_nodes(row0);
    let highest = visible_nodes(min(row0 + BLOCK_Q, params.queries) - 1u);
    var own = Row(vec2(0, -1), 0.0, 0.0, false);
    if thread < BLOCK_Q {
        own = load_row(batch, head, row0 + thread);
    }
    // Of the node before: logit, p, d_out·v.
    var left = vec3(0.0);
    var sum = vec4(0.0);
    for (var node0 = lowest.x; node0 <= highest.y; node0 += i32(BLOCK_K)) {
        multiply(thread, row0, node0, q_base, k_base, v_base, d_out_base, sink_k, sink_v);
        if thread < BLOCK_Q {
            for (var c = 0u; c < STAGE; c++) {
                let a = scores[thread * PITCH + c];
                let d = values[thread * PITCH + c];
                let node = node0 + i32(4u * c) + vec4(0, 1, 2, 3);
                if CONTINUOUS == 0u {
                    let seen = (node >= vec4(own.range.x)) & (node <= vec4(own.range.y));
                    sum += select(vec4(0.0), exp(select(vec4(0.0), a - own.lse, seen)) * d, seen);
                } else {
                    let p = node_weights(a, own.lse);
                    let length = load_intervals(intervals, node.x);
                    let live = (node > vec4(own.range.x)) & (node <= vec4(own.range.y)) & (length > vec4(0.0));
                    let s = segment_integrals(a - vec4(left.x, a.xyz), vec4(left.y, p.xyz), p);
                    sum += select(vec4(0.0), length * (s.left * vec4(left.z, d.xyz) + s.right * d), live);
                    left = vec3(a.w, p.w, d.w);
                }
            }
        }
    }
    if thread < BLOCK_Q && row0 + thread < params.queries {
        let at = params.rows + 2u * ((batch * params.heads + head) * params.queries + row0 + thread);
        workspace[at + 1u] += (sum.x + sum.y) + (sum.z + sum.w);
    }
}
