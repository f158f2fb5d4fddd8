//! The forward pass, chunked and recurrent: plan, bind, record.

use super::call::{EflaParams, Packing, Scratch, Sizes, check_packing, check_sizes};
use super::matrix;
use super::scan::{left_elements, steps};
use super::{Efla, EflaConfig, EflaShape, EflaTensors, Form};
use crate::error::{Error, Result};
use crate::gpu::{Gpu, LANES};
use crate::kernel::{BoundRange, Call, Load, Part, WorkspaceLayout, check_bindings, params_buffer, suits_lanes};
use crate::piece::Piece;
use crate::shader::{Constants, File, Kernel, input, output, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

pub(super) const GRID: File = wgsl!("shared/grid.wgsl");
pub(super) const TILE: File = wgsl!("shared/efla_tile.wgsl");
pub(super) const DECAY: File = wgsl!("shared/efla_decay.wgsl");
pub(super) const INVERSE: File = wgsl!("shared/efla_inverse.wgsl");
pub(super) const KEY: File = wgsl!("shared/efla_key.wgsl");
pub(super) const PRODUCT: File = wgsl!("shared/efla_product.wgsl");
pub(super) const QUERY: File = wgsl!("shared/efla_query.wgsl");
pub(super) const VALUE: File = wgsl!("shared/efla_value.wgsl");
pub(super) const UPDATES: File = wgsl!("shared/efla_updates.wgsl");
pub(super) const STATES: File = wgsl!("shared/efla_states.wgsl");

pub(crate) static GATES: Kernel = Kernel {
    name: "efla_gates",
    files: &[GRID, TILE, wgsl!("shared/exp.wgsl"), wgsl!("shared/phi.wgsl"), wgsl!("efla_gates.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("beta"),
        input("log_decay"),
        workspace("gates"),
        input("table").words(),
    ],
};

/// Also of the backward pass, which prepares and scans with the transpose.
pub(super) const PREPARE_FILES: &[File] =
    &[GRID, TILE, DECAY, KEY, VALUE, UPDATES, INVERSE, wgsl!("efla_prepare.wgsl")];
pub(super) const STATE_FILES: &[File] = &[GRID, TILE, KEY, wgsl!("efla_state.wgsl")];

pub(crate) static PREPARE: Kernel = Kernel {
    name: "efla_prepare",
    files: PREPARE_FILES,
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        input("v").stored(),
        workspace("gates"),
        workspace("w"),
        workspace("u"),
        input("table").words(),
    ],
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
        input("table").words(),
    ],
};

/// [`STATE`] of groups of chunks from zeros, and of the unit matrix.
pub(crate) static STATE_SUMS: Kernel =
    Kernel { name: "efla_state_sums", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

/// [`STATE`] of groups of chunks from where they start.
pub(crate) static STATE_STARTS: Kernel =
    Kernel { name: "efla_state_starts", files: STATE_FILES, params: &EflaParams::LAYOUT, bindings: STATE.bindings };

pub(crate) static GROUPS: Kernel = Kernel {
    name: "efla_groups",
    files: &[GRID, wgsl!("efla_groups.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[input("initial_state"), workspace("states"), output("final_state")],
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
        input("table").words(),
    ],
};

pub(super) const LANES_FILE: File = wgsl!("shared/lanes.wgsl");
pub(super) const CHUNK_LANES: File = wgsl!("shared/efla_lanes.wgsl");
pub(super) const PRODUCT_LANES: File = wgsl!("shared/efla_lanes_product.wgsl");
pub(super) const SCORES: File = wgsl!("shared/efla_lanes_scores.wgsl");
pub(super) const PREPARE_LANES_FILES: &[File] =
    &[GRID, TILE, KEY, VALUE, LANES_FILE, CHUNK_LANES, wgsl!("efla_prepare_lanes.wgsl")];
pub(super) const STATE_LANES_FILES: &[File] =
    &[GRID, TILE, KEY, LANES_FILE, CHUNK_LANES, PRODUCT_LANES, wgsl!("efla_state_lanes.wgsl")];

pub(crate) static PREPARE_LANES: Kernel = Kernel {
    name: "efla_prepare_lanes",
    files: PREPARE_LANES_FILES,
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        input("v").stored(),
        workspace("gates"),
        workspace("w").vectors(),
        workspace("u").vectors(),
        input("table").words(),
    ],
};

pub(crate) static STATE_LANES: Kernel = Kernel {
    name: "efla_state_lanes",
    files: STATE_LANES_FILES,
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("k").stored(),
        workspace("gates"),
        workspace("w").vectors(),
        input("initial_state"),
        workspace("u").vectors(),
        workspace("states").vectors(),
        output("final_state"),
        input("table").words(),
    ],
};

pub(crate) static OUTPUT_LANES: Kernel = Kernel {
    name: "efla_output_lanes",
    files: &[GRID, TILE, KEY, QUERY, LANES_FILE, CHUNK_LANES, PRODUCT_LANES, SCORES, wgsl!("efla_output_lanes.wgsl")],
    params: &EflaParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        workspace("gates"),
        workspace("u").vectors(),
        workspace("states").vectors(),
        output("out").stored(),
        input("table").words(),
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
        input("table").words(),
    ],
};

/// Columns that the kernels stage at a time.
const COLUMNS: usize = 32;
/// Value columns of one workgroup of `efla_recurrent`.
pub(super) const RECURRENT_COLUMNS: u64 = 16;

/// Value columns of one workgroup of `efla_state`: as many as keep the state in 8 KiB.
pub(super) fn state_columns(key_dim: usize) -> usize {
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

/// Chunk length of the kernels of one subgroup a workgroup: 4 rows a lane.
pub(super) const LANES_CHUNK: usize = 4 * LANES as usize;

/// Whether those kernels can do what is configured: they know no decay, and their arrays consist of vectors.
pub(super) fn knows_lanes(gpu: &Gpu, config: &EflaConfig) -> bool {
    gpu.lanes() && !config.gated && config.key_dim.is_multiple_of(4) && config.value_dim.is_multiple_of(4)
}

/// The configured chunk length, else the longest that fits and is hardly longer than the keys: beyond, a chunk's own
/// products cost more than the state's, and it may wipe out so much of the state that the rounding of the rest shows.
pub(crate) fn chunk_length(gpu: &Gpu, config: &EflaConfig) -> Result<usize> {
    let limit = gpu.limits().max_compute_workgroup_storage_size;
    let longest = match gpu.matrices() {
        Some(_) => matrix::CHUNK,
        None if limit >= workgroup_bytes(64) && !knows_lanes(gpu, config) => 64,
        None => LANES_CHUNK,
    };
    let chunk = config.chunk.unwrap_or(config.key_dim.next_power_of_two().clamp(16, longest));
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

/// What is compiled into EFLA's kernels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Build {
    pub chunk: usize,
    pub key_dim: usize,
    pub gated: bool,
    /// Whether sequences are packed.
    pub ragged: bool,
    /// Whether the kernels of one subgroup a workgroup do it.
    pub lanes: bool,
    /// Whether scans have two levels.
    pub grouped: bool,
}

/// What a run of `efla_state` scans.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    /// All chunks of a sequence.
    Whole,
    /// Groups of chunks from zeros.
    Sums,
    /// Groups of chunks from where they start.
    Starts,
}

/// What a run of `efla_state` is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scan {
    /// V_new and the states, from the first chunk to the last.
    Forward,
    /// Y and the gradients of the states, from the last chunk to the first.
    Reverse,
    /// The states again, from V_new.
    Replay,
}

impl Build {
    /// Constants of the kernels that have a whole chunk's products.
    pub fn products(self) -> Constants {
        // Rows of a tile start in different memory banks, where there is room for it.
        let pitch = if self.chunk == 64 { 8 } else { 9 };
        [vec![("PITCH", pitch)], self.chunks()].concat()
    }

    /// Constants of the kernels that know chunks.
    fn chunks(self) -> Constants {
        vec![("CHUNK", self.chunk as u32), ("DECAY", self.gated.into()), ("RAGGED", self.ragged.into())]
    }

    /// Constants of `efla_gates`, which has cumulative decays of a chunk. Token by token a chunk is one token, and without
    /// decay all tokens are alike.
    pub fn gates(self, form: Form) -> Constants {
        match form == Form::Chunked && self.gated {
            true => self.chunks(),
            false => Build { chunk: 1, ragged: false, ..self }.chunks(),
        }
    }

    /// Constants of `efla_prepare`; `reverse` for the transpose.
    pub fn prepare(self, reverse: bool) -> Constants {
        [vec![("REVERSE", reverse.into())], self.products()].concat()
    }

    /// Constants of `efla_state`.
    pub fn state(self, scan: Scan, level: Level) -> Constants {
        let stages = ("KEY_STAGES", self.key_dim.div_ceil(COLUMNS) as u32);
        let own = vec![
            stages,
            ("STATE_COLUMNS", state_columns(self.key_dim) as u32),
            ("SCAN", scan as u32),
            ("LEVEL", level as u32),
        ];
        [own, self.chunks()].concat()
    }

    /// Constants of the kernels of one subgroup a workgroup, before those of their own.
    pub fn lanes(self, own: Constants) -> Constants {
        [own, vec![("LANES", LANES), ("GROUPS", 4), ("TILE", 4 * LANES)], self.chunks()].concat()
    }

    /// Constants of `efla_recurrent`.
    fn recurrent(self) -> Constants {
        let stages = ("KEY_STAGES", self.key_dim.div_ceil(COLUMNS) as u32);
        [vec![stages], Build { chunk: 1, ..self }.chunks()].concat()
    }

    /// The kernels of a form in the order they run.
    pub fn kernels(self, form: Form) -> Vec<(&'static Kernel, Constants)> {
        match form {
            Form::Chunked if self.lanes => vec![
                (&GATES, self.gates(form)),
                (&PREPARE_LANES, self.lanes(vec![("REVERSE", 0)])),
                (&STATE_LANES, self.lanes(vec![("SCAN", Scan::Forward as u32)])),
                (&OUTPUT_LANES, self.lanes(vec![])),
            ],
            Form::Chunked => {
                let scan: Vec<(&'static Kernel, Constants)> = match self.grouped {
                    false => vec![(&STATE, self.state(Scan::Forward, Level::Whole))],
                    true => vec![
                        (&STATE_SUMS, self.state(Scan::Forward, Level::Sums)),
                        (&GROUPS, Vec::new()),
                        (&STATE_STARTS, self.state(Scan::Forward, Level::Starts)),
                    ],
                };
                let before: [(&'static Kernel, Constants); 2] =
                    [(&GATES, self.gates(form)), (&PREPARE, self.prepare(false))];
                before.into_iter().chain(scan).chain([(&OUTPUT, self.products())]).collect()
            }
            Form::Recurrent => vec![(&GATES, self.gates(form)), (&RECURRENT, self.recurrent())],
        }
    }
}

/// Workgroups of `efla_gates`: tokens, or those of whole chunks where [`Build::gates`] says that sequences are packed.
pub(super) fn gates_workgroups(sizes: &Sizes) -> u64 {
    sizes.sequences.saturating_mul(sizes.tokens.max(sizes.rows)).div_ceil(64)
}

/// Workgroups with a chunk each, and what those take at most that multiply it with the state, by its own scores and by T.
pub(super) fn chunk_load(sizes: &Sizes, chunk: usize) -> Load {
    let Sizes { key_dim, value_dim, .. } = *sizes;
    let chunk = chunk as u64;
    let operations = 4 * chunk * (key_dim * value_dim + 2 * chunk * (key_dim + value_dim));
    Load { workgroups: sizes.sequences * sizes.chunks, operations, rounds: 0 }
}

/// A validated forward call of given sizes, from [`Efla::plan`] or [`Efla::plan_step`].
#[derive(Debug, Clone)]
pub struct EflaPlan {
    efla: Efla,
    shape: EflaShape,
    cu_seqlens: Option<Vec<usize>>,
    /// Whether the call demands both ends of the state.
    step: bool,
    /// Groups of a scan and chunks of each.
    groups: (u64, u64),
    /// Whether there is room for the kernels of one subgroup a workgroup.
    lanes: bool,
    /// One, unless the workspace of the whole can't be bound.
    pieces: Vec<Piece>,
    workspace_bytes: u64,
}

impl EflaPlan {
    pub(super) fn new(efla: &Efla, shape: &EflaShape, cu_seqlens: Option<&[usize]>) -> Result<Self> {
        check_sizes(shape)?;
        let chunked = efla.config.form == Form::Chunked;
        let groups = if chunked { efla.groups(shape, cu_seqlens)? } else { (1, 0) };
        let (lanes, pieces, workspace_bytes) = Piece::whole(shape.batch, shape.heads)
            .plan_lanes(efla.knows_lanes() && chunked, |piece, lanes| {
                Ok(Pass::new(efla, &shape.part(piece), cu_seqlens, groups, lanes)?.workspace.bytes())
            })?;
        let cu_seqlens = cu_seqlens.map(<[usize]>::to_vec);
        Ok(EflaPlan {
            efla: efla.clone(),
            shape: *shape,
            cu_seqlens,
            step: false,
            groups,
            lanes,
            pieces,
            workspace_bytes,
        })
    }

    pub(super) fn step(efla: &Efla, shape: &EflaShape) -> Result<Self> {
        let mut efla = efla.clone();
        efla.config.form = Form::Recurrent;
        Ok(EflaPlan { step: true, ..Self::new(&efla, shape, None)? })
    }

    /// Bytes of device memory a call needs besides its tensors: the guide's page on [memory](crate::guide::memory) has
    /// the formula.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Checks the tensors against the plan and prepares everything a recording needs. A call whose tensors are too large
    /// for the device's bindings becomes several, over batch and heads.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of the wrong shape, in a buffer that is too small or lacks usage STORAGE, or
    /// whose output overlaps another tensor (only final_state may be the very range of initial_state), and for a state
    /// that a step lacks; [`Error::Limit`] when a single head is over the device's limits; [`Error::Gpu`] when the
    /// graphics stack refuses a buffer or a pipeline.
    pub fn bind(&self, tensors: &EflaTensors) -> Result<Call> {
        self.efla.gpu().catching("binding EFLA", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &EflaTensors) -> Result<Call> {
        let gpu = self.efla.gpu();
        let (config, limits) = (self.efla.config(), gpu.limits());
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        check_packing(&self.cu_seqlens, &tensors.cu_seqlens)?;
        let sequences = self.cu_seqlens.as_ref().map_or(batch, |cumulative| cumulative.len() - 1);
        tensors.q.check_stored("q", &[batch, heads, tokens, config.key_dim])?;
        tensors.k.check_stored("k", &[batch, heads, tokens, config.key_dim])?;
        tensors.v.check_stored("v", &[batch, value_heads, tokens, config.value_dim])?;
        tensors.beta.check("beta", &[batch, value_heads, tokens])?;
        config.check_gated(tensors.log_decay.is_some())?;
        if let Some(log_decay) = &tensors.log_decay {
            log_decay.check("log_decay", &[batch, value_heads, tokens])?;
        }
        tensors.out.check_stored_output("out", &[batch, value_heads, tokens, config.value_dim])?;
        let state = tensors.state();
        if self.step {
            for (name, end) in [state.before, state.after] {
                if end.is_none() {
                    return Err(Error::argument(name, "none", "a tensor, since a step carries a state on"));
                }
            }
        }
        state.check(&[sequences, value_heads, config.key_dim, config.value_dim])?;
        let mut inputs = vec![("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v), ("beta", &tensors.beta)];
        inputs.extend(tensors.log_decay.as_ref().map(|view| ("log_decay", view)));
        inputs.extend(state.input());
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes)?;
        let mut outputs = vec![("out", &tensors.out)];
        outputs.extend(state.output());
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
    /// Where a final state nobody asked for and an output without tokens are bound.
    spare: [Part; 2],
}

impl<'a> Pass<'a> {
    fn new(
        efla: &'a Efla,
        shape: &EflaShape,
        cu_seqlens: Option<&[usize]>,
        groups: (u64, u64),
        lanes: bool,
    ) -> Result<Self> {
        let config = efla.config();
        let packing = Packing::new(shape, cu_seqlens, (config.form == Form::Chunked).then(|| efla.chunk()))?;
        let sizes = Sizes::new(config, shape, &packing, efla.chunk());
        let mut workspace = WorkspaceLayout::new(efla.gpu().limits());
        let gate_elements = if config.gated { 8 } else { 4 };
        let gate_elements = sizes.elements(&[sizes.tokens, gate_elements]);
        // Tensors may not suit the kernels of one subgroup a workgroup, which keep their states elsewhere.
        let kernels = efla.build(packing.is_ragged(), false, groups.0 > 1).kernels(config.form);
        let kernels = kernels.iter().map(|(kernel, _)| *kernel);
        let left = left_elements(efla.gpu(), &sizes, groups, efla.chunk(), kernels);
        let scratch = Scratch::reserve(&mut workspace, &sizes, gate_elements, groups.0, lanes, left)?;
        let spare = [workspace.reserve("workspace", 1)?, workspace.reserve("workspace", 1)?];
        workspace.check()?;
        Ok(Pass { efla, shape: *shape, packing, sizes, groups, lanes, workspace, scratch, spare })
    }

    fn bind(&self, call: &mut Call, tensors: &EflaTensors, workspace: &TensorView) -> Result<()> {
        let gpu = self.efla.gpu();
        let (config, limits) = (self.efla.config(), gpu.limits());
        let state = tensors.state();
        let mut params = EflaParams {
            q: tensors.q.layout(limits),
            k: tensors.k.layout(limits),
            v: tensors.v.layout(limits),
            beta: tensors.beta.layout(limits),
            log_decay: tensors.log_decay.as_ref().map_or([0; 4], |view| view.layout(limits)),
            out: tensors.out.layout(limits),
            groups: self.groups.0 as u32,
            group_chunks: self.groups.1 as u32,
            group_states: self.scratch.group_states as u32,
            left: self.scratch.left as u32,
            ..EflaParams::new(config, &self.shape, &self.sizes, &self.packing).with_state(&state, limits)
        };
        if config.form == Form::Recurrent && params.has_final_state == 0 && self.scratch.has_left {
            // Where the state goes from dispatch to dispatch; no one else needs room for states.
            let (keys, values) = (params.key_dim, params.value_dim);
            params.final_state = [0, params.value_heads * keys * values, keys * values, values];
            params.has_final_state = 1;
        }
        let common = params_buffer(gpu, "efla", &params);
        let table = self.packing.upload(gpu)?;
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let part = |part: Part| Some(part.of(workspace));
        let argument = |name: &str| match name {
            "q" => bound(&tensors.q),
            "k" => bound(&tensors.k),
            "v" => bound(&tensors.v),
            "beta" => bound(&tensors.beta),
            "log_decay" => tensors.log_decay.as_ref().and_then(bound),
            "out" => bound(&tensors.out).or_else(|| part(self.spare[1])),
            "initial_state" => state.input().and_then(|(_, view)| bound(view)),
            "final_state" => state.output().and_then(|(_, view)| bound(view)).or_else(|| match config.form {
                Form::Chunked => part(self.spare[0]),
                Form::Recurrent => part(self.scratch.states),
            }),
            "gates" => part(self.scratch.gates),
            "w" => part(self.scratch.w),
            "u" => part(self.scratch.u),
            "states" => part(self.scratch.states),
            "table" => table.clone(),
            // Every name of the kernels' binding tables stands above.
            _ => unreachable!("{name} is no binding of EFLA"),
        };

        let sizes = &self.sizes;
        let chunk = self.efla.chunk();
        let chunked = config.form == Form::Chunked;
        let matrices = gpu.matrices().filter(|_| chunked && matrix::suits(chunk, tensors));
        let lanes =
            matrices.is_none() && self.lanes && suits_lanes(&[&tensors.q, &tensors.k, &tensors.v, &tensors.out]);
        for (kernel, constants) in
            self.efla.build(self.packing.is_ragged(), lanes, self.groups.0 > 1).kernels(config.form)
        {
            let (kernel, constants) = match matrices {
                Some(matrices) if matrix::multiplies(kernel, tensors) => matrix::kernel(matrices, kernel, constants),
                _ => (kernel, constants),
            };
            let arguments: Vec<_> = kernel.bindings.iter().map(|binding| argument(binding.name)).collect();
            if let Some(steps) = steps(kernel.name, sizes, self.groups, chunk) {
                let params = |first_step, steps| {
                    // Token by token the state stands where the dispatch before left it.
                    let handed_on = config.form == Form::Recurrent && first_step > 0;
                    let state_source = if handed_on { 2 } else { params.state_source };
                    params_buffer(gpu, "efla", &EflaParams { first_step, steps, state_source, ..params })
                };
                call.push_steps(gpu, (kernel, constants), params, &arguments, &steps)?;
                continue;
            }
            let load = match kernel.name {
                "efla_gates" => gates_workgroups(sizes).into(),
                _ => chunk_load(sizes, chunk),
            };
            call.push(gpu, kernel, constants, &common, &arguments, load)?;
        }
        Ok(())
    }
}
