//! Line charts as SVG: one axis pair, a legend, colours that colour-blind readers can tell apart.

use crate::table::escape;

/// Style of every chart. Colours (after Okabe and Ito) follow the reader's light or dark setting; lines also differ in
/// their dashes, so that colour is never the only difference.
pub const STYLE: &str = "\
.chart{--paper:#fff;--ink:#1b1f24;--soft:#59636e;--grid:#e4e7eb;--band:#f6eeea;\
--c0:#0072b2;--c1:#d55e00;--c2:#00805c;--c3:#a8568a;--c4:#1b1f24;--faint:#c3cad2;--dot:#6b7682;\
font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}
@media(prefers-color-scheme:dark){.chart{--paper:#14181d;--ink:#e8ebee;--soft:#9fa9b4;--grid:#2a3139;--band:#2b211d;\
--c0:#56b4e9;--c1:#ff8f4d;--c2:#33c79b;--c3:#e29cc6;--c4:#e8ebee;--faint:#454e58;--dot:#98a3af}}
.chart .paper{fill:var(--paper)} .chart text{fill:var(--soft)} .chart .legend text{fill:var(--ink)}
.chart .grid{stroke:var(--grid)} .chart .axis{stroke:var(--soft)} .chart .band{fill:var(--band)}
.chart .line{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}
.chart .s0{stroke:var(--c0);stroke-width:2.6} .chart .s1{stroke:var(--c1);stroke-dasharray:7 4}
.chart .s2{stroke:var(--c2);stroke-dasharray:2 4} .chart .s3{stroke:var(--c3);stroke-dasharray:9 4 2 4}
.chart .s4{stroke:var(--c4);stroke-width:1.6} .chart .s5{stroke:var(--soft);stroke-width:1.2;stroke-dasharray:3 3}
.chart .cross{fill:none;stroke-width:2.2;stroke-dasharray:none;stroke-linecap:round}
.chart .d0{fill:var(--faint)} .chart .d1{fill:var(--dot)}
.chart .mark{fill:var(--paper);stroke-width:2;stroke-dasharray:none}
";

const WIDTH: f64 = 720.0;
const LEFT: f64 = 52.0;
const RIGHT: f64 = 18.0;
const BOTTOM: f64 = 48.0;
/// Height of a legend row, and of a row of crosses.
const ROW: f64 = 20.0;

pub struct Chart {
    /// Read aloud in place of the picture.
    pub label: String,
    /// Height of the plot itself.
    pub height: f64,
    pub x: Axis,
    pub y: Axis,
    /// Drawn in this order, so that the last lies on top.
    pub series: Vec<Series>,
}

pub struct Axis {
    pub name: String,
    pub range: (f64, f64),
    pub logarithmic: bool,
    pub ticks: Vec<f64>,
}

pub struct Series {
    pub name: String,
    pub style: Style,
    /// Points outside the axes are left out.
    pub points: Vec<(f64, f64)>,
    /// Where on x the series has left every scale: crosses in a band above the plot.
    pub lost: Vec<f64>,
}

#[derive(Clone, Copy)]
pub enum Style {
    /// Small dots, light (0) or dark (1).
    Dots(usize),
    /// A line of style `s0` to `s5` in [`STYLE`].
    Line(usize),
    /// The same with a ring at each point.
    MarkedLine(usize),
}

impl Axis {
    /// A linear axis with a tick every `step`.
    pub fn linear(name: &str, range: (f64, f64), step: f64) -> Axis {
        let first = (range.0 / step).ceil() as i64;
        let last = (range.1 / step).floor() as i64;
        let ticks = (first..=last).map(|i| i as f64 * step).collect();
        Axis { name: name.into(), range, logarithmic: false, ticks }
    }

    /// A logarithmic axis with the given ticks.
    pub fn logarithmic(name: &str, range: (f64, f64), ticks: &[f64]) -> Axis {
        Axis { name: name.into(), range, logarithmic: true, ticks: ticks.to_vec() }
    }

    /// Where `value` lies: 0 at the start of the range, 1 at its end.
    fn place(&self, value: f64) -> f64 {
        let (low, high) = self.range;
        if self.logarithmic { (value / low).ln() / (high / low).ln() } else { (value - low) / (high - low) }
    }
}

impl Series {
    pub fn new(name: &str, style: Style, points: Vec<(f64, f64)>) -> Series {
        Series { name: name.into(), style, points, lost: Vec::new() }
    }
}

impl Chart {
    /// An `<svg>` element for a page that has [`STYLE`].
    pub fn inline(&self) -> String {
        self.render("")
    }

    /// A whole SVG file.
    pub fn file(&self) -> String {
        self.render(&format!("<style>{STYLE}</style>\n"))
    }

    fn render(&self, style: &str) -> String {
        let legend = self.legend();
        let lost: Vec<&Series> = self.series.iter().filter(|series| !series.lost.is_empty()).collect();
        let band = lost.len() as f64 * ROW;
        // From above: legend, crosses, name of the y axis, plot, ticks, name of the x axis.
        let band_top = legend.rows as f64 * ROW + 10.0;
        let top = band_top + band + 30.0;
        let bottom = top + self.height;
        let total = bottom + BOTTOM;
        let x = |value: f64| LEFT + self.x.place(value) * (WIDTH - LEFT - RIGHT);
        let y = |value: f64| bottom - self.y.place(value) * self.height;

        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"chart\" viewBox=\"0 0 {WIDTH} {total}\" role=\"img\" \
             aria-label=\"{}\">\n{style}<rect class=\"paper\" width=\"{WIDTH}\" height=\"{total}\"/>\n{}",
            escape(&self.label),
            legend.svg
        );
        if band > 0.0 {
            let width = WIDTH - LEFT - RIGHT;
            svg +=
                &format!("<rect class=\"band\" x=\"{LEFT}\" y=\"{band_top}\" width=\"{width}\" height=\"{band}\"/>\n");
        }
        for &tick in &self.y.ticks {
            let (right, at) = (WIDTH - RIGHT, y(tick));
            svg += &format!(
                "<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right}\"/><text x=\"{}\" y=\"{:.1}\" \
                 text-anchor=\"end\">{}</text>\n",
                LEFT - 8.0,
                at + 4.5,
                number(tick)
            );
        }
        for &tick in &self.x.ticks {
            let at = x(tick);
            svg += &format!(
                "<path class=\"axis\" d=\"M{at:.1} {bottom}v5\"/><text x=\"{at:.1}\" y=\"{}\" \
                 text-anchor=\"middle\">{}</text>\n",
                bottom + 20.0,
                number(tick)
            );
        }
        svg += &format!(
            "<path class=\"axis\" d=\"M{LEFT} {bottom}H{}\"/>\n\
             <text x=\"{}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n\
             <text x=\"{LEFT}\" y=\"{}\">{}</text>\n",
            WIDTH - RIGHT,
            (LEFT + WIDTH - RIGHT) / 2.0,
            bottom + 40.0,
            escape(&self.x.name),
            top - 12.0,
            escape(&self.y.name)
        );
        for series in &self.series {
            let inside =
                |&(px, py): &(f64, f64)| [self.x.place(px), self.y.place(py)].iter().all(|p| (0.0..=1.0).contains(p));
            let points: Vec<(f64, f64)> =
                series.points.iter().copied().filter(inside).map(|(a, b)| (x(a), y(b))).collect();
            svg += &draw(series.style, &points);
        }
        for (row, series) in lost.iter().enumerate() {
            let at = band_top + (row as f64 + 0.5) * ROW;
            let (left, base) = (LEFT + 10.0, at + 4.5);
            svg += &format!("<text x=\"{left}\" y=\"{base:.1}\">{} diverged</text>\n", escape(&series.name));
            for &value in &series.lost {
                let d = format!("M{:.1} {:.1}l9 9m0 -9l-9 9", x(value) - 4.5, at - 4.5);
                svg += &format!(
                    "<path class=\"cross {}\" style=\"stroke-dasharray:none\" d=\"{d}\"/>\n",
                    class(series.style)
                );
            }
        }
        svg + "</svg>\n"
    }

    fn legend(&self) -> Legend {
        let mut legend = Legend { svg: "<g class=\"legend\">\n".into(), rows: 1 };
        let mut left = LEFT;
        for series in self.series.iter().filter(|series| !series.name.is_empty()) {
            // Text can't be measured here; 6.9 is the width of an average character at this size.
            let width = 34.0 + 6.9 * series.name.chars().count() as f64 + 16.0;
            if left + width > WIDTH && left > LEFT {
                (left, legend.rows) = (LEFT, legend.rows + 1);
            }
            let middle = legend.rows as f64 * ROW - 6.0;
            let sample = match series.style {
                Style::Dots(_) => (0..3).map(|i| (left + 7.0 + 6.0 * i as f64, middle)).collect(),
                Style::Line(_) => vec![(left, middle), (left + 26.0, middle)],
                Style::MarkedLine(style) => {
                    legend.svg += &draw(Style::Line(style), &[(left, middle), (left + 26.0, middle)]);
                    vec![(left + 13.0, middle)]
                }
            };
            legend.svg += &draw(series.style, &sample);
            legend.svg +=
                &format!("<text x=\"{:.1}\" y=\"{:.1}\">{}</text>\n", left + 33.0, middle + 4.5, escape(&series.name));
            left += width;
        }
        legend.svg += "</g>\n";
        legend
    }
}

struct Legend {
    svg: String,
    rows: usize,
}

fn class(style: Style) -> String {
    match style {
        Style::Dots(n) => format!("d{n}"),
        Style::Line(n) | Style::MarkedLine(n) => format!("s{n}"),
    }
}

/// A series in picture coordinates.
fn draw(style: Style, points: &[(f64, f64)]) -> String {
    let mut svg = String::new();
    if let Style::Dots(_) = style {
        let d: String = points
            .iter()
            .map(|(x, y)| format!("M{:.1} {y:.1}a1.5 1.5 0 1 0 3 0a1.5 1.5 0 1 0 -3 0", x - 1.5))
            .collect();
        return format!("<path class=\"{}\" d=\"{d}\"/>\n", class(style));
    }
    let d: String = points
        .iter()
        .enumerate()
        .map(|(i, (x, y))| format!("{}{x:.1} {y:.1}", if i == 0 { 'M' } else { 'L' }))
        .collect();
    if points.len() > 1 {
        svg += &format!("<path class=\"line {}\" d=\"{d}\"/>\n", class(style));
    }
    if let Style::MarkedLine(_) = style {
        for (x, y) in points {
            svg += &format!("<circle class=\"mark {}\" cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.6\"/>\n", class(style));
        }
    }
    svg
}

/// A tick's number with a real minus sign.
fn number(value: f64) -> String {
    let rounded = (value * 1e6).round() / 1e6;
    format!("{}", if rounded == 0.0 { 0.0 } else { rounded }).replace('-', "−")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axes_place_their_ends() {
        let axis = Axis::linear("", (-1.0, 3.0), 0.5);
        assert_eq!((axis.place(-1.0), axis.place(3.0), axis.ticks.len()), (0.0, 1.0, 9));
        let axis = Axis::logarithmic("", (0.25, 16.0), &[1.0]);
        assert!((axis.place(2.0) - 0.5).abs() < 1e-12 && axis.place(16.0) == 1.0);
        assert_eq!(number(-0.5), "−0.5");
        assert_eq!(number(-0.0), "0");
    }

    #[test]
    fn a_chart_leaves_out_what_lies_outside() {
        let x = Axis::linear("x", (0.0, 1.0), 1.0);
        let y = Axis::linear("y", (0.0, 1.0), 1.0);
        let mut series = Series::new("a & b", Style::Dots(0), vec![(0.5, 0.5), (2.0, 0.5), (0.5, f64::NAN)]);
        series.lost.push(0.5);
        let svg = Chart { label: "\"quoted\"".into(), height: 100.0, x, y, series: vec![series] }.file();
        assert!(svg.contains("a &amp; b") && svg.contains("&quot;quoted&quot;") && svg.contains("cross"));
        assert!(!svg.contains("NaN"));
    }
}
