// What decay leaves, compiled in with DECAY. With κ_t = −log_decay_t, token t sees of what token j < t wrote
//
//     D_{tj} = e^{−(κ_{j+1} + … + κ_t)}
//
// Summed between j and t, positive numbers only: a difference of cumulative sums would lose what lies behind a strong
// decay. The chunk's κ are staged in `left`, a workgroup array that the kernel does not need meanwhile.

// left[i] ← κ of tokens 4i..4i+3. To be called by all invocations.
fn stage_kappas(place: Place, token0: u32, thread: u32) {
    workgroupBarrier();
    if thread < CHUNK / 4u {
        let token = token0 + 4u * thread;
        left[thread] = vec4(
            load_decay(place, token).x,
            load_decay(place, token + 1u).x,
            load_decay(place, token + 2u).x,
            load_decay(place, token + 3u).x,
        );
    }
    workgroupBarrier();
}

// D of 4 tokens against 4 tokens, whichever come first: columns 4·column.., rows 4·row...
fn decays(row: u32, column: u32) -> mat4x4<f32> {
    let early = left[min(row, column)];
    let late = left[max(row, column)];
    if row == column {
        let yz = early.y + early.z;
        let zw = early.z + early.w;
        let yzw = early.y + zw;
        return mat4x4(
            exp(-vec4(0.0, early.y, yz, yzw)),
            exp(-vec4(early.y, 0.0, early.z, zw)),
            exp(-vec4(yz, early.z, 0.0, early.w)),
            exp(-vec4(yzw, zw, early.w, 0.0)),
        );
    }
    var between = 0.0;
    for (var block = min(row, column) + 1u; block < max(row, column); block++) {
        let kappas = left[block];
        between += (kappas.x + kappas.y) + (kappas.z + kappas.w);
    }
    // From behind an early token to the end of its block, from the start of a late token's block up to it.
    let rest = vec4(early.y + (early.z + early.w), early.z + early.w, early.w, 0.0);
    let start = vec4(late.x, late.x + late.y, late.x + late.y + late.z, (late.x + late.y) + (late.z + late.w));
    let of_rows = select(rest, start, vec4(row > column)) + between;
    let of_columns = select(start, rest, vec4(row > column));
    return mat4x4(
        exp(-(of_rows + of_columns.x)),
        exp(-(of_rows + of_columns.y)),
        exp(-(of_rows + of_columns.z)),
        exp(-(of_rows + of_columns.w)),
    );
}
