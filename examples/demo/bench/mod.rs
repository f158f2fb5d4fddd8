//! `bench`: how fast the kernels are here, against each other and against what the adapter can do.

pub mod measure;
mod results;
mod roof;
mod rows;
mod work;

use crate::cli::BenchArgs;
use crate::engine::kind;
use crate::table::Table;
use crate::{Outcome, print, write_file};
use continuous_attention::{AdapterChoice, Gpu, GpuOptions};
use measure::{Budget, Measured, Spread, Timer, alone, interleave};
use results::Results;
use roof::{Limit, Roof};
use rows::{Row, Sizes};
use std::time::{Duration, Instant};
pub use work::allocated;
use work::{Spec, Work, shrink};

/// What all of it may take, compiling included.
const TOTAL: Duration = Duration::from_secs(100);
const ROOFS: Duration = Duration::from_secs(4);

pub fn bench(args: &BenchArgs) -> Outcome {
    let begin = Instant::now();
    // A file that can't be read is known before anything is measured.
    let old = args.compare.as_deref().map(Results::load).transpose()?;
    let adapter = args.adapter.as_deref().map(AdapterChoice::from);
    let options = GpuOptions { adapter, no_subgroups: args.no_subgroups, ..GpuOptions::default() };
    let gpu = Gpu::with_options(&options)?;
    let info = gpu.info();
    let sizes = if args.quick {
        Sizes::quick()
    } else {
        Sizes::of(info.device_type, gpu.limits().max_storage_buffer_binding_size)
    };
    let mut rows = rows::all(&sizes, args.variants);
    if let Some(filter) = &args.filter {
        rows.retain(|row| row.key.contains(filter.as_str()));
    }
    if rows.is_empty() {
        let keys: Vec<String> = rows::all(&sizes, args.variants).into_iter().map(|row| row.key).collect();
        return Err(format!("--filter: no row is named so, there are {}", keys.join(", ")).into());
    }
    let progress = |step: &str| eprintln!("[{:5.1} s] {step}", begin.elapsed().as_secs_f64());
    let timer = Timer::new(&gpu);

    progress(&format!("peaks of {}", info.name));
    let roof = Roof::measure(&gpu, &timer, &Budget { time: ROOFS, pairs: args.quick.then_some(1) })?;
    let mut bench = Bench { gpu: &gpu, timer: &timer, roof, args, found: Found::default() };
    bench.found.results.text("adapter", &info.name);
    bench.found.results.text("driver", format!("{} {}", info.driver, info.driver_info).trim());
    bench.found.results.text("backend", format!("{:?}", info.backend));
    bench.found.results.text("clock", timer.clock());
    bench.found.results.number("peak_flops", roof.flops);
    bench.found.results.number("peak_bandwidth", roof.bandwidth);
    for (at, row) in rows.iter().enumerate() {
        progress(&format!("{} ({} of {})", row.key, at + 1, rows.len()));
        // What is left, shared fairly: a row that ended early leaves more to the others.
        let share = TOTAL.saturating_sub(begin.elapsed()) / (rows.len() - at) as u32;
        if let Err(error) = bench.row(row, share) {
            bench.found.failures.push(format!("{}: {error}", row.key));
        }
    }
    let Found { results, ratios, kernels, shorter, fewer, failures } = bench.found;

    print(&format!(
        "{}, {}, {:?}, driver {} {}\nMedians by {}; the interval holds the ratio's median with a probability of 95 %.\n\
         Peaks: {:.1} GFLOP/s of f32 FMAs, {:.1} GB/s.\n",
        info.name,
        kind(info.device_type),
        info.backend,
        info.driver,
        info.driver_info,
        timer.clock(),
        roof.flops * 1e-9,
        roof.bandwidth * 1e-9
    ));
    for table in [&ratios, &kernels].into_iter().flatten() {
        print(&format!("\n{}", table.text()));
    }
    if (shorter || fewer) && !args.quick {
        let mut notes = Vec::new();
        notes.extend(shorter.then_some("sequences are shorter than they should be where T says so"));
        notes.extend(fewer.then_some("some rows have fewer than 30 pairs"));
        print(&format!("\nTo end in time {}; `--pairs 30` insists on all.\n", notes.join(", and ")));
    }
    if let Some(old) = &old {
        print(&comparison(&results, old));
    }
    print(&failures.iter().map(|failure| format!("\nFAIL {failure}")).collect::<String>());
    print(&format!("\n{} rows in {:.0} s, {} failed\n", rows.len(), begin.elapsed().as_secs_f64(), failures.len()));
    if let Some(path) = &args.json {
        write_file(path, &results.json())?;
    }
    Ok(failures.is_empty())
}

#[derive(Default)]
struct Found {
    results: Results,
    ratios: Option<Table>,
    kernels: Option<Table>,
    /// Whether a row had to make do with shorter sequences, or with fewer pairs than are good.
    shorter: bool,
    fewer: bool,
    failures: Vec<String>,
}

struct Bench<'a> {
    gpu: &'a Gpu,
    timer: &'a Timer,
    roof: Roof,
    args: &'a BenchArgs,
    found: Found,
}

impl Bench<'_> {
    /// Verifies, times and notes down a row within about `share`.
    fn row(&mut self, row: &Row, share: Duration) -> Measured<()> {
        let begin = Instant::now();
        let sides: Vec<_> = [Some(&row.first), row.second.as_ref()].into_iter().flatten().collect();
        let mut specs: Vec<Spec> = sides.iter().map(|side| side.spec).collect();
        // Some of the time goes into compiling and comparing.
        let once = 0.7 * share.as_secs_f64() / (measure::LEAST + 2) as f64;
        let divisor = shrink(self.gpu, self.timer, &specs, if self.forced() { f64::INFINITY } else { once })?;
        specs.iter_mut().for_each(|spec| spec.tokens /= divisor);
        self.found.shorter |= divisor > 1;
        let works = specs.iter().map(|spec| Work::new(self.gpu, *spec)).collect::<Measured<Vec<_>>>()?;
        works.iter().try_for_each(|work| work.verify(self.gpu))?;
        let timed = works.iter().map(|work| work.timed(self.timer)).collect::<Measured<Vec<_>>>()?;
        let pairs = if self.args.quick { Some(3) } else { self.args.pairs };
        let budget = Budget { time: share.saturating_sub(begin.elapsed()), pairs };
        match (&*timed, &*works) {
            ([first, second], [first_work, second_work]) => {
                let pairs = interleave(&budget, || first.sample(), || second.sample())?;
                self.found.fewer |= pairs.ratio.count < measure::ENOUGH;
                self.ratio(row, &specs, &pairs);
                self.kernel(&sides[0].name, first_work, &pairs.first);
                self.kernel(&sides[1].name, second_work, &pairs.second);
            }
            _ => self.kernel(&row.key, &works[0], &alone(&budget, || timed[0].sample())?),
        }
        Ok(())
    }

    /// Whether sizes stay what they are.
    fn forced(&self) -> bool {
        self.args.pairs.is_some() || self.args.quick
    }

    fn ratio(&mut self, row: &Row, specs: &[Spec], pairs: &measure::Pairs) {
        let header = ["ratio", "T", "first / second", "interval", "first, ms", "second, ms", "pairs"];
        let table = self.found.ratios.get_or_insert_with(|| Table::new(header));
        let (milliseconds, ratio) = (|spread: &Spread| 1e3 * spread.median, pairs.ratio);
        let mut tokens = specs[0].tokens.to_string();
        if specs[1].tokens != specs[0].tokens {
            tokens += &format!(", {}", specs[1].tokens);
        }
        if specs[0].tokens != row.first.spec.tokens {
            tokens += &format!(" of {}", row.first.spec.tokens);
        }
        table.rows.push(vec![
            row.key.clone(),
            tokens,
            format!("{:.3}", ratio.median),
            format!("{:.3} to {:.3}", ratio.low, ratio.high),
            digits(milliseconds(&pairs.first)),
            digits(milliseconds(&pairs.second)),
            ratio.count.to_string(),
        ]);
        for (end, number) in [
            ("", ratio.median),
            ("_low", ratio.low),
            ("_high", ratio.high),
            ("_pairs", ratio.count as f64),
            ("_tokens", specs[0].tokens as f64),
            ("_first_ms", milliseconds(&pairs.first)),
            ("_second_ms", milliseconds(&pairs.second)),
        ] {
            self.found.results.number(format!("{}{end}", row.key), number);
        }
    }

    /// A kernel's own line, the first time that it is met.
    fn kernel(&mut self, name: &str, work: &Work, spread: &Spread) {
        let header =
            ["kernel", "H", "T", "D", "ms", "GFLOP/s", "GB/s", "of its roof", "limited by", "memory, MB", "workspace"];
        let table = self.found.kernels.get_or_insert_with(|| Table::new(header));
        if table.rows.iter().any(|row| row[0] == name) {
            return;
        }
        let Spec { heads, tokens, dim, .. } = work.spec;
        let (flops, bytes, seconds) = (work.spec.flops(), work.spec.bytes(), spread.median);
        let (least, limit) = self.roof.least(flops, bytes);
        let megabytes = |bytes: u64| digits(bytes as f64 * 1e-6);
        table.rows.push(vec![
            name.into(),
            heads.to_string(),
            tokens.to_string(),
            dim.to_string(),
            digits(1e3 * seconds),
            digits(flops / seconds * 1e-9),
            digits(bytes / seconds * 1e-9),
            format!("{:.1} %", 100.0 * least / seconds),
            if limit == Limit::Arithmetic { "FMAs".into() } else { "bandwidth".into() },
            megabytes(work.memory_bytes),
            megabytes(work.workspace_bytes),
        ]);
        for (end, number) in [
            ("_ms", 1e3 * seconds),
            ("_tokens", tokens as f64),
            ("_roof_share", least / seconds),
            ("_fma_share", flops / self.roof.flops / seconds),
            ("_bandwidth_share", bytes / self.roof.bandwidth / seconds),
            ("_memory_bytes", work.memory_bytes as f64),
            ("_workspace_bytes", work.workspace_bytes as f64),
        ] {
            self.found.results.number(format!("{name}{end}"), number);
        }
    }
}

/// Old and new results side by side.
fn comparison(new: &Results, old: &Results) -> String {
    let mut table = Table::new(["compared", "old", "new", "new / old"]);
    for (key, old, new) in new.beside(old) {
        table.rows.push(vec![key.into(), digits(old), digits(new), format!("{:.3}", new / old)]);
    }
    let mut text = format!("\n{}", table.text());
    for key in ["adapter", "driver", "backend", "clock"] {
        if let Some((old, new)) = new.differs(old, key) {
            text += &format!("\nAnother {key}: {old} before, {new} now");
        }
    }
    text
}

/// Three digits that count, without an exponent unless it is needed.
fn digits(number: f64) -> String {
    match number.abs() {
        0.0 => "0".into(),
        size if !(1e-3..1e7).contains(&size) => format!("{number:.2e}"),
        size if size < 1.0 => format!("{number:.4}"),
        size if size < 10.0 => format!("{number:.2}"),
        size if size < 100.0 => format!("{number:.1}"),
        _ => format!("{number:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short() {
        let shown = [0.0, 0.01234, 1.234, 35.26, 1527.4, 3.1e10].map(digits);
        assert_eq!(shown, ["0", "0.0123", "1.23", "35.3", "1527", "3.10e10"]);
    }

    #[test]
    fn a_comparison_names_what_changed() {
        let (mut old, mut new) = (Results::default(), Results::default());
        for (results, adapter, number) in [(&mut old, "one", 2.0), (&mut new, "two", 3.0)] {
            results.text("adapter", adapter);
            results.number("a_over_b", number);
        }
        let text = comparison(&new, &old);
        assert!(text.contains("1.500") && text.contains("Another adapter: one before, two now"), "{text}");
    }
}
