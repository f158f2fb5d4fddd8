// 4 columns of a row of u [B, H_v, chunks·C, D_v].
fn load_u(row: u32, column: u32) -> vec4<f32> {
    let at = row * params.value_dim + clamped(column, params.value_dim);
    return within(vec4(u[at.x], u[at.y], u[at.z], u[at.w]), column, params.value_dim);
}
