// What EFLA's kernels for matrix units share: keys as they are stored, scales by powers of 2, tiles.

// 4 columns, 0 past the end of the sequence and of the row.
fn load_raw_key(place: Place, token: u32, column: u32) -> vec4<f16> {
    if token >= place.tokens || column >= params.key_dim {
        return vec4<f16>();
    }
    let base = params.k.x + place.batch * params.k.y + place.head * params.k.z + (place.first + token) * params.k.w;
    return k[(base + column) / 4u];
}

fn not_finite(x: vec4<f32>) -> vec4<bool> {
    return (bitcast<vec4<u32>>(x) & vec4(0x7f800000u)) == vec4(0x7f800000u);
}

// Sizes of the elements that are finite.
fn sizes(x: vec4<f32>) -> vec4<f32> {
    return select(abs(x), vec4(0.0), not_finite(x));
}

// Powers of 2 to divide by, none of which has a denormal inverse; 1 for 0.
fn powers_of_two(x: vec4<f32>) -> vec4<f32> {
    let power = min(bitcast<vec4<f32>>(bitcast<vec4<u32>>(x) & vec4(0x7f800000u)), vec4(8.507059e37));
    return select(power, vec4(1.0), power == vec4(0.0));
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
