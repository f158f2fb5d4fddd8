// EFLA, pass 2 of 3: the scan over chunks, parallel over batch, value heads and blocks of value columns.
//
// With S [D_k, D_v] the state before a chunk:
//
//     V_new = U − W S  [C, D_k] x [D_k, D_v]        S ← S + K̂ᵀ V_new  [D_k, C] x [C, D_v]
//
// V_new replaces U in the workspace, the state before every chunk goes to states [B, H_v, chunks, D_k, D_v] for pass 3.
// A workgroup keeps STATE_COLUMNS columns of S in workgroup memory.
//
// With SCAN = REVERSE it is the scan of the backward pass, from the last chunk to the first. With S [D_k, D_v] the gradient of
// the state after a chunk, w = −TᵀK̂, u = Tᵀ(gradient of V_new from within the chunk) and states = scale·QᵀdO,
//
//     Y = u − w S  [C, D_k] x [D_k, D_v]        S ← S + states − (γK̂)ᵀY  [D_k, C] x [C, D_v]
//
// where Y, the gradient of diag(c) V, replaces u, and the gradient after every chunk replaces states.
//
// With DECAY, G and E of efla_tile.wgsl and G_C what is left of S at the end of the chunk,
//
//     S ← G_C S + (diag(E) K̂)ᵀ V_new        REVERSE: S ← G_C S + states − (γG K̂)ᵀY
//
// With SCAN = REPLAY V_new stands in u already, and only the states before the chunks are computed again, where the
// gradients of the states after them stood. With DECAY the inner products G_C ⟨S, gradient⟩ of the two, what passes
// through the chunk as it is, go to the end of `gates`.

// Where there are too few scans to fill a device, the chunks of one are scanned in groups (params.groups of
// params.group_chunks each, in the order of the scan), in two levels. A scan is linear: over a group
//
//     S_after = M S_before + B  [D_k, D_k] x [D_k, D_v] + [D_k, D_v]
//
// With LEVEL = SUMS a workgroup scans a group from zeros, for columns of B, or from columns of the unit matrix without u
// and states, for columns of M; B and M go behind the states, [scans, groups, D_k, D_v + D_k]. efla_groups then puts the
// state before each group where B stood, and with LEVEL = STARTS the groups are scanned from there.
//
// A dispatch does params.steps chunks of every scan or group, from params.first_step on. Where chunks are left a workgroup's
// state goes to memory, from which the next dispatch has it: no dispatch becomes longer than desktops allow, and no loop
// has more rounds than llvmpipe goes through.

const REVERSE: u32 = 1u;
const REPLAY: u32 = 2u;

const SUMS: u32 = 1u;
const STARTS: u32 = 2u;

// Vectors of 4 state columns; rows of a chunk's product that an invocation has.
const WIDTH: u32 = STATE_COLUMNS / 4u;
const ROWS: u32 = STATE_COLUMNS / 8u;
const THREADS: u32 = CHUNK * 2u;

var<workgroup> state: array<vec4<f32>, KEY_STAGES * COLUMNS * WIDTH>;
// [C][COLUMNS] of W, then of K̂ or −γK̂.
var<workgroup> stage: array<vec4<f32>, CHUNK * VECTORS>;
// V_new or Y [C][STATE_COLUMNS].
var<workgroup> update: array<vec4<f32>, CHUNK * WIDTH>;

// A row of what stands behind the states for a group.
fn group_row(scan: u32, group: u32, d: u32) -> u32 {
    return params.group_states + ((scan * params.groups + group) * params.key_dim + d) * (params.value_dim + params.key_dim);
}

fn load_w(row: u32, column: u32) -> vec4<f32> {
    let at = row * params.key_dim + clamped(column, params.key_dim);
    return within(vec4(w[at.x], w[at.y], w[at.z], w[at.w]), column, params.key_dim);
}

// 4 columns of what a token multiplies its row of the update with.
fn load_direction(place: Place, token: u32, column: u32) -> vec4<f32> {
    var key = load_unit_key(place, token, column);
    if SCAN == REVERSE {
        key *= -load_gate(place, token).x;
    }
    if DECAY == 1u {
        let decay = load_decay(place, token);
        key *= select(decay.z, decay.y, SCAN == REVERSE);
    }
    return key;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) workgroup: vec3<u32>,
    @builtin(num_workgroups) workgroups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let index = params.first_workgroup + workgroup_index(workgroup, workgroups);
    let value_blocks = (params.value_dim + STATE_COLUMNS - 1u) / STATE_COLUMNS;
    var blocks = value_blocks;
    var groups = 1u;
    if LEVEL == SUMS {
        blocks += (params.key_dim + STATE_COLUMNS - 1u) / STATE_COLUMNS;
    }
    if LEVEL != 0u {
        groups = params.groups;
    }
    if index >= blocks * groups * params.value_sequences {
        return;
    }
    let block = index % blocks;
    let group = index / blocks % groups;
    let scan = index / (blocks * groups);
    let place = place_of(scan);
    // Columns of M, not of the state.
    let of_map = LEVEL == SUMS && block >= value_blocks;
    let column0 = select(block, block - value_blocks, of_map) * STATE_COLUMNS;
    let dim = select(params.value_dim, params.key_dim, of_map);
    let x = thread % WIDTH;
    let y = thread / WIDTH;
    let column = column0 + 4u * x;
    let columns = min(4u, dim - min(column, dim));

    let initial = params.initial_state.x + place.sequence * params.initial_state.y
        + place.value_head * params.initial_state.z;
    let final_base = params.final_state.x + place.sequence * params.final_state.y
        + place.value_head * params.final_state.z;

    let chunks = (place.tokens + CHUNK - 1u) / CHUNK;
    var group_end = chunks;
    var first = params.first_step;
    if LEVEL != 0u {
        group_end = min((group + 1u) * params.group_chunks, chunks);
        first += group * params.group_chunks;
    }
    if params.first_step > 0u && first >= group_end {
        // It has ended in an earlier dispatch.
        return;
    }
    let end = min(first + params.steps, group_end);
    let left_at = params.left + index * params.key_dim * STATE_COLUMNS + 4u * x;

    for (var d = y; d < KEY_STAGES * COLUMNS; d += THREADS / WIDTH) {
        var row = vec4(0.0);
        for (var c = 0u; c < columns && d < params.key_dim; c++) {
            if params.first_step > 0u {
                row[c] = states[left_at + d * STATE_COLUMNS + c];
            } else if LEVEL == SUMS {
                row[c] = select(0.0, 1.0, of_map && d == column + c);
            } else if LEVEL == STARTS {
                row[c] = states[group_row(scan, group, d) + column + c];
            } else if params.state_source == STATE_INITIAL {
                row[c] = initial_state[initial + d * params.initial_state.w + column + c];
            } else if params.state_source == STATE_IN_PLACE {
                row[c] = final_state[final_base + d * params.final_state.w + column + c];
            }
        }
        state[d * WIDTH + x] = row;
    }

    for (var step = first; step < end; step++) {
        let chunk = select(step, chunks - 1u - step, SCAN == REVERSE);
        let token0 = chunk * CHUNK;
        let row0 = (place.chunk0 + chunk) * CHUNK;
        let state0 = (place.chunk0 + chunk) * params.key_dim;
        // V_new or Y: rows y·ROWS.. of the chunk.
        var sums: array<vec4<f32>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            sums[r] = vec4(0.0);
        }
        for (var key = 0u; key < KEY_STAGES && SCAN != REPLAY; key++) {
            workgroupBarrier();
            for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
                stage[i] = load_w(row0 + i / VECTORS, key * COLUMNS + 4u * (i % VECTORS));
            }
            workgroupBarrier();
            for (var d = 0u; d < VECTORS; d++) {
                let s = (key * COLUMNS + 4u * d) * WIDTH + x;
                let s0 = state[s];
                let s1 = state[s + WIDTH];
                let s2 = state[s + 2u * WIDTH];
                let s3 = state[s + 3u * WIDTH];
                for (var r = 0u; r < ROWS; r++) {
                    let w_r = stage[(y * ROWS + r) * VECTORS + d];
                    sums[r] += w_r.x * s0 + w_r.y * s1 + w_r.z * s2 + w_r.w * s3;
                }
            }
        }
        if SCAN == REPLAY {
            // In place of those above: every invocation has read the update of the chunk before.
            workgroupBarrier();
        }
        for (var r = 0u; r < ROWS; r++) {
            let row = y * ROWS + r;
            let at = (row0 + row) * params.value_dim + column;
            var value = vec4(0.0);
            for (var c = 0u; c < columns; c++) {
                value[c] = -sums[r][c];
                if !of_map {
                    value[c] += u[at + c];
                }
                if SCAN != REPLAY && LEVEL != SUMS {
                    u[at + c] = value[c];
                }
            }
            update[row * WIDTH + x] = value;
        }

        var decay: vec4<f32>;
        if DECAY == 1u {
            decay = load_decay(place, min(token0 + CHUNK, place.tokens) - 1u);
        }
        // ⟨S, gradient of the state after the chunk⟩ over this invocation's elements, for REPLAY with DECAY.
        var passed = vec4(0.0);
        // S: 4 rows x 4 columns an invocation, COLUMNS rows of S at a time.
        for (var key = 0u; key < KEY_STAGES; key++) {
            workgroupBarrier();
            for (var i = thread; i < CHUNK * VECTORS; i += THREADS) {
                stage[i] = load_direction(place, token0 + i / VECTORS, key * COLUMNS + 4u * (i % VECTORS));
            }
            workgroupBarrier();
            for (var rows = y; rows < VECTORS; rows += THREADS / WIDTH) {
                var sum0 = vec4(0.0);
                var sum1 = vec4(0.0);
                var sum2 = vec4(0.0);
                var sum3 = vec4(0.0);
                for (var j = 0u; j < CHUNK; j++) {
                    let k_j = stage[j * VECTORS + rows];
                    let value = update[j * WIDTH + x];
                    sum0 += k_j.x * value;
                    sum1 += k_j.y * value;
                    sum2 += k_j.z * value;
                    sum3 += k_j.w * value;
                }
                var changes = array<vec4<f32>, 4>(sum0, sum1, sum2, sum3);
                for (var r = 0u; r < 4u; r++) {
                    let d = key * COLUMNS + 4u * rows + r;
                    let row = state[d * WIDTH + x];
                    var change = changes[r];
                    for (var c = 0u; c < columns && d < params.key_dim; c++) {
                        let at = (state0 + d) * params.value_dim + column + c;
                        if SCAN == REVERSE && !of_map {
                            change[c] += states[at];
                        }
                        if SCAN == REPLAY && DECAY == 1u {
                            passed[c] += row[c] * states[at];
                        }
                        if LEVEL != SUMS {
                            states[at] = row[c];
                        }
                    }
                    if DECAY == 1u {
                        state[d * WIDTH + x] =
                            select(decay.y * row + change, row + (change - decay.w * row), is_slow(decay));
                    } else {
                        state[d * WIDTH + x] = row + change;
                    }
                }
            }
        }
        if SCAN == REPLAY && DECAY == 1u {
            workgroupBarrier();
            stage[thread] = passed;
            workgroupBarrier();
            if thread < PASSED {
                passed = vec4(0.0);
                for (var i = thread; i < THREADS; i += PASSED) {
                    passed += stage[i];
                }
                let part = (place.chunk0 + chunk) * blocks + block;
                gates[passed_at(part) + thread] = decay.y * ((passed.x + passed.y) + (passed.z + passed.w));
            }
        }
    }

    workgroupBarrier();
    for (var d = y; d < params.key_dim; d += THREADS / WIDTH) {
        let row = state[d * WIDTH + x];
        for (var c = 0u; c < columns; c++) {
            if end < group_end {
                states[left_at + d * STATE_COLUMNS + c] = row[c];
            } else if LEVEL == SUMS {
                states[group_row(scan, group, d) + select(0u, params.value_dim, of_map) + column + c] = row[c];
            } else if params.has_final_state == 1u && group == groups - 1u {
                final_state[final_base + d * params.final_state.w + column + c] = row[c];
            }
        }
    }
}
