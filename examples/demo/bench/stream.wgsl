// As many bytes as memory can move: each invocation adds up vectors that are a whole grid apart, so that neighbours read
// neighbours, or copies them. The host writes the capitals.
@group(0) @binding(0) var<storage, read_write> source: array<vec4f>;
@group(0) @binding(1) var<storage, read_write> result: array<vec4f>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u, @builtin(num_workgroups) groups: vec3u) {
    let stride = groups.x * 64u;
    var sum = vec4f();
    for (var step = 0u; step < STEPS; step++) {
        let at = id.x + step * stride;
        if COPIES {
            result[at] = source[at];
        } else {
            sum += source[at];
        }
    }
    if !COPIES {
        result[id.x] = sum;
    }
}
