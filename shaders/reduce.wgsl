// Sums `count` dense partial results of the workspace, `stride` apart, into one small strided output [n0, n1, n2].
// One invocation two elements, always in the same order: a repeated run is bit-equal.

const THREADS: u32 = 64u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    let pairs = (params.shape.z + 1u) / 2u;
    if i >= params.shape.x * params.shape.y * pairs {
        return;
    }
    let inner = i % pairs * 2u;
    let middle = i / pairs % params.shape.y;
    let outer = i / pairs / params.shape.y;
    let first = params.source + outer * params.source_stride + middle * params.shape.z + inner;
    let both = inner + 1u < params.shape.z;
    var sum = vec2(0.0);
    for (var p = 0u; p < params.count; p++) {
        let at = first + p * params.stride;
        sum += vec2(workspace[at], workspace[at + u32(both)]);
    }
    let at = params.destination.x + outer * params.destination.y + middle * params.destination.z
        + inner * params.destination.w;
    if params.add == 1u {
        sum.x += destination_load(at);
        if both {
            sum.y += destination_load(at + params.destination.w);
        }
    }
    destination_store2(at, params.destination.w, both, sum);
}
