enable f16;
enable wgpu_cooperative_matrix;
// Products of 16 x 16 matrices that a subgroup holds together: operands of f16, sums of f32. matrix_emulated.wgsl has
// the same functions without matrix units.
//
// Operands come from two workgroup arrays and sums go to a third, since functions take no pointer to workgroup
// memory. A kernel says how large they are: LEFT_ROWS, LEFT_COLUMNS, RIGHT_ROWS; the others have 32 columns.
// Matrix units want rows and pitches at multiples of 16 bytes; the sizes of all workgroup arrays are such, too, so that
// each starts at one. Every invocation of a workgroup has to get to every call. No subgroup arithmetic beside them: it
// crashed a driver.

// Rows and columns of a matrix.
const SIDE: u32 = 16u;
// Elements from a row to the next: some more than there are, so that rows start in different memory banks.
const LEFT_PITCH: u32 = LEFT_COLUMNS + 8u;
const RIGHT_PITCH: u32 = 40u;
const PRODUCT_PITCH: u32 = 36u;

var<workgroup> left_halves: array<f16, LEFT_ROWS * LEFT_PITCH>;
var<workgroup> right_halves: array<f16, RIGHT_ROWS * RIGHT_PITCH>;
var<workgroup> product: array<f32, LEFT_ROWS * PRODUCT_PITCH>;

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
