// Copies one small strided input [n0, n1, n2] into a dense range of the workspace, for kernels that would otherwise
// need a binding for it.

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
    workspace[params.destination + i] =
        source_load(params.source.x + outer * params.source.y + middle * params.source.z + inner * params.source.w);
}
