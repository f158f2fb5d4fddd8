//! The forward pass, chunked and recurrent: plan, bind, record.

use super::{Efla, EflaShape, EflaTensors, Form, Integrator};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, WorkspaceLayout, params_buffer};
use crate::shader::{File, Kernel, input, output, params, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

params! {
    /// Parameters of every EFLA forward kernel; the vectors are [`TensorView::layout`]s.
    EflaParams {
        q: [u32; 4],
        k: [u32; 4],
        v: [u32; 4],
        beta: [u32; 4],
        initial_state: [u32; 4],
        final_state: [u32; 4],
        out: [u32; 4],
        batch: u32,
        value_heads: u32,
        /// Value heads per query/key head.
        group: u32,
        tokens: u32,
        chunks: u32,
        key_dim: u32,
        value_dim: u32,
        integrator: u32,
        normalize_q: u32,
        normalize_k: u32,
        /// 0 zeros, 1 initial_state, 2 final_state, updated in place.
        state_source: u32,
        has_final_state: u32,
        scale: f32,
        unused0: u32,
        unused1: u32,
        unused2: u32,
    }
}

const GRID: File = wgsl!("shared/grid.wgsl");
const TILE: File = wgsl!("shared/efla_tile.wgsl");

pub(crate) static GATES: Kernel = Kernel {
    name: "efla_gates",
    files: &[GRID, wgsl!("shared/phi.wgsl"), wgsl!("efla_gates.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("q"), input("k"), input("beta"), workspace("gates")],
};

pub(crate) static PREPARE: Kernel = Kernel {
    name: "efla_prepare",
    files: &[GRID, TILE, wgsl!("efla_prepare.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("k"), input("v"), workspace("gates"), workspace("w"), workspace("u")],
};

pub(crate) static STATE: Kernel = Kernel {
    name: "efla_state",
    files: &[GRID, TILE, wgsl!("efla_state.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k"),
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
    files: &[GRID, TILE, wgsl!("efla_output.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("q"), input("k"), workspace("gates"), workspace("u"), workspace("states"), output("out")],
};

pub(crate) static RECURRENT: Kernel = Kernel {
    name: "efla_recurrent",
    files: &[GRID, TILE, wgsl!("efla_recurrent.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q"),
        input("k"),
        input("v"),
        workspace("gates"),
        input("initial_state"),
        output("final_state"),
        output("out"),
    ],
};

/// Columns that the kernels stage at a time.
const COLUMNS: usize = 32;
/// Value columns of one workgroup of `efla_recurrent`.
const RECURRENT_COLUMNS: usize = 16;

/// Value columns of one workgroup of `efla_state`: as many as keep the state in 8 KiB.
fn state_columns(key_dim: usize) -> usize {
    match key_dim.div_ceil(COLUMNS) {
        0..=2 => 32,
        3..=4 => 16,
        _ => 8,
    }
}

/// Workgroup memory that chunks of this length need.
fn workgroup_bytes(chunk: usize) -> u32 {
    if chunk == 64 { 32768 } else { 16384 }
}

/// The configured chunk length, else the longest that fits.
pub(crate) fn chunk_length(gpu: &Gpu, configured: Option<usize>) -> Result<usize> {
    let limit = gpu.limits().max_compute_workgroup_storage_size;
    let chunk = configured.unwrap_or(if limit >= workgroup_bytes(64) { 64 } else { 32 });
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

/// What is compiled into the kernels of a form, in the order they run.
pub(crate) fn kernels(form: Form, chunk: usize, key_dim: usize) -> Vec<(&'static Kernel, Vec<(&'static str, u32)>)> {
    let chunk_constant = ("CHUNK", chunk as u32);
    // Rows of a tile start in different memory banks, where there is room for it.
    let pitch = ("PITCH", if chunk == 64 { 8 } else { 9 });
    let key_stages = ("KEY_STAGES", key_dim.div_ceil(COLUMNS) as u32);
    let columns = ("STATE_COLUMNS", state_columns(key_dim) as u32);
    match form {
        Form::Chunked => vec![
            (&GATES, vec![]),
            (&PREPARE, vec![chunk_constant, pitch]),
            (&STATE, vec![chunk_constant, key_stages, columns]),
            (&OUTPUT, vec![chunk_constant, pitch]),
        ],
        Form::Recurrent => vec![(&GATES, vec![]), (&RECURRENT, vec![key_stages])],
    }
}

/// A validated forward call of given sizes, from [`Efla::plan`].
#[derive(Debug, Clone)]
pub struct EflaPlan {
    efla: Efla,
    shape: EflaShape,
    workspace: WorkspaceLayout,
    chunks: usize,
    gates: Part,
    w: Part,
    u: Part,
    states: Part,
    /// Where a final state nobody asked for and an output without tokens may be bound.
    spare_state: Part,
    spare_out: Part,
}

/// A range of the workspace, in elements.
#[derive(Debug, Clone, Copy)]
struct Part {
    start: u64,
    elements: u64,
}

impl EflaPlan {
    pub(super) fn new(efla: &Efla, shape: &EflaShape) -> Result<Self> {
        shape.validate()?;
        let config = efla.config();
        let limits = efla.gpu().limits();
        let chunk = efla.chunk();
        let chunks = match config.form {
            Form::Chunked => shape.tokens.div_ceil(chunk),
            Form::Recurrent => 0,
        };
        let sequences = (shape.batch as u64).saturating_mul(shape.value_heads as u64);
        let padded = sequences.saturating_mul(chunks as u64).saturating_mul(chunk as u64);
        let (key_dim, value_dim) = (config.key_dim as u64, config.value_dim as u64);
        let mut layout = WorkspaceLayout::new(limits);
        let mut reserve = |name: &str, elements: u64| -> Result<Part> {
            let bytes = elements.saturating_mul(4);
            let limit = limits.max_storage_buffer_binding_size;
            for (limit_name, limit) in
                [("max_storage_buffer_binding_size", limit), ("2³¹ elements of 4 bytes", 1 << 33)]
            {
                if bytes > limit {
                    return Err(Error::Limit { argument: format!("{name}, in bytes"), got: bytes, limit_name, limit });
                }
            }
            Ok(Part { start: layout.reserve(elements), elements })
        };
        let gates = reserve("workspace of the gates", sequences.saturating_mul(shape.tokens as u64).saturating_mul(4))?;
        let w = reserve("workspace of W", padded.saturating_mul(key_dim))?;
        let u = reserve("workspace of U", padded.saturating_mul(value_dim))?;
        let states = sequences.saturating_mul(chunks as u64).saturating_mul(key_dim * value_dim);
        let states = reserve("workspace of the states", states)?;
        let spare_state = reserve("workspace", 1)?;
        let spare_out = reserve("workspace", 1)?;
        let plan = EflaPlan {
            efla: efla.clone(),
            shape: *shape,
            workspace: layout,
            chunks,
            gates,
            w,
            u,
            states,
            spare_state,
            spare_out,
        };
        if plan.workspace_bytes() > limits.max_buffer_size {
            return Err(Error::Limit {
                argument: "workspace, in bytes".to_string(),
                got: plan.workspace_bytes(),
                limit_name: "max_buffer_size",
                limit: limits.max_buffer_size,
            });
        }
        Ok(plan)
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
        tensors.q.check("q", &[batch, heads, tokens, config.key_dim], limits)?;
        tensors.k.check("k", &[batch, heads, tokens, config.key_dim], limits)?;
        tensors.v.check("v", &[batch, value_heads, tokens, config.value_dim], limits)?;
        tensors.beta.check("beta", &[batch, value_heads, tokens], limits)?;
        tensors.out.check_output("out", &[batch, value_heads, tokens, config.value_dim], limits)?;
        let mut inputs = vec![("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v), ("beta", &tensors.beta)];
        let mut outputs = vec![("out", &tensors.out)];
        if let Some(state) = &tensors.final_state {
            state.check_output("final_state", &state_shape, limits)?;
            outputs.push(("final_state", state));
        }
        let mut in_place = false;
        if let Some(state) = &tensors.initial_state {
            state.check("initial_state", &state_shape, limits)?;
            in_place = tensors.final_state.as_ref().is_some_and(|final_state| final_state.is_same(state));
            if !in_place {
                inputs.push(("initial_state", state));
            }
        }
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes())?;
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let layout = |view: &Option<TensorView>| view.as_ref().map_or([0; 4], |view| view.layout(limits));
        let params = EflaParams {
            q: tensors.q.layout(limits),
            k: tensors.k.layout(limits),
            v: tensors.v.layout(limits),
            beta: tensors.beta.layout(limits),
            initial_state: layout(&tensors.initial_state),
            final_state: layout(&tensors.final_state),
            out: tensors.out.layout(limits),
            batch: batch as u32,
            value_heads: value_heads as u32,
            group: self.shape.group() as u32,
            tokens: tokens as u32,
            chunks: self.chunks as u32,
            key_dim: config.key_dim as u32,
            value_dim: config.value_dim as u32,
            integrator: match config.integrator {
                Integrator::Exact => 0,
                Integrator::Euler => 1,
                Integrator::RungeKutta2 => 2,
                Integrator::RungeKutta4 => 3,
            },
            normalize_q: u32::from(config.normalize_q),
            normalize_k: u32::from(config.normalize_k),
            state_source: if in_place { 2 } else { u32::from(tensors.initial_state.is_some()) },
            has_final_state: u32::from(tensors.final_state.is_some()),
            scale: config.scale() as f32,
            ..Default::default()
        };
        let params = params_buffer(gpu, "efla", &params);
        let bound = |view: &TensorView| (!view.is_empty()).then(|| BoundRange::of(view, limits));
        let part = |part: Part| gpu.part(&workspace, part.start, part.elements);
        let state_in = tensors.initial_state.as_ref().filter(|_| !in_place).and_then(bound);
        let state_out = tensors.final_state.as_ref().map_or_else(|| Some(part(self.spare_state)), bound);
        let argument = |name: &str| match name {
            "q" => bound(&tensors.q),
            "k" => bound(&tensors.k),
            "v" => bound(&tensors.v),
            "beta" => bound(&tensors.beta),
            "out" => bound(&tensors.out).or_else(|| Some(part(self.spare_out))),
            "initial_state" => state_in.clone(),
            "final_state" => state_out.clone(),
            "gates" => Some(part(self.gates)),
            "w" => Some(part(self.w)),
            "u" => Some(part(self.u)),
            "states" => Some(part(self.states)),
            _ => None,
        };

        let sequences = batch as u64 * value_heads as u64;
        let mut call = Call::default();
        for (kernel, constants) in kernels(config.form, self.efla.chunk(), config.key_dim) {
            let workgroups = match kernel.name {
                "efla_gates" => (sequences * tokens as u64).div_ceil(64),
                "efla_state" => sequences * config.value_dim.div_ceil(state_columns(config.key_dim)) as u64,
                "efla_recurrent" => sequences * config.value_dim.div_ceil(RECURRENT_COLUMNS) as u64,
                _ => sequences * self.chunks as u64,
            };
            let arguments: Vec<_> = kernel.bindings.iter().map(|binding| argument(binding.name)).collect();
            call.push(gpu, kernel, constants, &params, &arguments, workgroups)?;
        }
        Ok(call)
    }
}
