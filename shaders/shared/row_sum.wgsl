// Sums over the invocations of a row, through workgroup memory.

const ROW_THREADS: u32 = 8u;
const THREADS: u32 = 64u;

var<workgroup> partial_sums: array<vec3<f32>, THREADS>;

// To be called by all invocations.
fn row_sum(thread: u32, own: vec3<f32>) -> vec3<f32> {
    partial_sums[thread] = own;
    workgroupBarrier();
    var sum = vec3(0.0);
    for (var i = 0u; i < ROW_THREADS; i++) {
        sum += partial_sums[thread / ROW_THREADS * ROW_THREADS + i];
    }
    return sum;
}
