//! Pages on what no single item explains.
//!
//! * [`numerics`]: why nothing has an epsilon, what errors to expect, and what NaN and −∞ do.
//! * [`memory`]: what a call needs, how to hand it over, what may share a buffer.
//! * [`options`]: which options suit which job, and which kernels run where.
//! * [`porting`]: names and conventions of PyTorch, FlashAttention and flash-linear-attention.

#[doc = include_str!("../docs/numerics.md")]
pub mod numerics {}

#[doc = include_str!("../docs/memory.md")]
pub mod memory {}

#[doc = include_str!("../docs/options.md")]
pub mod options {}

#[doc = include_str!("../docs/porting.md")]
pub mod porting {}
