//! `check`: the GPU against a case's expected values and the float64 reference.

use crate::Outcome;
use crate::cli::CheckArgs;

/// Checks every case and says whether all results are within their limits.
pub fn check(args: &CheckArgs) -> Outcome {
    let CheckArgs { cases, adapter, overrides } = args;
    Err(format!("check: not yet ({cases:?} on {adapter:?} with {overrides:?})").into())
}
