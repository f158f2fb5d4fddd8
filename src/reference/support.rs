//! What both operators' references need: checked sizes, vector arithmetic, the loop over heads.

use crate::error::{Error, Result};
use std::ops::Range;

/// Product of `dims`, or an error naming `argument` if it does not fit.
pub(super) fn elements(argument: &str, dims: &[usize]) -> Result<usize> {
    if dims.contains(&0) {
        return Ok(0);
    }
    let product = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    product.ok_or_else(|| Error::argument(argument, format!("shape {dims:?}"), "a size that fits in memory"))
}

/// Refuses more heads than anyone computes in float64: without tokens no tensor bounds how many there are to loop over.
pub(super) fn check_heads(sequences: usize, heads: usize) -> Result<()> {
    const MOST: usize = 1 << 20;
    let count = sequences.max(1).saturating_mul(heads.max(1));
    if count > MOST {
        let got = format!("{count} of all sequences");
        return Err(Error::argument("heads", got, format!("at most {MOST} by the reference")));
    }
    Ok(())
}

/// Refuses a tensor that has not exactly the elements of `dims`, or holds NaN or an infinity.
pub(super) fn check_tensor(argument: &str, tensor: &[f64], dims: &[usize]) -> Result<()> {
    check_size(argument, tensor, dims)?;
    check_finite(argument, tensor)
}

/// Refuses a tensor that has not exactly the elements of `dims`.
pub(super) fn check_size(argument: &str, tensor: &[f64], dims: &[usize]) -> Result<()> {
    let needed = elements(argument, dims)?;
    if tensor.len() != needed {
        let got = format!("{} elements", tensor.len());
        return Err(Error::argument(argument, got, format!("{needed} elements, shape {dims:?}")));
    }
    Ok(())
}

/// Refuses NaN and infinities.
pub(super) fn check_finite(argument: &str, tensor: &[f64]) -> Result<()> {
    match tensor.iter().position(|x| !x.is_finite()) {
        Some(at) => Err(Error::argument(argument, format!("{} at element {at}", tensor[at]), "finite values")),
        None => Ok(()),
    }
}

/// A tensor of zeros; an error, not an abort, if memory for it can't even be asked for.
pub(super) fn zeros(argument: &str, dims: &[usize]) -> Result<Vec<f64>> {
    let count = elements(argument, dims)?;
    let mut tensor = Vec::new();
    if tensor.try_reserve_exact(count).is_err() {
        return Err(Error::argument(argument, format!("shape {dims:?}"), "a size that fits in memory"));
    }
    tensor.resize(count, 0.0);
    Ok(tensor)
}

/// Part `index` of a tensor that consists of parts of `length` elements.
pub(super) fn part(tensor: &[f64], index: usize, length: usize) -> &[f64] {
    &tensor[index * length..(index + 1) * length]
}

/// Like [`part`], to be written to.
pub(super) fn part_mut(tensor: &mut [f64], index: usize, length: usize) -> &mut [f64] {
    &mut tensor[index * length..(index + 1) * length]
}

/// Where tokens `range` of batch entry `batch` stand in a tensor `[B, heads, tokens, width]`, head after head.
pub(super) fn places([batch, heads, tokens, width]: [usize; 4], range: &Range<usize>) -> Vec<usize> {
    if range.is_empty() {
        // Of however many heads.
        return Vec::new();
    }
    let head = |head: usize| {
        let first = (batch * heads + head) * tokens;
        (first + range.start) * width..(first + range.end) * width
    };
    (0..heads).flat_map(head).collect()
}

/// The elements at `places`.
pub(super) fn gather(tensor: &[f64], places: &[usize]) -> Vec<f64> {
    places.iter().map(|&at| tensor[at]).collect()
}

/// Adds to the elements at `places`.
pub(super) fn add_at(sum: &mut [f64], places: &[usize], x: &[f64]) {
    places.iter().zip(x).for_each(|(&at, x)| sum[at] += x);
}

/// x · y.
pub(super) fn dot(x: &[f64], y: &[f64]) -> f64 {
    x.iter().zip(y).map(|(x, y)| x * y).sum()
}

/// sum += factor · x.
pub(super) fn add_scaled(sum: &mut [f64], factor: f64, x: &[f64]) {
    for (sum, x) in sum.iter_mut().zip(x) {
        *sum += factor * x;
    }
}

/// `work(0), …, work(count − 1)` in this order, computed in parallel.
#[cfg(feature = "rayon")]
pub(super) fn map_heads<T: Send>(count: usize, work: impl Fn(usize) -> T + Send + Sync) -> Vec<T> {
    use rayon::prelude::*;
    (0..count).into_par_iter().map(work).collect()
}

/// `work(0), …, work(count − 1)`.
#[cfg(not(feature = "rayon"))]
pub(super) fn map_heads<T>(count: usize, work: impl Fn(usize) -> T) -> Vec<T> {
    (0..count).map(work).collect()
}
