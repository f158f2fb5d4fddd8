//! The command line: what was asked for, or one sentence about what is wrong with it.

use crate::engine::Device;
use lexopt::{Arg, Parser, ValueExt};
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::PathBuf;

/// What to do.
#[derive(Debug, PartialEq)]
pub enum Command {
    /// No subcommand: the job on the CO2 series.
    Main(MainArgs),
    Info,
    Run(RunArgs),
    Check(CheckArgs),
    Bench(BenchArgs),
    Soak(SoakArgs),
    /// Print this text and stop.
    Help(String),
}

#[derive(Debug, PartialEq)]
pub struct MainArgs {
    pub device: Device,
    /// Name or index of the adapter; none for the best one.
    pub adapter: Option<String>,
    pub report: PathBuf,
    /// Folder that also gets the figures, an SVG file each.
    pub figures: Option<PathBuf>,
}

#[derive(Debug, PartialEq)]
pub struct RunArgs {
    pub input: PathBuf,
    pub output: PathBuf,
    pub device: Device,
    pub adapter: Option<String>,
    /// Metadata key to the value that replaces the case's own.
    pub overrides: BTreeMap<String, String>,
}

#[derive(Debug, PartialEq)]
pub struct CheckArgs {
    pub cases: Vec<PathBuf>,
    pub adapter: Option<String>,
    /// Metadata key to the value that replaces the case's own.
    pub overrides: BTreeMap<String, String>,
}

#[derive(Debug, PartialEq, Default)]
pub struct BenchArgs {
    pub adapter: Option<String>,
    /// Part of the names of the rows to measure.
    pub filter: Option<String>,
    /// Whether to measure every tile shape too.
    pub variants: bool,
    /// Whether to run what adapters without subgroups run.
    pub no_subgroups: bool,
    /// Pairs of every row; none for as many as time allows.
    pub pairs: Option<usize>,
    /// Whether to take small sizes and few pairs.
    pub quick: bool,
    /// Where the results go.
    pub json: Option<PathBuf>,
    /// Earlier results to stand beside them.
    pub compare: Option<PathBuf>,
}

#[derive(Debug, PartialEq, Default)]
pub struct SoakArgs {
    pub adapter: Option<String>,
    /// How long to go on; none for 60 seconds, or as long as `count` takes.
    pub seconds: Option<usize>,
    /// Of the first configuration; none for one of the clock's.
    pub seed: Option<u64>,
    /// How many configurations at most.
    pub count: Option<usize>,
    /// Words of the kind of configurations to run.
    pub filter: Option<String>,
}

/// What a metadata value must be.
enum Needed {
    OneOf(&'static [&'static str]),
    /// Or `none`.
    Finite,
    /// Or `none`.
    Positive,
}

const BOOLEAN: Needed = Needed::OneOf(&["true", "false"]);

/// Every metadata key of a case and what it takes; the flag is the key with `-` for `_`.
static METADATA: [(&str, Needed); 11] = [
    ("op", Needed::OneOf(&["continuous_attention", "softmax_attention", "efla"])),
    ("causal", BOOLEAN),
    ("sink", Needed::OneOf(&["zero", "first", "given", "none"])),
    ("scale", Needed::Finite),
    ("window", Needed::Positive),
    ("integrator", Needed::OneOf(&["exact", "euler", "rk2", "rk4"])),
    ("normalize_q", BOOLEAN),
    ("normalize_k", BOOLEAN),
    ("chunk", Needed::OneOf(&["16", "32", "64", "none"])),
    ("form", Needed::OneOf(&["chunked", "recurrent"])),
    ("layout", Needed::OneOf(&["bhtd", "bthd"])),
];

impl Needed {
    fn describe(&self) -> String {
        match self {
            Needed::OneOf(values) => values.join("|"),
            Needed::Finite => "a finite number, or none".into(),
            Needed::Positive => "a whole number of at least 1, or none".into(),
        }
    }

    fn accepts(&self, value: &str) -> bool {
        match self {
            Needed::OneOf(values) => values.contains(&value),
            Needed::Finite => value == "none" || value.parse::<f32>().is_ok_and(f32::is_finite),
            Needed::Positive => value == "none" || value.parse::<usize>().is_ok_and(|n| n > 0),
        }
    }
}

const MAIN_HELP: &str = "\
Exact continuous softmax attention and error-free linear attention (EFLA) on a GPU.

Usage: demo [options]                               smooth and predict the CO2 record of Mauna Loa by both operators
       demo info                                    list the adapters
       demo run --input CASE --output RESULT        compute what a case file (safetensors) asks for
       demo check CASE...                           compare the GPU with a case's expected values and with float64
       demo bench                                   measure how fast the kernels are on this adapter
       demo soak --seconds N                        compare random configurations with float64 for N seconds

Options of the first form:
  --device gpu|reference  where to compute; reference is float64 on the CPU [gpu]
  --adapter NAME|INDEX    adapter to use, as `demo info` lists them [the best]
  --report PATH           where the report goes [report.html]
  --figures FOLDER        write the report's figures there too, as SVG files

`demo run --help` says more, and so do check, bench and soak. WGPU_ADAPTER_NAME chooses an adapter as well.
A machine without any adapter computes by the reference.
Exit status: 0 all is well, 1 a result misses its limit, 2 bad input.
";

const INFO_HELP: &str = "\
Lists every adapter with its driver, type, and the features and limits that matter here.

Usage: demo info
";

const RUN_HELP: &str = "\
Computes what a case file asks for and writes the results under their own names (out, lse, final_state, ...).

Usage: demo run --input CASE --output RESULT [options]

  --input CASE            tensors and metadata, safetensors
  --output RESULT         where the results go, safetensors
  --device gpu|reference  where to compute; reference is float64 on the CPU [gpu]
  --adapter NAME|INDEX    adapter to use, as `demo info` lists them [the best]
";

const CHECK_HELP: &str = "\
Compares the GPU with the float64 reference and, where a case has them, with its expected values.

Usage: demo check CASE... [options]

Prints a line per tensor. Exit status 1 if one misses its limit; 2 if a case could not be read or computed, the others
are checked all the same. Options that change the results leave out the comparison with the expected values. Steps of
EFLA that amplify rounding errors (γ < 0; for Euler and Runge-Kutta also γ > 1.9) are compared but not judged.

  --adapter NAME|INDEX    adapter to use, as `demo info` lists them [the best]
";

const BENCH_HELP: &str = "\
Measures how fast the kernels are on this adapter: against each other, pair by pair, and each against the adapter's own
peaks, the rate of f32 FMAs and the bandwidth of memory. Every kernel is compared with float64 before it is timed.

Usage: demo bench [options]

Ends in less than two minutes: where the adapter is slow with fewer pairs, then with shorter sequences, and says so.
Exit status 1 if a result was wrong or a row could not be measured; the other rows are measured all the same.

  --filter TEXT           only rows whose names contain TEXT
  --variants              every tile shape too
  --no-subgroups          the kernels of adapters without subgroups
  --pairs N               N pairs of every row, at full size, however long that takes [30, or what time allows]
  --quick                 tiny sizes, three pairs: tries everything out, the times mean nothing
  --json FILE             write the results as one flat JSON object
  --compare OLD.json      print earlier results, from --json, beside these
  --adapter NAME|INDEX    adapter to use, as `demo info` lists them [the best]
";

const SOAK_HELP: &str = "\
Runs random configurations of both operators, forward and backward, compares each with float64 and counts bytes leaked.

Usage: demo soak [options]

Options, sizes, storage types and places in memory are all random, NaN lies wherever nothing may be read, and whatever is
written outside of a result is noticed. Prints the seed of each failure; `demo soak --seed SEED --count 1` repeats it.
Ends with the number of each kind, the worst error of each tensor, and how much memory has grown.
Exit status 1 if a result was wrong or memory leaked.

  --seconds N             stop after N seconds, at the end of a configuration [60, or as long as --count takes]
  --seed SEED             of the first configuration, the next has the next [of the clock]
  --count N               stop after N configurations
  --filter WORDS          only kinds with all of these words, of continuous, softmax, attention, cache; efla, chunked,
                          recurrent, gated; packed
  --adapter NAME|INDEX    adapter to use, as `demo info` lists them [the best]
";

/// The flags that replace a case's metadata, for the help.
fn metadata_help() -> String {
    let mut help = "\nThese replace what the case's metadata says:\n".to_string();
    for (key, needed) in &METADATA {
        help += &format!("  {:<23} {}\n", flag(key), needed.describe());
    }
    help
}

fn flag(key: &str) -> String {
    format!("--{}", key.replace('_', "-"))
}

/// Reads the arguments after the program's name.
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut parser = Parser::from_args(args);
    // Only the very first argument can be a subcommand.
    let first = match parser.raw_args().map_err(text)?.peek() {
        Some(word) if !word.to_string_lossy().starts_with('-') => Some(word.to_owned()),
        _ => None,
    };
    if first.is_some() {
        parser.next().map_err(text)?;
    }
    match first.as_ref().map(|word| word.to_string_lossy()).as_deref() {
        None => parse_main(parser),
        Some("info") => parse_info(parser),
        Some("run") => parse_run(parser),
        Some("check") => parse_check(parser),
        Some("bench") => parse_bench(parser),
        Some("soak") => parse_soak(parser),
        Some("help") => Ok(Command::Help(MAIN_HELP.into())),
        Some(other) => {
            Err(format!("unknown command `{other}`, needed info, run, check, bench, soak or none (see demo --help)"))
        }
    }
}

fn parse_main(mut parser: Parser) -> Result<Command, String> {
    let mut args =
        MainArgs { device: Device::default(), adapter: None, report: PathBuf::from("report.html"), figures: None };
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Long("device") => args.device = device(&mut parser)?,
            Arg::Long("adapter") => args.adapter = Some(string(&mut parser, "--adapter")?),
            Arg::Long("report") => args.report = path(&mut parser, "--report")?,
            Arg::Long("figures") => args.figures = Some(path(&mut parser, "--figures")?),
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help(MAIN_HELP.into())),
            other => return Err(unexpected(other, "demo --help")),
        }
    }
    Ok(Command::Main(args))
}

fn parse_info(mut parser: Parser) -> Result<Command, String> {
    match parser.next().map_err(text)? {
        None => Ok(Command::Info),
        Some(Arg::Long("help") | Arg::Short('h')) => Ok(Command::Help(INFO_HELP.into())),
        Some(other) => Err(unexpected(other, "demo info --help")),
    }
}

fn parse_run(mut parser: Parser) -> Result<Command, String> {
    let (mut input, mut output, mut adapter) = (None, None, None);
    let mut on = Device::default();
    let mut overrides = BTreeMap::new();
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Long("input") => input = Some(path(&mut parser, "--input")?),
            Arg::Long("output") => output = Some(path(&mut parser, "--output")?),
            Arg::Long("device") => on = device(&mut parser)?,
            Arg::Long("adapter") => adapter = Some(string(&mut parser, "--adapter")?),
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help(RUN_HELP.to_string() + &metadata_help())),
            other => match metadata_key(&other) {
                Some((key, needed)) => drop(overrides.insert(key.into(), metadata(&mut parser, key, needed)?)),
                None => return Err(unexpected(other, "demo run --help")),
            },
        }
    }
    let missing = |name: &str| format!("run: {name} is missing (see demo run --help)");
    let input = input.ok_or_else(|| missing("--input CASE"))?;
    let output = output.ok_or_else(|| missing("--output RESULT"))?;
    Ok(Command::Run(RunArgs { input, output, device: on, adapter, overrides }))
}

fn parse_check(mut parser: Parser) -> Result<Command, String> {
    let mut args = CheckArgs { cases: Vec::new(), adapter: None, overrides: BTreeMap::new() };
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Value(case) => args.cases.push(case.into()),
            Arg::Long("adapter") => args.adapter = Some(string(&mut parser, "--adapter")?),
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help(CHECK_HELP.to_string() + &metadata_help())),
            other => match metadata_key(&other) {
                Some((key, needed)) => drop(args.overrides.insert(key.into(), metadata(&mut parser, key, needed)?)),
                None => return Err(unexpected(other, "demo check --help")),
            },
        }
    }
    if args.cases.is_empty() {
        return Err("check: a case file is missing (see demo check --help)".into());
    }
    Ok(Command::Check(args))
}

fn parse_bench(mut parser: Parser) -> Result<Command, String> {
    let mut args = BenchArgs::default();
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Long("adapter") => args.adapter = Some(string(&mut parser, "--adapter")?),
            Arg::Long("filter") => args.filter = Some(string(&mut parser, "--filter")?),
            Arg::Long("variants") => args.variants = true,
            Arg::Long("no-subgroups") => args.no_subgroups = true,
            Arg::Long("quick") => args.quick = true,
            Arg::Long("pairs") => args.pairs = Some(count(&mut parser, "--pairs")?),
            Arg::Long("json") => args.json = Some(path(&mut parser, "--json")?),
            Arg::Long("compare") => args.compare = Some(path(&mut parser, "--compare")?),
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help(BENCH_HELP.into())),
            other => return Err(unexpected(other, "demo bench --help")),
        }
    }
    Ok(Command::Bench(args))
}

fn parse_soak(mut parser: Parser) -> Result<Command, String> {
    let mut args = SoakArgs::default();
    while let Some(arg) = parser.next().map_err(text)? {
        match arg {
            Arg::Long("adapter") => args.adapter = Some(string(&mut parser, "--adapter")?),
            Arg::Long("filter") => args.filter = Some(string(&mut parser, "--filter")?),
            Arg::Long("seconds") => args.seconds = Some(count(&mut parser, "--seconds")?),
            Arg::Long("count") => args.count = Some(count(&mut parser, "--count")?),
            Arg::Long("seed") => {
                let value = string(&mut parser, "--seed")?;
                let mistake = |_| format!("--seed: got `{value}`, needed a whole number below 2^64");
                args.seed = Some(value.parse().map_err(mistake)?);
            }
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help(SOAK_HELP.into())),
            other => return Err(unexpected(other, "demo soak --help")),
        }
    }
    Ok(Command::Soak(args))
}

fn metadata_key(arg: &Arg) -> Option<(&'static str, &'static Needed)> {
    let Arg::Long(name) = arg else { return None };
    METADATA.iter().find(|(key, _)| key.replace('_', "-") == *name).map(|(key, needed)| (*key, needed))
}

fn metadata(parser: &mut Parser, key: &str, needed: &Needed) -> Result<String, String> {
    let value = string(parser, &flag(key))?;
    if !needed.accepts(&value) {
        return Err(format!("{}: got `{value}`, needed {}", flag(key), needed.describe()));
    }
    Ok(value)
}

fn device(parser: &mut Parser) -> Result<Device, String> {
    match string(parser, "--device")?.as_str() {
        "gpu" => Ok(Device::Gpu),
        "reference" => Ok(Device::Reference),
        other => Err(format!("--device: got `{other}`, needed gpu|reference")),
    }
}

fn string(parser: &mut Parser, name: &str) -> Result<String, String> {
    let value = parser.value().map_err(text)?;
    let shown = value.to_string_lossy().into_owned();
    match value.string() {
        Ok(value) if !value.is_empty() => Ok(value),
        _ => Err(format!("{name}: got `{shown}`, needed some text in UTF-8")),
    }
}

fn count(parser: &mut Parser, name: &str) -> Result<usize, String> {
    let value = string(parser, name)?;
    let mistake = || format!("{name}: got `{value}`, needed a whole number of at least 1");
    value.parse().ok().filter(|count| *count > 0).ok_or_else(mistake)
}

fn path(parser: &mut Parser, name: &str) -> Result<PathBuf, String> {
    let value = parser.value().map_err(text)?;
    if value.is_empty() { Err(format!("{name}: got an empty text, needed a path")) } else { Ok(value.into()) }
}

fn unexpected(arg: Arg, help: &str) -> String {
    format!("{} (see {help})", arg.unexpected())
}

fn text(error: lexopt::Error) -> String {
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn no_argument_is_the_main_job() {
        let Ok(Command::Main(args)) = parse_words("") else { panic!() };
        assert_eq!((args.device, args.adapter, args.report), (Device::Gpu, None, "report.html".into()));
        let Ok(Command::Main(args)) = parse_words("--device=reference --adapter 1 --report a/b.html") else { panic!() };
        assert_eq!((args.device, args.adapter, args.report), (Device::Reference, Some("1".into()), "a/b.html".into()));
    }

    #[test]
    fn every_metadata_key_can_be_replaced() {
        let line = "run --input a --output b --op efla --causal false --sink none --scale -0.5 --window 3 \
                    --integrator rk2 --normalize-q true --normalize-k false --chunk 32 --form recurrent --layout bthd";
        let Ok(Command::Run(args)) = parse_words(line) else { panic!() };
        assert_eq!(args.overrides.len(), METADATA.len());
        assert_eq!(args.overrides["scale"], "-0.5");
        assert_eq!(args.overrides["normalize_k"], "false");
        let Ok(Command::Check(args)) = parse_words("check a --window 3 b") else { panic!() };
        assert_eq!(args.cases, [PathBuf::from("a"), "b".into()]);
        assert_eq!(args.overrides["window"], "3");
    }

    #[test]
    fn bench_takes_its_options() {
        assert_eq!(parse_words("bench"), Ok(Command::Bench(BenchArgs::default())));
        let line = "bench --filter d64 --variants --no-subgroups --pairs 30 --json a.json --compare b.json --adapter 0 --quick";
        let Ok(Command::Bench(args)) = parse_words(line) else { panic!() };
        assert_eq!((args.filter.as_deref(), args.adapter.as_deref(), args.pairs), (Some("d64"), Some("0"), Some(30)));
        assert_eq!((args.json, args.compare), (Some("a.json".into()), Some("b.json".into())));
        assert!(args.variants && args.no_subgroups && args.quick);
    }

    #[test]
    fn soak_takes_its_options() {
        assert_eq!(parse_words("soak"), Ok(Command::Soak(SoakArgs::default())));
        let line = "soak --seconds 5 --seed 0 --count 7 --filter efla --adapter 0";
        let Ok(Command::Soak(args)) = parse_words(line) else { panic!() };
        assert_eq!((args.seconds, args.seed, args.count), (Some(5), Some(0), Some(7)));
        assert_eq!((args.filter.as_deref(), args.adapter.as_deref()), (Some("efla"), Some("0")));
    }

    #[test]
    fn mistakes_are_named() {
        for (line, said) in [
            ("jump", "unknown command `jump`"),
            ("run --input a", "--output RESULT is missing"),
            ("run --output a", "--input CASE is missing"),
            ("run --input", "missing argument"),
            ("run a --input b --output c", "unexpected argument"),
            ("check", "a case file is missing"),
            ("check a --causal maybe", "--causal: got `maybe`, needed true|false"),
            ("check a --window 0", "--window: got `0`, needed a whole number of at least 1"),
            ("check a --scale inf", "--scale: got `inf`, needed a finite number"),
            ("check a --device gpu", "invalid option '--device'"),
            ("--device cpu", "--device: got `cpu`, needed gpu|reference"),
            ("--input a", "invalid option '--input'"),
            ("info now", "unexpected argument"),
            ("bench --pairs 0", "--pairs: got `0`, needed a whole number of at least 1"),
            ("bench --filter", "missing argument"),
            ("bench fast", "unexpected argument"),
            ("soak --seconds 0", "--seconds: got `0`, needed a whole number of at least 1"),
            ("soak --seed -1", "--seed: got `-1`, needed a whole number below 2^64"),
        ] {
            let error = parse_words(line).expect_err(line);
            assert!(error.contains(said), "{line}: {error}");
            assert!(!error.contains('\n'), "{line}: {error}");
        }
    }

    #[test]
    fn every_command_has_help() {
        for line in
            ["--help", "-h", "help", "info --help", "run --input a --help", "check -h", "bench --help", "soak -h"]
        {
            assert!(matches!(parse_words(line), Ok(Command::Help(_))), "{line}");
        }
        assert!(metadata_help().contains("--normalize-k"));
    }
}
