//! EFLA, error-free linear attention.
//!
//! # With decay
//!
//! Over one unit of time a token of a gated operator moves the state by
//!
//! ```text
//! dS/dτ = −(β k kᵀ + κ) S + β k vᵀ,    κ = −log_decay ≥ 0
//! ```
//!
//! κ is a number and commutes with k kᵀ, so the solution keeps the erase factor, multiplies the whole state by
//! g = e^{−κ}, and integrates the input, which only ever meets the eigenvalue x + κ of k:
//!
//! ```text
//! S_t = g (I − γ k̂k̂ᵀ) S_{t−1} + c' k̂ vᵀ     γ = xφ̄(x)     c' = α'|k|     α' = β φ̄(x + κ)     φ̄(x) = (1 − e^{−x})/x
//! ```
//!
//! Other integrators put x + κ into the polynomial that stands for φ̄ (so it is x + κ that has to stay in their range);
//! g is exact. In a chunk of C tokens let D_{tj} = g_{j+1} ⋯ g_t be what is left at token t of what token j wrote, and
//! G_t = g_1 ⋯ g_t what is left of the state S before the chunk. With ∘ the product by elements:
//!
//! ```text
//! A = strict_lower(D ∘ diag(γ) K̂K̂ᵀ)     T = (I + A)⁻¹     W = T diag(γG) K̂     U = T diag(c') V     V_new = U − W S
//! O = scale (diag(G) Q S + lower_incl(D ∘ QK̂ᵀ) V_new)     S ← G_C S + (diag(D_C) K̂)ᵀ V_new
//! ```
//!
//! No entry of D, G, A or T exceeds 1, whatever the decays: D_{tj} is e to the minus of a sum of the κ between j and t,
//! never a quotient of cumulative decays (0/0 behind a strong one) nor a difference of cumulative sums (which would lose
//! a weak decay behind a strong one).

pub(crate) mod backward;
mod call;
pub(crate) mod forward;
pub(crate) mod matrix;
#[cfg(not(target_arch = "wasm32"))]
pub(crate) mod measure;
mod scan;

pub use backward::EflaBackwardPlan;
pub use forward::EflaPlan;

use call::{StateArguments, state_part};

use crate::attention::MAX_DIM;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::piece::Piece;
use crate::tensor::TensorView;

/// How one token's update dS/dτ = −β k kᵀ S + β k vᵀ is integrated over one unit of time; with x = β|k|².
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Integrator {
    /// α = β (1 − e^{−x})/x, the exact solution (EFLA). Contracts for every β ≥ 0.
    #[default]
    Exact,
    /// α = β: the delta rule (DeltaNet). Contracts for 0 ≤ x ≤ 2.
    Euler,
    /// α = β (1 − x/2). Contracts for 0 ≤ x ≤ 2.
    RungeKutta2,
    /// α = β (1 − x/2 + x²/6 − x³/24). Contracts for 0 ≤ x ≤ 2.785.
    RungeKutta4,
}

/// How a sequence is walked. Both give the same result up to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Form {
    /// Chunks in parallel: prefill, training.
    #[default]
    Chunked,
    /// Token by token from a resident state: decoding, for which [`Efla::step`] takes it by itself.
    Recurrent,
}

/// What an EFLA operator computes; fixed when it is created.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EflaConfig {
    /// D_k, the length of a query and of a key: 1 to 256.
    pub key_dim: usize,
    /// D_v, the length of a value and of an output row: 1 to 256.
    pub value_dim: usize,
    /// Exact by default.
    pub integrator: Integrator,
    /// Replace q by q/|q| first (0 stays 0).
    pub normalize_q: bool,
    /// Replace k by k/|k| first (0 stays 0).
    pub normalize_k: bool,
    /// Factor on Sᵀq; default 1/√D_k. Narrowed to f32 on the GPU.
    pub scale: Option<f64>,
    /// Tokens per chunk: 16, 32 or 64; by default the longest that fits the device's workgroup memory and is not longer
    /// than `key_dim` rounded up. Rounding errors are relative to the largest state within a chunk: where enormous keys
    /// wipe out an initial state at once and write next to nothing, shorter chunks and the recurrent form stay closer.
    pub chunk: Option<usize>,
    /// Chunked by default.
    pub form: Form,
    /// Whether the state also decays, see [`EflaTensors::log_decay`]: calls then have a log decay, and only then. With
    /// [`Integrator::Euler`] that is Gated DeltaNet. Off by default.
    pub gated: bool,
}

impl Default for EflaConfig {
    fn default() -> Self {
        EflaConfig {
            key_dim: 64,
            value_dim: 64,
            integrator: Integrator::default(),
            normalize_q: false,
            normalize_k: false,
            scale: None,
            chunk: None,
            form: Form::default(),
            gated: false,
        }
    }
}

/// Sizes of one EFLA call.
///
/// | tensor | shape |
/// |---|---|
/// | q, k | `[batch, heads, tokens, key_dim]` |
/// | v, out | `[batch, value_heads, tokens, value_dim]` |
/// | beta, log_decay | `[batch, value_heads, tokens]` |
/// | initial_state, final_state | `[batch, value_heads, key_dim, value_dim]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EflaShape {
    /// B.
    pub batch: usize,
    /// H, heads of q and k.
    pub heads: usize,
    /// H_v, a multiple of `heads`; value head h reads q and k of head h / (value_heads / heads).
    pub value_heads: usize,
    /// T.
    pub tokens: usize,
}

impl EflaConfig {
    /// The factor on Sᵀq.
    pub fn scale(&self) -> f64 {
        self.scale.unwrap_or(1.0 / (self.key_dim as f64).sqrt())
    }

    /// Refuses a log decay where there is none, and a missing one where there is.
    pub(crate) fn check_gated(&self, has_log_decay: bool) -> Result<()> {
        let (got, needed) = match (self.gated, has_log_decay) {
            (true, false) => ("none", "one: the operator is gated"),
            (false, true) => ("a tensor", "none: the operator is not gated"),
            _ => return Ok(()),
        };
        Err(Error::argument("log_decay", got, needed))
    }

    /// Refuses what no shape could make right.
    pub fn validate(&self) -> Result<()> {
        for (name, dim) in [("key_dim", self.key_dim), ("value_dim", self.value_dim)] {
            if !(1..=MAX_DIM).contains(&dim) {
                return Err(Error::argument(name, dim, format!("1 to {MAX_DIM}")));
            }
        }
        if let Some(chunk) = self.chunk
            && ![16, 32, 64].contains(&chunk)
        {
            return Err(Error::argument("chunk", chunk, "16, 32 or 64"));
        }
        if let Some(scale) = self.scale
            && !(scale as f32).is_finite()
        {
            return Err(Error::argument("scale", scale, "a finite float32"));
        }
        Ok(())
    }
}

impl EflaShape {
    /// Refuses heads that can't be grouped. Any size may be 0, but `heads` only together with `value_heads`.
    pub fn validate(&self) -> Result<()> {
        let grouped = if self.heads == 0 { self.value_heads == 0 } else { self.value_heads.is_multiple_of(self.heads) };
        if !grouped {
            return Err(Error::argument(
                "value_heads",
                self.value_heads,
                format!("a multiple of heads = {}", self.heads),
            ));
        }
        Ok(())
    }

    /// The sizes of a piece, whose heads are those of q and k.
    fn part(&self, piece: &Piece) -> Self {
        let (batch, heads) = (piece.batch.len(), piece.heads.len());
        EflaShape { batch, heads, value_heads: heads * self.group(), ..*self }
    }

    /// Value heads per query/key head.
    pub fn group(&self) -> usize {
        self.value_heads.checked_div(self.heads).unwrap_or(1)
    }
}

/// The tensors of one EFLA call, in the shapes of [`EflaShape`]; rows of four-dimensional ones contiguous. q, k, v and
/// out may each have any storage type, all else is f32. They may be ranges of one buffer; outputs may not overlap anything, save that `final_state` may be the very range of
/// `initial_state`: the state is then updated in place.
#[derive(Debug, Clone)]
pub struct EflaTensors {
    /// Queries.
    pub q: TensorView,
    /// Keys.
    pub k: TensorView,
    /// Values.
    pub v: TensorView,
    /// Step strengths β.
    pub beta: TensorView,
    /// Given exactly when the operator is gated: the token multiplies the whole state by e^{log_decay}. ≤ 0; from −1e18
    /// on it counts as −∞, which wipes the state out and, by exact steps, writes nothing.
    pub log_decay: Option<TensorView>,
    /// S before the first token; zeros when absent.
    pub initial_state: Option<TensorView>,
    /// Written: o_t = scale · S_tᵀ q_t.
    pub out: TensorView,
    /// Written when given: S after the last token.
    pub final_state: Option<TensorView>,
    /// Sequences packed one after another into a batch of 1: sequence n has tokens `cu_seqlens[n]..cu_seqlens[n + 1]`, and
    /// states are `[N, value_heads, key_dim, value_dim]`. N + 1 entries from 0 to all tokens; sequences may be empty.
    pub cu_seqlens: Option<Vec<usize>>,
    /// [`EflaPlan::workspace_bytes`] of scratch memory; allocated by the call when absent.
    pub workspace: Option<TensorView>,
}

impl EflaTensors {
    /// A call without optional tensors.
    pub fn new(q: TensorView, k: TensorView, v: TensorView, beta: TensorView, out: TensorView) -> Self {
        EflaTensors {
            q,
            k,
            v,
            beta,
            log_decay: None,
            initial_state: None,
            out,
            final_state: None,
            cu_seqlens: None,
            workspace: None,
        }
    }

    /// A piece's part of every tensor of a call of the given shape.
    fn part(&self, shape: &EflaShape, piece: &Piece) -> Result<Self> {
        let of_values = |view: &TensorView| piece.of(view, shape.group());
        Ok(EflaTensors {
            q: piece.of(&self.q, 1)?,
            k: piece.of(&self.k, 1)?,
            v: of_values(&self.v)?,
            beta: of_values(&self.beta)?,
            log_decay: self.log_decay.as_ref().map(of_values).transpose()?,
            initial_state: state_part(&self.initial_state, shape, piece)?,
            out: of_values(&self.out)?,
            final_state: state_part(&self.final_state, shape, piece)?,
            cu_seqlens: self.cu_seqlens.clone(),
            workspace: None,
        })
    }

    /// The tensors that kernels bind.
    fn views(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        let tensors = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("beta", &self.beta), ("out", &self.out)];
        let optional = [
            ("log_decay", &self.log_decay),
            ("initial_state", &self.initial_state),
            ("final_state", &self.final_state),
        ];
        tensors.into_iter().chain(optional.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?))))
    }

    /// The ends of the scan.
    fn state(&self) -> StateArguments<'_> {
        StateArguments {
            before: ("initial_state", self.initial_state.as_ref()),
            after: ("final_state", self.final_state.as_ref()),
        }
    }

    /// The sizes that q and v state.
    ///
    /// # Errors
    /// [`Error::Argument`] when either has not four dimensions.
    pub fn shape(&self) -> Result<EflaShape> {
        stated_shape(&self.q, &self.v)
    }
}

fn stated_shape(q: &TensorView, v: &TensorView) -> Result<EflaShape> {
    match (q.shape(), v.shape()) {
        (&[batch, heads, tokens, _], &[_, value_heads, _, _]) => Ok(EflaShape { batch, heads, value_heads, tokens }),
        (q, v) => {
            let (name, shape) = if q.len() == 4 { ("v", v) } else { ("q", q) };
            Err(Error::argument(name, format!("shape {shape:?}"), "[batch, heads, tokens, dim]"))
        }
    }
}

/// The tensors of one backward call, in the shapes of [`EflaShape`]; a gradient has the shape of what it is the
/// gradient of. Rows of four-dimensional ones are contiguous; q, k, v, d_out, d_q, d_k and d_v may each have any storage
/// type, all else is f32. They may be ranges of one buffer; outputs may not overlap anything, save that `d_initial_state` may be the very range of `d_final_state`.
///
/// Gradients are those of Σ d_out·out + Σ d_final_state·final_state. They are overwritten, not added to.
#[derive(Debug, Clone)]
pub struct EflaGradients {
    /// Queries, as in the forward call.
    pub q: TensorView,
    /// Keys, as in the forward call.
    pub k: TensorView,
    /// Values, as in the forward call.
    pub v: TensorView,
    /// Step strengths β, as in the forward call.
    pub beta: TensorView,
    /// Log decays, as in the forward call.
    pub log_decay: Option<TensorView>,
    /// S before the first token, as it was before the forward call; zeros when absent.
    pub initial_state: Option<TensorView>,
    /// Gradient of out.
    pub d_out: TensorView,
    /// Gradient of final_state; zeros when absent.
    pub d_final_state: Option<TensorView>,
    /// Written; summed over the value heads that read a query.
    pub d_q: TensorView,
    /// Written; summed over the value heads that read a key.
    pub d_k: TensorView,
    /// Written.
    pub d_v: TensorView,
    /// Written.
    pub d_beta: TensorView,
    /// Written when given; only if the operator is gated.
    pub d_log_decay: Option<TensorView>,
    /// Written when given, whether or not initial_state is. With no token it is d_final_state.
    pub d_initial_state: Option<TensorView>,
    /// As in the forward call.
    pub cu_seqlens: Option<Vec<usize>>,
    /// [`EflaBackwardPlan::workspace_bytes`] of scratch memory; allocated by the call when absent.
    pub workspace: Option<TensorView>,
}

impl EflaGradients {
    /// The backward call of a forward call, without optional tensors but its log decay and initial state.
    pub fn new(forward: &EflaTensors, d_out: TensorView, [d_q, d_k, d_v, d_beta]: [TensorView; 4]) -> Self {
        EflaGradients {
            q: forward.q.clone(),
            k: forward.k.clone(),
            v: forward.v.clone(),
            beta: forward.beta.clone(),
            log_decay: forward.log_decay.clone(),
            initial_state: forward.initial_state.clone(),
            d_out,
            d_final_state: None,
            d_q,
            d_k,
            d_v,
            d_beta,
            d_log_decay: None,
            d_initial_state: None,
            cu_seqlens: forward.cu_seqlens.clone(),
            workspace: None,
        }
    }

    /// A piece's part of every tensor of a call of the given shape.
    fn part(&self, shape: &EflaShape, piece: &Piece) -> Result<Self> {
        let (of_keys, of_values) =
            (|view: &TensorView| piece.of(view, 1), |view: &TensorView| piece.of(view, shape.group()));
        let state = |state: &Option<TensorView>| state_part(state, shape, piece);
        Ok(EflaGradients {
            q: of_keys(&self.q)?,
            k: of_keys(&self.k)?,
            v: of_values(&self.v)?,
            beta: of_values(&self.beta)?,
            log_decay: self.log_decay.as_ref().map(of_values).transpose()?,
            initial_state: state(&self.initial_state)?,
            d_out: of_values(&self.d_out)?,
            d_final_state: state(&self.d_final_state)?,
            d_q: of_keys(&self.d_q)?,
            d_k: of_keys(&self.d_k)?,
            d_v: of_values(&self.d_v)?,
            d_beta: of_values(&self.d_beta)?,
            d_log_decay: self.d_log_decay.as_ref().map(of_values).transpose()?,
            d_initial_state: state(&self.d_initial_state)?,
            cu_seqlens: self.cu_seqlens.clone(),
            workspace: None,
        })
    }

    /// The tensors that kernels bind.
    fn views(&self) -> impl Iterator<Item = (&'static str, &TensorView)> {
        let inputs = [("q", &self.q), ("k", &self.k), ("v", &self.v), ("beta", &self.beta), ("d_out", &self.d_out)];
        let outputs = [("d_q", &self.d_q), ("d_k", &self.d_k), ("d_v", &self.d_v), ("d_beta", &self.d_beta)];
        let optional = [
            ("log_decay", &self.log_decay),
            ("d_log_decay", &self.d_log_decay),
            ("initial_state", &self.initial_state),
            ("d_final_state", &self.d_final_state),
            ("d_initial_state", &self.d_initial_state),
        ];
        let optional = optional.into_iter().filter_map(|(name, view)| Some((name, view.as_ref()?)));
        inputs.into_iter().chain(outputs).chain(optional)
    }

    /// The ends of the forward scan, and of the scan of the gradients.
    fn states(&self) -> [StateArguments<'_>; 2] {
        let state =
            StateArguments { before: ("initial_state", self.initial_state.as_ref()), after: ("final_state", None) };
        let d_state = StateArguments {
            before: ("d_final_state", self.d_final_state.as_ref()),
            after: ("d_initial_state", self.d_initial_state.as_ref()),
        };
        [state, d_state]
    }

    /// The sizes that q and v state.
    ///
    /// # Errors
    /// [`Error::Argument`] when either has not four dimensions.
    pub fn shape(&self) -> Result<EflaShape> {
        stated_shape(&self.q, &self.v)
    }
}

/// Error-free linear attention: the delta rule with its state update solved exactly.
///
/// Over one unit of time a token moves the state by dS/dτ = −β k kᵀ S + β k vᵀ. With x = β|k|²:
///
/// α = β (1 − e^{−x})/x,  S_t = (I − α k kᵀ) S_{t−1} + α k vᵀ,  o_t = scale · S_tᵀ q_t.
///
/// Source: *Error-Free Linear Attention* (EFLA, arXiv 2512.12602). [`Integrator`] also offers the Euler step
/// (DeltaNet) and Runge–Kutta steps. Chunks are solved in parallel in the coordinates k̂ = k/|k|, γ = αλ, c = α|k|,
/// in which nothing grows however large or unequal the keys are.
///
/// A gated operator ([`EflaConfig::gated`]) also lets the whole state decay, solved together with the rest: the
/// [module](self) derives it.
///
/// Cheap to clone. [`Efla::plan`] → [`EflaPlan::bind`] → [`Call::record`](crate::Call::record), or [`Efla::forward`].
/// Decoding goes on from the state that a forward call left, with [`Efla::plan_step`] or [`Efla::step`].
#[derive(Debug, Clone)]
pub struct Efla {
    gpu: Gpu,
    config: EflaConfig,
    chunk: usize,
}

impl Efla {
    /// Validates the configuration and compiles its kernels.
    ///
    /// # Errors
    /// [`Error::Argument`] for a configuration that can't be, [`Error::Limit`] for a chunk that does not fit the
    /// device's workgroup memory, [`Error::Gpu`] when a kernel doesn't compile.
    pub fn new(gpu: &Gpu, config: EflaConfig) -> Result<Self> {
        config.validate()?;
        let chunk = forward::chunk_length(gpu, &config)?;
        let efla = Efla { gpu: gpu.clone(), config, chunk };
        for (kernel, constants) in efla.build(false, efla.knows_lanes(), false).kernels(config.form) {
            let dim = |name: &str| if matches!(name, "q" | "k") { config.key_dim } else { config.value_dim };
            gpu.precompile(kernel, constants, dim)?;
        }
        Ok(efla)
    }

    /// What is compiled into its kernels.
    fn build(&self, ragged: bool, lanes: bool, grouped: bool) -> forward::Build {
        let (key_dim, gated) = (self.config.key_dim, self.config.gated);
        forward::Build { chunk: self.chunk, key_dim, gated, ragged, lanes, grouped }
    }

    /// Groups of the scans of a chunked call, and chunks of each.
    fn groups(&self, shape: &EflaShape, cu_seqlens: Option<&[usize]>) -> Result<(u64, u64)> {
        let packing = call::Packing::new(shape, cu_seqlens, Some(self.chunk))?;
        let sizes = call::Sizes::new(&self.config, shape, &packing, self.chunk);
        Ok(scan::groups(&self.gpu, &sizes, packing.is_ragged()))
    }

    /// Whether the kernels of one subgroup a workgroup can do it.
    fn knows_lanes(&self) -> bool {
        forward::knows_lanes(&self.gpu, &self.config) && self.chunk == forward::LANES_CHUNK
    }

    /// The configuration.
    pub fn config(&self) -> &EflaConfig {
        &self.config
    }

    /// The device it runs on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Tokens per chunk of the chunked form.
    pub fn chunk(&self) -> usize {
        self.chunk
    }

    /// Validates sizes and lays out the workspace of a forward call.
    ///
    /// # Errors
    /// [`Error::Argument`] for heads that can't be grouped, [`Error::Limit`] for sizes over the device's limits.
    pub fn plan(&self, shape: &EflaShape) -> Result<EflaPlan> {
        EflaPlan::new(self, shape, None)
    }

    /// As [`Efla::plan`], for sequences packed into a batch of 1; see [`EflaTensors::cu_seqlens`].
    ///
    /// # Errors
    /// Also [`Error::Argument`] for cumulative lengths that don't fit the shape.
    pub fn plan_packed(&self, shape: &EflaShape, cu_seqlens: &[usize]) -> Result<EflaPlan> {
        EflaPlan::new(self, shape, Some(cu_seqlens))
    }

    /// Plans, binds and records a forward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Efla::plan`] and [`EflaPlan::bind`]; nothing is recorded then.
    pub fn forward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &EflaTensors) -> Result<()> {
        EflaPlan::new(self, &tensors.shape()?, tensors.cu_seqlens.as_deref())?.bind(tensors)?.encode(encoder);
        Ok(())
    }

    /// As [`Efla::plan`] for decoding: one or a few tokens, walked in the recurrent form whatever the operator's own. The
    /// call demands `initial_state` and `final_state`: one range, so that a bound call can be recorded for every token, or
    /// two, so that the state before is kept. Its kernel is compiled when a first one is bound.
    ///
    /// # Errors
    /// As [`Efla::plan`].
    pub fn plan_step(&self, shape: &EflaShape) -> Result<EflaPlan> {
        EflaPlan::step(self, shape)
    }

    /// Plans, binds and records a step in a compute pass of its own: see [`Efla::plan_step`].
    ///
    /// # Errors
    /// As [`Efla::plan_step`] and [`EflaPlan::bind`]; nothing is recorded then.
    pub fn step(&self, encoder: &mut wgpu::CommandEncoder, tensors: &EflaTensors) -> Result<()> {
        self.plan_step(&tensors.shape()?)?.bind(tensors)?.encode(encoder);
        Ok(())
    }

    /// Validates sizes and lays out the workspace of a backward call; its kernels are compiled when a first one is bound.
    /// Nothing is kept from the forward pass, and its form does not matter.
    ///
    /// # Errors
    /// As [`Efla::plan`].
    pub fn plan_backward(&self, shape: &EflaShape) -> Result<EflaBackwardPlan> {
        EflaBackwardPlan::new(self, shape, None)
    }

    /// As [`Efla::plan_backward`], for sequences packed into a batch of 1.
    ///
    /// # Errors
    /// As [`Efla::plan_packed`].
    pub fn plan_backward_packed(&self, shape: &EflaShape, cu_seqlens: &[usize]) -> Result<EflaBackwardPlan> {
        EflaBackwardPlan::new(self, shape, Some(cu_seqlens))
    }

    /// Plans, binds and records a backward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Efla::plan_backward`] and [`EflaBackwardPlan::bind`]; nothing is recorded then.
    pub fn backward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &EflaGradients) -> Result<()> {
        EflaBackwardPlan::new(self, &tensors.shape()?, tensors.cu_seqlens.as_deref())?.bind(tensors)?.encode(encoder);
        Ok(())
    }
}
