// EFLA, between the two levels of a scan (efla_state.wgsl): the state before every group,
//
//     S ← M S + B  [D_k, D_k] x [D_k, D_v] + [D_k, D_v]
//
// group by group, which takes the place of B. A workgroup has 8 value columns of a scan; an invocation has rows of them.

const STATE_INITIAL: u32 = 1u;
const STATE_IN_PLACE: u32 = 2u;

const THREADS: u32 = 64u;
const WIDTH: u32 = 8u;
// Rows of an invocation, for D_k up to 256.
const ROWS: u32 = 4u;

// [D_k][WIDTH]
var<workgroup> state: array<vec4<f32>, THREADS * ROWS * WIDTH / 4u>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    let blocks = (params.value_dim + WIDTH - 1u) / WIDTH;
    if index >= blocks * params.value_sequences {
        return;
    }
    let scan = index / blocks;
    let column = index % blocks * WIDTH;
    let columns = min(WIDTH, params.value_dim - column);
    let sequence = scan / params.value_heads;
    let value_head = scan % params.value_heads;
    let initial = params.initial_state.x + sequence * params.initial_state.y + value_head * params.initial_state.z;
    let in_place = params.final_state.x + sequence * params.final_state.y + value_head * params.final_state.z;

    for (var d = thread; d < params.key_dim; d += THREADS) {
        var row = array<vec4<f32>, 2>();
        for (var c = 0u; c < columns; c++) {
            if params.state_source == STATE_INITIAL {
                row[c / 4u][c % 4u] = initial_state[initial + d * params.initial_state.w + column + c];
            } else if params.state_source == STATE_IN_PLACE {
                row[c / 4u][c % 4u] = final_state[in_place + d * params.final_state.w + column + c];
            }
        }
        state[2u * d] = row[0];
        state[2u * d + 1u] = row[1];
    }
    let pitch = params.value_dim + params.key_dim;
    for (var group = 0u; group < params.groups; group++) {
        workgroupBarrier();
        let row0 = (scan * params.groups + group) * params.key_dim;
        var next = array<vec4<f32>, 2u * ROWS>();
        for (var r = 0u; r < ROWS; r++) {
            let d = thread + r * THREADS;
            if d < params.key_dim {
                let at = params.group_states + (row0 + d) * pitch;
                for (var e = 0u; e < params.key_dim; e++) {
                    let m = states[at + params.value_dim + e];
                    next[2u * r] += m * state[2u * e];
                    next[2u * r + 1u] += m * state[2u * e + 1u];
                }
                for (var c = 0u; c < columns; c++) {
                    next[2u * r + c / 4u][c % 4u] += states[at + column + c];
                    states[at + column + c] = state[2u * d + c / 4u][c % 4u];
                }
            }
        }
        workgroupBarrier();
        for (var r = 0u; r < ROWS; r++) {
            let d = thread + r * THREADS;
            if d < params.key_dim {
                state[2u * d] = next[2u * r];
                state[2u * d + 1u] = next[2u * r + 1u];
            }
        }
    }
}
