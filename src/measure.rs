//! Choices by measurement instead of by a table.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::Call;

/// Timed runs of each candidate, of which the fastest counts.
const RUNS: usize = 5;

/// The choices made so far on a device.
#[derive(Debug)]
pub(crate) struct Choices<Key>(Mutex<HashMap<Key, usize>>);

impl<Key> Default for Choices<Key> {
    fn default() -> Self {
        Choices(Mutex::default())
    }
}

impl<Key: Eq + Hash> Choices<Key> {
    /// What was chosen before, else the candidate whose call is the fastest, which is kept. Candidates over the device's
    /// limits are passed over; the first fits every device.
    pub fn fastest(
        &self,
        gpu: &Gpu,
        key: Key,
        candidates: &[usize],
        bind: impl Fn(usize) -> Result<Call>,
    ) -> Result<usize> {
        if let Some(known) = self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&key) {
            return Ok(*known);
        }
        let mut best: Option<(Duration, usize)> = None;
        for &candidate in candidates {
            let call = match bind(candidate) {
                Err(Error::Limit { .. }) => continue,
                call => call?,
            };
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
                    best = Some((time, candidate));
                }
            }
        }
        let choice = best.map_or(candidates[0], |(_, candidate)| candidate);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(key, choice);
        Ok(choice)
    }
}
