//! The rows of a tile by measurement.

use super::operands::FEW_ROWS;
use super::{Attention, AttentionConfig, AttentionShape, AttentionTensors, Method, Sink};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernel::Call;

/// What the choice depends on: method, dimensions, what a row sees, sizes.
pub(crate) type Key = (Method, [usize; 2], bool, Option<usize>, AttentionShape);

impl Attention {
    /// As [`Attention::new`], with the `block_q` (32 or 64) that takes a forward call of this shape, in f32, the least time on
    /// this device. It is measured once for each shape and kept by the [`Gpu`] and its clones: that allocates tensors of the
    /// shape, submits work and waits for it. A configured `block_q` is kept as it is, and with at
    /// most 8 queries or with matrix units there is nothing to choose.
    ///
    /// # Errors
    /// As [`Attention::new`], [`Attention::plan`] and [`AttentionPlan::bind`](super::AttentionPlan::bind).
    pub fn measured(gpu: &Gpu, config: AttentionConfig, shape: &AttentionShape) -> Result<Self> {
        config.validate()?;
        shape.validate()?;
        // Few rows have tiles of their own, and matrix units those of 32.
        if config.block_q.is_some() || shape.queries <= FEW_ROWS || gpu.matrices().is_some() {
            return Self::new(gpu, config);
        }
        let key = (config.method, [config.head_dim, config.value_dim], config.causal, config.window, *shape);
        let with = |block_q| AttentionConfig { block_q: Some(block_q), ..config };
        let block_q =
            gpu.block_choices().fastest(gpu, key, &[32, 64], |block_q| bind(&Self::new(gpu, with(block_q))?, shape))?;
        Self::new(gpu, with(block_q))
    }
}

/// A forward call on tensors of zeros.
fn bind(attention: &Attention, shape: &AttentionShape) -> Result<Call> {
    let (gpu, config) = (attention.gpu(), attention.config());
    let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
    let [q, k, v, out] = [
        [batch, heads, queries, config.head_dim],
        [batch, kv_heads, keys, config.head_dim],
        [batch, kv_heads, keys, config.value_dim],
        [batch, heads, queries, config.value_dim],
    ]
    .map(|shape| gpu.zeros(&shape));
    let mut tensors = AttentionTensors::new(q?.view(), k?.view(), v?.view(), out?.view());
    if config.sink == Sink::Given {
        let [sink_k, sink_v] = [config.head_dim, config.value_dim].map(|dim| gpu.zeros(&[1, kv_heads, dim]));
        (tensors.sink_k, tensors.sink_v) = (Some(sink_k?.view()), Some(sink_v?.view()));
    }
    attention.plan(shape)?.bind(&tensors)
}
