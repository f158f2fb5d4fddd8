//! Results as one flat JSON object: text, and numbers by their keys.

use std::collections::BTreeMap;
use std::path::Path;

/// In the order of their keys.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Results {
    texts: BTreeMap<String, String>,
    pub numbers: BTreeMap<String, f64>,
}

impl Results {
    pub fn text(&mut self, key: &str, text: impl Into<String>) {
        self.texts.insert(key.into(), text.into());
    }

    pub fn number(&mut self, key: impl Into<String>, number: f64) {
        self.numbers.insert(key.into(), number);
    }

    /// A line a key. A number that JSON has no word for is left out.
    pub fn json(&self) -> String {
        let mut object = serde_json::Map::new();
        object.extend(self.texts.iter().map(|(key, text)| (key.clone(), text.as_str().into())));
        let numbers = self.numbers.iter().filter(|(_, number)| number.is_finite());
        object.extend(numbers.map(|(key, &number)| (key.clone(), number.into())));
        format!("{:#}\n", serde_json::Value::Object(object))
    }

    pub fn parse(text: &str) -> Result<Results, String> {
        let object: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(text).map_err(|error| format!("no flat JSON object: {error}"))?;
        let mut results = Results::default();
        for (key, value) in object {
            match (value.as_f64(), value) {
                (Some(number), _) => results.number(key, number),
                (None, serde_json::Value::String(text)) => results.text(&key, text),
                (None, other) => return Err(format!("{key}: got {other}, needed a number or a text")),
            }
        }
        Ok(results)
    }

    pub fn load(path: &Path) -> Result<Results, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        Results::parse(&text).map_err(|error| format!("{}: {error}", path.display()))
    }

    /// Keys that both have, with the old and the new number; intervals and sizes are left out.
    pub fn beside<'a>(&'a self, old: &'a Results) -> impl Iterator<Item = (&'a str, f64, f64)> {
        const ASIDE: [&str; 5] = ["_low", "_high", "_pairs", "_tokens", "_bytes"];
        let said = |key: &&String| !ASIDE.iter().any(|end| key.ends_with(end));
        let numbers = self.numbers.iter().filter(move |(key, _)| said(key));
        numbers.filter_map(|(key, &new)| Some((key.as_str(), *old.numbers.get(key)?, new)))
    }

    /// A text that both have and that differs.
    pub fn differs(&self, old: &Results, key: &str) -> Option<(String, String)> {
        let (new, old) = (self.texts.get(key)?, old.texts.get(key)?);
        (new != old).then(|| (old.clone(), new.clone()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_there_and_back() {
        let mut results = Results::default();
        results.text("adapter", "a \"name\"");
        results.number("peak_flops", 1.25e13);
        results.number("a_over_b", 1.0 / 3.0);
        assert_eq!(Results::parse(&results.json()), Ok(results.clone()));
        let mut more = results.clone();
        more.number("lost", f64::NAN);
        assert_eq!(Results::parse(&more.json()), Ok(results));
        for bad in ["", "[1]", "{\"a\": {}}", "{\"a\": null}"] {
            assert!(Results::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn old_results_stand_beside_new_ones() {
        let of = |numbers: &[(&str, f64)]| {
            let mut results = Results::default();
            numbers.iter().for_each(|&(key, number)| results.number(key, number));
            results
        };
        let (old, new) = (of(&[("a", 2.0), ("b", 1.0), ("a_low", 1.0)]), of(&[("a", 3.0), ("c", 1.0), ("a_low", 1.0)]));
        assert_eq!(new.beside(&old).collect::<Vec<_>>(), [("a", 2.0, 3.0)]);
    }
}
