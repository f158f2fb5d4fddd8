//! The weekly CO2 series of Mauna Loa, 1958 to 2001: one reading a week, some weeks missing.
//!
//! C.D. Keeling and T.P. Whorf (2004), Scripps Institution of Oceanography, distributed by the Carbon Dioxide
//! Information Analysis Center, Oak Ridge National Laboratory. Public domain.

use std::fmt;

const CSV: &str = include_str!("../data/mauna_loa_weekly_co2.csv");

/// One reading.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sample {
    /// Calendar date as a fractional year: 1958.25 is early April 1958.
    pub year: f64,
    /// Mole fraction of CO2 in dry air, ppm.
    pub ppm: f64,
}

/// A line of a series that can't be read.
#[derive(Debug, PartialEq)]
pub struct BadLine {
    number: usize,
    text: String,
    needed: &'static str,
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        write!(f, "CO2 series, line {}: got `{}`, needed {}", self.number, self.text, self.needed)
    }
}

impl std::error::Error for BadLine {}

/// The whole series in time order, missing weeks left out.
pub fn series() -> Result<Vec<Sample>, BadLine> {
    parse(CSV)
}

/// Reads `date,co2` lines below one header line; a missing reading is an empty field and is dropped.
pub fn parse(csv: &str) -> Result<Vec<Sample>, BadLine> {
    let mut samples: Vec<Sample> = Vec::new();
    for (index, line) in csv.lines().enumerate().skip(1) {
        let bad = |needed| BadLine { number: index + 1, text: line.to_string(), needed };
        let (date, ppm) = line.split_once(',').ok_or_else(|| bad("date,co2"))?;
        let year = fractional_year(date.trim()).ok_or_else(|| bad("a date as yyyymmdd"))?;
        if ppm.trim().is_empty() {
            continue;
        }
        let ppm: f64 =
            ppm.trim().parse().ok().filter(|x: &f64| x.is_finite()).ok_or_else(|| bad("a reading in ppm"))?;
        if samples.last().is_some_and(|last| last.year >= year) {
            return Err(bad("a later date than the line before"));
        }
        samples.push(Sample { year, ppm });
    }
    Ok(samples)
}

/// `19580329` as a fractional year: the part of the year that has passed when that day begins.
fn fractional_year(date: &str) -> Option<f64> {
    if date.len() != 8 || !date.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let number = |range: std::ops::Range<usize>| date[range].parse::<u32>().ok();
    let (year, month, day) = (number(0..4)?, number(4..6)?, number(6..8)?);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let lengths = [31, if leap { 29 } else { 28 }, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let before = lengths.get(..(month as usize).checked_sub(1)?)?;
    if day == 0 || day > *lengths.get(before.len())? {
        return None;
    }
    let passed = before.iter().sum::<u32>() + day - 1;
    Some(year as f64 + passed as f64 / lengths.iter().sum::<u32>() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_become_fractional_years() {
        assert_eq!(fractional_year("19580101"), Some(1958.0));
        assert_eq!(fractional_year("20010702"), Some(2001.0 + 182.0 / 365.0));
        assert_eq!(fractional_year("20001231"), Some(2000.0 + 365.0 / 366.0));
        assert_eq!(fractional_year("20000229"), Some(2000.0 + 59.0 / 366.0));
        for wrong in ["19010229", "20001301", "20000001", "20000100", "2000010", "2000-1-1", "é00001", ""] {
            assert_eq!(fractional_year(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn gaps_are_dropped_and_bad_lines_named() {
        let samples = parse("date,co2\n19580329,316.1\n19580405,\n19580412,317.6\n").unwrap();
        assert_eq!(samples.iter().map(|s| s.ppm).collect::<Vec<_>>(), [316.1, 317.6]);
        for (csv, line) in
            [("h\n1958,1", 2), ("h\n19580329", 2), ("h\n19580329,1\n19580405,x", 3), ("h\n19580329,inf", 2)]
        {
            assert_eq!(parse(csv).unwrap_err().number, line, "{csv}");
        }
        assert!(parse("h\n19580405,1\n19580329,1").unwrap_err().to_string().contains("later date"));
    }

    #[test]
    fn the_series_is_whole() {
        let samples = series().unwrap();
        assert_eq!(samples.len(), 2284 - 59);
        assert_eq!(samples[0].ppm, 316.1);
        assert!((samples[0].year - 1958.24).abs() < 0.002);
        assert!(samples.iter().all(|s| (300.0..400.0).contains(&s.ppm)));
    }
}
