//! Ordinary attention of this crate and of burn: one adapter and device, the same inputs, compared, then timed in turn.
//!
//!     cargo run --release --manifest-path benches/peers/Cargo.toml -- [--json FILE] [--pairs N] [--tokens T] [--filter TEXT]
//!
//! Both sides by the clock on the wall, from the submission of a sample's calls to the end of their work: burn has no
//! other. The calls of this crate are bound once, as its callers do; burn's go through its public API, after it has tuned
//! itself.

#[path = "../../../examples/demo/bench/measure.rs"]
#[allow(dead_code)]
mod measure;
#[path = "../../../examples/demo/bench/results.rs"]
#[allow(dead_code)]
mod results;
#[path = "../../../examples/demo/table.rs"]
#[allow(dead_code)]
mod table;
#[path = "../../../examples/demo/bench/work.rs"]
#[allow(dead_code)]
mod work;

use burn::tensor::module::{attention, attention_fallback};
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Device, DeviceKind, Tensor, TensorData};
use continuous_attention::{DType, Gpu, Method, wgpu};
use measure::{Budget, Measured, Pairs, Timer, interleave};
use results::Results;
use std::process::ExitCode;
use std::time::{Duration, Instant};
use table::Table;
use work::{Kernel, Pass, Spec, Work};

const HELP: &str = "\
Times ordinary causal attention of this crate against burn's on one adapter (WGPU_ADAPTER_NAME chooses it).

Usage: peers [options]

  --json FILE    write the results as one flat JSON object
  --pairs N      pairs of every row [30]
  --tokens T     length of the sequences [1024]
  --heads H      heads [8]
  --filter TEXT  only rows whose names contain TEXT
";

struct Args {
    json: Option<std::path::PathBuf>,
    pairs: usize,
    tokens: usize,
    heads: usize,
    filter: String,
}

/// None: help was asked for.
fn parse() -> Measured<Option<Args>> {
    use lexopt::prelude::*;
    let mut args = Args { json: None, pairs: 30, tokens: 1024, heads: 8, filter: String::new() };
    let mut parser = lexopt::Parser::from_env();
    while let Some(arg) = parser.next()? {
        match arg {
            Long("json") => args.json = Some(parser.value()?.into()),
            Long("pairs") => args.pairs = parser.value()?.parse()?,
            Long("tokens") => args.tokens = parser.value()?.parse()?,
            Long("heads") => args.heads = parser.value()?.parse()?,
            Long("filter") => args.filter = parser.value()?.string()?,
            Long("help") | Short('h') => return Ok(None),
            other => return Err(other.unexpected().into()),
        }
    }
    if [args.pairs, args.tokens, args.heads].contains(&0) {
        return Err("--pairs, --tokens, --heads: got 0, needed at least 1".into());
    }
    Ok(Some(args))
}

fn main() -> ExitCode {
    let outcome = match parse() {
        Ok(Some(args)) => peers(&args),
        Ok(None) => {
            print!("{HELP}");
            Ok(())
        }
        Err(error) => Err(error),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(2)
        }
    }
}

/// burn's device and this crate's on top of it: the adapter that this crate would take.
fn open() -> Measured<(Device, Gpu)> {
    let infos: Vec<_> = pollster::block_on(Gpu::adapters()).iter().map(wgpu::Adapter::get_info).collect();
    let picked = Gpu::preferred(&infos)?;
    let wanted = &infos[picked];
    // burn counts the adapters of a kind and backend.
    let alike = |info: &&wgpu::AdapterInfo| info.device_type == wanted.device_type && info.backend == wanted.backend;
    let index = infos[..picked].iter().filter(alike).count();
    let kind = match wanted.device_type {
        wgpu::DeviceType::DiscreteGpu => DeviceKind::DiscreteGpu(index),
        wgpu::DeviceType::IntegratedGpu => DeviceKind::IntegratedGpu(index),
        wgpu::DeviceType::VirtualGpu => DeviceKind::VirtualGpu(index),
        wgpu::DeviceType::Cpu => DeviceKind::Cpu,
        wgpu::DeviceType::Other => DeviceKind::DefaultDevice,
    };
    let (device, setup) = Device::wgpu_options().device_kind(kind).init_with_setup()?;
    let info = setup.adapter.get_info();
    if (&info.name, info.backend) != (&wanted.name, wanted.backend) {
        return Err(format!("burn took {} ({:?}) instead of {}", info.name, info.backend, wanted.name).into());
    }
    Ok((device, Gpu::from_wgpu(setup.device, setup.queue)?))
}

fn peers(args: &Args) -> Measured<()> {
    let begin = Instant::now();
    let progress = |step: &str| eprintln!("[{:5.1} s] {step}", begin.elapsed().as_secs_f64());
    let (device, gpu) = open()?;
    let info = gpu.info();
    progress(&format!("computing on {}", info.name));
    let mut results = Results::default();
    results.text("adapter", &info.name);
    results.text("driver", format!("{} {}", info.driver, info.driver_info).trim());
    results.text("backend", format!("{:?}", info.backend));
    results.text("clock", "wall time");
    let mut table = Table::new(["row", "T", "ours / burn", "interval", "ours, ms", "burn, ms", "difference"]);
    for dim in [64, 128] {
        // What burn's tuner takes, and its attention of separate kernels, which it does not consider for long sequences.
        for (peer, fused) in [("burn", true), ("burn_fallback", false)] {
            let key = format!("ordinary_over_{peer}_d{dim}");
            if !key.contains(&args.filter) {
                continue;
            }
            progress(&key);
            let kernel = Kernel::Attention { method: Method::Softmax, pass: Pass::Forward };
            let (heads, tokens) = (args.heads, args.tokens);
            let spec = Spec { kernel, heads, tokens, dim, dtype: DType::F32 };
            let (pairs, difference) = row(&device, &gpu, spec, fused, args.pairs)?;
            table.rows.push(vec![
                key.clone(),
                args.tokens.to_string(),
                format!("{:.3}", pairs.ratio.median),
                format!("{:.3} to {:.3}", pairs.ratio.low, pairs.ratio.high),
                format!("{:.3}", 1e3 * pairs.first.median),
                format!("{:.3}", 1e3 * pairs.second.median),
                format!("{difference:.1e}"),
            ]);
            for (end, number) in [
                ("", pairs.ratio.median),
                ("_low", pairs.ratio.low),
                ("_high", pairs.ratio.high),
                ("_pairs", pairs.ratio.count as f64),
                ("_tokens", args.tokens as f64),
                ("_first_ms", 1e3 * pairs.first.median),
                ("_second_ms", 1e3 * pairs.second.median),
            ] {
                results.number(format!("{key}{end}"), number);
            }
        }
    }
    println!("{}, {:?}, wall time\n\n{}", info.name, info.backend, table.text());
    if let Some(path) = &args.json {
        std::fs::write(path, results.json()).map_err(|error| format!("{}: {error}", path.display()))?;
    }
    Ok(())
}

/// Times a row; also the largest difference of the results, relative to the largest element.
fn row(device: &Device, gpu: &Gpu, spec: Spec, fused: bool, pairs: usize) -> Measured<(Pairs, f64)> {
    let work = Work::new(gpu, spec)?;
    work.verify(gpu)?;
    let ours = work.read(gpu, "out")?;

    let input = |name: &str| {
        let values: Vec<f32> = (0..spec.heads).flat_map(|head| spec.input(name, head)).collect();
        Tensor::<4>::from_data(TensorData::new(values, [1, spec.heads, spec.tokens, spec.dim]), device)
    };
    let (q, k, v) = (input("q"), input("k"), input("v"));
    let options = AttentionModuleOptions { is_causal: true, ..Default::default() };
    let call = || {
        let function = if fused { attention } else { attention_fallback };
        function(q.clone(), k.clone(), v.clone(), None, None, options)
    };
    let theirs = call().into_data().try_to_vec::<f32>().map_err(|error| format!("burn's result: {error:?}"))?;
    let largest = ours.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
    let apart = |(a, b): (&f32, &f32)| if (a - b).is_nan() { f32::INFINITY } else { (a - b).abs() };
    let difference = f64::from(ours.iter().zip(&theirs).map(apart).fold(0.0, f32::max) / largest);
    if theirs.len() != ours.len() || difference > 1e-4 {
        return Err(format!("burn's result differs by {difference:.1e} of the largest element").into());
    }

    let timer = Timer::wall(gpu);
    let timed = work.timed(&timer)?;
    let sample = |times: usize| -> Measured<f64> {
        device.sync().map_err(|error| format!("burn: {error:?}"))?;
        let begin = Instant::now();
        let results: Vec<_> = (0..times).map(|_| call()).collect();
        device.sync().map_err(|error| format!("burn: {error:?}"))?;
        let seconds = begin.elapsed().as_secs_f64() / times as f64;
        drop(results);
        Ok(seconds)
    };
    // Tuning and compiling end within the first runs.
    let mut tried = f64::INFINITY;
    for _ in 0..3 {
        tried = tried.min(sample(1)?);
    }
    let times = (measure::SAMPLE / tried).ceil().clamp(1.0, 100.0) as usize;
    let budget = Budget { time: Duration::ZERO, pairs: Some(pairs) };
    Ok((interleave(&budget, || timed.sample(), || sample(times))?, difference))
}
