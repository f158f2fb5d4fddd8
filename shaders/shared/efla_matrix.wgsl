// What EFLA's kernels for matrix units share: keys as they are stored, scales by powers of 2.

// 4 columns, 0 past the end of the sequence and of the row.
fn load_raw_key(place: Place, token: u32, column: u32) -> vec4<f16> {
    if token >= place.tokens || column >= params.key_dim {
        return vec4<f16>();
    }
    let base = params.k.x + place.batch * params.k.y + place.head * params.k.z + (place.first + token) * params.k.w;
    return k[(base + column) / 4u];
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
