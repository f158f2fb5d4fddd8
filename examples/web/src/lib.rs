//! Both operators and their float64 reference for JavaScript: one object of named arguments in, typed arrays out.
//!
//! `continuous_attention.js` is the face of this module and says what the arguments are; here they are read and checked,
//! and what the library says against them becomes a JavaScript error.

mod arguments;
mod attention;
mod efla;

use continuous_attention::reference::compare::{self, Quantity, Scale};
use continuous_attention::{DType, Error, Gpu, GpuOptions, Result, Tensor, TensorView, wgpu};
use js_sys::{Float32Array, Float64Array, Object, Reflect};
use wasm_bindgen::prelude::*;

/// What JavaScript gets: a value, or an exception.
type Thrown<T> = std::result::Result<T, JsValue>;

/// A device and the pipelines compiled on it.
#[wasm_bindgen]
pub struct Engine {
    gpu: Gpu,
}

#[wasm_bindgen]
impl Engine {
    /// Opens the browser's GPU.
    pub async fn open() -> Thrown<Engine> {
        let gpu = Gpu::with_options_async(&GpuOptions::default()).await.map_err(thrown)?;
        Ok(Engine { gpu })
    }

    /// out and lse.
    pub async fn attention(&self, arguments: Object) -> Thrown<Object> {
        let call = attention::Call::read(&arguments).map_err(thrown)?;
        call.forward(&self.gpu).await.map_err(thrown)
    }

    /// What every node weighs in one row.
    #[wasm_bindgen(js_name = attentionWeights)]
    pub async fn attention_weights(&self, arguments: Object) -> Thrown<Object> {
        let (call, row) = attention::Call::read_row(&arguments).map_err(thrown)?;
        call.weights(&self.gpu, row).await.map_err(thrown)
    }

    /// out and finalState.
    pub async fn efla(&self, arguments: Object) -> Thrown<Object> {
        let call = efla::Call::read(&arguments).map_err(thrown)?;
        call.forward(&self.gpu).await.map_err(thrown)
    }
}

/// As `Engine.attention` in float64, and the largest logit.
#[wasm_bindgen(js_name = referenceAttention)]
pub fn reference_attention(arguments: Object) -> Thrown<Object> {
    attention::Call::read(&arguments).and_then(|call| call.reference()).map_err(thrown)
}

/// As `Engine.attentionWeights` in float64.
#[wasm_bindgen(js_name = referenceAttentionWeights)]
pub fn reference_attention_weights(arguments: Object) -> Thrown<Object> {
    attention::Call::read_row(&arguments).and_then(|(call, row)| call.reference_weights(row)).map_err(thrown)
}

/// As `Engine.efla` in float64.
#[wasm_bindgen(js_name = referenceEfla)]
pub fn reference_efla(arguments: Object) -> Thrown<Object> {
    efla::Call::read(&arguments).and_then(|call| call.reference()).map_err(thrown)
}

/// Whether float32 results count as equal to those of the reference, by the rule of the library's own tests: relative
/// rms error at most `limit` = 2e-6 · `factor`, relative largest error at most ten times that.
#[wasm_bindgen]
pub fn judge(got: Float32Array, want: Float64Array, factor: f64, lse: bool) -> Object {
    let limit = compare::limit(Quantity::Forward, DType::F32) * factor;
    let scale = if lse { Scale::Lse } else { Scale::Tensor };
    let comparison = compare::compare(&got.to_vec(), &want.to_vec(), limit, scale);
    object([
        ("passed", comparison.passed().into()),
        ("rms", comparison.rms.into()),
        ("max", comparison.max.into()),
        ("limit", comparison.limit.into()),
        ("failure", comparison.failure.map_or(JsValue::NULL, JsValue::from)),
    ])
}

/// Without it a panic is an `unreachable` without words.
#[wasm_bindgen(start)]
fn start() {
    std::panic::set_hook(Box::new(|info| wasm_bindgen::throw_str(&info.to_string())));
}

/// The JavaScript error of one of the library's: its words as the message, its kind as `kind`.
fn thrown(error: Error) -> JsValue {
    let kind = match error {
        Error::Argument { .. } => "argument",
        Error::Limit { .. } => "limit",
        Error::NoAdapter { .. } => "no adapter",
        _ => "gpu",
    };
    let thrown = js_sys::Error::new(&error.to_string());
    set(&thrown, "kind", &kind.into());
    thrown.into()
}

fn refused(argument: &str, got: impl std::fmt::Display, needed: impl std::fmt::Display) -> Error {
    Error::Argument { argument: argument.to_string(), got: got.to_string(), needed: needed.to_string() }
}

fn set(object: &Object, name: &str, value: &JsValue) {
    // Only a frozen object or a setter of one's own could refuse.
    let _ = Reflect::set(object, &name.into(), value);
}

fn object<const N: usize>(fields: [(&str, JsValue); N]) -> Object {
    let object = Object::new();
    for (name, value) in fields {
        set(&object, name, &value);
    }
    object
}

fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| f64::from(value)).collect()
}

/// A call's inputs: names, elements if given, shapes.
type Inputs<'a, const N: usize> = [(&'static str, Option<&'a [f32]>, Vec<usize>); N];

fn check_sizes<const N: usize>(inputs: Inputs<N>) -> Result<()> {
    for (name, values, shape) in inputs {
        if let Some(values) = values
            && values.len() != shape.iter().product::<usize>()
        {
            return Err(refused(name, format!("{} elements", values.len()), format!("those of shape {shape:?}")));
        }
    }
    Ok(())
}

fn upload<const N: usize>(gpu: &Gpu, inputs: Inputs<N>) -> Result<[Option<TensorView>; N]> {
    let mut views = [const { None }; N];
    for (view, (_, values, shape)) in views.iter_mut().zip(inputs) {
        if let Some(values) = values {
            *view = Some(gpu.upload(values, &shape)?.view());
        }
    }
    Ok(views)
}

/// Records with `record`, submits, and reads `results` back.
async fn run(
    gpu: &Gpu,
    record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>,
    results: [&Tensor; 2],
) -> Result<[Vec<f32>; 2]> {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder)?;
    gpu.queue().submit([encoder.finish()]);
    let [first, second] = results;
    Ok([gpu.read_async(first).await?, gpu.read_async(second).await?])
}
