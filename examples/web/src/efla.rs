//! EFLA: arguments, device, reference.

use continuous_attention::reference::efla as reference;
use continuous_attention::{Efla, EflaConfig, EflaShape, EflaTensors, Form, Gpu, Integrator, Result};
use js_sys::{Float32Array, Float64Array, Object};

use crate::arguments::{Arguments, rows};
use crate::{Inputs, check_sizes, object, refused, run, upload, widen};

/// One call.
pub struct Call {
    config: EflaConfig,
    shape: EflaShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    log_decay: Option<Vec<f32>>,
    initial_state: Option<Vec<f32>>,
}

const NAMES: [&str; 17] = [
    "q",
    "k",
    "v",
    "beta",
    "logDecay",
    "initialState",
    "batch",
    "heads",
    "valueHeads",
    "keyDim",
    "valueDim",
    "integrator",
    "normalizeQ",
    "normalizeK",
    "scale",
    "chunk",
    "form",
];

impl Call {
    /// A call's arguments.
    pub fn read(object: &Object) -> Result<Self> {
        let arguments = Arguments::new(object, &NAMES)?;
        let integrators = [
            ("exact", Integrator::Exact),
            ("euler", Integrator::Euler),
            ("rk2", Integrator::RungeKutta2),
            ("rk4", Integrator::RungeKutta4),
        ];
        let log_decay = arguments.floats("logDecay")?;
        let config = EflaConfig {
            key_dim: arguments.count("keyDim")?.ok_or_else(|| refused("keyDim", "nothing", "1 to 256"))?,
            value_dim: arguments.count("valueDim")?.ok_or_else(|| refused("valueDim", "nothing", "1 to 256"))?,
            integrator: arguments.choice("integrator", &integrators)?.unwrap_or_default(),
            normalize_q: arguments.flag("normalizeQ")?.unwrap_or(false),
            normalize_k: arguments.flag("normalizeK")?.unwrap_or(false),
            scale: arguments.number("scale")?,
            chunk: arguments.count("chunk")?,
            form: arguments
                .choice("form", &[("chunked", Form::Chunked), ("recurrent", Form::Recurrent)])?
                .unwrap_or_default(),
            gated: log_decay.is_some(),
        };
        config.validate()?;
        let (q, k, v) = (arguments.needed("q")?, arguments.needed("k")?, arguments.needed("v")?);
        let batch = arguments.count("batch")?.unwrap_or(1);
        let heads = arguments.count("heads")?.unwrap_or(1);
        let value_heads = arguments.count("valueHeads")?.unwrap_or(heads);
        let tokens = rows("q", &q, batch.saturating_mul(heads), config.key_dim)?;
        let shape = EflaShape { batch, heads, value_heads, tokens };
        shape.validate()?;
        let call = Call {
            config,
            shape,
            q,
            k,
            v,
            beta: arguments.needed("beta")?,
            log_decay,
            initial_state: arguments.floats("initialState")?,
        };
        check_sizes(call.tensors())?;
        Ok(call)
    }

    /// Every input with its shape.
    fn tensors(&self) -> Inputs<'_, 6> {
        let EflaConfig { key_dim, value_dim, .. } = self.config;
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        [
            ("q", Some(&self.q), vec![batch, heads, tokens, key_dim]),
            ("k", Some(&self.k), vec![batch, heads, tokens, key_dim]),
            ("v", Some(&self.v), vec![batch, value_heads, tokens, value_dim]),
            ("beta", Some(&self.beta), vec![batch, value_heads, tokens]),
            ("logDecay", self.log_decay.as_deref(), vec![batch, value_heads, tokens]),
            ("initialState", self.initial_state.as_deref(), vec![batch, value_heads, key_dim, value_dim]),
        ]
    }

    /// Computes on the device.
    pub async fn forward(&self, gpu: &Gpu) -> Result<Object> {
        let EflaConfig { key_dim, value_dim, .. } = self.config;
        let EflaShape { batch, value_heads, tokens, .. } = self.shape;
        let out = gpu.zeros(&[batch, value_heads, tokens, value_dim])?;
        let final_state = gpu.zeros(&[batch, value_heads, key_dim, value_dim])?;
        let [q, k, v, beta, log_decay, initial_state] = upload(gpu, self.tensors())?;
        let (Some(q), Some(k), Some(v), Some(beta)) = (q, k, v, beta) else { unreachable!("they are always given") };
        let tensors = EflaTensors {
            log_decay,
            initial_state,
            final_state: Some(final_state.view()),
            ..EflaTensors::new(q, k, v, beta, out.view())
        };
        let efla = Efla::new(gpu, self.config)?;
        let results = run(gpu, |encoder| efla.forward(encoder, &tensors), [&out, &final_state]);
        let [out, final_state] = results.await?;
        Ok(object([
            ("out", Float32Array::from(&out[..]).into()),
            ("finalState", Float32Array::from(&final_state[..]).into()),
        ]))
    }

    /// Computes in float64.
    pub fn reference(&self) -> Result<Object> {
        let wide = |values: &Option<Vec<f32>>| values.as_ref().map(|values| widen(values));
        let (q, k, v, beta) = (widen(&self.q), widen(&self.k), widen(&self.v), widen(&self.beta));
        let (log_decay, initial_state) = (wide(&self.log_decay), wide(&self.initial_state));
        let inputs = reference::Inputs {
            q: &q,
            k: &k,
            v: &v,
            beta: &beta,
            log_decay: log_decay.as_deref(),
            initial_state: initial_state.as_deref(),
        };
        let output = reference::forward(&self.config, &self.shape, &inputs)?;
        Ok(object([
            ("out", Float64Array::from(&output.out[..]).into()),
            ("finalState", Float64Array::from(&output.final_state[..]).into()),
        ]))
    }
}
