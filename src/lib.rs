//! Attention derived from continuous time, as hand-written WGSL kernels on [wgpu]: Vulkan, Metal, DX12, OpenGL,
//! WebGPU.
//!
//! * [`Attention`]: **continuous softmax attention**. Keys and values are linear between tokens, and softmax attention
//!   becomes an exact integral over time. The same kernels compute ordinary softmax attention ([`Method::Softmax`]).
//! * [`Efla`]: **error-free linear attention**, the delta rule with its state update solved exactly instead of by an
//!   Euler step, chunk by chunk in parallel. The same kernels compute DeltaNet ([`Integrator::Euler`]).
//! * Around them: [`Rotary`] position embedding, [`Merge`] of attention over two stretches of keys, and [`Gpu::copy`]
//!   between views, which appends to a cache.
//! * Decoding: [`Lengths::Cache`] attends to padded caches of different lengths, [`Efla::step`] carries a state on.
//!
//! Both have a forward and a backward pass, in f32 on tensors of f32, f16 or bf16, and are judged by the float64 [`mod@reference`].
//!
//! # A call
//!
//! An operator is compiled once, a *plan* fixes the sizes, *bind* the tensors, and the bound [`Call`] is recorded into
//! a compute pass as often as you like. `forward` and `backward` do all three.
//!
//! ```
//! use continuous_attention::{Attention, AttentionConfig, AttentionTensors, Gpu};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::new()?;
//! // One head, two tokens, D = D_v = 1; the sink (the default) is a node of zeros in front of them.
//! let q = gpu.upload(&[1.0, 1.0], &[1, 1, 2, 1])?;
//! let k = gpu.upload(&[0.0, 0.0], &[1, 1, 2, 1])?;
//! let v = gpu.upload(&[1.0, 2.0], &[1, 1, 2, 1])?;
//! let out = gpu.zeros(&[1, 1, 2, 1])?;
//!
//! let attention = Attention::new(&gpu, AttentionConfig { head_dim: 1, value_dim: 1, ..Default::default() })?;
//! let tensors = AttentionTensors::new(q.view(), k.view(), v.view(), out.view());
//! let call = attention.plan(&tensors.shape()?)?.bind(&tensors)?;
//!
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! call.encode(&mut encoder);
//! gpu.queue().submit([encoder.finish()]);
//! // All keys are equal, so the values are averaged over time: ½ over [0, 1], 1 over [0, 2].
//! let result = gpu.read(&out)?;
//! assert!((result[0] - 0.5).abs() < 1e-6 && (result[1] - 1.0).abs() < 1e-6);
//! # Ok(())
//! # }
//! ```
//!
//! # What to expect
//!
//! * Only [`Gpu::read`] waits. Types are `Send + Sync` and cheap to clone.
//! * On wasm32 nothing waits: [`Gpu::with_options_async`], [`Gpu::read_async`]. There errors of the graphics stack come from
//!   the latter, since a browser answers late, and types are not `Send`.
//! * What a caller can get wrong comes back as an [`Error`] that names the argument, what it got and what it needed,
//!   before anything is recorded.
//! * Tensors are [`TensorView`]s: any offset and strides in any storage buffer, as long as the last of four
//!   dimensions is contiguous. Inputs and outputs may be ranges of one buffer.
//! * Every element of an output is written, never accumulated into. Two identical runs on one adapter are bit-equal.
//! * [`Gpu::from_wgpu`] uses the host's device and never touches its error handlers; WebGPU's default limits do.
//!
//! Shapes, equations and sources stand at each operator.

#![deny(unsafe_code)]
#![deny(missing_docs)]

pub mod attention;
#[cfg(feature = "cases")]
pub mod case;
mod copy;
pub mod efla;
mod error;
mod gpu;
mod kernel;
mod piece;
pub mod reference;
mod rotary;
mod shader;
mod tensor;
mod trusted;
#[cfg(target_arch = "wasm32")]
mod web;

pub use attention::{
    Attention, AttentionBackwardPlan, AttentionConfig, AttentionGradients, AttentionPlan, AttentionShape,
    AttentionTensors, Lengths, Merge, MergeGradients, MergePlan, MergeShape, MergeTensors, Method, Sink,
};
pub use efla::{Efla, EflaBackwardPlan, EflaConfig, EflaGradients, EflaPlan, EflaShape, EflaTensors, Form, Integrator};
pub use error::{Error, Result};
pub use gpu::{AdapterChoice, Gpu, GpuOptions};
pub use half;
pub use kernel::Call;
pub use rotary::{Pairing, Rotary, RotaryConfig, RotaryGradients, RotaryPlan, RotaryShape, RotaryTensors};
pub use tensor::{DType, Element, Tensor, TensorView};
pub use wgpu;
