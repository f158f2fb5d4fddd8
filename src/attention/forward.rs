//! The forward pass: plan, bind, record.

use super::matrix;
use super::operands::{AttentionParams, BLOCK_K, BLOCK_Q, Blocks, FEW_ROWS, Tiles, check_sizes, packed_elements};
use super::{Attention, AttentionConfig, AttentionShape, AttentionTensors, Lengths, Method, Sink};
use crate::error::{Error, Result};
use crate::gpu::{Gpu, LANES};
use crate::kernel::{BoundRange, Call, Part, Steps, WorkspaceLayout, check_bindings, params_buffer, suits_lanes};
use crate::piece::Piece;
use crate::shader::{Constants, Kernel, input, output, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

pub(crate) static FORWARD: Kernel = Kernel {
    name: "attention_forward",
    files: &[
        wgsl!("shared/grid.wgsl"),
        wgsl!("shared/exp.wgsl"),
        wgsl!("shared/phi.wgsl"),
        wgsl!("shared/segment_weights.wgsl"),
        wgsl!("shared/attention.wgsl"),
        wgsl!("shared/attention_tile.wgsl"),
        wgsl!("shared/attention_rows.wgsl"),
        wgsl!("attention_forward.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        workspace("workspace"),
        output("out").stored(),
        output("lse"),
        input("table").words(),
    ],
};

pub(crate) static FORWARD_LANES: Kernel = Kernel {
    name: "attention_forward_lanes",
    files: &[
        wgsl!("shared/grid.wgsl"),
        wgsl!("shared/exp.wgsl"),
        wgsl!("shared/phi.wgsl"),
        wgsl!("shared/segment_weights.wgsl"),
        wgsl!("shared/attention.wgsl"),
        wgsl!("shared/lanes.wgsl"),
        wgsl!("shared/attention_lanes.wgsl"),
        wgsl!("attention_forward_lanes.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        workspace("workspace").vectors(),
        output("out").stored(),
        output("lse"),
        input("table").words(),
    ],
};

pub(crate) static COMBINE: Kernel = Kernel {
    name: "attention_combine",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("shared/exp.wgsl"), wgsl!("attention_combine.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[workspace("workspace"), output("out").stored(), output("lse")],
};

/// What is compiled into `attention_forward`.
pub(crate) fn constants(
    method: Method,
    value_dim: usize,
    block_q: usize,
    ragged: (&'static str, u32),
    split: bool,
) -> Constants {
    vec![
        ragged,
        ("SPLIT", split.into()),
        ("CONTINUOUS", u32::from(method == Method::Continuous)),
        ("BLOCK_Q", block_q as u32),
        ("BLOCK_K", BLOCK_K as u32),
        ("VALUE_STAGES", value_dim.div_ceil(BLOCK_K) as u32),
    ]
}

/// Groups of nodes of a tile of `attention_forward_lanes`: the larger, the fewer loads, the longer compilation takes.
pub(crate) const GROUPS: u32 = 8;

/// What is compiled into the kernels of one subgroup a workgroup; any head dimension is the same to them.
pub(crate) fn lanes_constants(
    config: &AttentionConfig,
    ragged: (&'static str, u32),
    intervals: bool,
    groups: u32,
) -> Constants {
    vec![
        ragged,
        ("CONTINUOUS", u32::from(config.method == Method::Continuous)),
        ("GIVEN", u32::from(config.sink == Sink::Given)),
        ("INTERVALS", intervals.into()),
        ("LANES", LANES),
        ("GROUPS", groups),
        ("TILE", groups * LANES),
    ]
}

/// Below this many workgroups the keys of a row are split over several, each of which gets at least so many nodes.
const FEW_WORKGROUPS: u64 = 128;
const SPLIT_NODES: u64 = 512;

/// Refuses tiles of so many rows where they do not fit workgroup memory: q, k or v, and scores, 9 vectors a row.
pub(super) fn check_block(gpu: &Gpu, block_q: usize) -> Result<()> {
    let (got, limit) = (workgroup_bytes(block_q), gpu.limits().max_compute_workgroup_storage_size);
    if got > limit {
        let (argument, limit_name) =
            (format!("workgroup memory for block_q = {block_q}"), "max_compute_workgroup_storage_size");
        return Err(Error::Limit { argument, got: got.into(), limit_name, limit: limit.into() });
    }
    Ok(())
}

/// Workgroup memory of `attention_forward`.
pub(crate) fn workgroup_bytes(block_q: usize) -> u32 {
    (144 * (2 * block_q + BLOCK_K) + 4 * block_q) as u32
}

/// Rows of a tile where there are rows enough. With 64 keys and values are loaded half as often; with many value columns a
/// workgroup's sums would take too many registers.
pub(super) fn table_rows(gpu: &Gpu, config: &AttentionConfig) -> usize {
    let fits = workgroup_bytes(64) <= gpu.limits().max_compute_workgroup_storage_size;
    // Matrix units have tiles of 32.
    let wide = fits && config.value_dim <= 128 && !gpu.is_software() && gpu.matrices().is_none();
    config.block_q.unwrap_or(if wide { 64 } else { BLOCK_Q })
}

/// Rows of a tile of a call.
fn block_rows(attention: &Attention, shape: &AttentionShape, lengths: &Lengths) -> usize {
    let most = match lengths {
        Lengths::Packed { cu_seqlens_q, .. } => {
            cu_seqlens_q.windows(2).map(|ends| ends[1].saturating_sub(ends[0])).max().unwrap_or(0)
        }
        _ => shape.queries,
    };
    let rows = table_rows(attention.gpu(), attention.config());
    let workgroups =
        |rows: usize| (shape.batch as u64 * shape.heads as u64).saturating_mul(shape.queries.div_ceil(rows) as u64);
    match attention.config().block_q {
        Some(block_q) => block_q,
        None if most <= FEW_ROWS => FEW_ROWS,
        // Rather many workgroups than large tiles.
        None if workgroups(rows) < FEW_WORKGROUPS => BLOCK_Q,
        None => rows,
    }
}

/// How the nodes of a row are split: into how many parts, of how many nodes.
fn splits(config: &AttentionConfig, shape: &AttentionShape, blocks: &Blocks) -> (u64, u64) {
    let nodes = blocks.longest as u64 + 1;
    // A window slides over the nodes: parts out of its reach would have nothing to do.
    let seen = config.window.map_or(nodes, |window| (window as u64).saturating_add(blocks.block_q as u64)).min(nodes);
    let splits = (FEW_WORKGROUPS / blocks.row_tasks(shape).max(1)).min(seen / SPLIT_NODES);
    if splits < 2 || seen < nodes {
        return (1, nodes);
    }
    let length = nodes.div_ceil(splits).next_multiple_of(BLOCK_K as u64);
    (nodes.div_ceil(length), length)
}

/// The steps of `attention_forward`, or of its twin for one subgroup a workgroup.
fn steps(config: &AttentionConfig, shape: &AttentionShape, blocks: &Blocks, splits: (u64, u64), lanes: bool) -> Steps {
    let row_tasks = blocks.row_tasks(shape);
    let (rows, [key, value]) = (blocks.block_q, [config.head_dim, config.value_dim]);
    let tiles = if lanes {
        let tile = u64::from(GROUPS * LANES);
        Tiles {
            workgroups: row_tasks,
            count: blocks.node_tiles(config, blocks.longest as u64 + 1, tile),
            pairs: rows as u64 * tile,
            products: key + value,
            rounds: (key + value) / 4 + 16,
            left: 20 * LANES as usize,
        }
    } else {
        let stages = [key, value].map(|dim| dim.div_ceil(BLOCK_K));
        Tiles {
            workgroups: row_tasks * splits.0,
            // Neighbouring splits share a node.
            count: blocks.node_tiles(config, splits.1 + 1, BLOCK_K as u64),
            pairs: (rows * BLOCK_K) as u64,
            products: key + value,
            rounds: 40 * (stages[0] + stages[1]) + 30,
            left: 2 * rows * (16 * stages[1] + 8),
        }
    };
    tiles.steps()
}

/// A validated forward call of given sizes, from [`Attention::plan`].
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    attention: Attention,
    shape: AttentionShape,
    lengths: Lengths,
    splits: (u64, u64),
    /// Whether there is room for `attention_forward_lanes`.
    lanes: bool,
    /// One, unless the workspace of the whole can't be bound.
    pieces: Vec<Piece>,
    workspace_bytes: u64,
}

impl AttentionPlan {
    pub(super) fn new(attention: &Attention, shape: &AttentionShape, lengths: &Lengths) -> Result<Self> {
        check_sizes(shape)?;
        let block_q = block_rows(attention, shape, lengths);
        let config = attention.config();
        let splits = splits(config, shape, &Blocks::new(config, shape, lengths, block_q)?);
        // Of a few rows most of a subgroup's would not exist.
        let lanes = attention.gpu().lanes() && block_q == 4 * LANES as usize;
        let (lanes, pieces, workspace_bytes) =
            Piece::whole(shape.batch, shape.kv_heads).plan_lanes(lanes, |piece, lanes| {
                Ok(Pass::new(attention, &shape.part(piece), &lengths.part(piece), splits, lanes)?.workspace.bytes())
            })?;
        let (attention, shape, lengths) = (attention.clone(), *shape, lengths.clone());
        Ok(AttentionPlan { attention, shape, lengths, splits, lanes, pieces, workspace_bytes })
    }

    /// Bytes of device memory a call needs besides its tensors, whichever optional tensors it has. On software adapters with
    /// subgroups the sums of all rows stand there: as much as an out in f32.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace_bytes
    }

    /// Checks the tensors against the plan and prepares everything a recording needs. A call whose tensors are too large
    /// for the device's bindings becomes several dispatches, over batch and key/value heads.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a tensor that is missing, superfluous, of the wrong shape, in
    /// a buffer that is too small or lacks usage STORAGE, or whose output overlaps another tensor;
    /// [`Error::Limit`](crate::Error::Limit) when a single head is over the device's limits;
    /// [`Error::Gpu`](crate::Error::Gpu) when the graphics stack refuses a buffer or a pipeline.
    pub fn bind(&self, tensors: &AttentionTensors) -> Result<Call> {
        self.attention.gpu().catching("binding attention", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &AttentionTensors) -> Result<Call> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let AttentionShape { batch, heads, queries, .. } = self.shape;
        self.lengths.check(&tensors.lengths)?;
        let inputs = tensors.operands().check(config, &self.shape, self.lengths.sequences(&self.shape))?;
        tensors.out.check_stored_output("out", &[batch, heads, queries, config.value_dim])?;
        let mut outputs = vec![("out", &tensors.out)];
        if let Some(lse) = &tensors.lse {
            lse.check_output("lse", &[batch, heads, queries])?;
            outputs.push(("lse", lse));
        }
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes)?;
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let fits = |piece: &Piece| check_bindings(tensors.part(&self.shape, piece)?.views(), limits);
        for piece in &self.pieces {
            for piece in piece.split(&fits)? {
                let part = tensors.part(&self.shape, &piece)?;
                let pass =
                    Pass::new(&self.attention, &self.shape.part(&piece), &part.lengths, self.splits, self.lanes)?;
                pass.bind(&mut call, &part, &workspace)?;
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
    /// Parts of a row's nodes that workgroups of their own have, and nodes of each.
    splits: (u64, u64),
    lanes: bool,
    workspace: WorkspaceLayout,
    /// Packed inputs, then out and lse of every split.
    all: Part,
    out_partial: u64,
    lse_partial: u64,
    /// Where the sums of `attention_forward_lanes` start.
    sums: u64,
    /// Where stands what workgroups leave for a next dispatch.
    left: u64,
    /// Where an lse nobody asked for is bound.
    spare: Part,
}

impl<'a> Pass<'a> {
    fn new(
        attention: &'a Attention,
        shape: &AttentionShape,
        lengths: &Lengths,
        splits: (u64, u64),
        lanes: bool,
    ) -> Result<Self> {
        let config = attention.config();
        let blocks = Blocks::new(config, shape, lengths, block_rows(attention, shape, lengths))?;
        let rows = (shape.batch as u64 * shape.heads as u64).saturating_mul(shape.queries as u64);
        let partial_rows = if splits.0 > 1 { splits.0.saturating_mul(rows) } else { 0 };
        let out_partial = packed_elements(config, shape, blocks.sequences);
        let lse_partial = out_partial.saturating_add(partial_rows.saturating_mul(config.value_dim as u64));
        let mut workspace = WorkspaceLayout::new(attention.gpu().limits());
        let mut elements = lse_partial.saturating_add(partial_rows);
        let sums = workspace.aligned(elements);
        if lanes {
            let rows = blocks.row_tasks(shape).saturating_mul(blocks.block_q as u64);
            elements = sums.saturating_add(rows.saturating_mul(config.value_dim.next_multiple_of(4) as u64));
        }
        let left = workspace.aligned(elements);
        // Tensors may not suit the kernel of one subgroup a workgroup.
        for lanes in if lanes { &[false, true][..] } else { &[false] } {
            let steps = steps(config, shape, &blocks, splits, *lanes);
            elements = elements.max(left.saturating_add(steps.elements(attention.gpu())));
        }
        let all = workspace.reserve("workspace of attention", elements)?;
        let spare = workspace.reserve("workspace", 1)?;
        workspace.check()?;
        Ok(Pass {
            attention,
            shape: *shape,
            blocks,
            splits,
            lanes,
            workspace,
            all,
            out_partial,
            lse_partial,
            sums,
            left,
            spare,
        })
    }

    fn bind(&self, call: &mut Call, tensors: &AttentionTensors, workspace: &TensorView) -> Result<()> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let operands = tensors.operands();
        let all = self.all.of(workspace);
        let packed = operands.pack(gpu, call, &all)?;
        // Of a few rows most of a matrix's would not exist.
        let matrices = gpu.matrices().filter(|_| self.blocks.block_q == BLOCK_Q && matrix::suits(tensors));
        let lanes =
            matrices.is_none() && self.lanes && suits_lanes(&[&tensors.q, &tensors.k, &tensors.v, &tensors.out]);
        let (splits, split_nodes) = if lanes { (1, 0) } else { self.splits };
        let params = AttentionParams {
            out: tensors.out.layout(limits),
            lse: tensors.lse.as_ref().map_or([0; 4], |lse| lse.layout(limits)),
            has_lse: u32::from(tensors.lse.is_some()),
            splits: splits as u32,
            split_nodes: split_nodes as i32,
            out_partial: self.out_partial as u32,
            lse_partial: self.lse_partial as u32,
            sums: self.sums as u32,
            left: self.left as u32,
            ..operands.params(config, &self.shape, &self.blocks, limits, packed)
        };
        let of_steps =
            |first_step, steps| params_buffer(gpu, FORWARD.name, &AttentionParams { first_step, steps, ..params });
        let split = splits > 1;
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let out = bound(&tensors.out);
        let lse = tensors.lse.as_ref().map_or_else(|| Some(self.spare.of(workspace)), bound);
        let arguments = [
            bound(&tensors.q),
            bound(&tensors.k),
            bound(&tensors.v),
            Some(all.clone()),
            out.clone(),
            lse.clone(),
            self.blocks.upload(gpu)?,
        ];
        let steps = steps(config, &self.shape, &self.blocks, (splits, self.splits.1), lanes);
        if lanes {
            let constants = lanes_constants(config, self.blocks.constants(), operands.intervals.is_some(), GROUPS);
            return call.push_steps(gpu, (&FORWARD_LANES, constants), of_steps, &arguments, &steps);
        }
        let constants = constants(config.method, config.value_dim, self.blocks.block_q, self.blocks.constants(), split);
        let (kernel, steps) = match matrices {
            // It walks all its tiles at once.
            Some(matrices) => (matrix::kernel(matrices, config.head_dim, constants), steps.whole()),
            None => ((&FORWARD, constants), steps),
        };
        call.push_steps(gpu, kernel, of_steps, &arguments, &steps)?;
        if split {
            let AttentionShape { batch, heads, queries, .. } = self.shape;
            let vectors = batch as u64 * heads as u64 * queries as u64 * config.value_dim.div_ceil(4) as u64;
            let params = params_buffer(gpu, COMBINE.name, &params);
            call.push(gpu, &COMBINE, Vec::new(), &params, &[Some(all), out, lse], vectors.div_ceil(64))?;
        }
        Ok(())
    }
}
