//! What the calls of EFLA share: sizes, scratch memory, the state's two ends, parameters.

use super::forward::LANES_CHUNK;
use super::{EflaConfig, EflaShape, Integrator};
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Part, WorkspaceLayout};
use crate::piece::Piece;
use crate::shader::params;
use crate::tensor::{TensorView, check_cumulative, check_longest};

params! {
    /// Parameters of every EFLA kernel; the vectors are [`TensorView::layout`]s.
    EflaParams {
        q: [u32; 4],
        k: [u32; 4],
        v: [u32; 4],
        beta: [u32; 4],
        /// Where a scan starts; the backward scan starts from d_final_state.
        initial_state: [u32; 4],
        /// Where a scan ends; the backward scan ends in d_initial_state.
        final_state: [u32; 4],
        out: [u32; 4],
        d_out: [u32; 4],
        d_q: [u32; 4],
        d_k: [u32; 4],
        d_v: [u32; 4],
        d_beta: [u32; 4],
        log_decay: [u32; 4],
        batch: u32,
        heads: u32,
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
        /// Whether efla_gates writes what only the backward pass needs.
        with_rates: u32,
        /// Blocks of value columns of efla_state.
        state_blocks: u32,
        /// Value heads of all sequences, also of packed ones, for which batch is 1 and chunks are those of all.
        value_sequences: u32,
        /// Where the chunks of packed sequences stand in their table.
        chunk_table: u32,
        /// Where X stands behind Y.
        found: u32,
        /// Groups of chunks that a scan in two levels has, chunks of a group, where they stand behind the states.
        groups: u32,
        group_chunks: u32,
        group_states: u32,
        /// Of this dispatch, where a long one was split.
        first_workgroup: u32,
        /// Chunks or tokens of a scan, those of its group, that this dispatch does.
        first_step: u32,
        steps: u32,
        /// Where, behind the states, those of workgroups with steps to come stand, in elements.
        left: u32,
        unused0: u32,
        unused1: u32,
    }
}

impl EflaParams {
    /// Everything but the tensors' layouts.
    pub fn new(config: &EflaConfig, shape: &EflaShape, sizes: &Sizes, packing: &Packing) -> Self {
        EflaParams {
            batch: shape.batch as u32,
            heads: shape.heads as u32,
            // Without value heads d_q and d_k are still to be written: as if every head had one.
            value_heads: if sizes.scans == 0 { shape.heads.max(1) } else { shape.value_heads } as u32,
            group: shape.group().max(1) as u32,
            value_sequences: sizes.scans as u32,
            chunk_table: packing.chunk_table as u32,
            tokens: shape.tokens as u32,
            chunks: sizes.chunks as u32,
            key_dim: config.key_dim as u32,
            value_dim: config.value_dim as u32,
            integrator: match config.integrator {
                Integrator::Exact => 0,
                Integrator::Euler => 1,
                Integrator::RungeKutta2 => 2,
                Integrator::RungeKutta4 => 3,
            },
            normalize_q: config.normalize_q.into(),
            normalize_k: config.normalize_k.into(),
            scale: config.scale() as f32,
            ..Default::default()
        }
    }

    /// The same with the ends of a scan.
    pub fn with_state(self, state: &StateArguments, limits: &wgpu::Limits) -> Self {
        let layout = |view: Option<&TensorView>| view.map_or([0; 4], |view| view.layout(limits));
        EflaParams {
            initial_state: layout(state.before.1),
            final_state: layout(state.after.1),
            state_source: if state.in_place() { 2 } else { state.before.1.is_some().into() },
            has_final_state: state.after.1.is_some().into(),
            ..self
        }
    }
}

/// Sizes of a call, in u64: products of them are checked before they are narrowed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    /// Value heads of all batches.
    pub sequences: u64,
    /// Value heads of all sequences: more, if the one batch holds several packed ones.
    pub scans: u64,
    pub tokens: u64,
    /// Of the longest sequence.
    pub longest: u64,
    /// Per value head; 0 for a recurrent call.
    pub chunks: u64,
    /// Tokens of a value head, padded to whole chunks.
    pub rows: u64,
    pub key_dim: u64,
    pub value_dim: u64,
}

/// Refuses sizes that 32-bit integers on the device could not count with room to spare.
pub(super) fn check_sizes(shape: &EflaShape) -> Result<()> {
    shape.validate()?;
    let EflaShape { batch, heads, value_heads, tokens } = *shape;
    check_longest(&[("batch", batch), ("heads", heads), ("value_heads", value_heads), ("tokens", tokens)])
}

/// Which tokens of a call belong together.
#[derive(Debug, Clone)]
pub(super) struct Packing {
    pub sequences: usize,
    /// Tokens of the longest.
    pub longest: usize,
    /// Chunks of a value head.
    pub chunks: usize,
    /// Of packed sequences: first token, tokens and first chunk of each, then the sequence of every chunk.
    table: Option<Vec<u32>>,
    chunk_table: usize,
}

impl Packing {
    /// Refuses cumulative lengths that don't fit the shape. Without chunks a call is recurrent.
    pub fn new(shape: &EflaShape, cu_seqlens: Option<&[usize]>, chunk: Option<usize>) -> Result<Self> {
        let chunks = |tokens: usize| chunk.map_or(0, |chunk| tokens.div_ceil(chunk));
        let Some(cumulative) = cu_seqlens else {
            let (sequences, chunks) = (shape.batch, chunks(shape.tokens));
            return Ok(Packing { sequences, longest: shape.tokens, chunks, table: None, chunk_table: 0 });
        };
        if shape.batch != 1 {
            return Err(Error::argument("batch", shape.batch, "1 with packed sequences"));
        }
        let sequences = check_cumulative("cu_seqlens", cumulative, shape.tokens)?;
        let (mut table, mut owners, mut longest) = (Vec::new(), Vec::new(), 0);
        for (sequence, ends) in cumulative.windows(2).enumerate() {
            let tokens = ends[1] - ends[0];
            longest = longest.max(tokens);
            table.extend([ends[0], tokens, owners.len()].map(|word| word as u32));
            owners.extend(std::iter::repeat_n(sequence as u32, chunks(tokens)));
        }
        let (chunks, chunk_table) = (owners.len(), table.len());
        table.extend(owners);
        // Never an empty buffer.
        table.push(0);
        Ok(Packing { sequences, longest, chunks, table: Some(table), chunk_table })
    }

    pub fn is_ragged(&self) -> bool {
        self.table.is_some()
    }

    /// The table on the device, if there is one.
    pub fn upload(&self, gpu: &Gpu) -> Result<Option<BoundRange>> {
        self.table.as_ref().map(|table| gpu.table(table)).transpose()
    }
}

/// Refuses tensors that state other cumulative lengths than the plan.
pub(super) fn check_packing(planned: &Option<Vec<usize>>, stated: &Option<Vec<usize>>) -> Result<()> {
    if planned != stated {
        return Err(Error::argument("cu_seqlens", "others than those of the plan", "the same"));
    }
    Ok(())
}

/// A piece's part of a state; of packed sequences every piece has all.
pub(super) fn state_part(state: &Option<TensorView>, shape: &EflaShape, piece: &Piece) -> Result<Option<TensorView>> {
    let Some(state) = state else { return Ok(None) };
    let (start, count) = (piece.heads.start * shape.group(), piece.heads.len() * shape.group());
    let heads = state.narrow(1, start, count)?;
    match state.shape()[0] == shape.batch {
        true => heads.narrow(0, piece.batch.start, piece.batch.len()).map(Some),
        false => Ok(Some(heads)),
    }
}

impl Sizes {
    pub fn new(config: &EflaConfig, shape: &EflaShape, packing: &Packing, chunk: usize) -> Self {
        let of_values = |sequences: usize| (sequences as u64).saturating_mul(shape.value_heads as u64);
        Sizes {
            sequences: of_values(shape.batch),
            scans: of_values(packing.sequences),
            tokens: shape.tokens as u64,
            longest: packing.longest as u64,
            chunks: packing.chunks as u64,
            rows: (packing.chunks as u64).saturating_mul(chunk as u64),
            key_dim: config.key_dim as u64,
            value_dim: config.value_dim as u64,
        }
    }

    /// Elements of `parts` for every sequence.
    pub fn elements(&self, parts: &[u64]) -> u64 {
        parts.iter().fold(self.sequences, |product, &part| product.saturating_mul(part))
    }
}

/// What the first two passes of the chunked form leave in the workspace.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scratch {
    /// What efla_gates writes per token, and what the backward pass adds to it.
    pub gates: Part,
    /// W, `[B, H_v, chunks·C, D_k]`.
    pub w: Part,
    /// U, then V_new, `[B, H_v, chunks·C, D_v]`.
    pub u: Part,
    /// The state before every chunk, `[B, H_v, chunks, D_k, D_v]`.
    pub states: Part,
    /// Where the groups start among the states, in elements.
    pub group_states: u64,
    /// Where, there too, the states of workgroups with steps to come stand, in elements; whether any do.
    pub left: u64,
    pub has_left: bool,
}

impl Scratch {
    /// With `lanes` the running state of every scan and the matrix of every chunk stand behind the states, then what the
    /// groups of a scan in two levels need, if there are several, then the `left` elements of workgroups that stop.
    pub fn reserve(
        layout: &mut WorkspaceLayout,
        sizes: &Sizes,
        gate_elements: u64,
        groups: u64,
        lanes: bool,
        left: u64,
    ) -> Result<Self> {
        let Sizes { chunks, rows, key_dim, value_dim, scans, .. } = *sizes;
        let mut states = sizes.elements(&[chunks, key_dim, value_dim]);
        if lanes {
            let running = scans.saturating_mul(key_dim * value_dim);
            states = states.saturating_add(running).saturating_add(sizes.elements(&[rows, LANES_CHUNK as u64]));
        }
        let group_states = states;
        if groups > 1 {
            let of_group = key_dim * (value_dim + key_dim);
            states = states.saturating_add(scans.saturating_mul(groups).saturating_mul(of_group));
        }
        let left_at = states;
        Ok(Scratch {
            group_states,
            left: left_at,
            has_left: left > 0,
            gates: layout.reserve("workspace of the gates", gate_elements)?,
            w: layout.reserve("workspace of W", sizes.elements(&[rows, key_dim]))?,
            u: layout.reserve("workspace of U", sizes.elements(&[rows, value_dim]))?,
            states: layout.reserve("workspace of the states", states.saturating_add(left))?,
        })
    }
}

/// The two ends of a scan, by argument name: where it starts and what it writes at its end. Both may be absent, and
/// both may be the same range.
#[derive(Debug, Clone, Copy)]
pub(super) struct StateArguments<'a> {
    pub before: (&'static str, Option<&'a TensorView>),
    pub after: (&'static str, Option<&'a TensorView>),
}

impl<'a> StateArguments<'a> {
    pub fn check(&self, shape: &[usize]) -> Result<()> {
        if let (name, Some(view)) = self.before {
            view.check(name, shape)?;
        }
        if let (name, Some(view)) = self.after {
            view.check_output(name, shape)?;
        }
        Ok(())
    }

    /// Whether the state is updated where it is.
    pub fn in_place(&self) -> bool {
        matches!((self.before.1, self.after.1), (Some(before), Some(after)) if before.is_same(after))
    }

    /// The start, if it is a range of its own.
    pub fn input(&self) -> Option<(&'static str, &'a TensorView)> {
        self.before.1.filter(|_| !self.in_place()).map(|view| (self.before.0, view))
    }

    /// The end.
    pub fn output(&self) -> Option<(&'static str, &'a TensorView)> {
        self.after.1.map(|view| (self.after.0, view))
    }
}
