//! Criterion around the measuring of `demo -- bench`. Its tests run with the demo.

#[path = "../../examples/demo/bench/measure.rs"]
#[allow(dead_code, unused_imports)]
pub mod measure;
#[path = "../../examples/demo/bench/rows.rs"]
#[allow(dead_code, unused_imports)]
pub mod rows;
#[path = "../../examples/demo/bench/work.rs"]
#[allow(dead_code, unused_imports)]
pub mod work;

use continuous_attention::Gpu;
use criterion::{Criterion, SamplingMode, Throughput};
use measure::Timer;
use rows::{Side, Sizes};
use std::time::Duration;
use work::{Spec, Work, shrink};

/// Longest that one call may take: with it the ten samples of a kernel end within some seconds.
const CALL: f64 = 0.4;
/// Calls that are recorded into one pass.
const PASS: u64 = 256;

/// Verifies each kernel at a small and at its own size and hands it to criterion: throughput in FLOPs, by the device's
/// own timestamps where it has them.
pub fn bench(group: &str, sides: impl FnOnce(&Sizes) -> Vec<Side>) {
    let gpu = Gpu::new().expect("benchmarks need an adapter, a software one will do");
    let timer = Timer::new(&gpu);
    let mut criterion = Criterion::default().configure_from_args();
    let mut group = criterion.benchmark_group(group);
    group.sample_size(10).sampling_mode(SamplingMode::Flat);
    group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(2));
    let sizes = Sizes::of(gpu.info().device_type, gpu.limits().max_storage_buffer_binding_size);
    for Side { name, spec } in sides(&sizes) {
        let spec = spec.chosen(&gpu).unwrap_or_else(|error| panic!("{name}: {error}"));
        // Nothing is made ready for a kernel that a filter leaves out.
        let mut ready: Option<Work> = None;
        group.throughput(Throughput::Elements(spec.flops() as u64));
        group.bench_function(&name, |bencher| {
            let work = ready.get_or_insert_with(|| prepare(&gpu, &timer, &name, spec));
            bencher.iter_custom(|calls| {
                let mut seconds = 0.0;
                let mut left = calls;
                while left > 0 {
                    let now = left.min(PASS);
                    seconds += timer.seconds(&|pass| work.record(pass), now as u32).expect("the device answers");
                    left -= now;
                }
                // Where sequences had to be shorter, the time of as many FLOPs.
                Duration::from_secs_f64(seconds * spec.flops() / work.spec.flops())
            });
        });
    }
    group.finish();
    criterion.final_summary();
}

fn prepare(gpu: &Gpu, timer: &Timer, name: &str, spec: Spec) -> Work {
    let ready = || {
        let divisor = shrink(gpu, timer, &[spec], CALL)?;
        if divisor > 1 {
            eprintln!("{name}: T divided by {divisor}, times are those of as many FLOPs as the whole has");
        }
        let work = Work::new(gpu, Spec { tokens: spec.tokens / divisor, ..spec })?;
        work.verify(gpu)?;
        measure::Measured::Ok(work)
    };
    ready().unwrap_or_else(|error| panic!("{name}: {error}"))
}
