// The workgroup arrays of the kernels for matrix units: operands come from two and sums go to a third, since functions take
// no pointer to workgroup memory. A kernel says how large they are: LEFT_ROWS, LEFT_COLUMNS, RIGHT_ROWS; the others have 32
// columns. Matrix units want rows and pitches at multiples of 16 bytes; the sizes of all workgroup arrays are such, too, so
// that each starts at one.

// Rows and columns of a matrix.
const SIDE: u32 = 16u;
// Elements from a row to the next: some more than there are, so that rows start in different memory banks.
const LEFT_PITCH: u32 = LEFT_COLUMNS + 8u;
const RIGHT_PITCH: u32 = 40u;
const PRODUCT_PITCH: u32 = 36u;

var<workgroup> left_halves: array<f16, LEFT_ROWS * LEFT_PITCH>;
var<workgroup> right_halves: array<f16, RIGHT_ROWS * RIGHT_PITCH>;
var<workgroup> product: array<f32, LEFT_ROWS * PRODUCT_PITCH>;

fn not_finite(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4(0x7f800000u)) == vec4(0x7f800000u);
}

fn stage_left(row: u32, column: u32, value: vec4<f16>) {
    let at = row * LEFT_PITCH + column;
    left_halves[at] = value.x;
    left_halves[at + 1u] = value.y;
    left_halves[at + 2u] = value.z;
    left_halves[at + 3u] = value.w;
}

fn stage_right(row: u32, column: u32, value: vec4<f16>) {
    let at = row * RIGHT_PITCH + column;
    right_halves[at] = value.x;
    right_halves[at + 1u] = value.y;
    right_halves[at + 2u] = value.z;
    right_halves[at + 3u] = value.w;
}

fn load_product(row: u32, c: u32) -> vec4<f32> {
    let at = row * PRODUCT_PITCH + 4u * c;
    return vec4(product[at], product[at + 1u], product[at + 2u], product[at + 3u]);
}
