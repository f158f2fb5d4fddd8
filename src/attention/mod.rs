//! Continuous softmax attention.

pub(crate) mod backward;
pub(crate) mod forward;
pub(crate) mod matrix;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) mod measure;
pub(crate) mod merge;
pub(crate) mod operands;

pub use backward::{AttentionBackwardPlan, AttentionGradients};
pub use forward::AttentionPlan;
pub use merge::{Merge, MergeGradients, MergePlan, MergeShape, MergeTensors};

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::piece::Piece;
use crate::tensor::{TensorView, check_cumulative};

/// Which attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Method {
    /// Exact integral over piecewise linear keys and values (the point of this crate).
    #[default]
    Continuous,
    /// Ordinary softmax attention over the tokens, by the same kernels.
    Softmax,
}

/// The node in front of the first token, where the integral starts. Only for [`Method::Continuous`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Sink {
    /// k₀ = 0, v₀ = 0, the choice of the article.
    #[default]
    Zero,
    /// k₀ = k₁, v₀ = v₁; exists only for rows that see token 1.
    First,
    /// k₀, v₀ are the tensors `sink_k`, `sink_v`: trainable, or the last node of an earlier shard.
    Given,
    /// No node 0: the integral starts at token 1.
    None,
}

/// What an attention operator computes; fixed when it is created.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionConfig {
    /// D, the length of a query and of a key: 1 to 256.
    pub head_dim: usize,
    /// D_v, the length of a value and of an output row: 1 to 256.
    pub value_dim: usize,
    /// Continuous (default) or ordinary softmax attention.
    pub method: Method,
    /// What stands before the first token. [`Method::Softmax`] takes [`Sink::None`] only.
    pub sink: Sink,
    /// Whether row r sees only nodes up to r + 1 + (T_k − T_q); default true.
    pub causal: bool,
    /// Keep only the last W ≥ 1 visible segments (tokens for [`Method::Softmax`]).
    pub window: Option<usize>,
    /// Factor on q·k; default 1/√D. Narrowed to f32 on the GPU.
    pub scale: Option<f64>,
    /// Query rows of a tile of the forward pass, 32 or 64; results are the same. By default a table decides: 64 where a GPU has
    /// the workgroup memory and there are rows enough, 8 where no sequence has more queries. 64 needs 23 KiB.
    pub block_q: Option<usize>,
}

impl Default for AttentionConfig {
    fn default() -> Self {
        AttentionConfig {
            head_dim: 64,
            value_dim: 64,
            method: Method::default(),
            sink: Sink::default(),
            causal: true,
            window: None,
            scale: None,
            block_q: None,
        }
    }
}

/// Sizes of one attention call.
///
/// | tensor | shape |
/// |---|---|
/// | q, out | `[batch, heads, queries, head_dim]`, `[batch, heads, queries, value_dim]` |
/// | k, v | `[batch, kv_heads, keys, head_dim]`, `[batch, kv_heads, keys, value_dim]` |
/// | lse | `[batch, heads, queries]` |
/// | intervals | `[batch, keys]` |
/// | sink_k, sink_v | `[batch or 1, kv_heads, head_dim]`, `[batch or 1, kv_heads, value_dim]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct AttentionShape {
    /// B.
    pub batch: usize,
    /// H_q, a multiple of `kv_heads`.
    pub heads: usize,
    /// H_kv; query head h reads key/value head h / (heads / kv_heads).
    pub kv_heads: usize,
    /// T_q.
    pub queries: usize,
    /// T_k.
    pub keys: usize,
}

/// Which of a call's tokens belong together; every sequence has a sink of its own, or all share one.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum Lengths {
    /// Every sequence of the batch has all queries and all keys.
    #[default]
    Full,
    /// A batch of 1 holds N sequences one after another: sequence n has queries `cu_seqlens_q[n]..cu_seqlens_q[n + 1]`
    /// and keys `cu_seqlens_k[n]..cu_seqlens_k[n + 1]`. Either has N + 1 entries, from 0 to all tokens; sequences may
    /// be empty. Sinks are `[N or 1, kv_heads, …]`.
    Packed {
        /// Where the queries of each sequence start, and where the last ones end.
        cu_seqlens_q: Vec<usize>,
        /// Where the keys of each sequence start, and where the last ones end.
        cu_seqlens_k: Vec<usize>,
    },
    /// Keys are a padded cache: of sequence b only the first `kv_lens[b]` exist. That number takes the place of T_k,
    /// alignment included; what lies behind is not looked at, and its gradients are 0.
    Cache {
        /// How many keys each sequence of the batch has.
        kv_lens: Vec<usize>,
    },
}

impl Lengths {
    /// Refuses lengths that don't fit the shape.
    pub fn validate(&self, shape: &AttentionShape) -> Result<()> {
        let AttentionShape { batch, queries, keys, .. } = *shape;
        match self {
            Lengths::Full => {}
            Lengths::Packed { cu_seqlens_q, cu_seqlens_k } => {
                if batch != 1 {
                    return Err(Error::argument("batch", batch, "1 with packed sequences"));
                }
                check_cumulative("cu_seqlens_q", cu_seqlens_q, queries)?;
                check_cumulative("cu_seqlens_k", cu_seqlens_k, keys)?;
                if cu_seqlens_k.len() != cu_seqlens_q.len() {
                    let (got, needed) = (cu_seqlens_k.len(), cu_seqlens_q.len());
                    let got = format!("{got} entries");
                    return Err(Error::argument("cu_seqlens_k", got, format!("{needed}, as cu_seqlens_q")));
                }
            }
            Lengths::Cache { kv_lens } => {
                if kv_lens.len() != batch {
                    let got = format!("{} entries", kv_lens.len());
                    return Err(Error::argument("kv_lens", got, format!("{batch}, one a sequence")));
                }
                if let Some(length) = kv_lens.iter().find(|length| **length > keys) {
                    return Err(Error::argument("kv_lens", length, format!("at most the {keys} keys of the cache")));
                }
            }
        }
        Ok(())
    }

    /// How many sequences there are, each with a sink of its own.
    pub(crate) fn sequences(&self, shape: &AttentionShape) -> usize {
        match self {
            Lengths::Packed { cu_seqlens_q, .. } => cu_seqlens_q.len().saturating_sub(1),
            _ => shape.batch,
        }
    }

    /// The lengths of a piece's sequences.
    fn part(&self, piece: &Piece) -> Lengths {
        match self {
            Lengths::Cache { kv_lens } => {
                // Lengths that do not fit the batch are refused elsewhere.
                Lengths::Cache { kv_lens: kv_lens.get(piece.batch.clone()).unwrap_or(kv_lens).to_vec() }
            }
            lengths => lengths.clone(),
        }
    }

    /// Refuses tensors that state other lengths than the plan, `self`.
    fn check(&self, stated: &Lengths) -> Result<()> {
        if self != stated {
            return Err(Error::argument("lengths", "others than those of the plan", "the same"));
        }
        Ok(())
    }
}

impl AttentionConfig {
    /// The factor on q·k.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.head_dim as f64).sqrt())
    }

    /// Refuses what no shape could make right.
    pub fn validate(&self) -> Result<()> {
        for (name, dim) in [("head_dim", self.head_dim), ("value_dim", self.value_dim)] {
            if !(1..=MAX_DIM).contains(&dim) {
                return Err(Error::argument(name, dim, format!("1 to {MAX_DIM}")));
            }
        }
        if let Some(block_q) = self.block_q
            && ![32, 64].contains(&block_q)
        {
            return Err(Error::argument("block_q", block_q, "32 or 64"));
        }
        if self.window == Some(0) {
            return Err(Error::argument("window", 0, "at least 1, or none"));
        }
        if let Some(scale) = self.scale
            && !(scale as f32).is_finite()
        {
            return Err(Error::argument("scale", scale, "a finite float32"));
        }
        if self.method == Method::Softmax && self.sink != Sink::None {
            let needed = "Sink::None with Method::Softmax: ordinary attention has no sink";
            return Err(Error::argument("sink", format!("{:?}", self.sink), needed));
        }
        Ok(())
    }
}

impl AttentionShape {
    /// Refuses heads that can't be grouped. Any size may be 0, but `kv_heads` only together with `heads`.
    pub fn validate(&self) -> Result<()> {
        let grouped = if self.kv_heads == 0 { self.heads == 0 } else { self.heads.is_multiple_of(self.kv_heads) };
        if !grouped {
            return Err(Error::argument("heads", self.heads, format!("a multiple of kv_heads = {}", self.kv_heads)));
        }
        Ok(())
    }

    /// The sizes that q and k state.
    fn of(q: &TensorView, k: &TensorView) -> Result<Self> {
        match (q.shape(), k.shape()) {
            (&[batch, heads, queries, _], &[_, kv_heads, keys, _]) => {
                Ok(AttentionShape { batch, heads, kv_heads, queries, keys })
            }
            (q, k) => {
                let (name, shape) = if q.len() == 4 { ("k", k) } else { ("q", q) };
                Err(Error::argument(name, format!("shape {shape:?}"), "[batch, heads, tokens, dim]"))
            }
        }
    }

    /// The sizes of a piece, whose heads are key/value heads.
    fn part(&self, piece: &Piece) -> Self {
        let (batch, kv_heads) = (piece.batch.len(), piece.heads.len());
        AttentionShape { batch, heads: kv_heads * self.group(), kv_heads, ..*self }
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(1)
    }
}

/// Largest D, D_v of either operator.
pub const MAX_DIM: usize = 256;

/// The tensors of one attention call, in the shapes of [`AttentionShape`], rows of four-dimensional ones contiguous. q,
/// k, v, sinks and out may each have any storage type, all else is f32. They may be ranges of one buffer; outputs may not overlap anything.
#[derive(Debug, Clone)]
pub struct AttentionTensors {
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
    /// Δ_i ≥ 0 at entry i − 1: the length of the segment that ends in token i; 1 when absent.
    pub intervals: Option<TensorView>,
    /// Written: the attention's result.
    pub out: TensorView,
    /// Written when given: ln of the normaliser, −∞ for rows without a segment. The backward pass needs it.
    pub lse: Option<TensorView>,
    /// Lengths of the sequences, those of the plan.
    pub lengths: Lengths,
    /// [`AttentionPlan::workspace_bytes`] of scratch memory; allocated by the call when absent.
    pub workspace: Option<TensorView>,
}

impl AttentionTensors {
    /// A call without optional tensors.
    pub fn new(q: TensorView, k: TensorView, v: TensorView, out: TensorView) -> Self {
        AttentionTensors {
            q,
            k,
            v,
            sink_k: None,
            sink_v: None,
            intervals: None,
            out,
            lse: None,
            lengths: Lengths::Full,
            workspace: None,
        }
    }

    /// A piece's part of every tensor of a call of the given shape.
    fn part(&self, shape: &AttentionShape, piece: &Piece) -> Result<Self> {
        Ok(AttentionTensors {
            q: piece.of(&self.q, shape.group())?,
            k: piece.of(&self.k, 1)?,
            v: piece.of(&self.v, 1)?,
            sink_k: operands::sink_part(&self.sink_k, shape, piece)?,
            sink_v: operands::sink_part(&self.sink_v, shape, piece)?,
            intervals: piece.of_batch(&self.intervals)?,
            out: piece.of(&self.out, shape.group())?,
            lse: self.lse.as_ref().map(|lse| piece.of(lse, shape.group())).transpose()?,
            lengths: self.lengths.part(piece),
            workspace: None,
        })
    }

    /// The tensors that kernels bind.
    fn views(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        let tensors = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("out", &self.out)];
        let optional =
            [("lse", &self.lse), ("intervals", &self.intervals), ("sink_k", &self.sink_k), ("sink_v", &self.sink_v)];
        tensors.into_iter().chain(optional.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?))))
    }

    fn operands(&self) -> operands::Operands<'_> {
        operands::Operands {
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

/// Continuous softmax attention, or ordinary attention by the same kernels.
///
/// On segment i, between nodes i − 1 and i, keys and values are linear: k(s) = (1 − s) k_{i−1} + s k_i. A query row
/// integrates over the segments it sees:
///
/// out = ∫ exp(scale q·k(s)) v(s) ds / ∫ exp(scale q·k(s)) ds,  lse = ln ∫ exp(scale q·k(s)) ds.
///
/// The integral is exact: with a_i = scale q·k_i and φ₂(x) = (eˣ − 1 − x)/x², node i weighs
/// Δ_i e^{a_i} φ₂(a_{i−1} − a_i) + Δ_{i+1} e^{a_i} φ₂(a_{i+1} − a_i).
/// Source: *连续化 Softmax Attention* (spaces.ac.cn, archive 11980), after *Continuum Attention* (arXiv 2406.06486).
///
/// Cheap to clone. [`Attention::plan`] → [`AttentionPlan::bind`] → [`Call::record`](crate::Call::record), or [`Attention::forward`].
#[derive(Debug, Clone)]
pub struct Attention {
    gpu: Gpu,
    config: AttentionConfig,
}

impl Attention {
    /// Validates the configuration and compiles its kernels.
    ///
    /// # Errors
    /// [`Error::Argument`] for a configuration that can't be, [`Error::Limit`] for a `block_q` that does not fit the device's
    /// workgroup memory, [`Error::Gpu`] when a kernel doesn't compile.
    pub fn new(gpu: &Gpu, config: AttentionConfig) -> Result<Self> {
        config.validate()?;
        forward::check_block(gpu, config.block_q.unwrap_or(operands::BLOCK_Q))?;
        let dim = |name: &str| if matches!(name, "q" | "k") { config.head_dim } else { config.value_dim };
        let block_q = forward::table_rows(gpu, &config);
        let vectors = config.head_dim.is_multiple_of(4) && config.value_dim.is_multiple_of(4);
        let (kernel, constants) = if gpu.lanes() && vectors && block_q == operands::BLOCK_Q {
            (&forward::FORWARD_LANES, forward::lanes_constants(&config, ("RAGGED", 0), false, forward::GROUPS))
        } else {
            let constants = forward::constants(config.method, config.value_dim, block_q, ("RAGGED", 0), false);
            (&forward::FORWARD, constants)
        };
        gpu.precompile(kernel, constants, dim)?;
        Ok(Attention { gpu: gpu.clone(), config })
    }

    /// The configuration.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The device it runs on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Validates sizes and lays out the workspace of a forward call.
    ///
    /// # Errors
    /// [`Error::Argument`] for heads that can't be grouped, [`Error::Limit`] for sizes over the device's limits.
    pub fn plan(&self, shape: &AttentionShape) -> Result<AttentionPlan> {
        self.plan_ragged(shape, &Lengths::Full)
    }

    /// As [`Attention::plan`], for sequences of different lengths.
    ///
    /// # Errors
    /// Also [`Error::Argument`] for lengths that don't fit the shape.
    pub fn plan_ragged(&self, shape: &AttentionShape, lengths: &Lengths) -> Result<AttentionPlan> {
        AttentionPlan::new(self, shape, lengths)
    }

    /// Plans, binds and records a forward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Attention::plan`] and [`AttentionPlan::bind`]; nothing is recorded then.
    pub fn forward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &AttentionTensors) -> Result<()> {
        self.plan_ragged(&tensors.shape()?, &tensors.lengths)?.bind(tensors)?.encode(encoder);
        Ok(())
    }

    /// Validates sizes and lays out the workspace of a backward call; its kernels are compiled when a first one is bound.
    ///
    /// # Errors
    /// As [`Attention::plan`].
    pub fn plan_backward(&self, shape: &AttentionShape) -> Result<AttentionBackwardPlan> {
        self.plan_backward_ragged(shape, &Lengths::Full)
    }

    /// As [`Attention::plan_backward`], for sequences of different lengths.
    ///
    /// # Errors
    /// As [`Attention::plan_ragged`].
    pub fn plan_backward_ragged(&self, shape: &AttentionShape, lengths: &Lengths) -> Result<AttentionBackwardPlan> {
        AttentionBackwardPlan::new(self, shape, lengths)
    }

    /// Plans, binds and records a backward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Attention::plan_backward`] and [`AttentionBackwardPlan::bind`]; nothing is recorded then.
    pub fn backward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &AttentionGradients) -> Result<()> {
        self.plan_backward_ragged(&tensors.shape()?, &tensors.lengths)?.bind(tensors)?.encode(encoder);
        Ok(())
    }
}
