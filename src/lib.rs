//! Attention derived from continuous time, as WGSL kernels on wgpu.

pub mod attention;
#[cfg(feature = "cases")]
pub mod case;
pub mod efla;
mod error;
pub mod reference;
mod tensor;

pub use attention::{AttentionConfig, AttentionShape, Method, Sink};
pub use efla::{EflaConfig, EflaShape, Form, Integrator};
pub use error::{Error, Result};
pub use tensor::DType;
pub use wgpu;
