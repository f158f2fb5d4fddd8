//! `info`: the adapters.

use crate::Outcome;

/// Lists every adapter.
pub fn info() -> Outcome {
    Err("info: not yet".into())
}
