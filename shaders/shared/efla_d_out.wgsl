// 4 columns of dO, 0 past the end of the sequence and of the row.
fn load_d_out(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0);
    }
    let base = params.d_out.x + place.batch * params.d_out.y + place.value_head * params.d_out.z
        + (place.first + token) * params.d_out.w;
    return d_out_load4(base, column, params.value_dim);
}
