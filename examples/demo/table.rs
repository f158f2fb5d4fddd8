//! A small table that can be printed and put on a page.

/// First column to the left, numbers to the right.
pub struct Table {
    pub header: Vec<String>,
    pub rows: Vec<Vec<String>>,
}

impl Table {
    pub fn new<'a>(header: impl IntoIterator<Item = &'a str>) -> Table {
        Table { header: header.into_iter().map(String::from).collect(), rows: Vec::new() }
    }

    /// Aligned text, a line per row.
    pub fn text(&self) -> String {
        let lines = || std::iter::once(&self.header).chain(&self.rows);
        let width = |column: usize| lines().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.header.len()).map(width).collect();
        let mut text = String::new();
        for row in lines() {
            for (column, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                text += &if column == 0 { format!("  {cell:<width$}") } else { format!("   {cell:>width$}") };
            }
            text.truncate(text.trim_end().len());
            text.push('\n');
        }
        text
    }

    /// An HTML table; cells that read `diverged` or `FAIL` stand out.
    pub fn html(&self, caption: &str) -> String {
        let cells = |tag: &str, row: &[String]| -> String {
            let cell = |(column, cell): (usize, &String)| match (column, cell.as_str()) {
                (0, _) => format!("<th scope=\"{}\">{}</th>", if tag == "th" { "col" } else { "row" }, escape(cell)),
                (_, "diverged" | "FAIL") => format!("<{tag} class=\"bad\">{cell}</{tag}>"),
                _ if tag == "th" => format!("<th scope=\"col\">{}</th>", escape(cell)),
                _ => format!("<td>{}</td>", escape(cell)),
            };
            row.iter().enumerate().map(cell).collect()
        };
        let body: String = self.rows.iter().map(|row| format!("<tr>{}</tr>\n", cells("td", row))).collect();
        format!(
            "<div class=\"wide\" tabindex=\"0\"><table><caption>{}</caption>\n<thead><tr>{}</tr></thead>\n\
             <tbody>\n{body}</tbody></table></div>\n",
            escape(caption),
            cells("th", &self.header)
        )
    }
}

/// Text as it may stand in HTML and SVG, attributes included.
pub fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["a", "long"]);
        table.rows.push(vec!["φ and more".into(), "1".into()]);
        assert_eq!(table.text(), "  a            long\n  φ and more      1\n");
        assert!(table.html("x < y").contains("<caption>x &lt; y</caption>"));
    }
}
