//! The backward pass: plan, bind, record.

use super::forward::lanes_constants;
use super::operands::{
    AttentionParams, BLOCK_K, BLOCK_Q, Blocks, Operands, Tiles, check_sizes, is_shared, packed_elements, sink_part,
    three_dimensions,
};
use super::{Attention, AttentionConfig, AttentionShape, AttentionTensors, Lengths, Method, Sink};
use crate::error::{Error, Result};
use crate::gpu::{Gpu, LANES};
use crate::kernel::{BoundRange, Call, Load, Part, Steps, WorkspaceLayout, check_bindings, params_buffer, suits_lanes};
use crate::piece::Piece;
use crate::shader::{Constants, File, Kernel, input, output, params, wgsl, workspace};
use crate::tensor::{DType, TensorView, check_overlaps};

params! {
    /// Parameters of `reduce`.
    ReduceParams {
        destination: [u32; 4],
        /// Sizes n0, n1, n2 of the destination; the fourth is unused.
        shape: [u32; 4],
        source: u32,
        /// Distance of neighbours along n0.
        source_stride: u32,
        count: u32,
        /// Distance of neighbouring partial results.
        stride: u32,
        /// Whether to add to the destination.
        add: u32,
        unused0: u32,
        unused1: u32,
        unused2: u32,
    }
}

const GRID: File = wgsl!("shared/grid.wgsl");
const EXP: File = wgsl!("shared/exp.wgsl");
const ATTENTION: File = wgsl!("shared/attention.wgsl");
const TILE: File = wgsl!("shared/attention_tile.wgsl");
const BACKWARD: File = wgsl!("shared/attention_backward.wgsl");
const BACKWARD_TILE: File = wgsl!("shared/attention_backward_tile.wgsl");
const LANES_FILE: File = wgsl!("shared/lanes.wgsl");
const ATTENTION_LANES: File = wgsl!("shared/attention_lanes.wgsl");
const BACKWARD_LANES: File = wgsl!("shared/attention_backward_lanes.wgsl");

pub(crate) static ROWS: Kernel = Kernel {
    name: "attention_backward_rows",
    files: &[GRID, wgsl!("attention_backward_rows.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[input("out").stored(), input("lse"), input("d_out").stored(), input("d_lse"), workspace("workspace")],
};

pub(crate) static OUTPUTS: Kernel = Kernel {
    name: "attention_backward_outputs",
    files: &[GRID, EXP, ATTENTION, TILE, BACKWARD, BACKWARD_TILE, wgsl!("attention_backward_outputs.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace"),
        input("table").words(),
    ],
};

pub(crate) static DQ: Kernel = Kernel {
    name: "attention_backward_dq",
    files: &[GRID, EXP, ATTENTION, TILE, BACKWARD, BACKWARD_TILE, wgsl!("attention_backward_dq.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace"),
        output("d_q").stored(),
        input("table").words(),
    ],
};

pub(crate) static DKV: Kernel = Kernel {
    name: "attention_backward_dkv",
    files: &[GRID, EXP, ATTENTION, TILE, BACKWARD, BACKWARD_TILE, wgsl!("attention_backward_dkv.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace"),
        output("d_k").stored(),
        output("d_v").stored(),
        input("table").words(),
    ],
};

pub(crate) static OUTPUTS_LANES: Kernel = Kernel {
    name: "attention_backward_outputs_lanes",
    files: &[
        GRID,
        EXP,
        ATTENTION,
        LANES_FILE,
        ATTENTION_LANES,
        BACKWARD,
        BACKWARD_LANES,
        wgsl!("attention_backward_outputs_lanes.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace").vectors(),
        input("table").words(),
    ],
};

pub(crate) static DQ_LANES: Kernel = Kernel {
    name: "attention_backward_dq_lanes",
    files: &[
        GRID,
        EXP,
        ATTENTION,
        LANES_FILE,
        ATTENTION_LANES,
        BACKWARD,
        BACKWARD_LANES,
        wgsl!("attention_backward_dq_lanes.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace").vectors(),
        output("d_q").stored(),
        input("table").words(),
    ],
};

pub(crate) static DKV_LANES: Kernel = Kernel {
    name: "attention_backward_dkv_lanes",
    files: &[
        GRID,
        EXP,
        ATTENTION,
        LANES_FILE,
        ATTENTION_LANES,
        BACKWARD,
        BACKWARD_LANES,
        wgsl!("attention_backward_dkv_lanes.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        input("d_out").stored(),
        workspace("workspace").vectors(),
        output("d_k").stored(),
        output("d_v").stored(),
        input("table").words(),
    ],
};

pub(crate) static REDUCE: Kernel = Kernel {
    name: "reduce",
    files: &[GRID, wgsl!("reduce.wgsl")],
    params: &ReduceParams::LAYOUT,
    bindings: &[workspace("workspace"), output("destination").stored()],
};

/// As in the forward pass; two tiles are in registers here.
pub(crate) const GROUPS: u32 = 4;

/// What is compiled into `attention_backward_dq` and `attention_backward_dkv`.
pub(crate) fn constants(config: &AttentionConfig, ragged: (&'static str, u32)) -> Constants {
    vec![
        ragged,
        ("CONTINUOUS", u32::from(config.method == Method::Continuous)),
        ("BLOCK_Q", BLOCK_Q as u32),
        ("BLOCK_K", BLOCK_K as u32),
        ("KEY_STAGES", config.head_dim.div_ceil(BLOCK_K) as u32),
        ("VALUE_STAGES", config.value_dim.div_ceil(BLOCK_K) as u32),
    ]
}

/// The steps of the kernels that walk tiles: `attention_backward_outputs`, `_dq`, `_dkv`, or their twins for one subgroup a
/// workgroup.
fn steps(config: &AttentionConfig, shape: &AttentionShape, blocks: &Blocks, lanes: bool) -> [Steps; 3] {
    let [key, value] = [config.head_dim, config.value_dim];
    let stages = [key, value].map(|dim| dim.div_ceil(BLOCK_K));
    let (tile, rounds) = match lanes {
        true => (GROUPS * LANES, (key + value) / 2 + 16),
        false => (BLOCK_K as u32, 130 * (stages[0] + stages[1]) + 100),
    };
    let pairs = (BLOCK_Q as u32 * tile).into();
    let rows = |products, left| {
        let count = blocks.node_tiles(config, blocks.longest as u64 + 1, tile.into());
        Tiles { workgroups: blocks.row_tasks(shape), count, pairs, products, rounds, left }
    };
    let nodes = |products, left| {
        let count = blocks.row_tiles(config, shape);
        Tiles { workgroups: blocks.node_tasks(shape), count, pairs, products, rounds, left }
    };
    // Of every invocation.
    let [outputs, dq, dkv] = match lanes {
        true => [16, 16, 4].map(|left| left * LANES as usize),
        false => [8, 16 * stages[0] + 4, 16 * (stages[0] + stages[1]) + 4].map(|left| left * BLOCK_Q * BLOCK_K / 16),
    };
    [rows(key + value, outputs), rows(2 * key + value, dq), nodes(2 * (key + value), dkv)].map(|tiles| tiles.steps())
}

/// The tensors of a backward call: those of the forward call, what it returned, the gradients of that, and where the
/// gradients of its inputs go, each in the shape of what it is the gradient of.
#[derive(Debug, Clone)]
pub struct AttentionGradients {
    /// Queries.
    pub q: TensorView,
    /// Keys of the tokens.
    pub k: TensorView,
    /// Values of the tokens.
    pub v: TensorView,
    /// Key of node 0; given exactly when the sink is [`Sink::Given`].
    pub sink_k: Option<TensorView>,
    /// Value of node 0; given exactly when the sink is [`Sink::Given`].
    pub sink_v: Option<TensorView>,
    /// Lengths of the segments, if the forward call had them.
    pub intervals: Option<TensorView>,
    /// What the forward call returned. Of 16 bits it is not read but computed again: its rounding would show.
    pub out: TensorView,
    /// What the forward call returned.
    pub lse: TensorView,
    /// Gradient of out.
    pub d_out: TensorView,
    /// Gradient of lse; zeros when absent. Ignored where lse is −∞.
    pub d_lse: Option<TensorView>,
    /// Written: gradient of q.
    pub d_q: TensorView,
    /// Written: gradient of k.
    pub d_k: TensorView,
    /// Written: gradient of v.
    pub d_v: TensorView,
    /// Written when given: gradient of sink_k. A sink that the batch shares needs f32 here, and in d_sink_v, when the batch
    /// is too large for one binding and its parts are added up.
    pub d_sink_k: Option<TensorView>,
    /// Written when given: gradient of sink_v.
    pub d_sink_v: Option<TensorView>,
    /// Written when given: gradient of the intervals.
    pub d_intervals: Option<TensorView>,
    /// As in the forward call.
    pub lengths: Lengths,
    /// [`AttentionBackwardPlan::workspace_bytes`] of scratch memory; allocated by the call when absent.
    pub workspace: Option<TensorView>,
}

impl AttentionGradients {
    /// The backward call of a forward call whose log-normaliser is `lse`, without optional gradients.
    pub fn new(
        forward: &AttentionTensors,
        lse: TensorView,
        d_out: TensorView,
        [d_q, d_k, d_v]: [TensorView; 3],
    ) -> Self {
        AttentionGradients {
            q: forward.q.clone(),
            k: forward.k.clone(),
            v: forward.v.clone(),
            sink_k: forward.sink_k.clone(),
            sink_v: forward.sink_v.clone(),
            intervals: forward.intervals.clone(),
            out: forward.out.clone(),
            lse,
            d_out,
            d_lse: None,
            d_q,
            d_k,
            d_v,
            d_sink_k: None,
            d_sink_v: None,
            d_intervals: None,
            lengths: forward.lengths.clone(),
            workspace: None,
        }
    }

    /// A piece's part of every tensor of a call of the given shape.
    fn part(&self, shape: &AttentionShape, piece: &Piece) -> Result<Self> {
        let (rows, nodes) = (|view: &TensorView| piece.of(view, shape.group()), |view: &TensorView| piece.of(view, 1));
        let sink = |sink: &Option<TensorView>| sink_part(sink, shape, piece);
        Ok(AttentionGradients {
            q: rows(&self.q)?,
            k: nodes(&self.k)?,
            v: nodes(&self.v)?,
            sink_k: sink(&self.sink_k)?,
            sink_v: sink(&self.sink_v)?,
            intervals: piece.of_batch(&self.intervals)?,
            out: rows(&self.out)?,
            lse: rows(&self.lse)?,
            d_out: rows(&self.d_out)?,
            d_lse: self.d_lse.as_ref().map(rows).transpose()?,
            d_q: rows(&self.d_q)?,
            d_k: nodes(&self.d_k)?,
            d_v: nodes(&self.d_v)?,
            d_sink_k: sink(&self.d_sink_k)?,
            d_sink_v: sink(&self.d_sink_v)?,
            d_intervals: piece.of_batch(&self.d_intervals)?,
            lengths: self.lengths.part(piece),
            workspace: None,
        })
    }

    /// The tensors that kernels bind.
    fn views(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        let inputs = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("out", &self.out), ("lse", &self.lse)];
        let gradients = [("d_out", &self.d_out), ("d_q", &self.d_q), ("d_k", &self.d_k), ("d_v", &self.d_v)];
        let optional = [
            ("d_lse", &self.d_lse),
            ("intervals", &self.intervals),
            ("d_intervals", &self.d_intervals),
            ("sink_k", &self.sink_k),
            ("sink_v", &self.sink_v),
            ("d_sink_k", &self.d_sink_k),
            ("d_sink_v", &self.d_sink_v),
        ];
        let optional = optional.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?)));
        inputs.into_iter().chain(gradients).chain(optional)
    }

    fn operands(&self) -> Operands<'_> {
        Operands {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            sink_k: self.sink_k.as_ref(),
            sink_v: self.sink_v.as_ref(),
            intervals: self.intervals.as_ref(),
        }
    }

    /// The sizes that q and k state.
    ///
    /// # Errors
    /// [`Error::Argument`] when either has not four dimensions.
    pub fn shape(&self) -> Result<AttentionShape> {
        AttentionShape::of(&self.q, &self.k)
    }
}

/// A validated backward call of given sizes, from [`Attention::plan_backward`].
#[derive(Debug, Clone)]
pub struct AttentionBackwardPlan {
    attention: Attention,
    shape: AttentionShape,
    lengths: Lengths,
    /// Whether there is room for the kernels of one subgroup a workgroup.
    lanes: bool,
    /// One, unless the workspace of the whole can't be bound.
    pieces: Vec<Piece>,
    workspace_bytes: u64,
}

impl AttentionBackwardPlan {
    pub(super) fn new(attention: &Attention, shape: &AttentionShape, lengths: &Lengths) -> Result<Self> {
        check_sizes(shape)?;
        let (lanes, pieces, workspace_bytes) = Piece::whole(shape.batch, shape.kv_heads)
            .plan_lanes(attention.gpu().lanes(), |piece, lanes| {
                Ok(Pass::new(attention, &shape.part(piece), &lengths.part(piece), lanes)?.workspace.bytes())
            })?;
        let (attention, shape, lengths) = (attention.clone(), *shape, lengths.clone());
        Ok(AttentionBackwardPlan { attention, shape, lengths, lanes, pieces, workspace_bytes })
    }

    /// Bytes of device memory a call needs besides its tensors, whichever optional tensors it has: linear in T. On software
    /// adapters with subgroups that includes sums as large as d_k and d_v in f32, or as d_q.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// As [`AttentionPlan::bind`](super::AttentionPlan::bind).
    pub fn bind(&self, tensors: &AttentionGradients) -> Result<Call> {
        self.attention.gpu().catching("binding attention's backward pass", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &AttentionGradients) -> Result<Call> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let AttentionShape { batch, heads, queries, .. } = self.shape;
        self.lengths.check(&tensors.lengths)?;
        let mut inputs = tensors.operands().check(config, &self.shape, self.lengths.sequences(&self.shape))?;
        let rows_shape = [batch, heads, queries];
        let out_shape = [batch, heads, queries, config.value_dim];
        tensors.out.check_stored("out", &out_shape)?;
        tensors.lse.check("lse", &rows_shape)?;
        tensors.d_out.check_stored("d_out", &out_shape)?;
        inputs.extend([("out", &tensors.out), ("lse", &tensors.lse), ("d_out", &tensors.d_out)]);
        if let Some(d_lse) = &tensors.d_lse {
            d_lse.check("d_lse", &rows_shape)?;
            inputs.push(("d_lse", d_lse));
        }
        let mut outputs = Vec::new();
        for (name, gradient, of) in [
            ("d_q", Some(&tensors.d_q), Some(&tensors.q)),
            ("d_k", Some(&tensors.d_k), Some(&tensors.k)),
            ("d_v", Some(&tensors.d_v), Some(&tensors.v)),
            ("d_sink_k", tensors.d_sink_k.as_ref(), tensors.sink_k.as_ref()),
            ("d_sink_v", tensors.d_sink_v.as_ref(), tensors.sink_v.as_ref()),
            ("d_intervals", tensors.d_intervals.as_ref(), tensors.intervals.as_ref()),
        ] {
            match (gradient, of) {
                (Some(gradient), Some(of)) => {
                    match name {
                        "d_intervals" => gradient.check_output(name, of.shape())?,
                        _ => gradient.check_stored_output(name, of.shape())?,
                    }
                    outputs.push((name, gradient));
                }
                (Some(_), None) => {
                    return Err(Error::argument(name, "a tensor", format!("none without {}", &name[2..])));
                }
                (None, _) => {}
            }
        }
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes)?;
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let shared = [&tensors.d_sink_k, &tensors.d_sink_v].map(|sink| sink.as_ref().is_some_and(is_shared));
        let fits = |piece: &Piece| check_bindings(tensors.part(&self.shape, piece)?.views(), limits);
        for piece in &self.pieces {
            for piece in piece.split(&fits)? {
                let part = tensors.part(&self.shape, &piece)?;
                let pass = Pass::new(&self.attention, &self.shape.part(&piece), &part.lengths, self.lanes)?;
                let gradients = [("d_sink_k", &tensors.d_sink_k), ("d_sink_v", &tensors.d_sink_v)];
                for ((name, gradient), shared) in gradients.into_iter().zip(shared) {
                    // Added up with 16 bits the sum would stand still one day.
                    if let Some(gradient) = gradient
                        && (shared && piece.batch.start > 0 && gradient.dtype() != DType::F32)
                    {
                        let got = format!("{:?} elements", gradient.dtype());
                        let needed = "F32, since the batch is too large for one binding and shares the sink";
                        return Err(Error::argument(name, got, needed));
                    }
                }
                // What several pieces give is added up.
                let add = shared.map(|shared| shared && piece.batch.start > 0);
                pass.bind(&mut call, &part, add, piece.heads.start > 0, &workspace)?;
            }
        }
        Ok(call)
    }
}

/// A piece of a call.
struct Pass<'a> {
    attention: &'a Attention,
    shape: AttentionShape,
    blocks: Blocks,
    lanes: bool,
    workspace: WorkspaceLayout,
    /// Packed inputs, rows and partial gradients are bound as one.
    all: Part,
    rows: u64,
    d_sink_k: u64,
    d_sink_v: u64,
    d_intervals: u64,
    /// Where the sums of the kernels of one subgroup a workgroup start.
    sums: u64,
    /// Where stands what workgroups leave for a next dispatch.
    left: u64,
    /// Where d_k and d_v are bound when there is no token.
    spare: [Part; 2],
}

impl<'a> Pass<'a> {
    fn new(attention: &'a Attention, shape: &AttentionShape, lengths: &Lengths, lanes: bool) -> Result<Self> {
        let config = attention.config();
        let blocks = Blocks::new(config, shape, lengths, BLOCK_Q)?;
        let kv_heads = shape.kv_heads as u64;
        let rows_elements = (shape.batch as u64 * shape.heads as u64).saturating_mul(2 * shape.queries as u64);
        let sinks = if config.sink == Sink::Given { blocks.sequences as u64 * kv_heads } else { 0 };
        let rows = packed_elements(config, shape, blocks.sequences);
        let d_sink_k = rows.saturating_add(rows_elements);
        let d_sink_v = d_sink_k.saturating_add(sinks.saturating_mul(config.head_dim as u64));
        let d_intervals = d_sink_v.saturating_add(sinks.saturating_mul(config.value_dim as u64));
        let segments = match config.method {
            Method::Continuous => (shape.batch as u64 * kv_heads).saturating_mul(shape.keys as u64),
            Method::Softmax => 0,
        };
        let mut workspace = WorkspaceLayout::new(attention.gpu().limits());
        let mut elements = d_intervals.saturating_add(segments);
        let sums = workspace.aligned(elements);
        if lanes {
            // Those of d_q, then those of d_k and d_v.
            let [key, value] = [config.head_dim, config.value_dim].map(|dim| dim.next_multiple_of(4) as u64);
            let rows = blocks.row_tasks(shape).saturating_mul(key);
            let nodes = blocks.node_tasks(shape).saturating_mul(key + value);
            elements = sums.saturating_add(rows.max(nodes).saturating_mul(BLOCK_Q as u64));
        }
        let left = workspace.aligned(elements);
        // Tensors may not suit the kernels of one subgroup a workgroup.
        for lanes in if lanes { &[false, true][..] } else { &[false] } {
            for steps in steps(config, shape, &blocks, *lanes) {
                elements = elements.max(left.saturating_add(steps.elements(attention.gpu())));
            }
        }
        let all = workspace.reserve("workspace of the gradients", elements)?;
        let spare = [workspace.reserve("workspace", 1)?, workspace.reserve("workspace", 1)?];
        workspace.check()?;
        Ok(Pass {
            attention,
            shape: *shape,
            blocks,
            lanes,
            workspace,
            all,
            rows,
            d_sink_k,
            d_sink_v,
            d_intervals,
            sums,
            left,
            spare,
        })
    }

    fn bind(
        &self,
        call: &mut Call,
        tensors: &AttentionGradients,
        add_sinks: [bool; 2],
        add_intervals: bool,
        workspace: &TensorView,
    ) -> Result<()> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let AttentionShape { batch, heads, kv_heads, queries, keys } = self.shape;
        let AttentionGradients { q, k, v, d_out, d_q, d_k, d_v, .. } = tensors;
        let lanes = self.lanes && suits_lanes(&[q, k, v, d_out, d_q, d_k, d_v]);
        let operands = tensors.operands();
        let has_out = tensors.out.dtype() == DType::F32;
        let all = self.all.of(workspace);
        let packed = operands.pack(gpu, call, &all)?;
        let params = AttentionParams {
            out: tensors.out.layout(limits),
            lse: tensors.lse.layout(limits),
            d_out: tensors.d_out.layout(limits),
            d_lse: tensors.d_lse.as_ref().map_or([0; 4], |d_lse| d_lse.layout(limits)),
            d_q: tensors.d_q.layout(limits),
            d_k: tensors.d_k.layout(limits),
            d_v: tensors.d_v.layout(limits),
            has_d_lse: u32::from(tensors.d_lse.is_some()),
            has_out: u32::from(has_out),
            has_d_intervals: u32::from(tensors.d_intervals.is_some()),
            rows: self.rows as u32,
            d_sink_k_partial: self.d_sink_k as u32,
            d_sink_v_partial: self.d_sink_v as u32,
            d_intervals_partial: self.d_intervals as u32,
            sums: self.sums as u32,
            left: self.left as u32,
            ..operands.params(config, &self.shape, &self.blocks, limits, packed)
        };
        let row_count = batch as u64 * heads as u64 * queries as u64;
        let of_steps = |first_step, steps| {
            params_buffer(gpu, "attention_backward", &AttentionParams { first_step, steps, ..params })
        };
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let [q, k, v, d_out] = [&tensors.q, &tensors.k, &tensors.v, &tensors.d_out].map(bound);

        let d_lse = tensors.d_lse.as_ref().and_then(bound);
        let arguments = [bound(&tensors.out), bound(&tensors.lse), d_out.clone(), d_lse, Some(all.clone())];
        call.push(gpu, &ROWS, Vec::new(), &of_steps(0, 0), &arguments, row_count.div_ceil(64))?;

        let ([outputs, dq, dkv], constants) = if lanes {
            let constants = lanes_constants(config, self.blocks.constants(), operands.intervals.is_some(), GROUPS);
            ([&OUTPUTS_LANES, &DQ_LANES, &DKV_LANES], constants)
        } else {
            ([&OUTPUTS, &DQ, &DKV], constants(config, self.blocks.constants()))
        };
        let table = self.blocks.upload(gpu)?;
        let [of_outputs, of_dq, of_dkv] = steps(config, &self.shape, &self.blocks, lanes);
        let inputs = [q, k, v, d_out, Some(all.clone())];
        if !has_out {
            let arguments = [&inputs[..], std::slice::from_ref(&table)].concat();
            call.push_steps(gpu, (outputs, constants.clone()), of_steps, &arguments, &of_outputs)?;
        }
        let arguments = [&inputs[..], &[bound(&tensors.d_q), table.clone()]].concat();
        call.push_steps(gpu, (dq, constants.clone()), of_steps, &arguments, &of_dq)?;

        let spare = |part: &Part| Some(part.of(workspace));
        let d_k = bound(&tensors.d_k).or_else(|| spare(&self.spare[0]));
        let d_v = bound(&tensors.d_v).or_else(|| spare(&self.spare[1]));
        // Without a token only a given sink has a gradient.
        if keys > 0 || config.sink == Sink::Given {
            let arguments = [&inputs[..], &[d_k, d_v, table]].concat();
            call.push_steps(gpu, (dkv, constants), of_steps, &arguments, &of_dkv)?;
        }

        // Sinks that are shared gather from every sequence, intervals from every head.
        let (kv_heads, keys) = (kv_heads as u64, keys as u64);
        for (gradient, source, size, add) in [
            (&tensors.d_sink_k, self.d_sink_k, kv_heads * config.head_dim as u64, add_sinks[0]),
            (&tensors.d_sink_v, self.d_sink_v, kv_heads * config.value_dim as u64, add_sinks[1]),
        ] {
            let count = if gradient.as_ref().is_some_and(is_shared) { self.blocks.sequences as u64 } else { 1 };
            reduce(gpu, call, gradient.as_ref(), &all, [source, size, count, size], add)?;
        }
        let lengths = [self.d_intervals, kv_heads * keys, kv_heads, keys];
        reduce(gpu, call, tensors.d_intervals.as_ref(), &all, lengths, add_intervals)
    }
}

/// Records the sum of `count` partial results, `stride` apart, into a gradient if it is asked for; `add` to what
/// stands there.
pub(crate) fn reduce(
    gpu: &Gpu,
    call: &mut Call,
    gradient: Option<&TensorView>,
    all: &BoundRange,
    [source, source_stride, count, stride]: [u64; 4],
    add: bool,
) -> Result<()> {
    let Some(view) = gradient.filter(|view| !view.is_empty()) else {
        return Ok(());
    };
    let (mut destination, mut shape) = three_dimensions(view, gpu.limits());
    if view.shape().len() == 2 {
        // Intervals: the batch is the outer dimension, there is no middle one.
        destination = [destination[0], destination[2], 0, destination[3]];
        shape = [shape[1], 1, shape[2], 0];
    }
    let params = ReduceParams {
        destination,
        shape,
        source: source as u32,
        source_stride: source_stride as u32,
        count: count as u32,
        stride: stride as u32,
        add: add.into(),
        ..Default::default()
    };
    let params = params_buffer(gpu, REDUCE.name, &params);
    let pairs = u64::from(shape[0]) * u64::from(shape[1]) * u64::from(shape[2].div_ceil(2));
    let arguments = [Some(all.clone()), BoundRange::of_view(view, gpu.limits())];
    let load = Load { workgroups: pairs.div_ceil(64), operations: 0, rounds: 2 * count + 8 };
    call.push(gpu, &REDUCE, Vec::new(), &params, &arguments, load)
}
