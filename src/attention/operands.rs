//! What the forward and the backward pass read alike: checks, parameters, packing of the small inputs.

use super::{AttentionConfig, AttentionShape, Lengths, Method, Sink};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, Load, Steps, params_buffer};
use crate::piece::Piece;
use crate::shader::{Kernel, input, params, wgsl, workspace};
use crate::tensor::{TensorView, check_longest};

params! {
    /// Parameters of every attention kernel; the vectors are [`TensorView::layout`]s.
    AttentionParams {
        q: [u32; 4],
        k: [u32; 4],
        v: [u32; 4],
        out: [u32; 4],
        lse: [u32; 4],
        d_out: [u32; 4],
        d_lse: [u32; 4],
        d_q: [u32; 4],
        d_k: [u32; 4],
        d_v: [u32; 4],
        batch: u32,
        /// Blocks of query rows of a head: of one sequence, or of all if they are ragged. Times heads (and batch).
        row_blocks: u32,
        row_tasks: u32,
        /// Blocks of nodes of a key/value head alike.
        node_blocks: u32,
        node_tasks: u32,
        /// Where the blocks of ragged sequences stand in their table.
        row_table: u32,
        node_table: u32,
        /// Parts of a row's nodes that workgroups of their own have, and how many nodes that is.
        splits: u32,
        split_nodes: i32,
        /// Where their results start in the workspace.
        out_partial: u32,
        lse_partial: u32,
        heads: u32,
        kv_heads: u32,
        /// Query heads per key/value head.
        group: u32,
        queries: u32,
        keys: u32,
        head_dim: u32,
        value_dim: u32,
        causal: u32,
        /// Segments (tokens, less one) that a row keeps.
        window: i32,
        /// 0 with a sink, 1 without.
        first_node: i32,
        /// 0 zero, 1 first, 2 given, 3 none.
        sink: u32,
        /// Elements of a sequence's sinks, 0 if all share one.
        sink_k_stride: u32,
        sink_v_stride: u32,
        has_intervals: u32,
        has_lse: u32,
        /// Whether D comes from out: it was stored as f32.
        has_out: u32,
        has_d_lse: u32,
        has_d_intervals: u32,
        scale: f32,
        /// Where parts of the workspace start: packed inputs, (lse, D) of every row, partial gradients.
        packed_sink_k: u32,
        packed_sink_v: u32,
        packed_intervals: u32,
        rows: u32,
        d_sink_k_partial: u32,
        d_sink_v_partial: u32,
        d_intervals_partial: u32,
        /// Of kernels that sum rows in the workspace.
        sums: u32,
        /// Of this dispatch, where a long one was split.
        first_workgroup: u32,
        /// Tiles of a workgroup that this dispatch does, and where stands what it leaves if there are more to come.
        first_step: u32,
        steps: u32,
        left: u32,
        unused0: u32,
        unused1: u32,
    }
}

params! {
    /// Parameters of `pack`.
    PackParams {
        source: [u32; 4],
        /// Sizes n0, n1, n2 of the source; the fourth is unused.
        shape: [u32; 4],
        destination: u32,
        unused0: u32,
        unused1: u32,
        unused2: u32,
    }
}

pub(crate) static PACK: Kernel = Kernel {
    name: "pack",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("pack.wgsl")],
    params: &PackParams::LAYOUT,
    bindings: &[input("source").stored(), workspace("workspace")],
};

/// Operations that the weight of a pair takes besides its products, about.
const WEIGHT: u64 = 32;

/// The steps of a kernel that walks tiles of rows and nodes.
pub(super) struct Tiles {
    pub workgroups: u64,
    pub count: u64,
    /// Pairs of a row and a node that a tile has.
    pub pairs: u64,
    /// Components that a pair multiplies.
    pub products: usize,
    /// Rounds of loops that a tile costs an invocation at most, as if none were unrolled.
    pub rounds: usize,
    /// Elements that a workgroup leaves.
    pub left: usize,
}

impl Tiles {
    pub fn steps(&self) -> Steps {
        let operations = self.pairs * (2 * self.products as u64 + WEIGHT);
        let load = Load { workgroups: self.workgroups, operations, rounds: self.rounds as u64 };
        Steps { load, count: self.count, left: self.left as u64 }
    }
}

/// Query rows and nodes of a tile: 16 logits an invocation, 14 KiB of workgroup memory.
pub(super) const BLOCK_Q: usize = 32;
/// Query rows of a tile where no sequence has more: decoding, where rows that do not exist would cost as much.
pub(super) const FEW_ROWS: usize = 8;
pub(super) const BLOCK_K: usize = 32;

/// Which blocks of rows and nodes there are: workgroups, but for the heads.
#[derive(Debug, Clone)]
pub(super) struct Blocks {
    /// Of a head: of every sequence alike, or of all sequences if they are ragged.
    pub rows: usize,
    pub nodes: usize,
    /// Sequences that come on top of the heads; 1 if they are ragged.
    batch: usize,
    /// How many sequences there are, each with a sink of its own.
    pub sequences: usize,
    /// Most keys of a sequence.
    pub longest: usize,
    /// Most queries of a sequence.
    most_queries: usize,
    /// Rows of a block.
    pub block_q: usize,
    /// Of ragged sequences: 6 words a sequence, then (sequence, block) of every block of rows, then of nodes.
    table: Option<Vec<u32>>,
    row_table: usize,
    node_table: usize,
}

impl Blocks {
    /// Refuses lengths that don't fit the shape.
    pub fn new(config: &AttentionConfig, shape: &AttentionShape, lengths: &Lengths, block_q: usize) -> Result<Self> {
        let own_nodes = if config.method == Method::Continuous { BLOCK_K - 2 } else { BLOCK_K };
        let (row_blocks, node_blocks) = (|rows: usize| rows.div_ceil(block_q), |room: usize| room / own_nodes + 1);
        let AttentionShape { batch, queries, keys, .. } = *shape;
        lengths.validate(shape)?;
        let mut words: Vec<[usize; 6]> = Vec::new();
        match lengths {
            Lengths::Full => {
                return Ok(Blocks {
                    rows: row_blocks(queries),
                    nodes: node_blocks(keys),
                    batch,
                    sequences: batch,
                    longest: keys,
                    most_queries: queries,
                    block_q,
                    table: None,
                    row_table: 0,
                    node_table: 0,
                });
            }
            Lengths::Packed { cu_seqlens_q, cu_seqlens_k } => {
                for n in 0..lengths.sequences(shape) {
                    let (queries, keys) =
                        (cu_seqlens_q[n + 1] - cu_seqlens_q[n], cu_seqlens_k[n + 1] - cu_seqlens_k[n]);
                    words.push([0, cu_seqlens_q[n], queries, cu_seqlens_k[n], keys, keys]);
                }
            }
            Lengths::Cache { kv_lens } => {
                words.extend(kv_lens.iter().enumerate().map(|(b, &length)| [b, 0, queries, 0, length, keys]));
            }
        }
        let blocks = |words: &[usize; 6]| row_blocks(words[2]) as u64 + node_blocks(words[5]) as u64;
        let (got, limit) = (words.iter().map(|words| 6 + 2 * blocks(words)).sum(), 1 << 25);
        if got > limit {
            let argument = "table of the blocks of all sequences, in words".to_string();
            return Err(Error::Limit { argument, got, limit_name: "2²⁵", limit });
        }
        let mut row_entries = Vec::new();
        let mut node_entries = Vec::new();
        for (sequence, &[_, _, queries, _, keys, room]) in words.iter().enumerate() {
            for block in 0..row_blocks(queries) {
                // What the last row of the block sees, but for a window.
                let seen = if config.causal { ((block + 1) * block_q + keys).saturating_sub(queries) } else { keys };
                row_entries.push((seen.min(keys), [sequence, block]));
            }
            node_entries.extend((0..node_blocks(room)).map(|block| [sequence, block]));
        }
        // The longest first.
        row_entries.sort_by_key(|&(seen, _)| std::cmp::Reverse(seen));
        let rows = row_entries.iter().flat_map(|(_, entry)| entry);
        let table = words.iter().flatten().chain(rows).chain(node_entries.iter().flatten());
        // Never an empty buffer.
        let table = table.chain(&[0]).map(|&word| word as u32).collect();
        Ok(Blocks {
            rows: row_entries.len(),
            nodes: node_entries.len(),
            batch: 1,
            sequences: words.len(),
            longest: words.iter().map(|words| words[4]).max().unwrap_or(0),
            most_queries: words.iter().map(|words| words[2]).max().unwrap_or(0),
            block_q,
            table: Some(table),
            row_table: 6 * words.len(),
            node_table: 6 * words.len() + 2 * row_entries.len(),
        })
    }

    /// Workgroups that have rows.
    pub fn row_tasks(&self, shape: &AttentionShape) -> u64 {
        (self.rows as u64).saturating_mul(shape.heads as u64).saturating_mul(self.batch as u64)
    }

    /// Workgroups that have nodes.
    pub fn node_tasks(&self, shape: &AttentionShape) -> u64 {
        (self.nodes as u64).saturating_mul(shape.kv_heads as u64).saturating_mul(self.batch as u64)
    }

    /// Tiles of `tile` nodes that a workgroup with a block of rows walks, which sees at most so many.
    pub fn node_tiles(&self, config: &AttentionConfig, most: u64, tile: u64) -> u64 {
        // Rows of a block see different stretches.
        let seen = config.window.map_or(most, |window| (window as u64).saturating_add(self.block_q as u64));
        // The last segment ends behind the last node's tile.
        (seen.min(most) + 1).div_ceil(tile)
    }

    /// Tiles of rows, of each of its heads, that a workgroup with a block of nodes walks.
    pub fn row_tiles(&self, config: &AttentionConfig, shape: &AttentionShape) -> u64 {
        let rows = self.most_queries as u64;
        let seeing = match config.window {
            Some(window) if config.causal => (window as u64).saturating_add(2 * BLOCK_K as u64),
            _ => rows,
        };
        seeing.min(rows).div_ceil(BLOCK_Q as u64).saturating_mul(shape.group() as u64)
    }

    /// What is compiled into every kernel that knows sequences.
    pub fn constants(&self) -> (&'static str, u32) {
        ("RAGGED", self.table.is_some().into())
    }

    /// The table on the device, if there is one.
    pub fn upload(&self, gpu: &Gpu) -> Result<Option<BoundRange>> {
        self.table.as_ref().map(|table| gpu.table(table)).transpose()
    }
}

/// A piece's part of a sink; of packed sequences every piece has all.
pub(super) fn sink_part(
    sink: &Option<TensorView>,
    shape: &AttentionShape,
    piece: &Piece,
) -> Result<Option<TensorView>> {
    let Some(sink) = sink else { return Ok(None) };
    let heads = sink.narrow(1, piece.heads.start, piece.heads.len())?;
    match is_shared(sink) || sink.shape()[0] != shape.batch {
        true => Ok(Some(heads)),
        false => heads.narrow(0, piece.batch.start, piece.batch.len()).map(Some),
    }
}

/// The tensors that either pass reads.
pub(super) struct Operands<'a> {
    pub q: &'a TensorView,
    pub k: &'a TensorView,
    pub v: &'a TensorView,
    pub sink_k: Option<&'a TensorView>,
    pub sink_v: Option<&'a TensorView>,
    pub intervals: Option<&'a TensorView>,
}

/// Where the packed inputs start in the workspace.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Packed {
    sink_k: u32,
    sink_v: u32,
    intervals: u32,
}

/// Refuses sizes that node and row numbers on the device, 32-bit integers, could not count with room to spare.
pub(super) fn check_sizes(shape: &AttentionShape) -> Result<()> {
    shape.validate()?;
    let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
    check_longest(&[("batch", batch), ("heads", heads), ("kv_heads", kv_heads), ("queries", queries), ("keys", keys)])
}

/// Elements that packed sinks and intervals of the largest kind take.
pub(super) fn packed_elements(config: &AttentionConfig, shape: &AttentionShape, sequences: usize) -> u64 {
    let sinks = if config.sink == Sink::Given { sequences.max(1) as u64 * shape.kv_heads as u64 } else { 0 };
    let intervals = if config.method == Method::Continuous { shape.batch as u64 * shape.keys as u64 } else { 0 };
    sinks.saturating_mul((config.head_dim + config.value_dim) as u64).saturating_add(intervals)
}

impl<'a> Operands<'a> {
    /// Checks every operand; returns them by name.
    pub fn check(
        &self,
        config: &AttentionConfig,
        shape: &AttentionShape,
        sequences: usize,
    ) -> Result<Vec<(&'static str, &'a TensorView)>> {
        let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
        self.q.check_stored("q", &[batch, heads, queries, config.head_dim])?;
        self.k.check_stored("k", &[batch, kv_heads, keys, config.head_dim])?;
        self.v.check_stored("v", &[batch, kv_heads, keys, config.value_dim])?;
        let mut inputs = vec![("q", self.q), ("k", self.k), ("v", self.v)];
        for (name, sink, dim) in [("sink_k", self.sink_k, config.head_dim), ("sink_v", self.sink_v, config.value_dim)] {
            match (sink, config.sink == Sink::Given) {
                (Some(sink), true) => {
                    let sinks = if is_shared(sink) { 1 } else { sequences };
                    sink.check_stored(name, &[sinks, kv_heads, dim])?;
                    inputs.push((name, sink));
                }
                (None, true) => return Err(Error::argument(name, "none", "a tensor, since the sink is Sink::Given")),
                (Some(_), false) => {
                    let needed = format!("none, since the sink is Sink::{:?}", config.sink);
                    return Err(Error::argument(name, "a tensor", needed));
                }
                (None, false) => {}
            }
        }
        if let Some(intervals) = self.intervals {
            if config.method == Method::Softmax {
                return Err(Error::argument("intervals", "a tensor", "none with Method::Softmax"));
            }
            intervals.check("intervals", &[batch, keys])?;
            inputs.push(("intervals", intervals));
        }
        Ok(inputs)
    }

    /// Records the copies of sinks and intervals into the start of the workspace.
    pub fn pack(&self, gpu: &Gpu, call: &mut Call, workspace: &BoundRange) -> Result<Packed> {
        let mut end = 0;
        let mut pack = |view: Option<&TensorView>| -> Result<u32> {
            let destination = end;
            if let Some(view) = view.filter(|view| !view.is_empty()) {
                let (source, shape) = three_dimensions(view, gpu.limits());
                let elements = shape[0] * shape[1] * shape[2];
                let params = PackParams { source, shape, destination, ..Default::default() };
                let params = params_buffer(gpu, PACK.name, &params);
                let arguments = [Some(BoundRange::of(view, gpu.limits())), Some(workspace.clone())];
                call.push(gpu, &PACK, Vec::new(), &params, &arguments, u64::from(elements).div_ceil(64))?;
                end += elements;
            }
            Ok(destination)
        };
        Ok(Packed { sink_k: pack(self.sink_k)?, sink_v: pack(self.sink_v)?, intervals: pack(self.intervals)? })
    }

    /// The parameters that both passes have; outputs and partial results are left at 0.
    pub fn params(
        &self,
        config: &AttentionConfig,
        shape: &AttentionShape,
        blocks: &Blocks,
        limits: &wgpu::Limits,
        packed: Packed,
    ) -> AttentionParams {
        let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
        // An ordinary row's window counts tokens, of which a lone node is one; segments lie between nodes.
        let lone = usize::from(config.method == Method::Softmax);
        let sink_stride = |sink: Option<&TensorView>| match sink {
            Some(view) if !is_shared(view) => (view.shape()[1] * view.shape()[2]) as u32,
            _ => 0,
        };
        AttentionParams {
            q: self.q.layout(limits),
            k: self.k.layout(limits),
            v: self.v.layout(limits),
            batch: batch as u32,
            row_blocks: blocks.rows as u32,
            row_tasks: blocks.row_tasks(shape) as u32,
            node_blocks: blocks.nodes as u32,
            node_tasks: blocks.node_tasks(shape) as u32,
            row_table: blocks.row_table as u32,
            node_table: blocks.node_table as u32,
            splits: 1,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            group: shape.group() as u32,
            queries: queries as u32,
            keys: keys as u32,
            head_dim: config.head_dim as u32,
            value_dim: config.value_dim as u32,
            causal: u32::from(config.causal),
            window: config.window.map_or(keys + 1, |window| (window - lone).min(keys + 1)) as i32,
            first_node: i32::from(config.sink == Sink::None),
            sink: match config.sink {
                Sink::Zero => 0,
                Sink::First => 1,
                Sink::Given => 2,
                Sink::None => 3,
            },
            sink_k_stride: sink_stride(self.sink_k),
            sink_v_stride: sink_stride(self.sink_v),
            has_intervals: u32::from(self.intervals.is_some() && keys > 0),
            scale: config.scale() as f32,
            packed_sink_k: packed.sink_k,
            packed_sink_v: packed.sink_v,
            packed_intervals: packed.intervals,
            ..Default::default()
        }
    }
}

/// Whether all batches share one sink.
pub(super) fn is_shared(sink: &TensorView) -> bool {
    sink.shape().first() == Some(&1)
}

/// Layout and sizes of a view of 2 or 3 dimensions as one of 3.
pub(super) fn three_dimensions(view: &TensorView, limits: &wgpu::Limits) -> ([u32; 4], [u32; 4]) {
    let layout = view.layout(limits);
    match *view.shape() {
        [n1, n2] => ([layout[0], 0, layout[1], layout[2]], [1, n1 as u32, n2 as u32, 0]),
        [n0, n1, n2] => (layout, [n0 as u32, n1 as u32, n2 as u32, 0]),
        _ => unreachable!("sinks and intervals were checked to have 3 and 2 dimensions"),
    }
}
