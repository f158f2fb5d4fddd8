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
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    if index >= params.row_tasks {
        return;
    }
    let task = row_task(index);
    let place = task.place;
    let q_of_head = q_rows(place, task.head);
    let k_of_head = k_nodes(place, task.head / params.group);
    let v_of_head = v_nodes(place, task.head / params.group);
    let d_out_of_head = d_out_rows(place, task.head);

    let row0 = task.block * BLOCK_Q;
    let lowest = visible_nodes(place, row0);
    let highest = visible_nodes(place, min(row0 + BLOCK_Q, place.queries) - 1u);
    let tiles = stretch(lowest.x, highest.y, BLOCK_K);
    if has_ended(tiles.x, highest.y) {
        return;
    }
    var own = Row(vec2(0, -1), 0.0, 0.0, false);
    if thread < BLOCK_Q {
        own = load_row(task, row0 + thread);
    }
    // Of the node before: logit, p, d_out·v.
    var left = vec3(0.0);
    var sum = vec4(0.0);
    let left_at = params.left + 8u * (index * THREADS + thread);
    if params.first_step > 0u {
        left = take_up(left_at).xyz;
        sum = take_up(left_at + 4u);
    }
    for (var node0 = tiles.x; node0 <= tiles.y; node0 += i32(BLOCK_K)) {
        multiply(thread, row0, node0, q_of_head, k_of_head, v_of_head, d_out_of_head);
        if thread < BLOCK_Q {
            for (var c = 0u; c < STAGE; c++) {
                let a = scores[thread * PITCH + c];
                let d = values[thread * PITCH + c];
                let node = node0 + i32(4u * c) + vec4(0, 1, 2, 3);
                if CONTINUOUS == 0u {
                    let seen = (node >= vec4(own.range.x)) & (node <= vec4(own.range.y));
                    sum += select(vec4(0.0), nan_exp(select(vec4(0.0), a - own.lse, seen)) * d, seen);
                } else {
                    let p = node_weights(a, vec4(own.lse));
                    let length = load_intervals(place, node.x);
                    let live = (node > vec4(own.range.x)) & (node <= vec4(own.range.y)) & (length > vec4(0.0));
                    let s = segment_integrals(a - vec4(left.x, a.xyz), vec4(left.y, p.xyz), p);
                    sum += select(vec4(0.0), length * (s.left * vec4(left.z, d.xyz) + s.right * d), live);
                    left = vec3(a.w, p.w, d.w);
                }
            }
        }
    }
    if tiles.y < highest.y {
        leave(left_at, vec4(left, 0.0));
        leave(left_at + 4u, sum);
    } else if thread < BLOCK_Q && row0 + thread < place.queries {
        let at = params.rows + 2u * flat_row(task, row0 + thread);
        workspace[at + 1u] += (sum.x + sum.y) + (sum.z + sum.w);
    }
}
