//! What a case should give, by the library's float64 reference.

use crate::engine::Tensors;
use continuous_attention::case::{Case, CaseTensor, Operation};
use continuous_attention::reference::{attention, efla};
use continuous_attention::{AttentionConfig, AttentionShape, DType, EflaConfig, EflaShape, Form, Result};
use std::collections::BTreeMap;

/// A result in float64.
pub struct Exact {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Exact {
    /// Rounded to float32.
    pub fn narrow(&self) -> CaseTensor {
        let values = self.values.iter().map(|&value| value as f32).collect();
        CaseTensor { dtype: DType::F32, shape: self.shape.clone(), values }
    }
}

/// Results by name.
pub type Exacts = BTreeMap<String, Exact>;

/// Everything that the case asks for: out and lse or final_state, and the gradients if it has d_out.
pub fn compute(case: &Case) -> Result<Exacts> {
    let wide = Wide::new(&case.inputs);
    let results = match &case.operation {
        Operation::Attention { config, shape, .. } => compute_attention(config, shape, &wide)?,
        Operation::Efla { config, shape, .. } => compute_efla(config, shape, &wide)?,
    };
    let named = results.into_iter().map(|(name, shape, values)| (name.to_string(), Exact { shape, values }));
    Ok(named.collect())
}

/// The largest |a| over all logits a that some row sees, for the limits; None for EFLA.
pub fn largest_logit(case: &Case) -> Result<Option<f64>> {
    match &case.operation {
        Operation::Attention { config, shape, .. } => {
            let wide = Wide::new(&case.inputs);
            Ok(Some(attention::largest_logit(config, shape, &wide.attention())?))
        }
        Operation::Efla { .. } => Ok(None),
    }
}

type Results = Vec<(&'static str, Vec<usize>, Vec<f64>)>;

fn compute_attention(config: &AttentionConfig, shape: &AttentionShape, wide: &Wide) -> Result<Results> {
    let inputs = wide.attention();
    let AttentionShape { batch, heads, queries, .. } = *shape;
    let output = attention::forward(config, shape, &inputs)?;
    let mut results = vec![
        ("out", vec![batch, heads, queries, config.value_dim], output.out),
        ("lse", vec![batch, heads, queries], output.lse),
    ];
    if let Some(d_out) = wide.get("d_out") {
        let gradients = attention::backward(config, shape, &inputs, d_out, wide.get("d_lse"))?;
        results.extend([
            ("d_q", wide.shape("q"), gradients.d_q),
            ("d_k", wide.shape("k"), gradients.d_k),
            ("d_v", wide.shape("v"), gradients.d_v),
        ]);
        results.extend(gradients.d_sink_k.map(|d| ("d_sink_k", wide.shape("sink_k"), d)));
        results.extend(gradients.d_sink_v.map(|d| ("d_sink_v", wide.shape("sink_v"), d)));
        results.extend(gradients.d_intervals.map(|d| ("d_intervals", wide.shape("intervals"), d)));
    }
    Ok(results)
}

fn compute_efla(config: &EflaConfig, shape: &EflaShape, wide: &Wide) -> Result<Results> {
    let inputs = wide.efla();
    let EflaShape { batch, value_heads, tokens, .. } = *shape;
    let state = vec![batch, value_heads, config.key_dim, config.value_dim];
    // The recurrence is the definition, whichever form the device takes.
    let output = efla::forward(&EflaConfig { form: Form::Recurrent, ..*config }, shape, &inputs)?;
    let mut results = vec![
        ("out", vec![batch, value_heads, tokens, config.value_dim], output.out),
        ("final_state", state.clone(), output.final_state),
    ];
    if let Some(d_out) = wide.get("d_out") {
        let gradients = efla::backward(config, shape, &inputs, d_out, wide.get("d_final_state"))?;
        results.extend([
            ("d_q", wide.shape("q"), gradients.d_q),
            ("d_k", wide.shape("k"), gradients.d_k),
            ("d_v", wide.shape("v"), gradients.d_v),
            ("d_beta", wide.shape("beta"), gradients.d_beta),
            ("d_initial_state", state, gradients.d_initial_state),
        ]);
    }
    Ok(results)
}

/// Inputs widened to float64: the reference reads what the device reads, so that what is measured is the kernel.
struct Wide<'a> {
    inputs: &'a Tensors,
    values: BTreeMap<&'a str, Vec<f64>>,
}

impl Wide<'_> {
    fn new(inputs: &Tensors) -> Wide<'_> {
        let widen = |tensor: &CaseTensor| tensor.values.iter().map(|&value| f64::from(value)).collect();
        let values = inputs.iter().map(|(name, tensor)| (name.as_str(), widen(tensor))).collect();
        Wide { inputs, values }
    }

    fn get(&self, name: &str) -> Option<&[f64]> {
        self.values.get(name).map(Vec::as_slice)
    }

    /// Empty if it is missing, which the reference then refuses by name.
    fn needed(&self, name: &str) -> &[f64] {
        self.get(name).unwrap_or_default()
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.inputs.get(name).map(|tensor| tensor.shape.clone()).unwrap_or_default()
    }

    fn attention(&self) -> attention::Inputs<'_> {
        attention::Inputs {
            q: self.needed("q"),
            k: self.needed("k"),
            v: self.needed("v"),
            sink_k: self.get("sink_k"),
            sink_v: self.get("sink_v"),
            intervals: self.get("intervals"),
        }
    }

    fn efla(&self) -> efla::Inputs<'_> {
        efla::Inputs {
            q: self.needed("q"),
            k: self.needed("k"),
            v: self.needed("v"),
            beta: self.needed("beta"),
            log_decay: self.get("log_decay"),
            initial_state: self.get("initial_state"),
        }
    }
}
