//! Rotary position embedding.

use crate::attention::MAX_DIM;
use crate::error::{Error, Result};

/// Which two columns of a row turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Pairing {
    /// Neighbours: pair i is columns 2i and 2i + 1 (RoFormer, GPT-J).
    #[default]
    Interleaved,
    /// Halves: pair i is columns i and i + rotary_dim/2 (GPT-NeoX, Llama in most libraries).
    HalfSplit,
}

/// What a rotary operator computes; fixed when it is created.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// D, the length of a row: 1 to 256.
    pub dim: usize,
    /// Leading columns that turn, an even number; the others are copied. D when absent.
    pub rotary_dim: Option<usize>,
    /// Pair i turns by base^(−2i/rotary_dim) per unit of position; at least 1, default 10 000.
    pub base: f64,
    /// Neighbours (default) or halves.
    pub pairing: Pairing,
}

impl Default for RotaryConfig {
    fn default() -> Self {
        RotaryConfig { dim: 64, rotary_dim: None, base: 10_000.0, pairing: Pairing::default() }
    }
}

/// Sizes and place of one rotary call.
///
/// | tensor | shape |
/// |---|---|
/// | x, out, d_out, d_x | `[batch, heads, tokens, dim]` |
/// | positions | `[batch or 1, tokens]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RotaryShape {
    /// B.
    pub batch: usize,
    /// H.
    pub heads: usize,
    /// T.
    pub tokens: usize,
    /// Position of the first token (decoding with a cache: the tokens already there). 0 if the call has positions.
    pub offset: u32,
}

impl RotaryConfig {
    /// Columns that turn.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.dim)
    }

    /// Refuses what no shape could make right.
    pub fn validate(&self) -> Result<()> {
        if !(1..=MAX_DIM).contains(&self.dim) {
            return Err(Error::argument("dim", self.dim, format!("1 to {MAX_DIM}")));
        }
        let rotary_dim = self.rotary_dim();
        if !rotary_dim.is_multiple_of(2) || !(2..=self.dim).contains(&rotary_dim) {
            return Err(Error::argument("rotary_dim", rotary_dim, format!("an even number, 2 to dim = {}", self.dim)));
        }
        if !self.base.is_finite() || self.base < 1.0 {
            return Err(Error::argument("base", self.base, "a finite number, at least 1"));
        }
        Ok(())
    }
}

impl RotaryShape {
    /// Refuses positions beyond 32 bits.
    pub fn validate(&self) -> Result<()> {
        if (self.tokens as u64).saturating_add(self.offset.into()) > 1 << 32 {
            let needed = format!("2³² − tokens = 2³² − {} at most", self.tokens);
            return Err(Error::argument("offset", self.offset, needed));
        }
        Ok(())
    }
}
