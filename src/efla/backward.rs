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
//! | reduce | d_log_decay, if asked for |
//!
//! Since Y = Tᵀ(dV_new from within + K̂ dS') and dS = dS' + scale·QᵀdO − (γK̂)ᵀY, the reverse scan has the form of the
//! forward one and is the same kernel text. S and dS' take turns in one matrix a chunk: the scan that brings S back has
//! V_new to go by and costs half of the first.
//!
//! Where both scans would leave a device idle, few sequences of many chunks, they have two levels: what every group of
//! chunks does to a state, the state before every group, the groups from there (`efla_state.wgsl`).
//!
//! # With decay
//!
//! D, G and E of the [module's](super) chunks stand in everything above: what token s reads of writer j comes times D_{sj},
//! what it reads of S times G_s, what j writes into the state after the chunk times E_j = D_{Cj}, and S itself arrives
//! there times G_C. P is what a key finds after its token's decay, α' stands for α where a value is written.
//!
//! ```text
//! P = diag(G) K̂S + strict_lower(D ∘ K̂K̂ᵀ)V_new         X = diag(α')V − diag(α|k|)P
//! dV_new = scale·lower_incl(D ∘ QK̂ᵀ)ᵀdO + diag(E) K̂ dS'  Y = Tᵀ dV_new        d_v = c'Y
//! d_Q = scale (diag(G) dO Sᵀ + lower_incl(D ∘ dO V_newᵀ)K̂)
//! SY = diag(G) Y Sᵀ + strict_lower(D ∘ Y V_newᵀ)K̂
//! GX = scale·lower_incl(D ∘ dO Xᵀ)ᵀQ + diag(E) X dS'ᵀ − strict_lower(D ∘ Y Xᵀ)ᵀ(γK̂)
//! d_k = GX − α|k|·SY + 2k̂ (h'(Y·v) − h|k|(Y·P))        d_β = |k| (∂α'/∂β (Y·v) − |k| ∂α/∂β (Y·P))
//! dS = G_C dS' + scale (diag(G) Q)ᵀdO − (γG K̂)ᵀY
//! ```
//!
//! A decay at token t multiplies all that a reader at t or later takes from a writer before t: queries and keys of this
//! chunk, or dS' for all later ones, from tokens of this chunk, or from S for all earlier ones. So
//!
//! ```text
//! d_log_decay_t = Σ_{s≥t, j<t} E_{sj} + Σ_{s≥t} e_s + Σ_{j<t} f_j + G_C⟨dS', S⟩ − |k| ∂α'/∂κ (Y·v)
//! E_{sj} = D_{sj} (scale (q_s·k̂_j)(do_s·V_new_j) − γ_s (k̂_s·k̂_j)(Y_s·V_new_j))
//! e_s = G_s (scale q_sᵀS do_s − γ_s k̂_sᵀS Y_s)           f_j = E_j k̂_jᵀdS' V_new_j
//! ```
//!
//! Every term has its decay as a factor and none is a difference, so that a strong decay gets the small gradient it
//! should. (Σ_{s≥t} (do_s·o_s − d_v_s·v_s) is the same number but for the end of the sequence, and all rounding there.)
//! E and e come in two parts from the two runs of efla_backward_read, f from efla_backward_keys, ⟨dS', S⟩ from
//! efla_backward_replay, which puts S where dS' stood, the rest from efla_backward_values; `reduce` adds them up.

use super::call::{EflaParams, Packing, Scratch, Sizes, check_packing, check_sizes};
use super::forward::{
    Build, CHUNK_LANES, DECAY, GATES, GRID, GROUPS, KEY, LANES_FILE, Level, PREPARE, PREPARE_FILES, PREPARE_LANES,
    PREPARE_LANES_FILES, PRODUCT, PRODUCT_LANES, QUERY, SCORES, STATE, STATE_FILES, STATE_LANES, STATE_LANES_FILES,
    STATE_STARTS, STATE_SUMS, STATES, Scan, TILE, UPDATES, chunk_load, gates_workgroups,
};
use super::scan::{left_elements, state_blocks, steps};
use super::{Efla, EflaGradients, EflaShape, Form};
use crate::attention::backward::reduce;
use crate::error::{Error, Result};
use crate::kernel::{BoundRange, Call, Load, Part, WorkspaceLayout, check_bindings, params_buffer, suits_lanes};
use crate::piece::Piece;
use crate::shader::{Constants, File, Format, Kernel, input, output, wgsl, workspace};
use crate::tensor::{DType, TensorView, check_overlaps};

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
        input("table").words(),
    ],
};

pub(crate) static SUM: Kernel = Kernel {
    name: "efla_backward_sum",
    files: &[GRID, TILE, wgsl!("shared/row_sum.wgsl"), wgsl!("efla_backward_sum.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("x").stored(),
        workspace("gates"),
        workspace("w"),
        output("d_x").stored(),
        input("table").words(),
    ],
};

/// [`SUM`] with a subgroup a row.
pub(crate) static SUM_LANES: Kernel = Kernel {
    name: "efla_backward_sum_lanes",
    files: &[GRID, TILE, wgsl!("shared/row_sum_lanes.wgsl"), wgsl!("efla_backward_sum.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: SUM.bindings,
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
        input("table").words(),
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

/// [`STATE_REVERSE`] of groups of chunks from zeros, and of the unit matrix.
pub(crate) static SUMS_REVERSE: Kernel =
    Kernel { name: "efla_backward_sums", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

/// [`STATE_REVERSE`] of groups of chunks from where they start.
pub(crate) static STARTS_REVERSE: Kernel =
    Kernel { name: "efla_backward_starts", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

/// [`STATE`] once more, from V_new.
pub(crate) static STATE_REPLAY: Kernel =
    Kernel { name: "efla_backward_replay", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

pub(crate) static FOUND: Kernel = Kernel {
    name: "efla_backward_found",
    files: &[GRID, TILE, KEY, UPDATES, DECAY, PRODUCT, STATES, wgsl!("efla_backward_found.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        workspace("gates"),
        workspace("u"),
        workspace("states"),
        workspace("found"),
        input("table").words(),
    ],
};

pub(crate) static VALUES: Kernel = Kernel {
    name: "efla_backward_values",
    files: &[GRID, TILE, wgsl!("shared/row_sum.wgsl"), wgsl!("efla_backward_values.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("v").stored(),
        workspace("gates"),
        workspace("y"),
        workspace("found"),
        output("d_v").stored(),
        output("d_beta"),
        input("table").words(),
    ],
};

/// [`VALUES`] with a subgroup a row.
pub(crate) static VALUES_LANES: Kernel = Kernel {
    name: "efla_backward_values_lanes",
    files: &[GRID, TILE, wgsl!("shared/row_sum_lanes.wgsl"), wgsl!("efla_backward_values.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: VALUES.bindings,
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
        workspace("states"),
        workspace("w"),
        input("table").words(),
    ],
};

pub(crate) static READ_LANES: Kernel = Kernel {
    name: "efla_backward_read_lanes",
    files: &[GRID, TILE, KEY, LANES_FILE, CHUNK_LANES, PRODUCT_LANES, SCORES, wgsl!("efla_backward_read_lanes.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("reader").stored(),
        input("k").stored(),
        workspace("gates"),
        workspace("u").vectors(),
        workspace("states").vectors(),
        workspace("w").vectors(),
        input("table").words(),
    ],
};

pub(crate) static OUTPUT_LANES: Kernel = Kernel {
    name: "efla_backward_output_lanes",
    files: &[
        GRID,
        TILE,
        KEY,
        QUERY,
        D_OUT,
        LANES_FILE,
        CHUNK_LANES,
        PRODUCT_LANES,
        SCORES,
        wgsl!("efla_backward_output_lanes.wgsl"),
    ],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("d_out").stored(),
        workspace("gates"),
        workspace("u").vectors(),
        workspace("states").vectors(),
        input("table").words(),
    ],
};

pub(crate) static FOUND_LANES: Kernel = Kernel {
    name: "efla_backward_found_lanes",
    files: &[GRID, TILE, KEY, LANES_FILE, CHUNK_LANES, PRODUCT_LANES, SCORES, wgsl!("efla_backward_found_lanes.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        workspace("gates"),
        workspace("u").vectors(),
        workspace("states").vectors(),
        workspace("found").vectors(),
        input("table").words(),
    ],
};

pub(crate) static KEYS_LANES: Kernel = Kernel {
    name: "efla_backward_keys_lanes",
    files: &[
        GRID,
        TILE,
        KEY,
        QUERY,
        D_OUT,
        LANES_FILE,
        CHUNK_LANES,
        PRODUCT_LANES,
        SCORES,
        wgsl!("efla_backward_keys_lanes.wgsl"),
    ],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("d_out").stored(),
        workspace("gates"),
        workspace("y").vectors(),
        workspace("states").vectors(),
        workspace("w").vectors(),
        input("table").words(),
    ],
};

/// [`PREPARE_LANES`] for the transpose.
pub(crate) static PREPARE_REVERSE_LANES: Kernel = Kernel {
    name: "efla_backward_prepare_lanes",
    files: PREPARE_LANES_FILES,
    params: &EflaParams::LAYOUT,
    bindings: PREPARE_LANES.bindings,
};

/// [`STATE_LANES`] from the last chunk to the first.
pub(crate) static STATE_REVERSE_LANES: Kernel = Kernel {
    name: "efla_backward_state_lanes",
    files: STATE_LANES_FILES,
    params: &EflaParams::LAYOUT,
    bindings: STATE_LANES.bindings,
};

/// [`STATE_LANES`] once more, from V_new.
pub(crate) static STATE_REPLAY_LANES: Kernel = Kernel {
    name: "efla_backward_replay_lanes",
    files: STATE_LANES_FILES,
    params: &EflaParams::LAYOUT,
    bindings: STATE_LANES.bindings,
};

/// Elements a token that a gated operator has among the gates: 8 + 4 + 6, the last four parts of d_log_decay.
const GATED_ELEMENTS: u64 = 18;
/// Elements a chunk and block of value columns that it has behind them.
const PASSED: u64 = 8;

/// How Y is read by vectors.
const VECTORS: Format = Format { dtype: DType::F32, vectors: true };

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
    /// What writing gives to d_k, from X and Y at once.
    Writers,
}

/// The kernels in the order they run, with what is compiled into them.
pub(crate) fn kernels(build: Build) -> Vec<(Stage, &'static Kernel, Constants)> {
    if build.lanes {
        let read = |keys: bool| build.lanes(vec![("KEYS", keys.into())]);
        let prepare = |reverse: bool| build.lanes(vec![("REVERSE", reverse.into())]);
        let state = |scan: Scan| build.lanes(vec![("SCAN", scan as u32)]);
        return vec![
            (Stage::Recompute, &GATES, build.gates(Form::Chunked)),
            (Stage::Recompute, &PREPARE_LANES, prepare(false)),
            (Stage::Recompute, &STATE_LANES, state(Scan::Forward)),
            (Stage::Queries, &READ_LANES, read(false)),
            (Stage::Queries, &SUM_LANES, read(false)),
            (Stage::Keys, &FOUND_LANES, build.lanes(vec![])),
            (Stage::Scan, &OUTPUT_LANES, build.lanes(vec![])),
            (Stage::Scan, &PREPARE_REVERSE_LANES, prepare(true)),
            (Stage::Scan, &STATE_REVERSE_LANES, state(Scan::Reverse)),
            (Stage::Keys, &VALUES_LANES, build.lanes(vec![])),
            (Stage::Writers, &KEYS_LANES, build.lanes(vec![])),
            (Stage::Recompute, &STATE_REPLAY_LANES, state(Scan::Replay)),
            (Stage::Keys, &READ_LANES, read(true)),
            (Stage::Keys, &SUM_LANES, read(true)),
        ];
    }
    let keys = |keys: bool| [vec![("KEYS", keys.into())], build.products()].concat();
    // A scan, in one level or two.
    let scan = |stage, [whole, sums, starts]: [&'static Kernel; 3], scan| -> Vec<(Stage, &'static Kernel, Constants)> {
        match build.grouped {
            false => vec![(stage, whole, build.state(scan, Level::Whole))],
            true => vec![
                (stage, sums, build.state(scan, Level::Sums)),
                (stage, &GROUPS, Vec::new()),
                (stage, starts, build.state(scan, Level::Starts)),
            ],
        }
    };
    let mut kernels: Vec<(Stage, &'static Kernel, Constants)> = vec![
        (Stage::Recompute, &GATES, build.gates(Form::Chunked)),
        (Stage::Recompute, &PREPARE, build.prepare(false)),
    ];
    kernels.extend(scan(Stage::Recompute, [&STATE, &STATE_SUMS, &STATE_STARTS], Scan::Forward));
    kernels.extend([
        (Stage::Queries, &READ, keys(false)),
        (Stage::Queries, &SUM, keys(false)),
        (Stage::Keys, &FOUND, build.products()),
        (Stage::Scan, &OUTPUT, build.products()),
        (Stage::Scan, &PREPARE_REVERSE, build.prepare(true)),
    ]);
    kernels.extend(scan(Stage::Scan, [&STATE_REVERSE, &SUMS_REVERSE, &STARTS_REVERSE], Scan::Reverse));
    kernels.extend([
        (Stage::Keys, &VALUES, build.products()),
        (Stage::Writers, &KEYS, build.products()),
        (Stage::Recompute, &STATE_REPLAY, build.state(Scan::Replay, Level::Whole)),
        (Stage::Keys, &READ, keys(true)),
        (Stage::Keys, &SUM, keys(true)),
    ]);
    kernels
}

/// A validated backward call of given sizes, from [`Efla::plan_backward`].
#[derive(Debug, Clone)]
pub struct EflaBackwardPlan {
    efla: Efla,
    shape: EflaShape,
    cu_seqlens: Option<Vec<usize>>,
    /// Groups of a scan and chunks of each.
    groups: (u64, u64),
    /// Whether there is room for the kernels of one subgroup a workgroup.
    lanes: bool,
    /// One, unless the workspace of the whole can't be bound.
    pieces: Vec<Piece>,
    workspace_bytes: u64,
}

impl EflaBackwardPlan {
    pub(super) fn new(efla: &Efla, shape: &EflaShape, cu_seqlens: Option<&[usize]>) -> Result<Self> {
        check_sizes(shape)?;
        let groups = efla.groups(shape, cu_seqlens)?;
        let (lanes, pieces, workspace_bytes) = Piece::whole(shape.batch, shape.heads)
            .plan_lanes(efla.knows_lanes(), |piece, lanes| {
                Ok(Pass::new(efla, &shape.part(piece), cu_seqlens, groups, lanes)?.workspace.bytes())
            })?;
        let cu_seqlens = cu_seqlens.map(<[usize]>::to_vec);
        Ok(EflaBackwardPlan { efla: efla.clone(), shape: *shape, cu_seqlens, groups, lanes, pieces, workspace_bytes })
    }

    /// Bytes of device memory a call needs besides its tensors. With T' = T padded to whole chunks of C tokens, per batch
    /// and value head 4·(8 T + T' (D_k + 3 D_v) + (T'/C) D_k D_v), each of its parts rounded up to the device's storage
    /// buffer alignment. If gated 18 T instead of 8 T, and 8 T'/C for every 32 value columns (16 with D_k over 64, 8 over
    /// 128). More where few sequences of many chunks are scanned in groups of chunks, D_k (D_k + D_v) for every group, and
    /// for kernels of software adapters, see [memory](crate::guide::memory).
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
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
        check_packing(&self.cu_seqlens, &tensors.cu_seqlens)?;
        let key_shape = [batch, heads, tokens, config.key_dim];
        let value_shape = [batch, value_heads, tokens, config.value_dim];
        let beta_shape = [batch, value_heads, tokens];
        let sequences = self.cu_seqlens.as_ref().map_or(batch, |cumulative| cumulative.len() - 1);
        let state_shape = [sequences, value_heads, config.key_dim, config.value_dim];
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
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes)?;
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
        for ends in &tensors.states() {
            ends.check(&state_shape)?;
            inputs.extend(ends.input());
            outputs.extend(ends.output());
        }
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let fits = |piece: &Piece| check_bindings(tensors.part(&self.shape, piece)?.views(), limits);
        for piece in &self.pieces {
            for piece in piece.split(&fits)? {
                let pass = Pass::new(
                    &self.efla,
                    &self.shape.part(&piece),
                    self.cu_seqlens.as_deref(),
                    self.groups,
                    self.lanes,
                )?;
                pass.bind(&mut call, &tensors.part(&self.shape, &piece)?, &workspace)?;
            }
        }
        Ok(call)
    }
}

/// A piece of a call.
struct Pass<'a> {
    efla: &'a Efla,
    shape: EflaShape,
    packing: Packing,
    sizes: Sizes,
    groups: (u64, u64),
    lanes: bool,
    workspace: WorkspaceLayout,
    scratch: Scratch,
    /// Gradient of V_new from within the chunk, then Y, `[B, H_v, chunks·C, D_v]`; behind it, bound with it where both are
    /// read, P, then X of the same shape.
    y_and_found: Part,
    y: Part,
    found: Part,
    found_offset: u64,
    spare: Part,
}

impl<'a> Pass<'a> {
    fn new(
        efla: &'a Efla,
        shape: &EflaShape,
        cu_seqlens: Option<&[usize]>,
        groups: (u64, u64),
        lanes: bool,
    ) -> Result<Self> {
        let (config, limits) = (efla.config(), efla.gpu().limits());
        let packing = Packing::new(shape, cu_seqlens, Some(efla.chunk()))?;
        let sizes = Sizes::new(config, shape, &packing, efla.chunk());
        let Sizes { tokens, chunks, rows, value_dim, .. } = sizes;
        let mut workspace = WorkspaceLayout::new(limits);
        let gate_elements = match config.gated {
            false => sizes.elements(&[tokens, 8]),
            true => {
                let passed = sizes.elements(&[chunks, state_blocks(&sizes), PASSED]);
                sizes.elements(&[tokens, GATED_ELEMENTS]).saturating_add(passed)
            }
        };
        // Tensors may not suit the kernels of one subgroup a workgroup, which keep their states elsewhere.
        let kernels = kernels(efla.build(packing.is_ragged(), false, groups.0 > 1));
        let kernels = kernels.iter().map(|(_, kernel, _)| *kernel);
        let left = left_elements(efla.gpu(), &sizes, groups, efla.chunk(), kernels);
        let scratch = Scratch::reserve(&mut workspace, &sizes, gate_elements, groups.0, lanes, left)?;
        let values = sizes.elements(&[rows, value_dim]);
        let found_offset = workspace.aligned(values);
        let y_and_found = workspace.reserve("workspace of Y and X", found_offset.saturating_add(values))?;
        let (y, found) = (y_and_found.narrow(0, values), y_and_found.narrow(found_offset, values));
        let spare = workspace.reserve("workspace", 1)?;
        workspace.check()?;
        let shape = *shape;
        Ok(Pass {
            efla,
            shape,
            packing,
            sizes,
            groups,
            lanes,
            workspace,
            scratch,
            y_and_found,
            y,
            found,
            found_offset,
            spare,
        })
    }

    fn bind(&self, call: &mut Call, tensors: &EflaGradients, workspace: &TensorView) -> Result<()> {
        let gpu = self.efla.gpu();
        let (config, limits) = (self.efla.config(), gpu.limits());
        let EflaShape { batch, heads, value_heads, .. } = self.shape;
        let [state, d_state] = tensors.states();
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
            groups: self.groups.0 as u32,
            group_chunks: self.groups.1 as u32,
            group_states: self.scratch.group_states as u32,
            left: self.scratch.left as u32,
            found: self.found_offset as u32,
            state_blocks: state_blocks(&self.sizes) as u32,
            ..EflaParams::new(config, &self.shape, &self.sizes, &self.packing)
        };
        let [recompute, params] = [&state, &d_state].map(|ends| params.with_state(ends, limits));
        let [common_recompute, common] =
            [&recompute, &params].map(|params| params_buffer(gpu, "efla backward", params));
        let table = self.packing.upload(gpu)?;
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let part = |part: Part| Some(part.of(workspace));
        let argument = |stage: Stage, name: &str| -> Option<BoundRange> {
            let ends = if stage == Stage::Recompute { &state } else { &d_state };
            match (name, stage) {
                ("q", _) | ("x", Stage::Queries) => bound(&tensors.q),
                ("k", _) | ("x", _) => bound(&tensors.k),
                ("v", _) => bound(&tensors.v),
                ("beta", _) => bound(&tensors.beta),
                ("log_decay", _) => tensors.log_decay.as_ref().and_then(bound),
                ("d_out", _) | ("rows" | "reader", Stage::Queries) => bound(&tensors.d_out),
                ("d_x", Stage::Queries) => bound(&tensors.d_q),
                ("d_x", _) => bound(&tensors.d_k),
                ("d_v", _) => bound(&tensors.d_v),
                ("d_beta", _) => bound(&tensors.d_beta),
                ("initial_state", _) => ends.input().and_then(|(_, view)| bound(view)),
                ("final_state", _) => ends.output().and_then(|(_, view)| bound(view)).or_else(|| part(self.spare)),
                ("gates", _) => part(self.scratch.gates),
                ("w", _) => part(self.scratch.w),
                ("found", _) => part(self.found),
                ("y", Stage::Writers) => part(self.y_and_found),
                ("reader", _) => part(self.y).map(|range| BoundRange { format: VECTORS, ..range }),
                ("y" | "rows", _) | ("u", Stage::Scan) => part(self.y),
                ("table", _) => table.clone(),
                ("u", _) => part(self.scratch.u),
                ("states", _) => part(self.scratch.states),
                // Every name of the kernels' binding tables stands above.
                (name, _) => unreachable!("{name} is no binding of EFLA"),
            }
        };

        let sizes = &self.sizes;
        let EflaGradients { q, k, v, d_out, d_q, d_k, d_v, .. } = tensors;
        let lanes = self.lanes && suits_lanes(&[q, k, v, d_out, d_q, d_k, d_v]);
        let key_rows = (batch as u64 * heads as u64).saturating_mul(sizes.rows);
        if key_rows > 1 << 31 {
            let argument = "rows of all heads in whole chunks".to_string();
            return Err(Error::Limit { argument, got: key_rows, limit_name: "2³¹", limit: 1 << 31 });
        }
        for (stage, kernel, constants) in kernels(self.efla.build(self.packing.is_ragged(), lanes, self.groups.0 > 1)) {
            let (params, common) =
                if stage == Stage::Recompute { (&recompute, &common_recompute) } else { (&params, &common) };
            let arguments: Vec<_> = kernel.bindings.iter().map(|binding| argument(stage, binding.name)).collect();
            if let Some(steps) = steps(kernel.name, sizes, self.groups, self.efla.chunk()) {
                let params = |first_step, steps| {
                    params_buffer(gpu, "efla backward", &EflaParams { first_step, steps, ..*params })
                };
                call.push_steps(gpu, (kernel, constants), params, &arguments, &steps)?;
                continue;
            }
            let load = match kernel.name {
                "efla_gates" => gates_workgroups(sizes).into(),
                "efla_backward_sum" | "efla_backward_sum_lanes" => {
                    let rounds = 2 * sizes.key_dim.div_ceil(32) * (self.shape.group() as u64 + 4);
                    Load { workgroups: key_rows.div_ceil(ROWS), operations: 0, rounds }
                }
                "efla_backward_values" | "efla_backward_values_lanes" => {
                    (sizes.sequences * sizes.rows).div_ceil(ROWS).into()
                }
                _ => chunk_load(sizes, self.efla.chunk()),
            };
            call.push(gpu, kernel, constants, common, &arguments, load)?;
        }
        // The parts of d_log_decay are the last 4 of a token's elements.
        let tokens = sizes.elements(&[sizes.tokens]);
        let parts = [(GATED_ELEMENTS - 4) * tokens, value_heads as u64 * sizes.tokens, 4, tokens];
        reduce(gpu, call, tensors.d_log_decay.as_ref(), &self.scratch.gates.of(workspace), parts, false)
    }
}
