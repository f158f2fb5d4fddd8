//! The backward pass: plan, bind, record. Always chunked, whatever the form of the forward pass.
//!
//! Nothing is kept from the forward pass: the first three steps compute the chunks' quantities again. Per chunk, with S
//! the state before it and dS' the gradient of the state after it:
//!
//! | step | writes |
//! |---|---|
//! | efla_gates | γ, c, norms; α and the derivatives of α |
//! | efla_prepare | w = W, u = U |
//! | efla_state | u = V_new, states = S |
//! | efla_backward_read (queries) | w = each value head's part of d_Q |
//! | efla_backward_sum (queries) | d_q |
//! | efla_backward_found | found = P |
//! | efla_backward_output | y = dV_new from within the chunk, states = scale·QᵀdO |
//! | efla_backward_prepare | w = −TᵀK̂, y = Tᵀy |
//! | efla_backward_state | y = Y, states = dS', d_initial_state |
//! | efla_backward_values | d_v, d_beta, found = X |
//! | efla_backward_keys | w = each value head's part of d_k, but for −c·SY |
//! | efla_backward_replay | states = S |
//! | efla_backward_read (keys) | w −= c·SY |
//! | efla_backward_sum (keys) | d_k |
//!
//! Since Y = Tᵀ(dV_new from within + K̂ dS') and dS = dS' + scale·QᵀdO − (γK̂)ᵀY, the reverse scan has the form of the
//! forward one and is the same kernel text. S and dS' take turns in one matrix a chunk: the scan that brings S back has
//! V_new to go by and costs half of the first.

use super::call::{EflaParams, Scratch, Sizes, StateArguments, check_sizes};
use super::forward::{
    DECAY, GATES, GRID, KEY, PREPARE, PREPARE_FILES, PRODUCT, QUERY, STATE, STATE_FILES, STATES, Scan, TILE, UPDATES,
    chunk_constants, gates_constants, gates_workgroups, prepare_constants, state_blocks, state_constants,
    state_workgroups,
};
use super::{Efla, EflaGradients, EflaShape};
use crate::attention::backward::reduce;
use crate::error::{Error, Result};
use crate::kernel::{BoundRange, Call, Part, WorkspaceLayout, params_buffer};
use crate::shader::{Constants, File, Kernel, input, output, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

const D_OUT: File = wgsl!("shared/efla_d_out.wgsl");

pub(crate) static READ: Kernel = Kernel {
    name: "efla_backward_read",
    files: &[GRID, TILE, KEY, QUERY, UPDATES, DECAY, PRODUCT, STATES, wgsl!("efla_backward_read.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("rows").stored(),
        input("q").stored(),
        input("k").stored(),
        workspace("gates"),
        workspace("u"),
        workspace("states"),
        workspace("w"),
    ],
};

pub(crate) static SUM: Kernel = Kernel {
    name: "efla_backward_sum",
    files: &[GRID, TILE, wgsl!("efla_backward_sum.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("x").stored(), workspace("gates"), workspace("w"), output("d_x").stored()],
};

pub(crate) static OUTPUT: Kernel = Kernel {
    name: "efla_backward_output",
    files: &[GRID, TILE, KEY, QUERY, D_OUT, DECAY, PRODUCT, wgsl!("efla_backward_output.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("d_out").stored(),
        workspace("gates"),
        workspace("u"),
        workspace("states"),
    ],
};

/// [`PREPARE`] for the transpose.
pub(crate) static PREPARE_REVERSE: Kernel = Kernel {
    name: "efla_backward_prepare",
    files: PREPARE_FILES,
    params: &EflaParams::LAYOUT,
    bindings: PREPARE.bindings,
};

/// [`STATE`] from the last chunk to the first.
pub(crate) static STATE_REVERSE: Kernel =
    Kernel { name: "efla_backward_state", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

/// [`STATE`] once more, from V_new.
pub(crate) static STATE_REPLAY: Kernel =
    Kernel { name: "efla_backward_replay", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

pub(crate) static FOUND: Kernel = Kernel {
    name: "efla_backward_found",
    files: &[GRID, TILE, KEY, UPDATES, DECAY, PRODUCT, STATES, wgsl!("efla_backward_found.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("k").stored(), workspace("gates"), workspace("u"), workspace("states"), workspace("found")],
};

pub(crate) static VALUES: Kernel = Kernel {
    name: "efla_backward_values",
    files: &[GRID, TILE, wgsl!("efla_backward_values.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("v").stored(),
        workspace("gates"),
        workspace("y"),
        workspace("found"),
        output("d_v").stored(),
        output("d_beta"),
    ],
};

pub(crate) static KEYS: Kernel = Kernel {
    name: "efla_backward_keys",
    files: &[GRID, TILE, KEY, QUERY, D_OUT, DECAY, PRODUCT, STATES, wgsl!("efla_backward_keys.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("d_out").stored(),
        workspace("gates"),
        workspace("y"),
        workspace("found"),
        workspace("states"),
        workspace("w"),
    ],
};

/// Elements a token that a gated operator has among the gates: 8 + 4 + 6, the last four parts of d_log_decay.
const GATED_ELEMENTS: u64 = 18;

/// Tokens of a head that one workgroup of `efla_backward_sum` or `efla_backward_values` has.
const ROWS: u64 = 8;

/// What one dispatch of the backward pass is for: it decides what the kernel's bindings stand for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stage {
    /// From the initial state on: the forward pass and its states again.
    Recompute,
    /// d_q.
    Queries,
    /// From d_final_state back: Y and dS'.
    Scan,
    /// d_v, d_beta, d_k.
    Keys,
}

/// The kernels in the order they run, with what is compiled into them.
pub(crate) fn kernels(chunk: usize, key_dim: usize, gated: bool) -> Vec<(Stage, &'static Kernel, Constants)> {
    let keys = |keys: bool| {
        let mut constants = chunk_constants(chunk, gated);
        constants.push(("KEYS", keys.into()));
        constants
    };
    vec![
        (Stage::Recompute, &GATES, gates_constants(chunk, gated)),
        (Stage::Recompute, &PREPARE, prepare_constants(chunk, gated, false)),
        (Stage::Recompute, &STATE, state_constants(chunk, key_dim, gated, Scan::Forward)),
        (Stage::Queries, &READ, keys(false)),
        (Stage::Queries, &SUM, keys(false)),
        (Stage::Keys, &FOUND, chunk_constants(chunk, gated)),
        (Stage::Scan, &OUTPUT, chunk_constants(chunk, gated)),
        (Stage::Scan, &PREPARE_REVERSE, prepare_constants(chunk, gated, true)),
        (Stage::Scan, &STATE_REVERSE, state_constants(chunk, key_dim, gated, Scan::Reverse)),
        (Stage::Keys, &VALUES, chunk_constants(chunk, gated)),
        (Stage::Keys, &KEYS, chunk_constants(chunk, gated)),
        (Stage::Recompute, &STATE_REPLAY, state_constants(chunk, key_dim, gated, Scan::Replay)),
        (Stage::Keys, &READ, keys(true)),
        (Stage::Keys, &SUM, keys(true)),
    ]
}

/// A validated backward call of given sizes, from [`Efla::plan_backward`].
#[derive(Debug, Clone)]
pub struct EflaBackwardPlan {
    efla: Efla,
    shape: EflaShape,
    sizes: Sizes,
    workspace: WorkspaceLayout,
    scratch: Scratch,
    /// Gradient of V_new from within the chunk, then Y, `[B, H_v, chunks·C, D_v]`.
    y: Part,
    /// P, then X, `[B, H_v, chunks·C, D_v]`.
    found: Part,
    spare: Part,
}

impl EflaBackwardPlan {
    pub(super) fn new(efla: &Efla, shape: &EflaShape) -> Result<Self> {
        check_sizes(shape)?;
        let gpu = efla.gpu();
        let sizes = Sizes::new(efla.config(), shape, Some(efla.chunk()));
        let Sizes { tokens, chunks, rows, value_dim, .. } = sizes;
        let mut workspace = WorkspaceLayout::new(gpu.limits());
        let gate_elements = match efla.config().gated {
            false => sizes.elements(&[tokens, 8]),
            true => {
                let passed = sizes.elements(&[chunks, state_blocks(&sizes), 8]);
                sizes.elements(&[tokens, GATED_ELEMENTS]).saturating_add(passed)
            }
        };
        let scratch = Scratch::reserve(&mut workspace, &sizes, gate_elements)?;
        let y = workspace.reserve("workspace of Y", sizes.elements(&[rows, value_dim]))?;
        let found = workspace.reserve("workspace of P and X", sizes.elements(&[rows, value_dim]))?;
        let spare = workspace.reserve("workspace", 1)?;
        workspace.check()?;
        Ok(EflaBackwardPlan { efla: efla.clone(), shape: *shape, sizes, workspace, scratch, y, found, spare })
    }

    /// Bytes of device memory a call needs besides its tensors. With T padded to whole chunks of C tokens, per batch
    /// and value head 4·(8 T + T (D_k + 3 D_v) + (T/C) D_k D_v), each of its six parts rounded up to the device's storage
    /// buffer alignment.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// As [`EflaPlan::bind`](super::EflaPlan::bind); only d_initial_state may be the very range of d_final_state.
    pub fn bind(&self, tensors: &EflaGradients) -> Result<Call> {
        self.efla.gpu().catching("binding EFLA's backward pass", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &EflaGradients) -> Result<Call> {
        let gpu = self.efla.gpu();
        let (config, limits) = (self.efla.config(), gpu.limits());
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        let key_shape = [batch, heads, tokens, config.key_dim];
        let value_shape = [batch, value_heads, tokens, config.value_dim];
        let beta_shape = [batch, value_heads, tokens];
        let state_shape = [batch, value_heads, config.key_dim, config.value_dim];
        config.check_gated(tensors.log_decay.is_some())?;
        if tensors.d_log_decay.is_some() && !config.gated {
            return Err(Error::argument("d_log_decay", "a tensor", "none: the operator is not gated"));
        }
        let mut inputs = Vec::new();
        for (name, view, shape) in [
            ("q", &tensors.q, &key_shape[..]),
            ("k", &tensors.k, &key_shape),
            ("v", &tensors.v, &value_shape),
            ("beta", &tensors.beta, &beta_shape),
            ("d_out", &tensors.d_out, &value_shape),
        ] {
            match name {
                "beta" => view.check(name, shape)?,
                _ => view.check_stored(name, shape)?,
            }
            inputs.push((name, view));
        }
        if let Some(log_decay) = &tensors.log_decay {
            log_decay.check("log_decay", &beta_shape)?;
            inputs.push(("log_decay", log_decay));
        }
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes())?;
        let mut outputs = Vec::new();
        for (name, view, shape) in [
            ("d_q", &tensors.d_q, &key_shape[..]),
            ("d_k", &tensors.d_k, &key_shape),
            ("d_v", &tensors.d_v, &value_shape),
            ("d_beta", &tensors.d_beta, &beta_shape),
        ] {
            match name {
                "d_beta" => view.check_output(name, shape)?,
                _ => view.check_stored_output(name, shape)?,
            }
            outputs.push((name, view));
        }
        if let Some(d_log_decay) = &tensors.d_log_decay {
            d_log_decay.check_output("d_log_decay", &beta_shape)?;
            outputs.push(("d_log_decay", d_log_decay));
        }
        let state =
            StateArguments { before: ("initial_state", tensors.initial_state.as_ref()), after: ("final_state", None) };
        let d_state = StateArguments {
            before: ("d_final_state", tensors.d_final_state.as_ref()),
            after: ("d_initial_state", tensors.d_initial_state.as_ref()),
        };
        for ends in [&state, &d_state] {
            ends.check(&state_shape)?;
            inputs.extend(ends.input());
            outputs.extend(ends.output());
        }
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let params = EflaParams {
            q: tensors.q.layout(limits),
            k: tensors.k.layout(limits),
            v: tensors.v.layout(limits),
            beta: tensors.beta.layout(limits),
            d_out: tensors.d_out.layout(limits),
            d_q: tensors.d_q.layout(limits),
            d_k: tensors.d_k.layout(limits),
            d_v: tensors.d_v.layout(limits),
            d_beta: tensors.d_beta.layout(limits),
            log_decay: tensors.log_decay.as_ref().map_or([0; 4], |view| view.layout(limits)),
            with_rates: 1,
            state_blocks: state_blocks(&self.sizes) as u32,
            ..EflaParams::new(config, &self.shape, &self.sizes)
        };
        let recompute_params = params_buffer(gpu, "efla backward", &params.with_state(&state, limits));
        let params = params_buffer(gpu, "efla backward", &params.with_state(&d_state, limits));
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let part = |part: Part| Some(part.of(&workspace));
        let argument = |stage: Stage, name: &str| -> Option<BoundRange> {
            let ends = if stage == Stage::Recompute { &state } else { &d_state };
            match (name, stage) {
                ("q", _) | ("x", Stage::Queries) => bound(&tensors.q),
                ("k", _) | ("x", _) => bound(&tensors.k),
                ("v", _) => bound(&tensors.v),
                ("beta", _) => bound(&tensors.beta),
                ("log_decay", _) => tensors.log_decay.as_ref().and_then(bound),
                ("d_out", _) | ("rows", Stage::Queries) => bound(&tensors.d_out),
                ("d_x", Stage::Queries) => bound(&tensors.d_q),
                ("d_x", _) => bound(&tensors.d_k),
                ("d_v", _) => bound(&tensors.d_v),
                ("d_beta", _) => bound(&tensors.d_beta),
                ("initial_state", _) => ends.input().and_then(|(_, view)| bound(view)),
                ("final_state", _) => ends.output().map_or_else(|| part(self.spare), |(_, view)| bound(view)),
                ("gates", _) => part(self.scratch.gates),
                ("w", _) => part(self.scratch.w),
                ("found", _) => part(self.found),
                ("y" | "rows", _) | ("u", Stage::Scan) => part(self.y),
                ("u", _) => part(self.scratch.u),
                ("states", _) => part(self.scratch.states),
                // Every name of the kernels' binding tables stands above.
                (name, _) => unreachable!("{name} is no binding of EFLA"),
            }
        };

        let sizes = &self.sizes;
        let mut call = Call::default();
        for (stage, kernel, constants) in kernels(self.efla.chunk(), config.key_dim, config.gated) {
            let workgroups = match kernel.name {
                "efla_gates" => gates_workgroups(sizes),
                "efla_state" | "efla_backward_state" | "efla_backward_replay" => state_workgroups(sizes),
                "efla_backward_sum" => (batch as u64 * heads as u64 * sizes.tokens).div_ceil(ROWS),
                "efla_backward_values" => (sizes.sequences * sizes.tokens).div_ceil(ROWS),
                _ => sizes.sequences * sizes.chunks,
            };
            let params = if stage == Stage::Recompute { &recompute_params } else { &params };
            let arguments: Vec<_> = kernel.bindings.iter().map(|binding| argument(stage, binding.name)).collect();
            call.push(gpu, kernel, constants, params, &arguments, workgroups)?;
        }
        // The parts of d_log_decay are the last 4 of a token's elements.
        let tokens = sizes.elements(&[sizes.tokens]);
        let parts = [(GATED_ELEMENTS - 4) * tokens, value_heads as u64 * sizes.tokens, 4, tokens];
        reduce(gpu, &mut call, tensors.d_log_decay.as_ref(), &self.scratch.gates.of(&workspace), parts, false)?;
        Ok(call)
    }
}
