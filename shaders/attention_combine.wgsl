// Attention, forward, where the keys of a row were split over workgroups: the lse-weighted sum of the splits' results,
//
//     lse = ln Σ_s e^{lse_s}        out = Σ_s e^{lse_s − lse} out_s
//
// Splits without a segment of the row have lse −∞ and count for nothing, unless all have: then the one that holds the
// row's only node, if it has one, wrote its value, and the others 0. One invocation 4 columns of a row.

const THREADS: u32 = 64u;
const MINUS_INFINITY: u32 = 0xff800000u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    let blocks = (params.value_dim + 3u) / 4u;
    let rows = params.batch * params.heads * params.queries;
    if i >= rows * blocks {
        return;
    }
    let flat = i / blocks;
    let column = 4u * (i % blocks);
    var live = 0u;
    var largest = 0.0;
    for (var s = 0u; s < params.splits; s++) {
        let lse_s = workspace[params.lse_partial + s * rows + flat];
        if bitcast<u32>(lse_s) != MINUS_INFINITY {
            largest = select(max(largest, lse_s), lse_s, live == 0u);
            live++;
        }
    }
    let columns = min(column + vec4(0u, 1u, 2u, 3u), vec4(params.value_dim - 1u));
    var total = 0.0;
    var sum = vec4(0.0);
    for (var s = 0u; s < params.splits; s++) {
        let lse_s = workspace[params.lse_partial + s * rows + flat];
        var weight = 1.0;
        if live > 0u {
            if bitcast<u32>(lse_s) == MINUS_INFINITY {
                continue;
            }
            weight = nan_exp(vec4(lse_s - largest)).x;
        }
        total += weight;
        let at = params.out_partial + (s * rows + flat) * params.value_dim + columns;
        sum += weight * vec4(workspace[at.x], workspace[at.y], workspace[at.z], workspace[at.w]);
    }
    let row = flat % params.queries;
    let head = flat / params.queries % params.heads;
    let batch = flat / params.queries / params.heads;
    let base = params.out.x + batch * params.out.y + head * params.out.z + row * params.out.w;
    out_store4(base, column, params.value_dim, select(sum, sum / total, live > 0u));
    if params.has_lse == 1u && column == 0u {
        var bits = MINUS_INFINITY;
        if live > 0u {
            bits = bitcast<u32>(largest + nan_log(total));
        }
        lse[params.lse.x + batch * params.lse.y + head * params.lse.z + row * params.lse.w] = bitcast<f32>(bits);
    }
}
