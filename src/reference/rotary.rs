//! Rotary position embedding in float64.
//!
//! Pair i of a row at position p turns by the angle p · base^(−2i/r), r = `rotary_dim` (*RoFormer*, arXiv 2104.09864).

use super::support::{check_tensor, elements};
use crate::error::{Error, Result};
use crate::rotary::{Pairing, RotaryConfig, RotaryShape};

/// (x_a, x_b) → (x_a cos θ − x_b sin θ, x_a sin θ + x_b cos θ) for every pair; the columns from `rotary_dim` on are
/// copied. `x` is `[B, H, T, D]`; `positions`, `[B or 1, T]`, stand for offset + 0, 1, ….
///
/// # Errors
/// [`Error::Argument`] for anything about sizes or values that is not so.
pub fn forward(config: &RotaryConfig, shape: &RotaryShape, x: &[f64], positions: Option<&[f64]>) -> Result<Vec<f64>> {
    turn("x", config, shape, x, positions, 1.0)
}

/// The gradient of x from that of the result: the turn back, since the inverse of a rotation is its transpose.
///
/// # Errors
/// As [`forward`].
pub fn backward(
    config: &RotaryConfig,
    shape: &RotaryShape,
    d_out: &[f64],
    positions: Option<&[f64]>,
) -> Result<Vec<f64>> {
    turn("d_out", config, shape, d_out, positions, -1.0)
}

fn turn(
    name: &str,
    config: &RotaryConfig,
    shape: &RotaryShape,
    x: &[f64],
    positions: Option<&[f64]>,
    sign: f64,
) -> Result<Vec<f64>> {
    config.validate()?;
    shape.validate()?;
    let RotaryShape { batch, heads, tokens, offset } = *shape;
    let (dim, rotary_dim) = (config.dim, config.rotary_dim());
    check_tensor(name, x, &[batch, heads, tokens, dim])?;
    if let Some(positions) = positions {
        let one = elements("positions", &[1, tokens])?;
        let batches = if positions.len() == one { 1 } else { batch };
        check_tensor("positions", positions, &[batches, tokens])?;
        if offset != 0 {
            return Err(Error::argument("offset", offset, "0, since positions are given"));
        }
    }
    let mut out = x.to_vec();
    for (at, row) in out.chunks_exact_mut(dim).enumerate() {
        let (token, batch) = (at % tokens, at / tokens / heads);
        let position = match positions {
            Some(positions) if positions.len() == tokens => positions[token],
            Some(positions) => positions[batch * tokens + token],
            None => f64::from(offset) + token as f64,
        };
        for i in 0..rotary_dim / 2 {
            let (a, b) = match config.pairing {
                Pairing::Interleaved => (2 * i, 2 * i + 1),
                Pairing::HalfSplit => (i, i + rotary_dim / 2),
            };
            let angle = sign * position * config.base.powf(-2.0 * i as f64 / rotary_dim as f64);
            let (sin, cos) = angle.sin_cos();
            (row[a], row[b]) = (row[a] * cos - row[b] * sin, row[a] * sin + row[b] * cos);
        }
    }
    Ok(out)
}
