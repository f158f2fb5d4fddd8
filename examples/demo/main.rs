//! The demo: both operators on real data, checked against float64, and on your own tensors.
//!
//!     cargo run --release --example demo -- --help
//!
//! Without arguments it smooths the weekly CO2 record of Mauna Loa by ordinary and by continuous attention, predicts
//! it with EFLA and its approximations, compares every device result with float64 and writes a report.

mod bench;
mod chart;
mod check;
mod cli;
mod co2;
mod engine;
mod exact;
mod info;
mod judge;
mod memory;
#[path = "../../tests/suite/random/mod.rs"]
mod random;
mod report;
mod run;
mod smoothing;
mod soak;
mod table;
#[cfg(test)]
mod variants;

use cli::{Command, MainArgs};
use engine::Engine;
use std::io::Write;
use std::process::ExitCode;
use std::time::Instant;

/// Whether every check passed, or one sentence about why there is no answer.
pub type Outcome = Result<bool, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let outcome = match cli::parse(std::env::args_os().skip(1)) {
        Err(mistake) => Err(mistake.into()),
        Ok(Command::Help(text)) => {
            print(&text);
            Ok(true)
        }
        Ok(Command::Info) => info::info(),
        Ok(Command::Run(args)) => run::run(&args),
        Ok(Command::Check(args)) => check::check(&args),
        Ok(Command::Bench(args)) => bench::bench(&args),
        Ok(Command::Soak(args)) => soak::soak(&args),
        Ok(Command::Main(args)) => main_job(&args),
    };
    match outcome {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

fn main_job(args: &MainArgs) -> Outcome {
    let begin = Instant::now();
    let mut progress = |step: &str| eprintln!("[{:5.1} s] {step}", begin.elapsed().as_secs_f64());
    let engine = Engine::open(args.device, args.adapter.as_deref())?;
    progress(&format!("computing on {}", engine.name()));
    let series = co2::series()?;
    let smoothing = smoothing::run(&engine, &series, &mut progress)?;
    let memory = memory::run(&engine, &series, &mut progress)?;
    let seconds = begin.elapsed().as_secs_f64();

    let report =
        report::Report { adapter: engine.name(), on_gpu: engine.is_gpu(), series: &series, smoothing, memory, seconds };
    print(&report.text());
    write_file(&args.report, &report.html())?;
    if let Some(folder) = &args.figures {
        std::fs::create_dir_all(folder).map_err(|error| format!("{}: {error}", folder.display()))?;
        for (name, svg) in report.figures() {
            write_file(&folder.join(name), &svg)?;
        }
    }
    print(&format!("\nReport: {}\n", args.report.display()));
    Ok(report.passed())
}

fn write_file(path: &std::path::Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("{}: {error}", path.display()))
}

/// Prints to stdout; a reader that has gone away (`demo | head`) is no reason to panic.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
