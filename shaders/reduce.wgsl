// Sums `count` dense partial results of the workspace, `stride` apart, into one small strided output [n0, n1, n2].
// One invocation an element, always in the same order: a repeated run is bit-equal.

const THREADS: u32 = 64u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    if i >= params.shape.x * params.shape.y * params.shape.z {
        return;
    }
    let inner = i % params.shape.z;
    let middle = i / params.shape.z % params.shape.y;
    let outer = i / params.shape.z / params.shape.y;
    let first = params.source + outer * params.source_stride + middle * params.shape.z + inner;
    var sum = 0.0;
    for (var p = 0u; p < params.count; p++) {
        sum += workspace[first + p * params.stride];
    }
    destination[params.destination.x + outer * params.destination.y + middle * params.destination.z
        + inner * params.destination.w] = sum;
}
