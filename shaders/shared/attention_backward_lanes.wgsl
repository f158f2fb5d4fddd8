// What the backward kernels of attention of one subgroup a workgroup share.

fn load(part: u32, address: u32, column: u32) -> vec4<f32> {
    if part == Q {
        return q_vector(address + column) * params.scale;
    }
    if part == K {
        return load_k_at(address, column);
    }
    if part == V {
        return load_v_at(address, column);
    }
    return d_out_vector(address + column);
}

// 4 rows of a lane, see `Row`.
struct LaneRows {
    ranges: Ranges,
    lse: vec4<f32>,
    correction: vec4<f32>,
}

fn load_lane_rows(task: Task, row: u32) -> LaneRows {
    let x = load_row(task, row);
    let y = load_row(task, row + 1u);
    let z = load_row(task, row + 2u);
    let w = load_row(task, row + 3u);
    return LaneRows(
        Ranges(
            vec4(x.range.x, y.range.x, z.range.x, w.range.x),
            vec4(x.range.y, y.range.y, z.range.y, w.range.y),
        ),
        vec4(x.lse, y.lse, z.lse, w.lse),
        vec4(x.correction, y.correction, z.correction, w.correction),
    );
}
