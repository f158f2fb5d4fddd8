// Sums over the invocations of a row, which are a subgroup (lanes.wgsl says where).

const ROW_THREADS: u32 = LANES;
const THREADS: u32 = 64u;

fn row_sum(thread: u32, own: vec3<f32>) -> vec3<f32> {
    return subgroupAdd(own);
}
