//! Error-free linear attention: configuration and shapes.

use crate::attention::MAX_DIM;
use crate::error::{Error, Result};

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
    /// Token by token from a resident state: decoding.
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
    /// Tokens per chunk: 16, 32 or 64; by default the longest that fits the device's workgroup memory.
    pub chunk: Option<usize>,
    /// Chunked by default.
    pub form: Form,
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
        }
    }
}

/// Sizes of one EFLA call.
///
/// | tensor | shape |
/// |---|---|
/// | q, k | `[batch, heads, tokens, key_dim]` |
/// | v, out | `[batch, value_heads, tokens, value_dim]` |
/// | beta | `[batch, value_heads, tokens]` |
/// | initial_state, final_state | `[batch, value_heads, key_dim, value_dim]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
        let grouped = if self.heads == 0 { self.value_heads == 0 } else { self.value_heads % self.heads == 0 };
        if !grouped {
            return Err(Error::argument(
                "value_heads",
                self.value_heads,
                format!("a multiple of heads = {}", self.heads),
            ));
        }
        Ok(())
    }

    /// Value heads per query/key head.
    pub fn group(&self) -> usize {
        self.value_heads.checked_div(self.heads).unwrap_or(1)
    }
}
