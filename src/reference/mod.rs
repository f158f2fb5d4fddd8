//! The oracle: the operators in float64 on slices, forward and backward, written to be read.
//!
//! Nothing here shares code with the kernels. Every function takes dense row-major slices in the shapes of
//! [`AttentionShape`](crate::AttentionShape), [`EflaShape`](crate::EflaShape) and [`RotaryShape`](crate::RotaryShape),
//! checks all of them before it computes anything, and returns owned vectors. [`compare`] says when a float32 result
//! counts as equal to a float64 one.
//!
//! The formulas come from *Continuous softmax attention* (spaces.ac.cn archive 11980) and *Error-Free Linear Attention*
//! (EFLA, arXiv 2512.12602); each item states the equation it implements. With the feature `rayon` the heads are worked
//! on in parallel; sums across heads are always taken in the same order, so results do not depend on it.

pub mod attention;
pub mod compare;
pub mod efla;
pub mod phi;
pub mod rotary;
mod support;

#[cfg(test)]
mod tests;
