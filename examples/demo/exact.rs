//! What a case should give, by the library's float64 reference.

use continuous_attention::case::{Case, CaseTensor, Operation};
use continuous_attention::half::{bf16, f16};
use continuous_attention::reference::{attention, efla};
use continuous_attention::{AttentionConfig, AttentionShape, DType, EflaConfig, EflaShape, Form, Lengths, Result};
use std::collections::BTreeMap;

/// A tensor in float64.
pub struct Exact {
    pub shape: Vec<usize>,
    pub values: Vec<f64>,
}

impl Exact {
    /// Rounded to a storage type.
    pub fn narrow(&self, dtype: DType) -> CaseTensor {
        let values = self.values.iter().map(|&value| rounded(dtype, value as f32)).collect();
        CaseTensor { dtype, shape: self.shape.clone(), values }
    }

    /// From heads before tokens to the layout of the case, or back.
    fn laid_out(self, case: &Case, name: &str) -> Exact {
        if !case.operation.layout().is_tokens_first(name) {
            return self;
        }
        let Exact { mut shape, values } = self;
        let (rows, columns, width) = (shape[1], shape[2], shape[3..].iter().product::<usize>());
        let mut exchanged = Vec::with_capacity(values.len());
        for matrix in values.chunks((rows * columns * width).max(1)) {
            for column in 0..columns {
                for row in 0..rows {
                    exchanged.extend_from_slice(&matrix[(row * columns + column) * width..][..width]);
                }
            }
        }
        shape.swap(1, 2);
        Exact { shape, values: exchanged }
    }
}

/// How a result is stored: out as q is, a gradient as what it is the gradient of, all else as F32.
pub fn stored(case: &Case, result: &str) -> DType {
    let like = if result == "out" { "q" } else { result.strip_prefix("d_").unwrap_or(result) };
    case.inputs.get(like).map_or(DType::F32, |tensor| tensor.dtype)
}

/// What storing does to a value.
pub fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
    }
}

/// Results by name.
pub type Exacts = BTreeMap<String, Exact>;

/// Everything that the case asks for: out and lse or final_state, and the gradients if it has d_out.
pub fn compute(case: &Case) -> Result<Exacts> {
    let wide = Wide::new(case);
    let results = match &case.operation {
        Operation::Attention { config, shape, lengths, .. } => compute_attention(config, shape, lengths, &wide)?,
        Operation::Efla { config, shape, cu_seqlens, .. } => compute_efla(config, shape, cu_seqlens.as_deref(), &wide)?,
    };
    let named = |(name, shape, values)| (String::from(name), Exact { shape, values }.laid_out(case, name));
    Ok(results.into_iter().map(named).collect())
}

/// The largest |a| over all logits a that some row sees, for the limits; None for EFLA.
pub fn largest_logit(case: &Case) -> Result<Option<f64>> {
    match &case.operation {
        Operation::Attention { config, shape, lengths, .. } => {
            let wide = Wide::new(case);
            Ok(Some(attention::largest_logit_ragged(config, shape, lengths, &wide.attention())?))
        }
        Operation::Efla { .. } => Ok(None),
    }
}

type Results = Vec<(&'static str, Vec<usize>, Vec<f64>)>;

fn compute_attention(
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
    wide: &Wide,
) -> Result<Results> {
    let inputs = wide.attention();
    let AttentionShape { batch, heads, queries, .. } = *shape;
    let output = attention::forward_ragged(config, shape, lengths, &inputs)?;
    let mut results = vec![
        ("out", vec![batch, heads, queries, config.value_dim], output.out),
        ("lse", vec![batch, heads, queries], output.lse),
    ];
    if let Some(d_out) = wide.get("d_out") {
        let gradients = attention::backward_ragged(config, shape, lengths, &inputs, d_out, wide.get("d_lse"))?;
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

fn compute_efla(config: &EflaConfig, shape: &EflaShape, cu_seqlens: Option<&[usize]>, wide: &Wide) -> Result<Results> {
    let inputs = wide.efla();
    let EflaShape { batch, value_heads, tokens, .. } = *shape;
    let states = cu_seqlens.map_or(batch, |cu_seqlens| cu_seqlens.len() - 1);
    let state = vec![states, value_heads, config.key_dim, config.value_dim];
    // The recurrence is the definition, whichever form the device takes.
    let recurrent = EflaConfig { form: Form::Recurrent, ..*config };
    let output = match cu_seqlens {
        None => efla::forward(&recurrent, shape, &inputs)?,
        Some(cu_seqlens) => efla::forward_packed(&recurrent, shape, cu_seqlens, &inputs)?,
    };
    let mut results = vec![
        ("out", vec![batch, value_heads, tokens, config.value_dim], output.out),
        ("final_state", state.clone(), output.final_state),
    ];
    if let Some(d_out) = wide.get("d_out") {
        let d_final_state = wide.get("d_final_state");
        let gradients = match cu_seqlens {
            None => efla::backward(config, shape, &inputs, d_out, d_final_state)?,
            Some(cu_seqlens) => efla::backward_packed(config, shape, cu_seqlens, &inputs, d_out, d_final_state)?,
        };
        results.extend([
            ("d_q", wide.shape("q"), gradients.d_q),
            ("d_k", wide.shape("k"), gradients.d_k),
            ("d_v", wide.shape("v"), gradients.d_v),
            ("d_beta", wide.shape("beta"), gradients.d_beta),
            ("d_initial_state", state, gradients.d_initial_state),
        ]);
        results.extend(config.gated.then(|| ("d_log_decay", wide.shape("log_decay"), gradients.d_log_decay)));
    }
    Ok(results)
}

/// Inputs widened to float64, heads before tokens: the reference reads what the device reads, so that what is measured
/// is the kernel.
pub struct Wide<'a> {
    tensors: BTreeMap<&'a str, Exact>,
}

impl Wide<'_> {
    pub fn new(case: &Case) -> Wide<'_> {
        let tensors = case.inputs.iter().map(|(name, tensor)| {
            let values = tensor.values.iter().map(|&value| f64::from(value)).collect();
            (name.as_str(), Exact { shape: tensor.shape.clone(), values }.laid_out(case, name))
        });
        Wide { tensors: tensors.collect() }
    }

    pub fn get(&self, name: &str) -> Option<&[f64]> {
        self.tensors.get(name).map(|tensor| &tensor.values[..])
    }

    /// Empty if it is missing, which the reference then refuses by name.
    fn needed(&self, name: &str) -> &[f64] {
        self.get(name).unwrap_or_default()
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        self.tensors.get(name).map(|tensor| tensor.shape.clone()).unwrap_or_default()
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
