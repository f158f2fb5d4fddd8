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
//! The [guide] has a page each on [numerics](guide::numerics), [memory](guide::memory),
//! [choosing options](guide::options) and [porting](guide::porting) from PyTorch, FlashAttention and
//! flash-linear-attention.
//!
//! # Continuous softmax attention
//!
//! Tokens are samples of a curve. Node 0 is the *sink*, nodes 1 to T_k are the tokens; segment i, of length Δ_i (1
//! unless intervals are given), runs from node i − 1 to node i. On it keys and values are linear,
//! k(s) = (1 − s) k_{i−1} + s k_i, and so is the logit a(s) = scale q·k(s). Replacing the sums of softmax attention by
//! integrals over the segments that a query sees,
//!
//! ```text
//! out = ∫ e^{a(s)} v(s) ds / ∫ e^{a(s)} ds          lse = ln ∫ e^{a(s)} ds
//! ```
//!
//! each segment has an elementary integral. With a_i = scale q·k_i, δ_i = a_i − a_{i−1} and φ₂(x) = (eˣ − 1 − x)/x²,
//! φ₂(0) = ½:
//!
//! ```text
//! left  weight of segment i, to node i − 1:  L_i = Δ_i ∫ (1 − s) e^{a(s)} ds = Δ_i e^{a_{i−1}} φ₂(δ_i)
//! right weight of segment i, to node i:      R_i = Δ_i ∫    s    e^{a(s)} ds = Δ_i e^{a_i}     φ₂(−δ_i)
//! w_i = R_i + L_{i+1}                        out = Σ w_i v_i / Σ w_i         lse = ln Σ w_i
//! ```
//!
//! It is softmax attention with logits a_i + b_i, where b_i depends on the differences to the two neighbouring logits
//! only, about (a_{i−1} + a_{i+1} − 2 a_i)/6 for small ones. Source: *连续化 Softmax Attention* (spaces.ac.cn, archive
//! 11980), equations (10) and (11), after *Continuum Attention* (arXiv 2406.06486).
//!
//! An operator is compiled once, a *plan* fixes the sizes, *bind* the tensors, and the bound [`Call`] is recorded into
//! a compute pass as often as you like. [`Attention::forward`] and [`Attention::backward`] do all three.
//!
//! ```
//! use continuous_attention::{Attention, AttentionConfig, AttentionGradients, AttentionTensors, Gpu};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::new()?;
//! // One head, two tokens, D = D_v = 1; the sink (the default) is a node of zeros in front of them.
//! let q = gpu.upload(&[1.0, 1.0], &[1, 1, 2, 1])?;
//! let k = gpu.upload(&[0.0, 0.0], &[1, 1, 2, 1])?;
//! let v = gpu.upload(&[1.0, 2.0], &[1, 1, 2, 1])?;
//! let out = gpu.zeros(&[1, 1, 2, 1])?;
//! let lse = gpu.zeros(&[1, 1, 2])?;
//!
//! let attention = Attention::new(&gpu, AttentionConfig { head_dim: 1, value_dim: 1, ..Default::default() })?;
//! // The backward pass needs lse; without one leave it `None`.
//! let tensors = AttentionTensors {
//!     lse: Some(lse.view()),
//!     ..AttentionTensors::new(q.view(), k.view(), v.view(), out.view())
//! };
//! let call = attention.plan(&tensors.shape()?)?.bind(&tensors)?;
//!
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! call.encode(&mut encoder);
//! gpu.queue().submit([encoder.finish()]);
//! // All keys are equal, so the values are averaged over time: ½ over [0, 1], 1 over [0, 2].
//! let close = |got: Vec<f32>, want: &[f32]| got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6);
//! assert!(close(gpu.read(&out)?, &[0.5, 1.0]));
//! assert!(close(gpu.read(&lse)?, &[0.0, 2f32.ln()]));
//!
//! // Gradients of the sum of out.
//! let d_out = gpu.upload(&[1.0, 1.0], &[1, 1, 2, 1])?;
//! let [d_q, d_k, d_v] = [gpu.zeros(q.shape())?, gpu.zeros(k.shape())?, gpu.zeros(v.shape())?];
//! let gradients =
//!     AttentionGradients::new(&tensors, lse.view(), d_out.view(), [d_q.view(), d_k.view(), d_v.view()]);
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! attention.backward(&mut encoder, &gradients)?;
//! gpu.queue().submit([encoder.finish()]);
//! // Token 1 weighs ½ in the first row and 1 of 2 in the second, token 2 ½ of 2.
//! assert!(close(gpu.read(&d_v)?, &[1.0, 0.25]));
//! # Ok(())
//! # }
//! ```
//!
//! # EFLA
//!
//! Linear attention keeps a state S `[D_k, D_v]`, an associative memory. The delta rule lets a token (k, v) pull the
//! state towards Sᵀk = v; as motion over one unit of time that is
//!
//! ```text
//! dS/dτ = −β k kᵀ S + β k vᵀ
//! ```
//!
//! DeltaNet takes one Euler step, S + β k (v − Sᵀk)ᵀ, which diverges where β|k|² > 2. But k kᵀ has rank one, so that the
//! equation has an elementary solution. With λ = |k|², x = βλ:
//!
//! ```text
//! α = β (1 − e^{−x})/x        S_t = (I − α k kᵀ) S_{t−1} + α k vᵀ        o_t = scale · S_tᵀ q_t
//! ```
//!
//! αλ = 1 − e^{−x} lies in [0, 1] for every β ≥ 0: the step contracts, whatever the key. Source: *Error-Free Linear
//! Attention* (arXiv 2512.12602). With a decay of the whole state, [`EflaConfig::gated`], see [`mod@efla`].
//!
//! A chunk of C tokens is solved at once. With k̂ = k/|k|, γ = αλ and c = α|k|, one a token:
//!
//! ```text
//! A = strict_lower(diag(γ) K̂K̂ᵀ)     T = (I + A)⁻¹     W = T diag(γ) K̂     U = T diag(c) V
//! V_new = U − W S     O = scale (Q S + lower_incl(Q K̂ᵀ) V_new)     S ← S + K̂ᵀ V_new
//! ```
//!
//! ```
//! use continuous_attention::{Efla, EflaConfig, EflaGradients, EflaTensors, Gpu};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let gpu = Gpu::new()?;
//! // One head, two tokens, D_k = D_v = 1. β|k|² = ln 2: every token wipes out half of the state, α = ½/|k|² = ½.
//! let q = gpu.upload(&[1.0, 1.0], &[1, 1, 2, 1])?;
//! let k = gpu.upload(&[1.0, 1.0], &[1, 1, 2, 1])?;
//! let v = gpu.upload(&[2.0, 4.0], &[1, 1, 2, 1])?;
//! let beta = gpu.upload(&[2f32.ln(); 2], &[1, 1, 2])?;
//! let out = gpu.zeros(&[1, 1, 2, 1])?;
//! let state = gpu.zeros(&[1, 1, 1, 1])?;
//!
//! let efla = Efla::new(&gpu, EflaConfig { key_dim: 1, value_dim: 1, ..Default::default() })?;
//! let tensors = EflaTensors {
//!     final_state: Some(state.view()),
//!     ..EflaTensors::new(q.view(), k.view(), v.view(), beta.view(), out.view())
//! };
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! efla.forward(&mut encoder, &tensors)?;
//! gpu.queue().submit([encoder.finish()]);
//! // The state is ½ · 2 after the first token, ½ · 1 + ½ · 4 after the second.
//! let close = |got: Vec<f32>, want: &[f32]| got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6);
//! assert!(close(gpu.read(&out)?, &[1.0, 2.5]));
//! assert!(close(gpu.read(&state)?, &[2.5]));
//!
//! // Gradients of the last token's out.
//! let d_out = gpu.upload(&[0.0, 1.0], &[1, 1, 2, 1])?;
//! let [d_q, d_k, d_v, d_beta] =
//!     [gpu.zeros(q.shape())?, gpu.zeros(k.shape())?, gpu.zeros(v.shape())?, gpu.zeros(beta.shape())?];
//! let gradients =
//!     EflaGradients::new(&tensors, d_out.view(), [d_q.view(), d_k.view(), d_v.view(), d_beta.view()]);
//! let mut encoder = gpu.device().create_command_encoder(&Default::default());
//! efla.backward(&mut encoder, &gradients)?;
//! gpu.queue().submit([encoder.finish()]);
//! assert!(close(gpu.read(&d_v)?, &[0.25, 0.5]));
//! assert!(close(gpu.read(&d_q)?, &[0.0, 2.5]));
//! # Ok(())
//! # }
//! ```
//!
//! # In an application with a wgpu device
//!
//! [`Gpu::from_wgpu`] takes a device and a queue; tensors are ranges of the application's own buffers, which need usage
//! `STORAGE` and nothing else; a bound call is recorded into the application's compute pass. The wgpu here is
//! [`continuous_attention::wgpu`](wgpu): depend on the same major version, or use that one.
//!
//! ```
//! use continuous_attention::{Attention, AttentionConfig, AttentionShape, AttentionTensors, Gpu, TensorView, wgpu};
//!
//! /// What an application does once: `buffer` holds q, k, v and out one after another, `[1, 4, 256, 64]` each.
//! fn prepare(
//!     device: &wgpu::Device,
//!     queue: &wgpu::Queue,
//!     buffer: &wgpu::Buffer,
//! ) -> continuous_attention::Result<continuous_attention::Call> {
//!     let gpu = Gpu::from_wgpu(device.clone(), queue.clone())?;
//!     let attention = Attention::new(&gpu, AttentionConfig { head_dim: 64, value_dim: 64, ..Default::default() })?;
//!     let plan = attention.plan(&AttentionShape { batch: 1, heads: 4, kv_heads: 4, queries: 256, keys: 256 })?;
//!     // Offsets count elements, here floats, from the start of the buffer.
//!     let part = |i: u64| TensorView::new(buffer, i * 4 * 256 * 64, &[1, 4, 256, 64]);
//!     plan.bind(&AttentionTensors::new(part(0), part(1), part(2), part(3)))
//! }
//!
//! /// What it does every frame, among its own dispatches.
//! fn frame(call: &continuous_attention::Call, pass: &mut wgpu::ComputePass<'_>) {
//!     call.record(pass);
//! }
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let gpu = Gpu::new()?;
//! # let (device, queue) = (gpu.device(), gpu.queue());
//! # let buffer = device.create_buffer(&wgpu::BufferDescriptor {
//! #     label: None,
//! #     size: 4 * 4 * 4 * 256 * 64,
//! #     usage: wgpu::BufferUsages::STORAGE,
//! #     mapped_at_creation: false,
//! # });
//! # let call = prepare(device, queue, &buffer)?;
//! # let mut encoder = device.create_command_encoder(&Default::default());
//! # frame(&call, &mut encoder.begin_compute_pass(&Default::default()));
//! # queue.submit([encoder.finish()]);
//! # device.poll(wgpu::PollType::wait_indefinitely())?;
//! # Ok(())
//! # }
//! ```
//!
//! A plan says its [`workspace_bytes`](AttentionPlan::workspace_bytes); a call allocates that much when it is bound,
//! unless it is given a range for it.
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
pub mod guide;
mod kernel;
#[cfg(not(target_arch = "wasm32"))]
mod measure;
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

/// The programs in README.md: they compile and run.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
