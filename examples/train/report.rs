//! What the training says: a table on the terminal, and one page without outside parts.

use crate::chart::{self, Axis, Chart, Series, Style};
use crate::table::{Table, escape};

/// How one model from one seed fared.
#[derive(Debug, Clone, Default)]
pub struct Run {
    pub parameters: usize,
    /// Training loss of every step; ends with the first that is no number.
    pub losses: Vec<f64>,
    /// Held-out rms error, ppm, after so many steps.
    pub held_out: Vec<(usize, f64)>,
    /// Time of all steps but the first, evaluation left out.
    pub seconds: f64,
    /// The part of it spent waiting for the device.
    pub device_seconds: f64,
}

/// All runs of one model.
pub struct Entry {
    pub name: &'static str,
    pub runs: Vec<Run>,
}

pub struct Report {
    pub adapter: String,
    /// Date at which the held-out part begins.
    pub split: f64,
    pub entries: Vec<Entry>,
    /// Name and held-out rms error, ppm.
    pub baselines: [(&'static str, f64); 2],
    pub seconds: f64,
}

impl Run {
    /// Mean loss of the first and of the last tenth of the steps.
    fn ends(&self) -> [f64; 2] {
        let tenth = self.losses.len().div_ceil(10);
        let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
        [mean(&self.losses[..tenth]), mean(&self.losses[self.losses.len() - tenth..])]
    }

    fn final_error(&self) -> f64 {
        self.held_out.last().map_or(f64::NAN, |&(_, error)| error)
    }
}

/// Mean, and the range if there are several.
fn summary(values: &[f64]) -> String {
    let mean = values.iter().sum::<f64>() / values.len() as f64;
    let (low, high) =
        (values.iter().copied().fold(f64::MAX, f64::min), values.iter().copied().fold(f64::MIN, f64::max));
    if values.len() > 1 { format!("{mean:.3} ({low:.3}–{high:.3})") } else { format!("{mean:.3}") }
}

impl Report {
    /// A line for every run that did not learn.
    pub fn failures(&self) -> Vec<String> {
        let mut failures = Vec::new();
        for Entry { name, runs } in &self.entries {
            for run in runs {
                let [first, last] = run.ends();
                if !last.is_finite() || run.held_out.iter().any(|(_, error)| !error.is_finite()) {
                    failures.push(format!("{name}: the loss is no number at step {}", run.losses.len()));
                } else if last >= first {
                    failures.push(format!("{name}: the training loss did not fall ({first:.3} to {last:.3})"));
                }
            }
        }
        failures
    }

    /// The table and the remarks for the terminal.
    pub fn text(&self) -> String {
        let mut text = format!("Trained on {} in {:.0} s\n\n{}", self.adapter, self.seconds, self.table().text());
        for note in NOTES {
            text += &format!("\n{note}\n");
        }
        text
    }

    fn table(&self) -> Table {
        let mut table =
            Table::new(["model", "parameters", "training loss", "held-out error, ppm", "ms a step", "of it device"]);
        for Entry { name, runs } in &self.entries {
            let all = |value: &dyn Fn(&Run) -> f64| runs.iter().map(value).collect::<Vec<_>>();
            let milliseconds = |value: &dyn Fn(&Run) -> f64| {
                let mean = |run: &Run| 1e3 * value(run) / (run.losses.len().max(2) - 1) as f64;
                format!("{:.0}", all(&mean).iter().sum::<f64>() / runs.len() as f64)
            };
            table.rows.push(vec![
                name.to_string(),
                runs[0].parameters.to_string(),
                summary(&all(&|run| run.ends()[1])),
                summary(&all(&Run::final_error)),
                milliseconds(&|run| run.seconds),
                milliseconds(&|run| run.device_seconds),
            ]);
        }
        for (name, error) in self.baselines {
            let mut row = vec![name.to_string(), String::new(), String::new(), summary(&[error])];
            row.resize(table.header.len(), String::new());
            table.rows.push(row);
        }
        table
    }

    /// The training loss of the first seed, smoothed.
    fn loss_chart(&self) -> Chart {
        let curve = |run: &Run| {
            let width = run.losses.len().div_ceil(30);
            let point = |(index, losses): (usize, &[f64])| {
                ((index + width) as f64, losses.iter().sum::<f64>() / losses.len() as f64)
            };
            run.losses.windows(width).enumerate().map(point).collect()
        };
        let series = self.series(Style::Line, curve);
        self.chart(
            "Training loss of every model against steps.",
            "mean squared error, 1 = repeating the last reading",
            series,
        )
    }

    /// The held-out error of the first seed on the way, with the baselines.
    fn error_chart(&self) -> Chart {
        let steps = self.steps();
        let curve = |run: &Run| run.held_out.iter().map(|&(step, error)| (step as f64, error)).collect();
        let mut series = self.series(Style::MarkedLine, curve);
        for (name, error) in self.baselines {
            // Both lines look alike; the numbers tell them apart.
            let name = format!("{name}: {error:.3}");
            series.push(Series::new(&name, Style::Line(5), vec![(0.0, error), (steps, error)]));
        }
        self.chart(
            "Held-out error of every model against steps, with two baselines.",
            "held-out rms error, ppm",
            series,
        )
    }

    fn steps(&self) -> f64 {
        self.entries.iter().flat_map(|entry| &entry.runs).map(|run| run.losses.len()).max().unwrap_or(1) as f64
    }

    fn series(&self, style: fn(usize) -> Style, curve: impl Fn(&Run) -> Vec<(f64, f64)>) -> Vec<Series> {
        let entries = self.entries.iter().enumerate();
        entries.map(|(index, entry)| Series::new(entry.name, style(index), curve(&entry.runs[0]))).collect()
    }

    fn chart(&self, label: &str, y: &str, series: Vec<Series>) -> Chart {
        let values = || series.iter().flat_map(|series| &series.points).map(|&(_, y)| y).filter(|y| y.is_finite());
        let (low, high) = (values().fold(f64::MAX, f64::min), values().fold(0.0, f64::max));
        // What models start from would leave no room for where they end.
        let high = high.min(4.0 * low);
        let step = tick_step(high - low);
        let range = ((low / step).floor() * step, (high / step).ceil() * step);
        Chart {
            label: label.into(),
            height: 260.0,
            x: Axis::linear("steps", (0.0, self.steps()), tick_step(self.steps())),
            y: Axis::linear(y, range, step),
            series,
        }
    }

    /// The page.
    pub fn html(&self) -> String {
        let figure = |chart: Chart, caption: &str| {
            let svg = chart.inline();
            format!("<figure><div class=\"wide\">\n{svg}</div><figcaption>{caption}</figcaption></figure>\n")
        };
        let failures = self.failures();
        let (class, verdict) =
            if failures.is_empty() { ("good", "every model learned".into()) } else { ("bad", failures.join("; ")) };
        format!(
            "<!doctype html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<title>Training with continuous attention and EFLA</title>
<style>
{PAGE_STYLE}{}</style>
</head>
<body>
<main>
<h1>Training with continuous attention and EFLA</h1>
<p class=\"facts\"><span class=\"verdict {class}\">{}</span> Trained on {} in {:.0} s.</p>
<p>Four small models, alike but for the operator, learn to predict the next CO₂ reading at Mauna Loa from the readings
before it and the times between them. The weekly record is thinned at random, in stretches of few and of many readings;
what follows {:.0} is held out.</p>
{}{}{}{}
<footer>Data: C.D. Keeling and T.P. Whorf (2004), Scripps Institution of Oceanography, distributed by the Carbon
Dioxide Information Analysis Center, Oak Ridge National Laboratory.</footer>
</main>
</body>
</html>
",
            chart::STYLE,
            escape(&verdict),
            escape(&self.adapter),
            self.seconds,
            self.split,
            self.table().html("how the models end"),
            figure(self.error_chart(), "Held-out error on the way; first seed."),
            figure(self.loss_chart(), "Training loss, averaged over a thirtieth of the steps; first seed."),
            NOTES.map(|note| format!("<p class=\"note\">{}</p>\n", escape(note))).concat(),
        )
    }
}

/// What the numbers mean and how far to trust them; wrapped for a terminal.
const NOTES: [&str; 2] = [
    "\
All models have the same width, steps, seed and data; only the operator differs (EFLA and DeltaNet add a projection for
β). \"No operator\" sees the last two readings and where its window began. Training loss: the mean of the last tenth
of the steps, 1 is the cost of repeating the last reading. Held-out error: root mean square over every held-out reading
under eight thinnings, predicted from the last 33 to 64 readings. The models know how long a year is but not the
date: they must find the season in the readings. \"Add trend and season\" knows the date.",
    "\
How much is chance: over seeds 0 to 2 (200 steps, llvmpipe) the held-out error was 0.530 to 0.564 for continuous
attention, 0.539 to 0.545 for softmax attention, 0.538 to 0.543 for EFLA, 0.517 to 0.546 for DeltaNet, 0.772 to 0.781
without an operator. These ranges overlap: this task shows that each operator learns, not which is best.",
];

/// A round distance of ticks: about six in `length`.
fn tick_step(length: f64) -> f64 {
    let power = 10f64.powf((length / 6.0).log10().floor());
    [1.0, 2.0, 5.0, 10.0].map(|step| step * power).into_iter().find(|step| step * 6.0 >= length).unwrap_or(power)
}

/// The demo's page style, as far as this page needs it.
const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--quiet:#59636e;--rule:#dfe3e8;\
--good:#00684a;--good-bg:#dff3ea;--bad:#a63a00;--bad-bg:#fdebe0}
@media(prefers-color-scheme:dark){:root{--page:#0e1115;--card:#14181d;--text:#e8ebee;--quiet:#9fa9b4;--rule:#2a3139;\
--good:#5fd6ad;--good-bg:#12332a;--bad:#ff9d66;--bad-bg:#3a2213}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);\
font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:820px;margin:0 auto;padding:2rem 1rem 3rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .6rem} p{margin:.6rem 0}
.facts,.note,figcaption,footer{color:var(--quiet)} .note,figcaption,footer{font-size:.9rem}
.verdict{display:inline-block;padding:.1rem .6rem;border-radius:1rem;margin-right:.4rem;font-weight:600}
.verdict.good{color:var(--good);background:var(--good-bg)} .verdict.bad{color:var(--bad);background:var(--bad-bg)}
figure{margin:1.2rem 0;padding:.8rem;background:var(--card);border:1px solid var(--rule);border-radius:10px}
figure svg{display:block;width:100%;min-width:540px;height:auto} figcaption{padding:.4rem .2rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;background:var(--card)}
caption{text-align:left;color:var(--quiet);font-size:.9rem;padding:.3rem 0}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;font-weight:400}
thead th{color:var(--quiet);font-size:.9rem;white-space:normal;vertical-align:bottom}
th:first-child{text-align:left}
footer{margin-top:3rem;border-top:1px solid var(--rule);padding-top:1rem}
";

#[cfg(test)]
mod tests {
    use super::*;

    fn report(losses: [f64; 20]) -> Report {
        let run = Run { parameters: 1, losses: losses.to_vec(), held_out: vec![(0, 1.0), (20, 0.5)], ..Run::default() };
        let entries = vec![Entry { name: "a & b", runs: vec![run.clone(), run] }];
        let baselines = [("one", 0.9), ("other", 0.4)];
        Report { adapter: "<adapter>".into(), split: 1990.0, entries, baselines, seconds: 1.0 }
    }

    #[test]
    fn a_loss_that_does_not_fall_is_named() {
        assert_eq!(report(std::array::from_fn(|step| 1.0 / (1 + step) as f64)).failures(), Vec::<String>::new());
        for (losses, said) in
            [([0.5; 20], "did not fall"), (std::array::from_fn(|i| [0.5, f64::NAN][i / 19]), "no number")]
        {
            let failures = report(losses).failures();
            assert!(
                failures.len() == 2 && failures[0].starts_with("a & b: ") && failures[0].contains(said),
                "{failures:?}"
            );
            assert!(!report(losses).html().contains("every model learned"));
        }
    }

    #[test]
    fn the_page_stands_alone_and_is_balanced() {
        let page = report(std::array::from_fn(|step| 1.0 / (1 + step) as f64)).html();
        assert!(page.contains("&lt;adapter&gt;") && page.contains("a &amp; b") && page.contains("every model learned"));
        assert_eq!(page.matches("http").count(), page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
        assert!(!page.contains("NaN") && !page.contains("<script") && !page.contains("src="));
        for tag in ["svg", "table", "figure", "div", "tr", "p"] {
            let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
    }

    #[test]
    fn ticks_are_round() {
        for (length, step) in [(200.0, 50.0), (1.0, 0.2), (0.6, 0.1), (0.07, 0.02)] {
            assert!((tick_step(length) / step - 1.0).abs() < 1e-9, "{length}: {}", tick_step(length));
        }
    }
}
