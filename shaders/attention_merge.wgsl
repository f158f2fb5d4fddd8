// Attention: joins the results of two disjoint stretches of the integral,
//
//     lse = ln(e^{lse_a} + e^{lse_b})        w_j = e^{lse_j − lse}        out = w_a out_a + w_b out_b
//
// One side empty (lse −∞): the other. Both: out_a + out_b and −∞.
//
// LANES invocations a row. Every element is read by whoever writes it, and lse before it is written: out and lse may be
// those of either side.

fn load_out_a(place: Place, column: u32) -> vec4<f32> {
    if (params.out_in_place & 1u) != 0u {
        return out_load4(base_of(params.out, place), column, params.value_dim);
    }
    return out_a_load4(base_of(params.out_a, place), column, params.value_dim);
}

fn load_out_b(place: Place, column: u32) -> vec4<f32> {
    if (params.out_in_place & 2u) != 0u {
        return out_load4(base_of(params.out, place), column, params.value_dim);
    }
    return out_b_load4(base_of(params.out_b, place), column, params.value_dim);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let place = place_of(workgroup_index(workgroup, workgroups), thread);
    let lse_at = base_of(params.lse, place);
    var own_lse_a = 0.0;
    var own_lse_b = 0.0;
    if place.is_used {
        if (params.lse_in_place & 1u) != 0u {
            own_lse_a = lse[lse_at];
        } else {
            own_lse_a = lse_a[base_of(params.lse_a, place)];
        }
        if (params.lse_in_place & 2u) != 0u {
            own_lse_b = lse[lse_at];
        } else {
            own_lse_b = lse_b[base_of(params.lse_b, place)];
        }
    }
    storageBarrier();
    if !place.is_used {
        return;
    }

    let weights = weigh(own_lse_a, own_lse_b);
    let is_a_empty = is_empty(own_lse_a);
    let is_b_empty = is_empty(own_lse_b);
    if place.column == 0u {
        var bits = bitcast<u32>(weights.lse);
        if is_b_empty {
            bits = bitcast<u32>(own_lse_a);
        }
        if is_a_empty {
            bits = bitcast<u32>(own_lse_b);
        }
        lse[lse_at] = bitcast<f32>(bits);
    }
    for (var column = place.column; column < params.value_dim; column += 4u * LANES) {
        let a = load_out_a(place, column);
        let b = load_out_b(place, column);
        // What an empty side holds must not reach the other, be it NaN.
        var result = weights.a * a + weights.b * b;
        if is_a_empty && is_b_empty {
            result = a + b;
        } else if is_a_empty {
            result = b;
        } else if is_b_empty {
            result = a;
        }
        out_store4(base_of(params.out, place), column, params.value_dim, result);
    }
}
