//! The forward pass, chunked and recurrent: plan, bind, record.

use super::call::{EflaParams, Scratch, Sizes, StateArguments, check_sizes};
use super::{Efla, EflaShape, EflaTensors, Form};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, Part, WorkspaceLayout, params_buffer};
use crate::shader::{Constants, File, Kernel, input, output, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

pub(super) const GRID: File = wgsl!("shared/grid.wgsl");
pub(super) const TILE: File = wgsl!("shared/efla_tile.wgsl");
pub(super) const DECAY: File = wgsl!("shared/efla_decay.wgsl");
pub(super) const KEY: File = wgsl!("shared/efla_key.wgsl");
pub(super) const PRODUCT: File = wgsl!("shared/efla_product.wgsl");
pub(super) const QUERY: File = wgsl!("shared/efla_query.wgsl");
pub(super) const VALUE: File = wgsl!("shared/efla_value.wgsl");
pub(super) const UPDATES: File = wgsl!("shared/efla_updates.wgsl");
pub(super) const STATES: File = wgsl!("shared/efla_states.wgsl");

pub(crate) static GATES: Kernel = Kernel {
    name: "efla_gates",
    files: &[GRID, TILE, wgsl!("shared/phi.wgsl"), wgsl!("efla_gates.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("q").stored(), input("k").stored(), input("beta"), input("log_decay"), workspace("gates")],
};

/// Also of the backward pass, which prepares and scans with the transpose.
pub(super) const PREPARE_FILES: &[File] = &[GRID, TILE, DECAY, KEY, VALUE, UPDATES, wgsl!("efla_prepare.wgsl")];
pub(super) const STATE_FILES: &[File] = &[GRID, TILE, KEY, wgsl!("efla_state.wgsl")];

pub(crate) static PREPARE: Kernel = Kernel {
    name: "efla_prepare",
    files: PREPARE_FILES,
    params: &EflaParams::LAYOUT,
    bindings: &[input("k").stored(), input("v").stored(), workspace("gates"), workspace("w"), workspace("u")],
};

pub(crate) static STATE: Kernel = Kernel {
    name: "efla_state",
    files: STATE_FILES,
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        workspace("gates"),
        workspace("w"),
        input("initial_state"),
        workspace("u"),
        workspace("states"),
        output("final_state"),
    ],
};

pub(crate) static OUTPUT: Kernel = Kernel {
    name: "efla_output",
    files: &[GRID, TILE, DECAY, KEY, QUERY, UPDATES, PRODUCT, STATES, wgsl!("efla_output.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        workspace("gates"),
        workspace("u"),
        workspace("states"),
        output("out").stored(),
    ],
};

pub(crate) static RECURRENT: Kernel = Kernel {
    name: "efla_recurrent",
    files: &[GRID, TILE, wgsl!("efla_recurrent.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        workspace("gates"),
        input("initial_state"),
        output("final_state"),
        output("out").stored(),
    ],
};

/// Columns that the kernels stage at a time.
const COLUMNS: usize = 32;
/// Value columns of one workgroup of `efla_recurrent`.
const RECURRENT_COLUMNS: u64 = 16;

/// Value columns of one workgroup of `efla_state`: as many as keep the state in 8 KiB.
fn state_columns(key_dim: usize) -> usize {
    match key_dim.div_ceil(COLUMNS) {
        0..=2 => 32,
        3..=4 => 16,
        _ => 8,
    }
}

/// Workgroup memory that chunks of this length need.
pub(crate) fn workgroup_bytes(chunk: usize) -> u32 {
    if chunk == 64 { 32768 } else { 16384 }
}

/// The configured chunk length, else the longest that fits and is hardly longer than the keys: beyond, a chunk's own
/// products cost more than the state's, and it may wipe out so much of the state that the rounding of the rest shows.
pub(crate) fn chunk_length(gpu: &Gpu, configured: Option<usize>, key_dim: usize) -> Result<usize> {
    let limit = gpu.limits().max_compute_workgroup_storage_size;
    let longest = if limit >= workgroup_bytes(64) { 64 } else { 32 };
    let chunk = configured.unwrap_or(key_dim.next_power_of_two().clamp(16, longest));
    if workgroup_bytes(chunk) > limit {
        return Err(Error::Limit {
            argument: format!("workgroup memory for chunk = {chunk}"),
            got: workgroup_bytes(chunk).into(),
            limit_name: "max_compute_workgroup_storage_size",
            limit: limit.into(),
        });
    }
    Ok(chunk)
}

/// Constants of the kernels that have a whole chunk's products.
pub(super) fn chunk_constants(chunk: usize, gated: bool) -> Constants {
    // Rows of a tile start in different memory banks, where there is room for it.
    vec![("CHUNK", chunk as u32), ("PITCH", if chunk == 64 { 8 } else { 9 }), ("DECAY", gated.into())]
}

/// Constants of `efla_gates`, which has cumulative decays of a chunk. Token by token a chunk is one token.
pub(super) fn gates_constants(chunk: usize, gated: bool) -> Constants {
    vec![("CHUNK", if gated { chunk as u32 } else { 1 }), ("DECAY", gated.into())]
}

/// Constants of `efla_prepare`; `reverse` for the transpose.
pub(super) fn prepare_constants(chunk: usize, gated: bool, reverse: bool) -> Constants {
    let mut constants = chunk_constants(chunk, gated);
    constants.push(("REVERSE", reverse.into()));
    constants
}

/// What a run of `efla_state` is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// V_new and the states, from the first chunk to the last.
    Forward,
    /// Y and the gradients of the states, from the last chunk to the first.
    Reverse,
    /// The states again, from V_new.
    Replay,
}

/// Constants of `efla_state`.
pub(super) fn state_constants(chunk: usize, key_dim: usize, gated: bool, scan: Scan) -> Constants {
    vec![
        ("CHUNK", chunk as u32),
        ("DECAY", gated.into()),
        ("KEY_STAGES", key_dim.div_ceil(COLUMNS) as u32),
        ("STATE_COLUMNS", state_columns(key_dim) as u32),
        ("SCAN", scan as u32),
    ]
}

/// What is compiled into the kernels of a form, in the order they run.
pub(crate) fn kernels(form: Form, chunk: usize, key_dim: usize, gated: bool) -> Vec<(&'static Kernel, Constants)> {
    match form {
        Form::Chunked => vec![
            (&GATES, gates_constants(chunk, gated)),
            (&PREPARE, prepare_constants(chunk, gated, false)),
            (&STATE, state_constants(chunk, key_dim, gated, Scan::Forward)),
            (&OUTPUT, chunk_constants(chunk, gated)),
        ],
        Form::Recurrent => vec![
            (&GATES, gates_constants(1, gated)),
            (&RECURRENT, vec![("KEY_STAGES", key_dim.div_ceil(COLUMNS) as u32), ("DECAY", gated.into())]),
        ],
    }
}

/// Workgroups of `efla_gates`.
pub(super) fn gates_workgroups(sizes: &Sizes) -> u64 {
    sizes.sequences.saturating_mul(sizes.tokens).div_ceil(64)
}

/// Blocks of value columns that workgroups of `efla_state` have.
pub(super) fn state_blocks(sizes: &Sizes) -> u64 {
    sizes.value_dim.div_ceil(state_columns(sizes.key_dim as usize) as u64)
}

/// Workgroups of `efla_state`.
pub(super) fn state_workgroups(sizes: &Sizes) -> u64 {
    sizes.sequences * state_blocks(sizes)
}

/// A validated forward call of given sizes, from [`Efla::plan`] or [`Efla::plan_step`].
#[derive(Debug, Clone)]
pub struct EflaPlan {
    efla: Efla,
    shape: EflaShape,
    /// Whether the call demands both ends of the state.
    step: bool,
    sizes: Sizes,
    workspace: WorkspaceLayout,
    scratch: Scratch,
    /// Where a final state nobody asked for and an output without tokens are bound.
    spare: [Part; 2],
}

impl EflaPlan {
    pub(super) fn new(efla: &Efla, shape: &EflaShape) -> Result<Self> {
        check_sizes(shape)?;
        let chunk = match efla.config().form {
            Form::Chunked => Some(efla.chunk()),
            Form::Recurrent => None,
        };
        let sizes = Sizes::new(efla.config(), shape, chunk);
        let mut workspace = WorkspaceLayout::new(efla.gpu().limits());
        let gate_elements = if efla.config().gated { 8 } else { 4 };
        let scratch = Scratch::reserve(&mut workspace, &sizes, sizes.elements(&[sizes.tokens, gate_elements]))?;
        let spare = [workspace.reserve("workspace", 1)?, workspace.reserve("workspace", 1)?];
        workspace.check()?;
        Ok(EflaPlan { efla: efla.clone(), shape: *shape, step: false, sizes, workspace, scratch, spare })
    }

    pub(super) fn step(efla: &Efla, shape: &EflaShape) -> Result<Self> {
        let mut efla = efla.clone();
        efla.config.form = Form::Recurrent;
        Ok(EflaPlan { step: true, ..Self::new(&efla, shape)? })
    }

    /// Bytes of device memory a call needs besides its tensors.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of the wrong shape, in a buffer that is too small or lacks usage STORAGE, or
    /// whose output overlaps another tensor (only final_state may be the very range of initial_state), and for a state
    /// that a step lacks;
    /// [`Error::Limit`] for one over the device's limits; [`Error::Gpu`] when the graphics stack refuses a buffer or
    /// a pipeline.
    pub fn bind(&self, tensors: &EflaTensors) -> Result<Call> {
        self.efla.gpu().catching("binding EFLA", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &EflaTensors) -> Result<Call> {
        let gpu = self.efla.gpu();
        let (config, limits) = (self.efla.config(), gpu.limits());
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        let state_shape = [batch, value_heads, config.key_dim, config.value_dim];
        tensors.q.check_stored("q", &[batch, heads, tokens, config.key_dim])?;
        tensors.k.check_stored("k", &[batch, heads, tokens, config.key_dim])?;
        tensors.v.check_stored("v", &[batch, value_heads, tokens, config.value_dim])?;
        tensors.beta.check("beta", &[batch, value_heads, tokens])?;
        config.check_gated(tensors.log_decay.is_some())?;
        if let Some(log_decay) = &tensors.log_decay {
            log_decay.check("log_decay", &[batch, value_heads, tokens])?;
        }
        tensors.out.check_stored_output("out", &[batch, value_heads, tokens, config.value_dim])?;
        let state = StateArguments {
            before: ("initial_state", tensors.initial_state.as_ref()),
            after: ("final_state", tensors.final_state.as_ref()),
        };
        if self.step {
            for (name, end) in [state.before, state.after] {
                if end.is_none() {
                    return Err(Error::argument(name, "none", "a tensor, since a step carries a state on"));
                }
            }
        }
        state.check(&state_shape)?;
        let mut inputs = vec![("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v), ("beta", &tensors.beta)];
        inputs.extend(tensors.log_decay.as_ref().map(|view| ("log_decay", view)));
        inputs.extend(state.input());
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes())?;
        let mut outputs = vec![("out", &tensors.out)];
        outputs.extend(state.output());
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let params = EflaParams {
            q: tensors.q.layout(limits),
            k: tensors.k.layout(limits),
            v: tensors.v.layout(limits),
            beta: tensors.beta.layout(limits),
            log_decay: tensors.log_decay.as_ref().map_or([0; 4], |view| view.layout(limits)),
            out: tensors.out.layout(limits),
            ..EflaParams::new(config, &self.shape, &self.sizes).with_state(&state, limits)
        };
        let params = params_buffer(gpu, "efla", &params);
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let part = |part: Part| Some(part.of(&workspace));
        let argument = |name: &str| match name {
            "q" => bound(&tensors.q),
            "k" => bound(&tensors.k),
            "v" => bound(&tensors.v),
            "beta" => bound(&tensors.beta),
            "log_decay" => tensors.log_decay.as_ref().and_then(bound),
            "out" => bound(&tensors.out).or_else(|| part(self.spare[1])),
            "initial_state" => state.input().and_then(|(_, view)| bound(view)),
            "final_state" => state.output().map_or_else(|| part(self.spare[0]), |(_, view)| bound(view)),
            "gates" => part(self.scratch.gates),
            "w" => part(self.scratch.w),
            "u" => part(self.scratch.u),
            "states" => part(self.scratch.states),
            // Every name of the kernels' binding tables stands above.
            _ => unreachable!("{name} is no binding of EFLA"),
        };

        let sizes = &self.sizes;
        let mut call = Call::default();
        for (kernel, constants) in kernels(config.form, self.efla.chunk(), config.key_dim, config.gated) {
            let workgroups = match kernel.name {
                "efla_gates" => gates_workgroups(sizes),
                "efla_state" => state_workgroups(sizes),
                "efla_recurrent" => sizes.sequences * sizes.value_dim.div_ceil(RECURRENT_COLUMNS),
                _ => sizes.sequences * sizes.chunks,
            };
            let arguments: Vec<_> = kernel.bindings.iter().map(|binding| argument(binding.name)).collect();
            call.push(gpu, kernel, constants, &params, &arguments, workgroups)?;
        }
        Ok(call)
    }
}
