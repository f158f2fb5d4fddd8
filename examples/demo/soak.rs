//! `soak`: random configurations for a while, each compared with float64, and what they leave in memory.

use crate::bench::allocated;
use crate::cli::SoakArgs;
use crate::random::{Case, Judged};
use crate::table::Table;
use crate::{Outcome, print};
use continuous_attention::{AdapterChoice, Gpu, GpuOptions};
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant, SystemTime};

/// Configurations that run again and again at the end. All their shaders are compiled: what grows then is a leak.
const REPEATED: usize = 16;
const REPEATS: usize = 10;

/// Runs configurations until time or their number is up.
pub fn soak(args: &SoakArgs) -> Outcome {
    let adapter = args.adapter.as_deref().map(AdapterChoice::from);
    let gpu = Gpu::with_options(&GpuOptions { adapter, ..GpuOptions::default() })?;
    let seconds = args.seconds.or((args.count.is_none()).then_some(60));
    let limit = seconds.map_or(Duration::MAX, |seconds| Duration::from_secs(seconds as u64));
    let first = args.seed.unwrap_or_else(clock);
    print(&format!("Computed on {}; the first seed is {first}\n", gpu.info().name));
    let wanted = |kind: &str| {
        let has = |word: &str| kind.split(' ').any(|of| of == word);
        args.filter.iter().flat_map(|words| words.split_whitespace()).all(has)
    };
    let seeds = (0..u64::MAX).map(|index| first.wrapping_add(index));
    // Kinds change every few seeds: one that does not turn up in so many does not exist.
    if !seeds.clone().take(10_000).any(|seed| wanted(&Case::draw(seed).kind())) {
        return Err("--filter: there is no such kind (see demo soak --help)".into());
    }

    // Failures are printed here.
    std::panic::set_hook(Box::new(|_| {}));
    let begin = Instant::now();
    let mut tally = Tally { tells: args.count == Some(1), ..Tally::default() };
    let (mut passed, mut before) = (Vec::new(), None);
    for seed in seeds.filter(|&seed| wanted(&Case::draw(seed).kind())) {
        if tally.run(&gpu, seed) {
            passed.push(seed);
        }
        // The first one leaves what is made once.
        before.get_or_insert_with(|| Memory::of(&gpu));
        if begin.elapsed() >= limit || Some(tally.count) == args.count {
            break;
        }
    }
    let soaked = begin.elapsed();
    let compiled = Memory::of(&gpu);
    print(&tally.text(soaked));

    // Allocators keep what they were given once: not the first round counts, but the later ones.
    let repeated = &passed[passed.len().saturating_sub(REPEATED)..];
    let round = |gpu: &Gpu| {
        repeated.iter().for_each(|&seed| {
            Tally::default().run(gpu, seed);
        })
    };
    let (repeating, mut rounds) = (Instant::now(), 0);
    round(&gpu);
    let again = Memory::of(&gpu);
    while rounds < REPEATS && (rounds == 0 || repeating.elapsed() < soaked / 5) {
        round(&gpu);
        rounds += 1;
    }
    let _ = std::panic::take_hook();
    let after = Memory::of(&gpu);
    let before = before.unwrap_or_default();
    let again_text = format!("{} configurations again, {rounds} times", repeated.len());
    print(&format!(
        "\nBytes grown by      on the device      of the process\n{}{}",
        compiled.line("all, with shaders", &before),
        after.line(&again_text, &again)
    ));
    let leaked = after.device > before.device || after.resident > again.resident.map(|bytes| bytes + SLACK);
    print(&format!(
        "\n{} configurations, {} failed, {}\n",
        tally.count,
        tally.failed,
        if leaked { "memory LEAKED" } else { "no memory leaked" }
    ));
    Ok(tally.failed == 0 && !leaked)
}

/// Pages that the allocator of the process may take at any time.
const SLACK: u64 = 16 << 20;

/// A seed that is likely to be new; runs of seeds begin at multiples of a thousand.
fn clock() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    now.as_secs() % 1_000_000 * 1000
}

#[derive(Default)]
struct Tally {
    /// Whether to print every tensor judged.
    tells: bool,
    count: usize,
    failed: usize,
    /// Configurations of each kind, and how many failed.
    kinds: BTreeMap<String, [usize; 2]>,
    /// The largest share of its limit that a tensor of an operator used, and in which configuration.
    worst: BTreeMap<String, (f64, u64)>,
}

impl Tally {
    /// Runs a configuration; whether all of it was right.
    fn run(&mut self, gpu: &Gpu, seed: u64) -> bool {
        let case = Case::draw(seed);
        let kind = case.kind();
        let operator = if kind.contains("efla") { "efla" } else { "attention" };
        let (worst, tells) = (&mut self.worst, self.tells);
        let mut watch = |judged: &Judged| {
            let Judged { tensor, dtype, comparison, label } = judged;
            if tells {
                let (rms, limit) = (comparison.rms, comparison.limit);
                print(&format!("{tensor} {dtype:?}: rms {rms:.2e}, limit {limit:.2e}: {label}\n"));
            }
            let used = (comparison.rms / comparison.limit).max(comparison.max / (10.0 * comparison.limit));
            let entry = worst.entry(format!("{operator} {tensor} {dtype:?}")).or_default();
            // A tensor with NaN uses more than all of its limit.
            if used.is_nan() || used > entry.0 {
                *entry = (if used.is_nan() { f64::INFINITY } else { used }, seed);
            }
        };
        // A failed assertion of the configuration, or a panic of the library.
        let result = catch_unwind(AssertUnwindSafe(|| case.run(gpu, &mut watch)));
        let [all, failed] = self.kinds.entry(kind.clone()).or_default();
        *all += 1;
        self.count += 1;
        let Err(payload) = result else { return true };
        *failed += 1;
        self.failed += 1;
        let text = payload.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| payload.downcast_ref::<&str>().copied()).unwrap_or("a panic");
        print(&format!("FAIL seed {seed}, {kind}: {text}\n"));
        false
    }

    fn text(&self, took: Duration) -> String {
        let mut kinds = Table::new(["kind", "configurations", "failed"]);
        for (kind, [all, failed]) in &self.kinds {
            kinds.rows.push(vec![kind.clone(), all.to_string(), failed.to_string()]);
        }
        let mut worst = Table::new(["tensor", "worst error / limit", "seed"]);
        for (tensor, (used, seed)) in &self.worst {
            worst.rows.push(vec![tensor.clone(), format!("{used:.3}"), seed.to_string()]);
        }
        format!("\nIn {:.0} s:\n{}\n{}", took.as_secs_f64(), kinds.text(), worst.text())
    }
}

/// Bytes in use; none where nobody says.
#[derive(Default)]
struct Memory {
    device: Option<u64>,
    resident: Option<u64>,
}

impl Memory {
    fn of(gpu: &Gpu) -> Self {
        let device = allocated(gpu);
        // Linux: the second number counts resident pages of 4 KiB.
        let resident = std::fs::read_to_string("/proc/self/statm").ok();
        let resident = resident.and_then(|text| text.split(' ').nth(1)?.parse::<u64>().ok()).map(|pages| pages * 4096);
        Memory { device, resident }
    }

    /// How much more than before.
    fn line(&self, name: &str, before: &Memory) -> String {
        let grown = |now: Option<u64>, before: Option<u64>| match (now, before) {
            (Some(now), Some(before)) => format!("{:+}", now as i64 - before as i64),
            _ => "unknown".into(),
        };
        format!("{name:<35} {:>15} {:>15}\n", grown(self.device, before.device), grown(self.resident, before.resident))
    }
}
