//! The chunk length by measurement instead of by the table.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{Efla, EflaConfig, EflaShape, EflaTensors, Form};
use crate::error::{Error, Result};
use crate::gpu::Gpu;

/// What a choice depends on: dimensions, whether it is gated, sizes.
type Key = (usize, usize, bool, EflaShape);

/// The choices made so far on a device.
#[derive(Debug, Default)]
pub(crate) struct Choices(Mutex<HashMap<Key, usize>>);

/// Timed runs of each chunk length, of which the fastest counts.
const RUNS: usize = 5;

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
        let known = gpu.chunk_choices().0.lock().unwrap_or_else(PoisonError::into_inner).get(&key).copied();
        let chunk = match known {
            Some(chunk) => chunk,
            None => {
                let chunk = fastest(gpu, config, shape)?;
                gpu.chunk_choices().0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, chunk);
                chunk
            }
        };
        Self::new(gpu, EflaConfig { chunk: Some(chunk), ..config })
    }
}

/// The chunk length of the fastest forward call, among those that fit workgroup memory.
fn fastest(gpu: &Gpu, config: EflaConfig, shape: &EflaShape) -> Result<usize> {
    let EflaShape { batch, heads, value_heads, tokens } = *shape;
    let [q, k] = [(); 2].map(|()| gpu.zeros(&[batch, heads, tokens, config.key_dim]));
    let [v, out] = [(); 2].map(|()| gpu.zeros(&[batch, value_heads, tokens, config.value_dim]));
    let [beta, decay] = [(); 2].map(|()| gpu.zeros(&[batch, value_heads, tokens]));
    let mut tensors = EflaTensors::new(q?.view(), k?.view(), v?.view(), beta?.view(), out?.view());
    tensors.log_decay = config.gated.then_some(decay?.view());
    let mut best: Option<(Duration, usize)> = None;
    for chunk in [16, 32, 64] {
        let efla = match Efla::new(gpu, EflaConfig { chunk: Some(chunk), ..config }) {
            // It does not fit.
            Err(Error::Limit { .. }) => continue,
            efla => efla?,
        };
        let call = efla.plan(shape)?.bind(&tensors)?;
        // The first run compiles what drivers leave for then.
        for run in 0..=RUNS {
            let start = Instant::now();
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            call.encode(&mut encoder);
            gpu.queue().submit([encoder.finish()]);
            let waited = gpu.device().poll(wgpu::PollType::wait_indefinitely());
            waited.map_err(|error| Error::gpu("waiting for a measurement", error))?;
            let time = start.elapsed();
            if run > 0 && best.is_none_or(|(least, _)| time < least) {
                best = Some((time, chunk));
            }
        }
    }
    // Every device can do chunks of 16.
    Ok(best.map_or(16, |(_, chunk)| chunk))
}
