// EFLA token by token from a resident state, for decoding: with S [D_k, D_v],
//
//     S ← g S        S ← S + k̂ (c v − γ Sᵀk̂)ᵀ        o = scale Sᵀq
//
// where g = e^{log_decay}, with DECAY.
//
// A dispatch does params.steps tokens of every sequence and leaves the state for the next one in final_state (efla_state.wgsl
// says why).
// A workgroup has STATE_COLUMNS columns of S in registers, PARTS invocations a column, D_k / PARTS rows each.

const PARTS: u32 = 4u;
const STATE_COLUMNS: u32 = 16u;
const THREADS: u32 = PARTS * STATE_COLUMNS;
const ROWS: u32 = KEY_STAGES * COLUMNS / PARTS;

var<workgroup> key: array<f32, KEY_STAGES * COLUMNS>;
var<workgroup> query: array<f32, KEY_STAGES * COLUMNS>;
// Partial sums [PARTS][STATE_COLUMNS].
var<workgroup> partial: array<f32, THREADS>;
var<workgroup> partial_out: array<f32, THREADS>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    let blocks = (params.value_dim + STATE_COLUMNS - 1u) / STATE_COLUMNS;
    if index >= blocks * params.value_sequences {
        return;
    }
    let place = place_of(index / blocks);
    let x = thread % STATE_COLUMNS;
    let part = thread / STATE_COLUMNS;
    let column0 = index % blocks * STATE_COLUMNS;
    let column = column0 + x;
    let in_range = column < params.value_dim;

    let initial = params.initial_state.x + place.sequence * params.initial_state.y
        + place.value_head * params.initial_state.z + column;
    let final_base = params.final_state.x + place.sequence * params.final_state.y
        + place.value_head * params.final_state.z + column;
    // Row r of this invocation is row r·PARTS + part of S.
    var state: array<f32, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        let d = r * PARTS + part;
        state[r] = 0.0;
        if in_range && d < params.key_dim {
            if params.state_source == STATE_INITIAL {
                state[r] = initial_state[initial + d * params.initial_state.w];
            } else if params.state_source == STATE_IN_PLACE {
                state[r] = final_state[final_base + d * params.final_state.w];
            }
        }
    }

    let q_base = params.q.x + place.batch * params.q.y + place.head * params.q.z;
    let k_base = params.k.x + place.batch * params.k.y + place.head * params.k.z;
    let v_base = params.v.x + place.batch * params.v.y + place.value_head * params.v.z + column;
    let out_base = params.out.x + place.batch * params.out.y + place.value_head * params.out.z;
    let end = min(params.first_step + params.steps, place.tokens);
    for (var token = params.first_step; token < end; token++) {
        let gate = load_gate(place, token);
        if DECAY == 1u {
            let decay = load_decay(place, token);
            for (var r = 0u; r < ROWS; r++) {
                state[r] = select(decay.y * state[r], state[r] - decay.w * state[r], is_slow(decay));
            }
        }
        for (var d = thread; d < KEY_STAGES * COLUMNS; d += THREADS) {
            var k_d = 0.0;
            var q_d = 0.0;
            if d < params.key_dim {
                k_d = k_load(k_base + (place.first + token) * params.k.w + d) / gate.z;
                q_d = q_load(q_base + (place.first + token) * params.q.w + d) / gate.w * params.scale;
            }
            key[d] = k_d;
            query[d] = q_d;
        }
        workgroupBarrier();
        var sum = 0.0;
        for (var r = 0u; r < ROWS; r++) {
            sum += state[r] * key[r * PARTS + part];
        }
        partial[thread] = sum;
        workgroupBarrier();
        sum = 0.0;
        for (var p = 0u; p < PARTS; p++) {
            sum += partial[p * STATE_COLUMNS + x];
        }
        var value = 0.0;
        if in_range {
            value = v_load(v_base + (place.first + token) * params.v.w);
        }
        let change = gate.y * value - gate.x * sum;
        sum = 0.0;
        for (var r = 0u; r < ROWS; r++) {
            state[r] += key[r * PARTS + part] * change;
            sum += state[r] * query[r * PARTS + part];
        }
        partial_out[thread] = sum;
        workgroupBarrier();
        // 4 columns an invocation.
        if thread < STATE_COLUMNS / 4u {
            var sums = vec4(0.0);
            for (var p = 0u; p < PARTS; p++) {
                let at = p * STATE_COLUMNS + 4u * thread;
                sums += vec4(partial_out[at], partial_out[at + 1u], partial_out[at + 2u], partial_out[at + 3u]);
            }
            out_store4(out_base + (place.first + token) * params.out.w, column0 + 4u * thread, params.value_dim, sums);
        }
    }

    if params.has_final_state == 1u && in_range {
        for (var r = 0u; r < ROWS; r++) {
            let d = r * PARTS + part;
            if d < params.key_dim {
                final_state[final_base + d * params.final_state.w] = state[r];
            }
        }
    }
}
