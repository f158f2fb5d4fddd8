//! `check`: the GPU against a case's expected values and the float64 reference.

use crate::cli::CheckArgs;
use crate::engine::{Device, Engine};
use crate::judge::{self, Check, Limits};
use crate::{Outcome, exact, print};
use continuous_attention::Result;
use continuous_attention::case::Case;
use std::collections::BTreeMap;
use std::path::Path;

/// Checks every case and says whether all results are within their limits. A case that can't be read or computed does
/// not keep the others from being checked.
pub fn check(args: &CheckArgs) -> Outcome {
    let engine = Engine::open(Device::Gpu, args.adapter.as_deref())?;
    print(&format!("Computed on {}\nrms must not exceed the limit, max not ten times the limit.\n", engine.name()));
    let (mut compared, mut failed, mut broken) = (0, 0, 0);
    for file in &args.cases {
        let name = file.display();
        match compare(&engine, file, &args.overrides) {
            Ok(Compared { checks, notes }) => {
                print(&format!("\n{name}\n{}", judge::table(checks.iter()).text()));
                print(&notes.iter().map(|note| format!("  {note}\n")).collect::<String>());
                print(&judge::failures(checks.iter()));
                compared += checks.len();
                failed += checks.iter().filter(|check| !check.passed()).count();
            }
            Err(error) => {
                let text = error.to_string();
                let named = if text.contains(&name.to_string()) { text } else { format!("{name}: {text}") };
                eprintln!("error: {named}");
                broken += 1;
            }
        }
    }
    if !engine.is_gpu() {
        print("\nNo GPU was checked: there is no adapter, and the reference was compared with itself.\n");
    }
    let verdict = if failed == 0 { "none failed".into() } else { format!("{failed} FAILED") };
    print(&format!("\n{compared} comparisons, {verdict}\n"));
    match broken {
        0 => Ok(failed == 0),
        _ => Err(format!("{broken} of {} cases could not be checked", args.cases.len()).into()),
    }
}

struct Compared {
    checks: Vec<Check>,
    /// What was not compared, and why.
    notes: Vec<String>,
}

fn compare(engine: &Engine, file: &Path, overrides: &BTreeMap<String, String>) -> Result<Compared> {
    let case = Case::load(file, overrides)?;
    let limits = Limits::of(&case)?;
    let exact = exact::compute(&case)?;
    let got = engine.compute(&case)?;
    let (mut checks, mut notes) = (Vec::new(), Vec::new());
    if !case.expected.is_empty() && !same_results(&case, file, overrides) {
        notes.push("the options given change the results: not compared with those expected in the file".into());
    } else {
        for (tensor, want) in &case.expected {
            let Some(got) = got.get(tensor) else { continue };
            checks.push(Check::expected(format!("{tensor} against expected"), tensor, got, want, &limits));
        }
    }
    checks.extend(Check::all(&got, &exact, &limits, |tensor| format!("{tensor} against float64")));
    checks.sort_by(|a, b| a.name.cmp(&b.name));

    notes.extend(limits.unjudged.map(|why| format!("nothing is promised here, a miss does not count: {why}")));
    Ok(Compared { checks, notes })
}

/// Whether the case means the same with the overrides as without. `form` and `chunk` choose a way to the same results.
fn same_results(case: &Case, file: &Path, overrides: &BTreeMap<String, String>) -> bool {
    let meaning = |case: &Case| {
        let mut metadata = case.metadata();
        metadata.retain(|key, _| key != "form" && key != "chunk");
        metadata
    };
    overrides.is_empty() || Case::load(file, &BTreeMap::new()).is_ok_and(|original| meaning(&original) == meaning(case))
}
