// Copies a strided tensor of up to 4 dimensions [n0, n1, n2, n3] into another, from any storage type to any.
// One invocation 4 columns of a row.

const THREADS: u32 = 64u;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = workgroup_index(workgroup, workgroups) * THREADS + thread;
    if i >= params.quads * params.rows {
        return;
    }
    let column = 4u * (i % params.quads);
    let row = i / params.quads;
    let n2 = row % params.shape.z;
    let n1 = row / params.shape.z % params.shape.y;
    let n0 = row / params.shape.z / params.shape.y;
    let source_base = params.source.x + n0 * params.source.y + n1 * params.source.z + n2 * params.source.w;
    let destination_base = params.destination.x + n0 * params.destination.y + n1 * params.destination.z
        + n2 * params.destination.w;
    let end = params.shape.w;

    var value: vec4<f32>;
    if params.source_step == 1u {
        value = source_load4(source_base, column, end);
    } else {
        let at = source_base + params.source_step * min(column + vec4(0u, 1u, 2u, 3u), vec4(end - 1u));
        value = vec4(source_load(at.x), source_load(at.y), source_load(at.z), source_load(at.w));
    }
    if params.destination_step == 1u {
        destination_store4(destination_base, column, end, value);
    } else {
        for (var c = 0u; c < 4u && column + c < end; c++) {
            let at = destination_base + params.destination_step * (column + c);
            destination_store4(at, 0u, 1u, vec4(value[c]));
        }
    }
}
