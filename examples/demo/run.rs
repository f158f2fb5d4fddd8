//! `run`: computes what a case file asks for.

use crate::Outcome;
use crate::cli::RunArgs;

/// Computes and writes the results.
pub fn run(args: &RunArgs) -> Outcome {
    let RunArgs { input, output, device, adapter, overrides } = args;
    Err(format!("run: not yet ({input:?} to {output:?} on {device:?} {adapter:?} with {overrides:?})").into())
}
