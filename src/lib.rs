//! Attention derived from continuous time, as WGSL kernels on wgpu.

#![deny(unsafe_code)]

pub mod attention;
#[cfg(feature = "cases")]
pub mod case;
pub mod efla;
mod error;
mod gpu;
mod kernel;
pub mod reference;
mod shader;
mod tensor;
mod trusted;

pub use attention::{Attention, AttentionConfig, AttentionPlan, AttentionShape, AttentionTensors, Method, Sink};
pub use efla::{Efla, EflaBackwardPlan, EflaConfig, EflaGradients, EflaPlan, EflaShape, EflaTensors, Form, Integrator};
pub use error::{Error, Result};
pub use gpu::{AdapterChoice, Gpu, GpuOptions};
pub use kernel::Call;
pub use tensor::{DType, Tensor, TensorView};
pub use wgpu;
