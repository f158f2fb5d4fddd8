// As many multiplications and additions as the device can do: chains of FMAs in registers that wait for nothing but
// themselves. The host writes the capitals: the chains, one step of each several times over (so that counting costs
// nothing), how often that is done, and the sum that keeps compilers from leaving it out.
@group(0) @binding(0) var<storage, read_write> result: array<vec4f>;

@compute @workgroup_size(64)
fn main(@builtin(global_invocation_id) id: vec3u) {
    // Known to no compiler, and such that nothing overflows: x · b + c tends to 1.
    let seed = result[id.x];
    let b = seed * 0.5 + vec4f(0.5);
    let c = vec4f(1.0) - b;
//DECLARED
    for (var step = 0u; step < STEPS; step++) {
//UNROLLED
    }
    result[id.x] = min(seed, SUM);
}
