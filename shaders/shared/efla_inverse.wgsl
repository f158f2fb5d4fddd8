// T = (I + A)⁻¹ of a chunk, for efla_prepare.

const BLOCKS: u32 = CHUNK / 4u;

// A, then T, transposed: [column][rows 4i..4i+3]. With REVERSE Aᵀ, then Tᵀ, transposed alike.
var<workgroup> matrix: array<vec4<f32>, CHUNK * BLOCKS>;

// A becomes T, to be read behind a barrier. Invocation j solves (I + A) t = e_j, column by column of A; t_l is final
// when its turn comes. With REVERSE (I + Aᵀ) t = e_j from the last column to the first. To be called by all
// invocations.
fn invert(thread: u32) {
    workgroupBarrier();
    var t: array<vec4<f32>, BLOCKS>;
    if thread < CHUNK {
        for (var i = 0u; i < BLOCKS; i++) {
            t[i] = select(vec4(0.0), vec4(1.0), 4u * i + vec4(0u, 1u, 2u, 3u) == vec4(thread));
        }
        for (var n = 0u; n < CHUNK; n++) {
            let l = select(n, CHUNK - 1u - n, REVERSE == 1u);
            let t_l = t[l / 4u][l % 4u];
            // The zeros of a diagonal block are selected: a NaN in row l may not reach the rows above it.
            let own = 4u * (l / 4u) + vec4(0u, 1u, 2u, 3u);
            let kept = select(own > vec4(l), own < vec4(l), vec4(REVERSE == 1u));
            t[l / 4u] -= select(vec4(0.0), matrix[l * BLOCKS + l / 4u] * t_l, kept);
            let end = select(BLOCKS, l / 4u, REVERSE == 1u);
            for (var i = select(l / 4u + 1u, 0u, REVERSE == 1u); i < end; i++) {
                t[i] -= matrix[l * BLOCKS + i] * t_l;
            }
        }
    }
    workgroupBarrier();
    if thread < CHUNK {
        for (var i = 0u; i < BLOCKS; i++) {
            matrix[thread * BLOCKS + i] = t[i];
        }
    }
}
