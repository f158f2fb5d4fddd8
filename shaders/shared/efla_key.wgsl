// 4 columns of k̂, 0 past the end of the sequence and of the key.
fn load_unit_key(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0);
    }
    let base = params.k.x + place.batch * params.k.y + place.head * params.k.z + (place.first + token) * params.k.w;
    return k_load4(base, column, params.key_dim) / gates[4u * (place.flat + token) + 2u];
}
