// 4 columns of a value, 0 past the end of the sequence and of the row.
fn load_v(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0);
    }
    let base = params.v.x + place.batch * params.v.y + place.value_head * params.v.z + (place.first + token) * params.v.w;
    return v_load4(base, column, params.value_dim);
}
