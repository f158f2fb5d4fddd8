//! The chunk length by measurement.

use super::{Efla, EflaConfig, EflaShape, EflaTensors, Form};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernel::Call;

/// What the choice depends on: dimensions, whether it is gated, sizes.
pub(crate) type Key = (usize, usize, bool, EflaShape);

impl Efla {
    /// As [`Efla::new`], with the chunk length (16, 32 or 64) that takes a forward call of this shape the least time on this
    /// device. It is measured once for each shape and kept by the [`Gpu`] and its clones: that allocates tensors of the
    /// shape, submits work and waits for it. A configured chunk is kept as it is.
    ///
    /// # Errors
    /// As [`Efla::new`], [`Efla::plan`] and [`EflaPlan::bind`](super::EflaPlan::bind).
    pub fn measured(gpu: &Gpu, config: EflaConfig, shape: &EflaShape) -> Result<Self> {
        config.validate()?;
        shape.validate()?;
        if config.chunk.is_some() || config.form == Form::Recurrent {
            return Self::new(gpu, config);
        }
        let key = (config.key_dim, config.value_dim, config.gated, *shape);
        let with = |chunk| EflaConfig { chunk: Some(chunk), ..config };
        let chunk =
            gpu.chunk_choices().fastest(gpu, key, &[16, 32, 64], |chunk| bind(&Self::new(gpu, with(chunk))?, shape))?;
        Self::new(gpu, with(chunk))
    }
}

/// A forward call on tensors of zeros.
fn bind(efla: &Efla, shape: &EflaShape) -> Result<Call> {
    let (gpu, config) = (efla.gpu(), efla.config());
    let EflaShape { batch, heads, value_heads, tokens } = *shape;
    let [q, k] = [(); 2].map(|()| gpu.zeros(&[batch, heads, tokens, config.key_dim]));
    let [v, out] = [(); 2].map(|()| gpu.zeros(&[batch, value_heads, tokens, config.value_dim]));
    let [beta, decay] = [(); 2].map(|()| gpu.zeros(&[batch, value_heads, tokens]));
    let mut tensors = EflaTensors::new(q?.view(), k?.view(), v?.view(), beta?.view(), out?.view());
    tensors.log_decay = config.gated.then_some(decay?.view());
    efla.plan(shape)?.bind(&tensors)
}
