//! The command line.

use lexopt::{Arg, Parser, ValueExt};
use std::ffi::OsString;
use std::path::PathBuf;

pub const HELP: &str = "\
Trains one small model around each operator to predict the next CO2 reading of Mauna Loa, and compares them.

Usage: train [options]

  --steps N               steps of Adam for each model, at least 10 [200]
  --quick                 the same as --steps 40: enough to see that every model learns
  --seed N                seed of the initial parameters and of the order of the data [0]
  --seeds N               repeat with N successive seeds, to see how much chance decides [1]
  --adapter NAME|INDEX    adapter to use, as the demo's `info` lists them [the best]
  --report PATH           where the report goes [train.html]

Exit status: 0 every model learned, 1 a training loss did not fall or is no number, 2 bad input or no adapter.
";

#[derive(Debug, PartialEq)]
pub enum Command {
    Train(Options),
    Help,
}

#[derive(Debug, PartialEq)]
pub struct Options {
    pub steps: usize,
    pub seed: u64,
    pub seeds: u64,
    /// Name or index of the adapter; none for the best one.
    pub adapter: Option<String>,
    pub report: PathBuf,
}

pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Command, String> {
    let mut options = Options { steps: 200, seed: 0, seeds: 1, adapter: None, report: "train.html".into() };
    let mut parser = Parser::from_args(args);
    while let Some(arg) = parser.next().map_err(|error| error.to_string())? {
        match arg {
            Arg::Long("help") | Arg::Short('h') => return Ok(Command::Help),
            Arg::Long("quick") => options.steps = 40,
            Arg::Long("steps") => options.steps = number(&mut parser, "--steps", 10, 1_000_000)? as usize,
            Arg::Long("seed") => options.seed = number(&mut parser, "--seed", 0, u64::from(u32::MAX))?,
            Arg::Long("seeds") => options.seeds = number(&mut parser, "--seeds", 1, 1000)?,
            Arg::Long("adapter") => {
                let value = parser.value().map_err(|error| error.to_string())?;
                options.adapter = Some(value.string().map_err(|error| format!("--adapter: {error}"))?);
            }
            Arg::Long("report") => options.report = parser.value().map_err(|error| error.to_string())?.into(),
            other => return Err(format!("{} (see train --help)", other.unexpected())),
        }
    }
    Ok(Command::Train(options))
}

fn number(parser: &mut Parser, name: &str, least: u64, most: u64) -> Result<u64, String> {
    let value = parser.value().map_err(|error| error.to_string())?;
    let number = value.to_str().and_then(|text| text.parse().ok()).filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| {
        format!("{name}: got `{}`, needed a whole number from {least} to {most}", value.to_string_lossy())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse_words(line: &str) -> Result<Command, String> {
        parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn options_are_read_and_mistakes_named() {
        let Ok(Command::Train(options)) = parse_words("--quick --seeds 3 --adapter 1 --report a.html") else {
            panic!()
        };
        let expected =
            Options { steps: 40, seed: 0, seeds: 3, adapter: Some("1".into()), report: PathBuf::from("a.html") };
        assert_eq!(options, expected);
        assert_eq!(parse_words("--steps 10 -h"), Ok(Command::Help));
        for (line, said) in [
            ("--steps 9", "--steps: got `9`"),
            ("--seeds 0", "from 1"),
            ("--seed -1", "--seed: got `-1`"),
            ("--fast", "invalid option"),
            ("twice", "unexpected argument"),
            ("--report", "missing argument"),
        ] {
            let error = parse_words(line).unwrap_err();
            assert!(error.contains(said), "{line}: {error}");
        }
    }
}
