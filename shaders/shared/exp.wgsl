// exp and ln that keep a NaN: those of some drivers make a number of it.

fn nan_exp(x: vec4<f32>) -> vec4<f32> {
    return select(exp(x), x, (bitcast<vec4<u32>>(x) & vec4(0x7fffffffu)) > vec4(0x7f800000u));
}

fn nan_log(x: f32) -> f32 {
    return select(log(x), x, (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u);
}
