// 4 columns of dO, 0 past the end of the sequence and of the row.
fn load_d_out(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= params.tokens {
        return vec4(0.0);
    }
    let base = params.d_out.x + place.batch * params.d_out.y + place.value_head * params.d_out.z
        + token * params.d_out.w;
    let at = base + clamped(column, params.value_dim);
    return within(vec4(d_out[at.x], d_out[at.y], d_out[at.z], d_out[at.w]), column, params.value_dim);
}
