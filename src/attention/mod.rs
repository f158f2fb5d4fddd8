//! Continuous softmax attention: configuration and shapes.

use crate::error::{Error, Result};

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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
        let grouped = if self.kv_heads == 0 { self.heads == 0 } else { self.heads % self.kv_heads == 0 };
        if !grouped {
            return Err(Error::argument("heads", self.heads, format!("a multiple of kv_heads = {}", self.kv_heads)));
        }
        Ok(())
    }

    /// Query heads per key/value head.
    pub fn group(&self) -> usize {
        self.heads.checked_div(self.kv_heads).unwrap_or(1)
    }
}

/// Largest D, D_v of either operator.
pub const MAX_DIM: usize = 256;
