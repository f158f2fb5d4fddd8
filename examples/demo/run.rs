//! `run`: computes what a case file asks for.

use crate::cli::RunArgs;
use crate::engine::Engine;
use crate::{Outcome, print};
use continuous_attention::case::{self, Case, CaseTensor};

/// Computes and writes the results. The output appears only once it is complete.
pub fn run(args: &RunArgs) -> Outcome {
    let RunArgs { input, output, device, adapter, overrides } = args;
    let case = Case::load(input, overrides)?;
    if let (Ok(from), Ok(to)) = (input.canonicalize(), output.canonicalize())
        && from == to
    {
        return Err(format!("--output: got {}, needed another file than --input", output.display()).into());
    }
    let engine = Engine::open(*device, adapter.as_deref())?;
    let results = engine.compute(&case)?;
    case::save(output, &results, &case.metadata())?;
    let stored = |(name, tensor): (&String, &CaseTensor)| format!("{:?} {name} {:?}", tensor.dtype, tensor.shape);
    let stored: Vec<String> = results.iter().map(stored).collect();
    print(&format!("{}\nComputed on {}\nWritten to {}\n", stored.join(", "), engine.name(), output.display()));
    Ok(true)
}
