//! What the main job says: short tables on the terminal, and one page without outside parts.

use crate::chart::{self, Axis, Chart, Series, Style};
use crate::co2::Sample;
use crate::judge::{self, Check};
use crate::memory::{self, INTEGRATORS, Memory, SCALES};
use crate::smoothing::{BANDWIDTH, Smoothing};
use crate::table::{Table, escape};

/// Everything the main job found.
pub struct Report<'a> {
    /// What the results were computed on.
    pub adapter: &'a str,
    /// Whether that was a GPU, not the reference.
    pub on_gpu: bool,
    pub series: &'a [Sample],
    pub smoothing: Smoothing,
    pub memory: Memory,
    /// Time of the whole job, the float64 comparisons included.
    pub seconds: f64,
}

impl Report<'_> {
    /// Whether every device result is within its limit.
    pub fn passed(&self) -> bool {
        self.checks().all(Check::passed)
    }

    fn checks(&self) -> impl Iterator<Item = &Check> {
        self.smoothing.checks.iter().chain(&self.memory.checks)
    }

    /// One line on all checks.
    fn verdict(&self) -> String {
        let (total, good) = (self.checks().count(), self.checks().filter(|check| check.passed()).count());
        match self.on_gpu {
            true => format!("{good} of {total} results agree with float64"),
            false => format!("no GPU checked, all {total} results are the reference’s own"),
        }
    }

    /// The tables for the terminal.
    pub fn text(&self) -> String {
        let mut text = format!("Computed on {}\nTook {:.1} s\n", self.adapter, self.seconds);
        text += "\nCO2 curve from seasonally thinned samples: rms error in ppm\n";
        text += &self.smoothing_table().text();
        text += "\nPredicting the next reading from an associative memory: rms error in ppm\n";
        text += &self.memory_table().text();
        text += &format!("  (repeating the last reading: {:.3})\n", self.memory.persistence);
        text += &format!("\n{}", self.verdict());
        let worst = self.checks().max_by(|a, b| a.used().total_cmp(&b.used()));
        if let Some(worst) = worst.filter(|check| self.on_gpu && check.passed()) {
            text += &format!("; the farthest off uses {:.0} % of its limit ({})", 100.0 * worst.used(), worst.name);
        }
        text.push('\n');
        if !self.passed() {
            text += &judge::failures(self.checks());
        }
        text
    }

    fn smoothing_table(&self) -> Table {
        let mut table = Table::new(["other season kept", "samples", "ordinary", "continuous"]);
        for row in &self.smoothing.rows {
            table.rows.push(vec![
                format!("{} %", 100.0 * row.kept),
                row.samples.len().to_string(),
                format!("{:.3}", row.softmax_rmse),
                format!("{:.3}", row.continuous_rmse),
            ]);
        }
        table
    }

    fn memory_table(&self) -> Table {
        let names = INTEGRATORS.map(|(_, name)| name);
        let mut table = Table::new(["key scale", "x = β|k|²"].into_iter().chain(names));
        for scale in SCALES {
            let step = (1e4 * memory::BETA * scale * scale).round() / 1e4;
            let mut row = vec![scale.to_string(), step.to_string()];
            row.extend(INTEGRATORS.map(|(integrator, _)| match self.memory.cell(integrator, scale).map(|c| c.rmse) {
                Some(Some(rmse)) => format!("{rmse:.3}"),
                Some(None) => "diverged".into(),
                None => String::new(),
            }));
            table.rows.push(row);
        }
        table
    }

    /// The figures as files of their own: name and content.
    pub fn figures(&self) -> [(&'static str, String); 3] {
        [
            ("smoothing.svg", self.curves().file()),
            ("smoothing_error.svg", self.deviations().file()),
            ("memory.svg", self.memory_chart().file()),
        ]
    }

    /// Ten years of the curves: over all 44 the rise of 55 ppm would hide the differences.
    fn curves(&self) -> Chart {
        let window = (1980.0, 1990.0);
        let Smoothing { rows, years, full, .. } = &self.smoothing;
        let thinned = rows.last();
        let curve = |values: &[f64]| -> Vec<(f64, f64)> { years.iter().copied().zip(values.iter().copied()).collect() };
        let dots = |samples: &[Sample]| -> Vec<(f64, f64)> { samples.iter().map(|s| (s.year, s.ppm)).collect() };
        let mut series = vec![Series::new("reading left out", Style::Dots(0), dots(self.series))];
        if let Some(row) = thinned {
            series.push(Series::new("reading kept", Style::Dots(1), dots(&row.samples)));
            series.push(Series::new("ordinary, from the kept", Style::Line(1), curve(&row.softmax)));
            series.push(Series::new("continuous, from the kept", Style::Line(0), curve(&row.continuous)));
        }
        series.push(Series::new("continuous, from all readings", Style::Line(4), curve(full)));
        Chart {
            label: "Weekly CO2 readings at Mauna Loa, 1980 to 1990, with three smoothed curves. Where 10 % of one \
                    season is kept, the curve of ordinary attention runs above the one from all readings; the curve of \
                    continuous attention stays on it."
                .into(),
            height: 300.0,
            x: Axis::linear("year", window, 1.0),
            y: Axis::linear("CO₂, ppm", (334.0, 358.0), 4.0),
            series,
        }
    }

    /// How far the curves from the thinned series are from the one that used all readings.
    fn deviations(&self) -> Chart {
        let Smoothing { rows, years, full, .. } = &self.smoothing;
        let curve = |values: &[f64]| -> Vec<(f64, f64)> {
            years.iter().zip(values.iter().zip(full)).map(|(&year, (value, full))| (year, value - full)).collect()
        };
        let mut series = vec![Series::new("", Style::Line(5), vec![(1958.0, 0.0), (2002.0, 0.0)])];
        let mut range: (f64, f64) = (-0.5, 0.5);
        if let Some(row) = rows.last() {
            series.push(Series::new("ordinary", Style::Line(1), curve(&row.softmax)));
            series.push(Series::new("continuous", Style::Line(0), curve(&row.continuous)));
        }
        for (_, y) in series.iter().flat_map(|series| &series.points) {
            range = (range.0.min((2.0 * y).floor() / 2.0), range.1.max((2.0 * y).ceil() / 2.0));
        }
        Chart {
            label: "Difference from the curve of all readings, 1961 to 1998, with 10 % of one season kept. Ordinary \
                    attention is off by one to two ppm nearly everywhere, continuous attention by a few tenths."
                .into(),
            height: 220.0,
            x: Axis::linear("year", (1960.0, 2000.0), 5.0),
            y: Axis::linear("error of the curve, ppm", range, 0.5),
            series,
        }
    }

    /// Prediction error against key scale.
    fn memory_chart(&self) -> Chart {
        let (low, high) = (SCALES[0], SCALES[SCALES.len() - 1]);
        let persistence = self.memory.persistence;
        let repeat = vec![(low * 0.85, persistence), (high * 1.18, persistence)];
        let mut series = vec![Series::new("repeating the last reading", Style::Line(5), repeat)];
        for (index, (integrator, name)) in INTEGRATORS.into_iter().enumerate() {
            let cells = || self.memory.cells.iter().filter(|cell| cell.integrator == integrator);
            let points = cells().filter_map(|cell| Some((cell.scale, cell.rmse?))).collect();
            let lost = cells().filter(|cell| cell.rmse.is_none()).map(|cell| cell.scale).collect();
            series.push(Series { name: name.into(), style: Style::MarkedLine(index), points, lost });
        }
        Chart {
            label: "One-step prediction error against key scale, both logarithmic. All four integrators agree up to \
                    key scale 1. Euler and RK2 diverge from 2 on, RK4 from 4 on. The exact one never does."
                .into(),
            height: 260.0,
            x: Axis::logarithmic("key scale s = |k|", (low * 0.85, high * 1.18), &SCALES),
            y: Axis::logarithmic("rms error of the prediction, ppm", (0.4, 2.5), &[0.4, 0.5, 0.7, 1.0, 1.5, 2.0]),
            series,
        }
    }

    /// The page.
    pub fn html(&self) -> String {
        let figure = |chart: Chart, caption: &str| {
            let svg = chart.inline();
            format!(
                "<figure><div class=\"wide\" tabindex=\"0\">\n{svg}</div><figcaption>{caption}</figcaption></figure>\n"
            )
        };
        let all_pass = self.passed();
        let smoothing =
            figure(
                self.curves(),
                "Ten years of the series. Every reading from mid-March to early August is kept and 10 % of the others.",
            ) + &figure(
                self.deviations(),
                "The same curves over the whole series, as difference from the one that used all readings.",
            ) + &self.smoothing_table().html("rms difference from the continuous curve of all readings, ppm");
        let memory = figure(
            self.memory_chart(),
            "A cross: the state passed a million times the largest value. Up to key scale 1, RK2 and RK4 lie on the \
             exact line.",
        ) + &self.memory_table().html("rms error of the one-step prediction, ppm");
        let details = |title: &str, checks: &[Check]| {
            let good = checks.iter().filter(|check| check.passed()).count();
            format!(
                "<details{}><summary>{title}: {good} of {} within their limits</summary>\n{}</details>\n",
                if good == checks.len() { "" } else { " open" },
                checks.len(),
                judge::table(checks.iter()).html("device result against float64")
            )
        };
        let accuracy =
            details("Smoothing", &self.smoothing.checks) + &details("Associative memory", &self.memory.checks);
        let persistence = self.memory.persistence;
        let (adapter, verdict, seconds) = (escape(self.adapter), self.verdict(), self.seconds);
        let verdict_class = if all_pass { "good" } else { "bad" };
        let style = chart::STYLE;
        format!(
            "<!doctype html>
<html lang=\"en\">
<head>
<meta charset=\"utf-8\">
<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">
<title>Continuous attention on real data</title>
<style>
{PAGE_STYLE}{style}</style>
</head>
<body>
<main>
<h1>Continuous attention on real data</h1>
<p class=\"facts\"><span class=\"verdict {verdict_class}\">{verdict}</span> Computed on {adapter} in {seconds:.1} s.</p>
<p>Two operators from <code>continuous-attention</code> run on 44 years of weekly CO₂ readings at Mauna Loa: an exact
integral in place of attention’s sum, and error-free linear attention (EFLA).</p>

<h2>Attention that weighs time, not samples</h2>
<p>A Gaussian kernel smoother is an attention with two-dimensional keys. Half the year loses most of its readings
here. Ordinary softmax attention counts samples, so its curve leans towards the season that kept them. Continuous
attention integrates over time between the samples (<code>intervals</code>) and hardly notices. The bandwidth is
{BANDWIDTH} years.</p>
{smoothing}
<p class=\"note\">Which readings are kept is random with a fixed seed. With other seeds the last row comes out between
about 0.2 and 0.45 ppm for continuous and between 1.45 and 1.6 ppm for ordinary attention.</p>

<h2>A memory that can’t blow up</h2>
<p>Each reading is written into an associative memory under a key made of its date (level, slow trend and three
harmonics of the year), then the memory is asked for the next date. EFLA solves the write exactly. DeltaNet takes one
Euler step, RK2 and RK4 a Runge-Kutta step. As keys get longer the step x = β|k|² grows (β = {beta}), and the
approximations leave the range in which they contract: 2 for Euler and RK2, 2.785 for RK4.</p>
{memory}
<p class=\"note\">Repeating the last reading gives {persistence:.3} ppm. With long keys the exact memory replaces
outright what it held under a key, so its error levels off. A weaker write, as at key scale 1 or by RK4 at 2, averages
over more readings and predicts a little better; what EFLA adds is that no key scale breaks it.</p>

<h2>Checked against float64</h2>
<p>Every device result is compared with a float64 computation on the same inputs. <i>rms</i> is
rms(error)/rms(reference) and must not exceed the limit, <i>max</i> is max|error|/max|reference| and must not exceed
ten times the limit. The limit is 2·10⁻⁶, for attention times max|a|/8 over the logits a that carry weight. A
diverging memory is compared until it has diverged, with ten times the limit: there every step multiplies the rounding
errors too.</p>
{accuracy}
<footer>Data: C.D. Keeling and T.P. Whorf (2004), Scripps Institution of Oceanography, distributed by the Carbon
Dioxide Information Analysis Center, Oak Ridge National Laboratory.</footer>
</main>
</body>
</html>
",
            beta = memory::BETA,
        )
    }
}

/// Style of the page; the figures bring their own.
const PAGE_STYLE: &str = "\
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--text:#1b1f24;--quiet:#59636e;--rule:#dfe3e8;\
--good:#00684a;--good-bg:#dff3ea;--bad:#a63a00;--bad-bg:#fdebe0}
@media(prefers-color-scheme:dark){:root{--page:#0e1115;--card:#14181d;--text:#e8ebee;--quiet:#9fa9b4;--rule:#2a3139;\
--good:#5fd6ad;--good-bg:#12332a;--bad:#ff9d66;--bad-bg:#3a2213}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--text);\
font:16px/1.55 system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
main{max-width:820px;margin:0 auto;padding:2rem 1rem 3rem}
h1{font-size:1.75rem;line-height:1.2;margin:0 0 .6rem} h2{font-size:1.25rem;margin:2.6rem 0 .5rem}
p{margin:.6rem 0} .facts,.note,figcaption,footer{color:var(--quiet)} .note,figcaption,footer{font-size:.9rem}
.verdict{display:inline-block;padding:.1rem .6rem;border-radius:1rem;margin-right:.4rem;font-weight:600}
.verdict.good{color:var(--good);background:var(--good-bg)} .verdict.bad{color:var(--bad);background:var(--bad-bg)}
figure{margin:1.2rem 0;padding:.8rem;background:var(--card);border:1px solid var(--rule);border-radius:10px}
figure svg{display:block;width:100%;min-width:540px;height:auto} figcaption{padding:.4rem .2rem 0}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;background:var(--card)}
caption{text-align:left;color:var(--quiet);font-size:.9rem;padding:.3rem 0}
th,td{padding:.35rem .7rem;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap;font-weight:400}
thead th{color:var(--quiet);font-size:.9rem;white-space:normal;vertical-align:bottom}
@media(max-width:520px){th,td{padding:.3rem .35rem}}
th:first-child{text-align:left} td.bad{color:var(--bad)}
details{margin:.6rem 0} summary{cursor:pointer}
footer{margin-top:3rem;border-top:1px solid var(--rule);padding-top:1rem}
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Device, Engine};
    use crate::{co2, memory, smoothing};

    #[test]
    fn the_page_stands_alone_and_is_balanced() {
        let engine = Engine::open(Device::Reference, None).unwrap();
        let series = co2::series().unwrap();
        let report = Report {
            on_gpu: true,
            adapter: "<adapter & co>",
            series: &series,
            smoothing: smoothing::run(&engine, &series, &mut |_| {}).unwrap(),
            memory: memory::run(&engine, &series, &mut |_| {}).unwrap(),
            seconds: 1.0,
        };
        let page = report.html();
        assert!(page.contains("&lt;adapter &amp; co&gt;") && !page.contains("<adapter"));
        // The only address is the name of SVG's namespace, which nothing fetches.
        assert_eq!(page.matches("http").count(), page.matches("xmlns=\"http://www.w3.org/2000/svg\"").count());
        assert!(!page.contains("NaN") && !page.contains("<script") && !page.contains("src="));
        for tag in ["svg", "table", "figure", "details", "div", "tr", "p"] {
            let open = page.matches(&format!("<{tag}>")).count() + page.matches(&format!("<{tag} ")).count();
            assert_eq!(open, page.matches(&format!("</{tag}>")).count(), "{tag}");
        }
        assert_eq!(page.matches("role=\"img\"").count(), report.figures().len());
        assert!(report.passed() && report.text().contains("diverged"));
    }
}
