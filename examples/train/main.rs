//! Trains a small model around each operator, on nothing but this library and plain Rust, and says what comes out.
//!
//!     cargo run --release --example train -- --help
//!
//! The task: the weekly CO2 record of Mauna Loa, irregularly thinned; predict the next reading from those before it and
//! the times between them. The last fifth of the record is held out.

// The demo's data, charts and tables; not everything in them is of use here.
#[allow(dead_code)]
#[path = "../demo/chart.rs"]
mod chart;
#[allow(dead_code)]
#[path = "../demo/co2.rs"]
mod co2;
#[path = "../demo/table.rs"]
mod table;

mod cli;
mod data;
mod model;
mod operator;
mod report;

use cli::{Command, Options};
use continuous_attention::{Gpu, GpuOptions};
use data::{Batch, Data, rms};
use model::{Adam, Model};
use operator::{Kind, Size};
use report::{Entry, Report, Run};
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SIZE: Size = Size { batch: 8, tokens: 64, heads: 2, head_dim: 16 };
/// How often the held-out error is measured in a run.
const MEASUREMENTS: usize = 5;

fn main() -> ExitCode {
    let outcome = match cli::parse(std::env::args_os().skip(1)) {
        Err(mistake) => Err(mistake.into()),
        Ok(Command::Help) => {
            print(cli::HELP);
            Ok(true)
        }
        Ok(Command::Train(options)) => train_all(&options),
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

/// Whether every model learned.
fn train_all(options: &Options) -> Result<bool> {
    let begin = Instant::now();
    let adapter = options.adapter.as_deref().map(Into::into);
    let gpu = Gpu::with_options(&GpuOptions { adapter, ..Default::default() })?;
    let data = Data::new(co2::series()?);
    let windows = data.held_out_windows(SIZE.tokens);
    let held_out = data.held_out_batches(&windows, SIZE.batch, SIZE.tokens);

    let mut entries = Vec::new();
    for kind in Kind::ALL.into_iter().map(Some).chain([None]) {
        let name = kind.map_or("no operator", Kind::name);
        let mut runs = Vec::new();
        for seed in options.seed..options.seed + options.seeds {
            runs.push(train(&gpu, kind, name, &data, &held_out, options.steps, seed)?);
        }
        entries.push(Entry { name, runs });
    }
    let report = Report {
        adapter: gpu.info().name,
        split: data.split,
        entries,
        baselines: data.baselines(&windows),
        seconds: begin.elapsed().as_secs_f64(),
    };
    print(&report.text());
    let path = &options.report;
    std::fs::write(path, report.html()).map_err(|error| format!("{}: {error}", path.display()))?;
    print(&format!("\nReport: {}\n", path.display()));
    for failure in report.failures() {
        eprintln!("{failure}");
    }
    Ok(report.failures().is_empty())
}

/// One model from one seed. Equal seeds see equal data in equal order.
fn train(
    gpu: &Gpu,
    kind: Option<Kind>,
    name: &str,
    data: &Data,
    held_out: &[Batch],
    steps: usize,
    seed: u64,
) -> Result<Run> {
    let mut model = Model::new(gpu, kind, SIZE, seed)?;
    let mut adam = Adam::new(model.parameters.len(), steps);
    let mut rng = fastrand::Rng::with_seed(seed);
    let mut run = Run { parameters: model.parameters.len(), ..Default::default() };
    run.held_out.push((0, held_out_error(&mut model, data, held_out)?));
    let progress = Progress { name, steps };
    for step in 1..=steps {
        let batch = data.training_batch(&mut rng, SIZE.batch, SIZE.tokens);
        let (start, device_before) = (Instant::now(), model.device_time);
        let (loss, gradient) = model.loss_and_gradient(&batch)?;
        adam.update(&mut model.parameters, &gradient);
        // The first step also compiles, which some drivers put off until then.
        if step > 1 {
            run.seconds += start.elapsed().as_secs_f64();
            run.device_seconds += (model.device_time - device_before).as_secs_f64();
        }
        let loss = if gradient.iter().all(|x| x.is_finite()) { loss } else { f64::NAN };
        run.losses.push(loss);
        progress.show(step, loss);
        if !loss.is_finite() {
            break;
        }
        if step * MEASUREMENTS / steps > (step - 1) * MEASUREMENTS / steps {
            run.held_out.push((step, held_out_error(&mut model, data, held_out)?));
        }
    }
    progress.end();
    Ok(run)
}

/// Root mean square error of the held-out predictions, ppm.
fn held_out_error(model: &mut Model, data: &Data, batches: &[Batch]) -> Result<f64> {
    let mut errors = Vec::new();
    for batch in batches {
        let y = model.predict(batch)?;
        let counted = y.iter().zip(&batch.targets).zip(&batch.counted).filter(|(_, counted)| **counted);
        errors.extend(counted.map(|((&y, &target), _)| data.change * (f64::from(y) - f64::from(target))));
    }
    Ok(rms(errors.into_iter()))
}

/// A bar on stderr, where someone watches; nothing in a log.
struct Progress<'a> {
    name: &'a str,
    steps: usize,
}

impl Progress<'_> {
    fn show(&self, step: usize, loss: f64) {
        const WIDTH: usize = 30;
        if std::io::stderr().is_terminal() {
            let done = step * WIDTH / self.steps;
            let (bar, rest) = ("█".repeat(done), "░".repeat(WIDTH - done));
            eprint!("\r  {:<21} {bar}{rest} {step:>5}/{}   loss {loss:.3} ", self.name, self.steps);
        } else if step == self.steps {
            eprintln!("  {:<21} {step} steps, loss {loss:.3}", self.name);
        }
    }

    fn end(&self) {
        if std::io::stderr().is_terminal() {
            // Back to an empty line.
            eprint!("\r\x1b[K");
        }
    }
}

/// Prints to stdout; a reader that has gone away (`train | head`) is no reason to panic.
fn print(text: &str) {
    let _ = std::io::stdout().write_all(text.as_bytes());
}
