// efla_state for software adapters: a workgroup is one subgroup, which has COLUMNS columns of the state and keeps them
// behind the states of all chunks (lanes.wgsl says why). Steps and equations are those of efla_state.wgsl, without decay.

const REVERSE: u32 = 1u;
const REPLAY: u32 = 2u;

// Left sides: W; (with REVERSE −γ) K̂ transposed, from row `direction0` on. Right sides: S, the update.
const W: u32 = 0u;
const DIRECTIONS: u32 = 1u;
const STATE: u32 = 2u;
const UPDATE: u32 = 3u;

var<private> direction0: u32;
// First row of the running state.
var<private> running0: u32;

fn load(part: u32, row: u32, column: u32) -> vec4<f32> {
    if part == W {
        return w[((row0 + row) * params.key_dim + column) / 4u];
    }
    let inside = min(column, params.value_dim - 4u);
    if part == STATE {
        // Past the last row W has columns of 0, and so the state needs a number there.
        let at = (running0 + min(row, params.key_dim - 1u)) * params.value_dim + inside;
        return select(vec4(0.0), states[at / 4u], vec4(row < params.key_dim));
    }
    return u[((row0 + row) * params.value_dim + inside) / 4u];
}

fn direction(token: u32) -> vec4<f32> {
    var key = load_unit_key(place, token0 + token, direction0 + 4u * lane);
    if SCAN == REVERSE {
        key *= -load_gate(place, token0 + token).x;
    }
    return key;
}

fn left_columns(part: u32, j: u32) -> mat4x4<f32> {
    if part == W {
        if j >= params.key_dim {
            return mat4x4<f32>();
        }
        return load_rows(W, rows, j);
    }
    return mat4x4(direction(j), direction(j + 1u), direction(j + 2u), direction(j + 3u));
}

@compute @workgroup_size(LANES)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(subgroup_invocation_id) own_lane: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    let blocks = (params.value_dim + COLUMNS - 1u) / COLUMNS;
    if index >= blocks * params.value_sequences {
        return;
    }
    let scan = place_of(index / blocks);
    let column0 = index % blocks * COLUMNS;
    enter(scan, scan.chunk0, own_lane);
    running0 = (chunk_count() + index / blocks) * params.key_dim;

    let initial = params.initial_state.x + scan.sequence * params.initial_state.y + scan.value_head * params.initial_state.z;
    let final_base = params.final_state.x + scan.sequence * params.final_state.y + scan.value_head * params.final_state.z;
    let chunks = (scan.tokens + CHUNK - 1u) / CHUNK;
    if params.first_step > 0u && params.first_step >= chunks {
        // It has ended in an earlier dispatch.
        return;
    }
    let end = min(params.first_step + params.steps, chunks);
    // In later dispatches the running state is there.
    for (var d = select(params.key_dim, lane, params.first_step == 0u); d < params.key_dim; d += LANES) {
        for (var column = column0; column < min(column0 + COLUMNS, params.value_dim); column += 4u) {
            var row = vec4(0.0);
//# for c in 4
            if params.state_source == STATE_INITIAL {
                row[$c] = initial_state[initial + d * params.initial_state.w + column + $c];
            } else if params.state_source == STATE_IN_PLACE {
                row[$c] = final_state[final_base + d * params.final_state.w + column + $c];
            }
//# end
            states[((running0 + d) * params.value_dim + column) / 4u] = row;
        }
    }

    var sums: Sums;
    for (var step = params.first_step; step < end; step++) {
        enter(scan, scan.chunk0 + select(step, chunks - 1u - step, SCAN == REVERSE), own_lane);
        // Lanes read what others have written: the state, then the update.
        subgroupBarrier();
        if SCAN != REPLAY {
            clear(&sums);
            add_product(&sums, W, STATE, params.key_dim, column0, ALL);
            let u_at = ((row0 + rows) * params.value_dim + column0) / 4u;
//# for c in 8
            if column0 + 4u * $c < params.value_dim {
                let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
//# for r in x y z w
                u[u_at.$r + $c] -= by_row[at_$r];
//# end
            }
//# end
        }
        subgroupBarrier();
        for (direction0 = 0u; direction0 < params.key_dim; direction0 += CHUNK) {
            clear(&sums);
            add_product(&sums, DIRECTIONS, UPDATE, CHUNK, column0, ALL);
//# for c in 8
            {
                let by_row = transpose(mat4x4(sums[4 * $c], sums[4 * $c + 1], sums[4 * $c + 2], sums[4 * $c + 3]));
//# for r in x y z w
                carry(direction0 + rows.$r, column0 + 4u * $c, by_row[at_$r]);
//# end
            }
//# end
        }
    }

    subgroupBarrier();
    if params.has_final_state == 1u && end == chunks {
        for (var d = lane; d < params.key_dim; d += LANES) {
            for (var column = column0; column < min(column0 + COLUMNS, params.value_dim); column += 4u) {
                let row = states[((running0 + d) * params.value_dim + column) / 4u];
//# for c in 4
                final_state[final_base + d * params.final_state.w + column + $c] = row[$c];
//# end
            }
        }
    }
}

// 4 columns of a row of the state: S goes to where the chunk has its own, and on with the change.
fn carry(d: u32, column: u32, change: vec4<f32>) {
    if d >= params.key_dim || column >= params.value_dim {
        return;
    }
    let running = ((running0 + d) * params.value_dim + column) / 4u;
    let own = ((state0 + d) * params.value_dim + column) / 4u;
    let row = states[running];
    var next = change;
    if SCAN == REVERSE {
        next += states[own];
    }
    states[own] = row;
    states[running] = row + next;
}
