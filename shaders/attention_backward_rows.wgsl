// Attention, backward: per query row D = Σ_c d_out_c out_c − d_lse, kept beside lse in the workspace as (lse, D).
// One invocation a row.

const THREADS: u32 = 64u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    if i >= params.batch * params.heads * params.queries {
        return;
    }
    let row = i % params.queries;
    let head = i / params.queries % params.heads;
    let batch = i / params.queries / params.heads;
    let out_base = params.out.x + batch * params.out.y + head * params.out.z + row * params.out.w;
    let d_out_base = params.d_out.x + batch * params.d_out.y + head * params.d_out.z + row * params.d_out.w;
    var sum = 0.0;
    // An out of 16 bits was rounded: its D comes from attention_backward_outputs.
    for (var c = 0u; c < params.value_dim && params.has_out == 1u; c += 4u) {
        sum += dot(d_out_load4(d_out_base, c, params.value_dim), out_load4(out_base, c, params.value_dim));
    }
    if params.has_d_lse == 1u {
        sum -= d_lse[params.d_lse.x + batch * params.d_lse.y + head * params.d_lse.z + row * params.d_lse.w];
    }
    workspace[params.rows + 2u * i] = lse[params.lse.x + batch * params.lse.y + head * params.lse.z + row * params.lse.w];
    workspace[params.rows + 2u * i + 1u] = sum;
}
