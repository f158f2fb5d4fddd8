// 4 columns of a query times scale (and over its norm, if asked for), 0 past the end of the sequence and of the query.
fn load_query(place: Place, token: u32, column: u32) -> vec4<f32> {
    if token >= place.tokens {
        return vec4(0.0);
    }
    let base = params.q.x + place.batch * params.q.y + place.head * params.q.z + (place.first + token) * params.q.w;
    return params.scale * (q_load4(base, column, params.key_dim) / load_gate(place, token).w);
}
