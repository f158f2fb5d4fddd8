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
pub(super) const KEY: File = wgsl!("shared/efla_key.wgsl");
pub(super) const PRODUCT: File = wgsl!("shared/efla_product.wgsl");
pub(super) const QUERY: File = wgsl!("shared/efla_query.wgsl");
pub(super) const VALUE: File = wgsl!("shared/efla_value.wgsl");
pub(super) const UPDATES: File = wgsl!("shared/efla_updates.wgsl");
pub(super) const STATES: File = wgsl!("shared/efla_states.wgsl");

pub(crate) static GATES: Kernel = Kernel {
    name: "efla_gates",
    files: &[GRID, wgsl!("shared/phi.wgsl"), wgsl!("efla_gates.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("q").stored(), input("k").stored(), input("beta"), workspace("gates")],
};

/// Also of the backward pass, which prepares and scans with the transpose.
pub(super) const PREPARE_FILES: &[File] = &[GRID, TILE, KEY, VALUE, UPDATES, wgsl!("efla_prepare.wgsl")];
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
    files: &[GRID, TILE, KEY, QUERY, UPDATES, PRODUCT, STATES, wgsl!("efla_output.wgsl")],
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
pub(super) fn chunk_constants(chunk: usize) -> Constants {
    // Rows of a tile start in different memory banks, where there is room for it.
    vec![("CHUNK", chunk as u32), ("PITCH", if chunk == 64 { 8 } else { 9 })]
}

/// Constants of `efla_prepare`; `reverse` for the transpose.
pub(super) fn prepare_constants(chunk: usize, reverse: bool) -> Constants {
    let mut constants = chunk_constants(chunk);
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
pub(super) fn state_constants(chunk: usize, key_dim: usize, scan: Scan) -> Constants {
    vec![
        ("CHUNK", chunk as u32),
        ("KEY_STAGES", key_dim.div_ceil(COLUMNS) as u32),
        ("STATE_COLUMNS", state_columns(key_dim) as u32),
        ("SCAN", scan as u32),
    ]
}

/// What is compiled into the kernels of a form, in the order they run.
pub(crate) fn kernels(form: Form, chunk: usize, key_dim: usize) -> Vec<(&'static Kernel, Constants)> {
    match form {
        Form::Chunked => vec![
            (&GATES, vec![]),
            (&PREPARE, prepare_constants(chunk, false)),
            (&STATE, state_constants(chunk, key_dim, Scan::Forward)),
            (&OUTPUT, chunk_constants(chunk)),
        ],
        Form::Recurrent => vec![(&GATES, vec![]), (&RECURRENT, vec![("KEY_STAGES", key_dim.div_ceil(COLUMNS) as u32)])],
    }
}

/// Workgroups of `efla_gates`.
pub(super) fn gates_workgroups(sizes: &Sizes) -> u64 {
    sizes.sequences.saturating_mul(sizes.tokens).div_ceil(64)
}

/// Workgroups of `efla_state`.
pub(super) fn state_workgroups(sizes: &Sizes) -> u64 {
    sizes.sequences * sizes.value_dim.div_ceil(state_columns(sizes.key_dim as usize) as u64)
}

/// A validated forward call of given sizes, from [`Efla::plan`].
#[derive(Debug, Clone)]
pub struct EflaPlan {
    efla: Efla,
    shape: EflaShape,
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
        let scratch = Scratch::reserve(&mut workspace, &sizes, 4)?;
        let spare = [workspace.reserve("workspace", 1)?, workspace.reserve("workspace", 1)?];
        workspace.check()?;
        Ok(EflaPlan { efla: efla.clone(), shape: *shape, sizes, workspace, scratch, spare })
    }

    /// Bytes of device memory a call needs besides its tensors.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of the wrong shape, in a buffer that is too small or lacks usage STORAGE, or
    /// whose output overlaps another tensor (only final_state may be the very range of initial_state);
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
        tensors.out.check_stored_output("out", &[batch, value_heads, tokens, config.value_dim])?;
        let state = StateArguments {
            before: ("initial_state", tensors.initial_state.as_ref()),
            after: ("final_state", tensors.final_state.as_ref()),
        };
        state.check(&state_shape)?;
        let mut inputs = vec![("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v), ("beta", &tensors.beta)];
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
        for (kernel, constants) in kernels(config.form, self.efla.chunk(), config.key_dim) {
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
