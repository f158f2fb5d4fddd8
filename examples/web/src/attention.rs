//! Attention: arguments, device, reference, and the weights of one row.

use continuous_attention::reference::attention as reference;
use continuous_attention::{
    Attention, AttentionConfig, AttentionShape, AttentionTensors, Gpu, Method, Result, Sink, TensorView,
};
use js_sys::{Float32Array, Float64Array, Object};

use crate::arguments::{Arguments, rows};
use crate::{Inputs, check_sizes, object, refused, run, upload, widen};

/// Columns of values per head when weights are asked for.
const COLUMNS: usize = 32;

/// One call.
#[derive(Clone)]
pub struct Call {
    config: AttentionConfig,
    shape: AttentionShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    sink_k: Option<Vec<f32>>,
    sink_v: Option<Vec<f32>>,
    intervals: Option<Vec<f32>>,
}

/// A row of a call.
#[derive(Clone, Copy)]
pub struct Row {
    batch: usize,
    head: usize,
    row: usize,
}

const NAMES: [&str; 16] = [
    "q",
    "k",
    "v",
    "sinkK",
    "sinkV",
    "intervals",
    "batch",
    "heads",
    "kvHeads",
    "headDim",
    "valueDim",
    "method",
    "sink",
    "causal",
    "window",
    "scale",
];

impl Call {
    /// A call's arguments.
    pub fn read(object: &Object) -> Result<Self> {
        Self::of(&Arguments::new(object, &NAMES)?)
    }

    /// A call's arguments and which row: `row`, `head`, `batchEntry`, 0 unless given.
    pub fn read_row(object: &Object) -> Result<(Self, Row)> {
        let arguments = Arguments::new(object, &[&NAMES[..], &["row", "head", "batchEntry"]].concat())?;
        let call = Self::of(&arguments)?;
        let AttentionShape { batch, heads, queries, .. } = call.shape;
        let place = |name: &str, size: usize| -> Result<usize> {
            let place = arguments.count(name)?.unwrap_or(0);
            if place < size { Ok(place) } else { Err(refused(name, place, format!("less than {size}"))) }
        };
        let row = Row { batch: place("batchEntry", batch)?, head: place("head", heads)?, row: place("row", queries)? };
        Ok((call, row))
    }

    fn of(arguments: &Arguments) -> Result<Self> {
        let method = [("continuous", Method::Continuous), ("softmax", Method::Softmax)];
        let method = arguments.choice("method", &method)?.unwrap_or_default();
        let sink = [("zero", Sink::Zero), ("first", Sink::First), ("given", Sink::Given), ("none", Sink::None)];
        let usual = if method == Method::Softmax { Sink::None } else { Sink::default() };
        let config = AttentionConfig {
            head_dim: arguments.count("headDim")?.ok_or_else(|| refused("headDim", "nothing", "1 to 256"))?,
            value_dim: arguments.count("valueDim")?.ok_or_else(|| refused("valueDim", "nothing", "1 to 256"))?,
            method,
            sink: arguments.choice("sink", &sink)?.unwrap_or(usual),
            causal: arguments.flag("causal")?.unwrap_or(true),
            window: arguments.count("window")?,
            scale: arguments.number("scale")?,
            block_q: None,
        };
        config.validate()?;
        let (q, k, v) = (arguments.needed("q")?, arguments.needed("k")?, arguments.needed("v")?);
        let batch = arguments.count("batch")?.unwrap_or(1);
        let heads = arguments.count("heads")?.unwrap_or(1);
        let kv_heads = arguments.count("kvHeads")?.unwrap_or(heads);
        let queries = rows("q", &q, batch.saturating_mul(heads), config.head_dim)?;
        let keys = rows("k", &k, batch.saturating_mul(kv_heads), config.head_dim)?;
        let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
        shape.validate()?;
        let (sink_k, sink_v) = (arguments.floats("sinkK")?, arguments.floats("sinkV")?);
        let call = Call { config, shape, q, k, v, sink_k, sink_v, intervals: arguments.floats("intervals")? };
        check_sizes(call.tensors())?;
        Ok(call)
    }

    /// Every input with its shape.
    fn tensors(&self) -> Inputs<'_, 6> {
        let AttentionConfig { head_dim, value_dim, .. } = self.config;
        let AttentionShape { batch, heads, kv_heads, queries, keys } = self.shape;
        // One sink for the whole batch, or one an entry.
        let sink = |values: &Option<Vec<f32>>, dim: usize| match values {
            Some(values) if values.len() == kv_heads * dim => vec![1, kv_heads, dim],
            _ => vec![batch, kv_heads, dim],
        };
        [
            ("q", Some(&self.q), vec![batch, heads, queries, head_dim]),
            ("k", Some(&self.k), vec![batch, kv_heads, keys, head_dim]),
            ("v", Some(&self.v), vec![batch, kv_heads, keys, value_dim]),
            ("sinkK", self.sink_k.as_deref(), sink(&self.sink_k, head_dim)),
            ("sinkV", self.sink_v.as_deref(), sink(&self.sink_v, value_dim)),
            ("intervals", self.intervals.as_deref(), vec![batch, keys]),
        ]
    }

    /// Computes on the device.
    pub async fn forward(&self, gpu: &Gpu) -> Result<Object> {
        let AttentionShape { batch, heads, queries, .. } = self.shape;
        let out = gpu.zeros(&[batch, heads, queries, self.config.value_dim])?;
        let lse = gpu.zeros(&[batch, heads, queries])?;
        let [q, k, v, sink_k, sink_v, intervals] = upload(gpu, self.tensors())?;
        let (Some(q), Some(k), Some(v)) = (q, k, v) else { unreachable!("they are always given") };
        let tensors = AttentionTensors {
            sink_k,
            sink_v,
            intervals,
            lse: Some(lse.view()),
            ..AttentionTensors::new(q, k, v, out.view())
        };
        let attention = Attention::new(gpu, self.config)?;
        let [out, lse] = run(gpu, |encoder| attention.forward(encoder, &tensors), [&out, &lse]).await?;
        Ok(object([("out", Float32Array::from(&out[..]).into()), ("lse", Float32Array::from(&lse[..]).into())]))
    }

    /// Computes in float64.
    pub fn reference(&self) -> Result<Object> {
        let (output, largest) = self.in_float64()?;
        Ok(object([
            ("out", Float64Array::from(&output.out[..]).into()),
            ("lse", Float64Array::from(&output.lse[..]).into()),
            ("largestLogit", largest.into()),
        ]))
    }

    fn in_float64(&self) -> Result<(reference::Output, f64)> {
        let wide = |values: &Option<Vec<f32>>| values.as_ref().map(|values| widen(values));
        let (q, k, v) = (widen(&self.q), widen(&self.k), widen(&self.v));
        let (sink_k, sink_v, intervals) = (wide(&self.sink_k), wide(&self.sink_v), wide(&self.intervals));
        let inputs = reference::Inputs {
            q: &q,
            k: &k,
            v: &v,
            sink_k: sink_k.as_deref(),
            sink_v: sink_v.as_deref(),
            intervals: intervals.as_deref(),
        };
        let output = reference::forward(&self.config, &self.shape, &inputs)?;
        Ok((output, reference::largest_logit(&self.config, &self.shape, &inputs)?))
    }

    /// Weights of a row: attention over values that are the columns of a unit matrix, so that column i of the result is
    /// what token i weighs. Each head takes [`COLUMNS`] of them.
    pub async fn weights(&self, gpu: &Gpu, row: Row) -> Result<Object> {
        let one = self.one_row(row);
        let (keys, head_dim) = (one.shape.keys, one.config.head_dim);
        let heads = keys.div_ceil(COLUMNS);
        let config = AttentionConfig { value_dim: COLUMNS, ..one.config };
        let q = gpu.upload(&one.q, &[1, 1, 1, head_dim])?;
        let k = gpu.upload(&one.k, &[1, 1, keys, head_dim])?;
        // All heads read the same query and keys.
        let q = TensorView::strided(q.buffer(), 0, &[1, heads, 1, head_dim], &[0, 0, head_dim, 1]);
        let k = TensorView::strided(k.buffer(), 0, &[1, heads, keys, head_dim], &[0, 0, head_dim, 1]);
        // Heads from the last columns to the first, each reading the same rows 32 further down: zeros with one unit
        // matrix among them.
        let above = heads.saturating_sub(1) * COLUMNS;
        let mut units = vec![0.0; (above + keys.next_multiple_of(COLUMNS)) * COLUMNS];
        for column in 0..if keys == 0 { 0 } else { COLUMNS } {
            units[(above + column) * COLUMNS + column] = 1.0;
        }
        let units = gpu.upload(&units, &[units.len()])?;
        let strides = [0, COLUMNS * COLUMNS, COLUMNS, 1];
        let v = TensorView::strided(units.buffer(), 0, &[1, heads, keys, COLUMNS], &strides);
        let out = gpu.zeros(&[1, heads, 1, COLUMNS])?;
        let mut tensors = AttentionTensors::new(q, k, v, out.view());
        if let (Some(sink_k), Sink::Given) = (&one.sink_k, config.sink) {
            let sink_k = gpu.upload(sink_k, &[1, 1, head_dim])?;
            let sink_v = gpu.zeros(&[1, 1, COLUMNS])?;
            tensors.sink_k = Some(TensorView::strided(sink_k.buffer(), 0, &[1, heads, head_dim], &[0, 0, 1]));
            tensors.sink_v = Some(TensorView::strided(sink_v.buffer(), 0, &[1, heads, COLUMNS], &[0, 0, 1]));
        }
        if let Some(intervals) = &one.intervals {
            tensors.intervals = Some(gpu.upload(intervals, &[1, keys])?.view());
        }
        let attention = Attention::new(gpu, config)?;
        let [blocks, _] = run(gpu, |encoder| attention.forward(encoder, &tensors), [&out, &out]).await?;
        // The last head has the first columns.
        let mut weights: Vec<f32> = blocks.rchunks(COLUMNS).flatten().copied().collect();
        weights.resize(self.shape.keys, 0.0);
        Ok(object([("weights", Float32Array::from(&weights[..]).into())]))
    }

    /// The same in float64.
    pub fn reference_weights(&self, row: Row) -> Result<Object> {
        let mut one = self.one_row(row);
        let keys = one.shape.keys;
        one.config.value_dim = 1;
        one.sink_v = one.sink_v.map(|_| vec![0.0]);
        let (mut weights, mut largest) = (Vec::new(), 0.0);
        for token in 0..keys {
            one.v = (0..keys).map(|other| f32::from(other == token)).collect();
            let (output, logit) = one.in_float64()?;
            weights.push(output.out[0]);
            largest = logit;
        }
        weights.resize(self.shape.keys, 0.0);
        Ok(object([("weights", Float64Array::from(&weights[..]).into()), ("largestLogit", largest.into())]))
    }

    /// The call that computes one row only: its query, and the keys it may see. Values are left out.
    fn one_row(&self, Row { batch, head, row }: Row) -> Self {
        let AttentionConfig { head_dim, causal, .. } = self.config;
        let AttentionShape { heads, kv_heads, queries, keys, .. } = self.shape;
        let kv_head = head / self.shape.group();
        let seen = if causal { (row + 1 + keys).saturating_sub(queries).min(keys) } else { keys };
        let part = |values: &[f32], unit: usize, size: usize| values[unit * size..(unit + 1) * size].to_vec();
        let k = part(&self.k, batch * kv_heads + kv_head, keys * head_dim);
        let sink = |values: &Vec<f32>| {
            let batch = if values.len() == kv_heads * head_dim { 0 } else { batch };
            part(values, batch * kv_heads + kv_head, head_dim)
        };
        Call {
            config: self.config,
            shape: AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1, keys: seen },
            q: part(&self.q, (batch * heads + head) * queries + row, head_dim),
            k: k[..seen * head_dim].to_vec(),
            v: Vec::new(),
            sink_k: self.sink_k.as_ref().map(sink),
            sink_v: self.sink_v.as_ref().map(|_| Vec::new()),
            intervals: self.intervals.as_ref().map(|values| part(values, batch, keys)[..seen].to_vec()),
        }
    }
}
