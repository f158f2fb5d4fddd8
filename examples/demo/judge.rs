//! How far a result is from float64, and how far it may be.

use crate::engine::Tensors;
use crate::exact::{self, Exacts, Wide};
use crate::table::Table;
use continuous_attention::case::{Case, CaseTensor, Operation};
use continuous_attention::reference::compare::{self, Comparison, Quantity, Scale};
use continuous_attention::reference::efla;
use continuous_attention::{DType, EflaConfig, EflaShape, Integrator, Result};

/// One result that was compared.
#[derive(Debug, Clone)]
pub struct Check {
    /// What was computed and compared with what, for people.
    pub name: String,
    pub comparison: Comparison,
    /// Whether a miss counts, see [`Limits::unjudged`].
    judged: bool,
}

/// How far the results of one computation may be off.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    /// By what every limit is multiplied.
    pub factor: f64,
    /// Why no limit is promised, where none is.
    pub unjudged: Option<String>,
}

/// γ of an Euler or Runge-Kutta step up to which limits hold. One token keeps 1 − γ of what the state held along its
/// key: beyond 2 it multiplies what was there, rounding errors included, and close to 2 it hardly forgets them.
const LARGEST_STEP: f64 = 1.9;

impl Limits {
    /// The limits that the library promises for a case.
    pub fn of(case: &Case) -> Result<Limits> {
        let factor = exact::largest_logit(case)?.map_or(1.0, compare::attention_factor);
        let unjudged = match &case.operation {
            Operation::Attention { .. } => None,
            Operation::Efla { config, shape, .. } => unpromised_step(config, shape, case),
        };
        Ok(Limits { factor, unjudged })
    }

    /// For a result that is stored as `dtype`.
    fn limit(&self, tensor: &str, dtype: DType) -> f64 {
        let quantity = match tensor {
            "d_beta" | "d_log_decay" => Quantity::BetaGradient,
            _ if tensor.starts_with("d_") => Quantity::Gradient,
            _ => Quantity::Forward,
        };
        self.factor * compare::limit(quantity, dtype)
    }
}

/// Says which step of an EFLA case leaves the range in which anything is promised, if one does.
fn unpromised_step(config: &EflaConfig, shape: &EflaShape, case: &Case) -> Option<String> {
    let wide = Wide::new(case);
    let (k, beta) = (wide.get("k")?, wide.get("beta")?);
    let (tokens, key_dim) = (shape.tokens, config.key_dim);
    let gamma = |(index, &beta): (usize, &f64)| {
        // The key head of value head index / tokens, counted through the batch.
        let head = index / tokens / shape.group();
        let key = &k[(head * tokens + index % tokens) * key_dim..][..key_dim];
        let length = key.iter().map(|x| x * x).sum::<f64>().sqrt();
        let length = if config.normalize_k && length > 0.0 { 1.0 } else { length };
        efla::gate(config.integrator, beta, length, 0.0).gamma
    };
    let gammas: Vec<f64> = beta.iter().enumerate().map(gamma).collect();
    let (low, high) = gammas.iter().fold((0.0f64, 0.0f64), |(low, high), &gamma| (low.min(gamma), high.max(gamma)));
    if low < 0.0 {
        return Some(format!("a step has γ = {low:.3}: below 0 the state grows and its rounding errors with it"));
    }
    (config.integrator != Integrator::Exact && high > LARGEST_STEP).then(|| {
        format!("a step has γ = {high:.3}: beyond {LARGEST_STEP} this integrator amplifies its rounding errors")
    })
}

impl Check {
    /// Compares one result with float64; `tensor` is its name in a case file.
    pub fn new(name: String, tensor: &str, got: &CaseTensor, want: &[f64], limits: &Limits) -> Check {
        Check::within(name, tensor, &got.values, want, limits.limit(tensor, got.dtype), limits)
    }

    /// Compares one result with what is stored of it elsewhere: in fewer bits, maybe.
    pub fn expected(name: String, tensor: &str, got: &CaseTensor, want: &CaseTensor, limits: &Limits) -> Check {
        let limit = limits.limit(tensor, got.dtype).max(limits.limit(tensor, want.dtype));
        let want: Vec<f64> = want.values.iter().map(|&value| f64::from(value)).collect();
        Check::within(name, tensor, &got.values, &want, limit, limits)
    }

    fn within(name: String, tensor: &str, got: &[f32], want: &[f64], limit: f64, limits: &Limits) -> Check {
        let scale = if tensor == "lse" { Scale::Lse } else { Scale::Tensor };
        let comparison = compare::compare(got, want, limit, scale);
        Check { name, comparison, judged: limits.unjudged.is_none() }
    }

    /// Compares every result with float64, one that the device did not give too; `name` makes a name of that of a
    /// tensor.
    pub fn all(got: &Tensors, want: &Exacts, limits: &Limits, name: impl Fn(&str) -> String) -> Vec<Check> {
        let nothing = CaseTensor { dtype: DType::F32, shape: vec![0], values: vec![] };
        let check = |(tensor, want): (&String, &crate::exact::Exact)| {
            Check::new(name(tensor), tensor, got.get(tensor).unwrap_or(&nothing), &want.values, limits)
        };
        want.iter().map(check).collect()
    }

    /// Whether the result is as it should be, or nothing is promised about it.
    pub fn passed(&self) -> bool {
        !self.judged || self.comparison.passed()
    }

    /// In a word.
    fn verdict(&self) -> &'static str {
        match (self.comparison.passed(), self.judged) {
            (true, _) => "ok",
            (false, true) => "FAIL",
            (false, false) => "not judged",
        }
    }

    /// The share of its limit that the result uses.
    pub fn used(&self) -> f64 {
        let Comparison { rms, max, limit, .. } = self.comparison;
        (rms / limit).max(max / (10.0 * limit))
    }
}

/// A row for each result.
pub fn table<'a>(checks: impl Iterator<Item = &'a Check>) -> Table {
    let mut table = Table::new(["result", "rms", "max", "limit", "verdict"]);
    for check in checks {
        let number = |x: f64| if x == 0.0 { "0".into() } else { format!("{x:.1e}") };
        let Comparison { rms, max, limit, .. } = check.comparison;
        table.rows.push(vec![check.name.clone(), number(rms), number(max), number(limit), check.verdict().into()]);
    }
    table
}

/// A line for each result that fails: what is wrong with it.
pub fn failures<'a>(checks: impl Iterator<Item = &'a Check>) -> String {
    let failed = checks.filter(|check| !check.passed());
    failed.map(|check| format!("  {}: {}\n", check.name, check.comparison.failure.as_deref().unwrap_or(""))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Device, Engine};
    use std::collections::BTreeMap;

    fn case(name: &str, overrides: &[(&str, &str)]) -> Case {
        let overrides: BTreeMap<_, _> =
            overrides.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect();
        let path = format!("{}/tests/cases/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
        Case::load(path, &overrides).unwrap()
    }

    #[test]
    fn a_right_result_passes_and_a_spoilt_one_fails() {
        for name in ["attention_given_sink_lse_grad", "efla_grouped_values"] {
            let case = case(name, &[]);
            let (limits, exact) = (Limits::of(&case).unwrap(), exact::compute(&case).unwrap());
            let right = Engine::open(Device::Reference, None).unwrap().compute(&case).unwrap();
            let judge = |got: &Tensors| Check::all(got, &exact, &limits, str::to_string);
            assert!(judge(&right).iter().all(Check::passed) && right.contains_key("d_q"));
            for tensor in right.keys() {
                for spoil in [f32::NAN, 1e3] {
                    let mut got = right.clone();
                    got.get_mut(tensor).unwrap().values[0] = spoil;
                    let failed: Vec<_> = judge(&got).into_iter().filter(|check| !check.passed()).collect();
                    assert_eq!(failed.iter().map(|check| &check.name).collect::<Vec<_>>(), [tensor]);
                    assert!(
                        table(failed.iter()).text().contains("FAIL") && failures(failed.iter()).contains("element 0")
                    );
                }
            }
        }
    }

    #[test]
    fn steps_that_amplify_are_not_judged() {
        for (integrator, promised) in [("exact", true), ("rk4", true), ("euler", false), ("rk2", false)] {
            let limits = Limits::of(&case("efla_rk4", &[("integrator", integrator)])).unwrap();
            assert_eq!(limits.unjudged.is_none(), promised, "{integrator}: {limits:?}");
        }
        let mut negative = case("efla_exact_raw_keys", &[]);
        negative.inputs.get_mut("beta").unwrap().values[0] = -0.1;
        let limits = Limits::of(&negative).unwrap();
        assert!(limits.unjudged.is_some());
        let miss = Check::within("out".into(), "out", &[f32::NAN], &[1.0], 1.0, &limits);
        assert!(miss.passed() && table([miss].iter()).text().contains("not judged"));
    }
}
