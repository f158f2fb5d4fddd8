//! What both operators' references need: checked sizes, vector arithmetic, the loop over heads.

use crate::error::{Error, Result};

/// Product of `dims`, or an error naming `argument` if it does not fit.
pub(super) fn elements(argument: &str, dims: &[usize]) -> Result<usize> {
    if dims.contains(&0) {
        return Ok(0);
    }
    let product = dims.iter().try_fold(1usize, |product, &dim| product.checked_mul(dim));
    product.ok_or_else(|| Error::argument(argument, format!("shape {dims:?}"), "a size that fits in memory"))
}

/// Refuses a tensor that has not exactly the elements of `dims`, or holds NaN or an infinity.
pub(super) fn check_tensor(argument: &str, tensor: &[f64], dims: &[usize]) -> Result<()> {
    let needed = elements(argument, dims)?;
    if tensor.len() != needed {
        let got = format!("{} elements", tensor.len());
        return Err(Error::argument(argument, got, format!("{needed} elements, shape {dims:?}")));
    }
    check_finite(argument, tensor)
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
