enable f16;
enable wgpu_cooperative_matrix;
// Products of 16 x 16 matrices that a subgroup holds together: operands of f16, sums of f32. matrix_emulated.wgsl has
// the same functions without matrix units, matrix_tiles.wgsl where operands come from and sums go.
//
// Every invocation of a workgroup has to get to every call. No subgroup arithmetic beside them: it crashed a driver.

alias LeftMatrix = coop_mat16x16<f16, A>;
alias RightMatrix = coop_mat16x16<f16, B>;
alias SumMatrix = coop_mat16x16<f32, C>;

// Which of the workgroup's subgroups this is. To be called first.
fn matrix_subgroup(subgroup: u32, thread: u32) -> u32 {
    return subgroup;
}

// Rows and columns from `row`, `column` on.
fn left_matrix(row: u32, column: u32) -> LeftMatrix {
    let at = row * LEFT_PITCH + column;
    return coopLoadT<LeftMatrix>(&left_halves[at], LEFT_PITCH);
}

fn right_matrix(row: u32, column: u32) -> RightMatrix {
    let at = row * RIGHT_PITCH + column;
    return coopLoadT<RightMatrix>(&right_halves[at], RIGHT_PITCH);
}

// The transpose of the rows and columns from `row`, `column` on.
fn right_transposed(row: u32, column: u32) -> RightMatrix {
    let at = row * RIGHT_PITCH + column;
    return coopLoad<RightMatrix>(&right_halves[at], RIGHT_PITCH);
}

fn multiply_add(left: LeftMatrix, right: RightMatrix, sum: SumMatrix) -> SumMatrix {
    return coopMultiplyAdd(left, right, sum);
}

fn store_product(sum: SumMatrix, row: u32, column: u32) {
    // naga wants both as names.
    let at = row * PRODUCT_PITCH + column;
    let pitch = PRODUCT_PITCH;
    coopStoreT(sum, &product[at], pitch);
}
