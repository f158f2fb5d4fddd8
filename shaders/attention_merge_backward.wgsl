// Attention: gradients of one side of a merge of partial results. It is called a here, its gradients are written to
// d_side and d_side_lse. With w_j = e^{lse_j − lse}, out_a − out = w_b (out_a − out_b), hence
//
//     d_out_a = w_a d_out        d_lse_a = w_a (d_out·(out_a − out) + d_lse) = w_a (w_b d_out·(out_a − out_b) + d_lse)
//
// Of two sides of which one is empty (lse −∞) the other has the weight 1, the empty one 0 and no gradient. Both empty:
// d_out_a = d_out, d_lse_a = 0.
//
// LANES invocations a row, whose parts of the product are summed in a fixed order: a repeated run is bit-equal.

var<workgroup> sums: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = place_of(workgroup_index(workgroup, workgroups), thread);
    var weights = Weights(0.0, 0.0, 0.0);
    var is_a_empty = true;
    var is_b_empty = true;
    var sum = 0.0;
    if place.is_used {
        let own_lse_a = lse_a[base_of(params.lse_a, place)];
        let own_lse_b = lse_b[base_of(params.lse_b, place)];
        weights = weigh(own_lse_a, own_lse_b);
        is_a_empty = is_empty(own_lse_a);
        is_b_empty = is_empty(own_lse_b);
        var weight = weights.a;
        if is_a_empty || is_b_empty {
            weight = select(0.0, 1.0, is_b_empty);
        }
        for (var column = place.column; column < params.value_dim; column += 4u * LANES) {
            let d = d_out_load4(base_of(params.d_out, place), column, params.value_dim);
            let a = out_a_load4(base_of(params.out_a, place), column, params.value_dim);
            let b = out_b_load4(base_of(params.out_b, place), column, params.value_dim);
            sum += dot(d, a - b);
            d_side_store4(base_of(params.out, place), column, params.value_dim, weight * d);
        }
    }
    sums[thread] = sum;
    workgroupBarrier();
    if !place.is_used || place.column != 0u {
        return;
    }
    for (var lane = 1u; lane < LANES; lane++) {
        sum += sums[thread + lane];
    }
    var gradient = 0.0;
    if params.has_d_lse == 1u {
        gradient = d_lse[base_of(params.d_lse, place)];
    }
    // What an empty side holds, or is told about its lse, is of no account.
    if is_a_empty {
        gradient = 0.0;
    } else if !is_b_empty {
        gradient = weights.a * (weights.b * sum + gradient);
    }
    d_side_lse[base_of(params.lse, place)] = gradient;
}
