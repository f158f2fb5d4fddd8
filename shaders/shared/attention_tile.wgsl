// Tiles of the attention kernels that stage them in workgroup memory.

// Columns staged at a time, as vectors of 4; one more a row, so that rows start in different memory banks.
const STAGE: u32 = BLOCK_K / 4u;
const PITCH: u32 = STAGE + 1u;
const THREADS: u32 = BLOCK_Q * BLOCK_K / 16u;

fn packed(at: u32) -> f32 {
    return workspace[at];
}

// Σ w v over the 4 nodes from `node` that lie in the range seen.
fn seen_sum(
    w: vec4<f32>,
    node: i32,
    range: vec2<i32>,
    v0: vec4<f32>,
    v1: vec4<f32>,
    v2: vec4<f32>,
    v3: vec4<f32>,
) -> vec4<f32> {
    let nodes = node + vec4(0, 1, 2, 3);
    let seen = (nodes >= vec4(range.x)) & (nodes <= vec4(range.y));
    let zero = vec4(0.0);
    return select(zero, w.x * v0, seen.x) + select(zero, w.y * v1, seen.y)
        + select(zero, w.z * v2, seen.z) + select(zero, w.w * v3, seen.w);
}

// What an invocation leaves for the next dispatch.
fn leave(at: u32, value: vec4<f32>) {
    for (var c = 0u; c < 4u; c++) {
        workspace[at + c] = value[c];
    }
}

fn take_up(at: u32) -> vec4<f32> {
    return vec4(workspace[at], workspace[at + 1u], workspace[at + 2u], workspace[at + 3u]);
}
