enable f16;
// The functions of matrix.wgsl without matrix units, for tests: so a kernel's tiles, layouts and scales are run where
// there are none. A subgroup is what SUBGROUP says, whatever the device's are: consecutive invocations that share a
// matrix of sums. Operands are read when they are multiplied: until then a kernel may not overwrite them. Rounds of loops
// are not counted here, though llvmpipe leaves them after 65,535: tests keep to small shapes.

// Where it starts.
alias LeftMatrix = u32;
// Where it starts; how far apart its rows are, and its columns.
alias RightMatrix = vec3<u32>;

const ELEMENTS: u32 = SIDE * SIDE / SUBGROUP;

// Element i is that at i·SUBGROUP + lane.
alias SumMatrix = array<f32, ELEMENTS>;

var<private> lane: u32;

fn matrix_subgroup(subgroup: u32, thread: u32) -> u32 {
    lane = thread % SUBGROUP;
    return thread / SUBGROUP;
}

fn left_matrix(row: u32, column: u32) -> LeftMatrix {
    return row * LEFT_PITCH + column;
}

fn right_matrix(row: u32, column: u32) -> RightMatrix {
    return vec3(row * RIGHT_PITCH + column, RIGHT_PITCH, 1u);
}

fn right_transposed(row: u32, column: u32) -> RightMatrix {
    return vec3(row * RIGHT_PITCH + column, 1u, RIGHT_PITCH);
}

fn multiply_add(left: LeftMatrix, right: RightMatrix, sum: SumMatrix) -> SumMatrix {
    var result = sum;
    for (var i = 0u; i < ELEMENTS; i++) {
        let row = (i * SUBGROUP + lane) / SIDE;
        let column = lane % SIDE;
        for (var k = 0u; k < SIDE; k++) {
            let factor = f32(left_halves[left + row * LEFT_PITCH + k]);
            result[i] += factor * f32(right_halves[right.x + k * right.y + column * right.z]);
        }
    }
    return result;
}

fn store_product(sum: SumMatrix, row: u32, column: u32) {
    var result = sum;
    for (var i = 0u; i < ELEMENTS; i++) {
        let at = (row + (i * SUBGROUP + lane) / SIDE) * PRODUCT_PITCH + column + lane % SIDE;
        product[at] = result[i];
    }
}
