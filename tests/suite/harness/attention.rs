//! One attention call from slices.

use continuous_attention::reference::attention::{Inputs, Output, forward, largest_logit};
use continuous_attention::reference::compare::attention_factor;
use continuous_attention::{Attention, AttentionConfig, AttentionShape, AttentionTensors, Gpu, Lengths, Method, Sink};

use super::{Guarded, forward_limit, gpu, input, judge, normal, submit, widen};

/// A call with everything it reads.
#[derive(Clone)]
pub struct AttentionCase {
    pub config: AttentionConfig,
    pub shape: AttentionShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    /// With [`Sink::Given`], of `sink_batch` sequences.
    pub sink_k: Option<Vec<f32>>,
    pub sink_v: Option<Vec<f32>>,
    pub sink_batch: usize,
    pub intervals: Option<Vec<f32>>,
    /// The reference knows [`Lengths::Full`] only.
    pub lengths: Lengths,
}

/// What a call wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionOutput {
    pub out: Vec<f32>,
    pub lse: Vec<f32>,
}

impl AttentionCase {
    /// Normally distributed tensors; a given sink is one for the whole batch.
    pub fn random(config: AttentionConfig, shape: AttentionShape, rng: &mut fastrand::Rng) -> Self {
        let AttentionShape { batch, heads, kv_heads, queries, keys } = shape;
        let given = config.sink == Sink::Given;
        AttentionCase {
            config,
            shape,
            q: normal(rng, batch * heads * queries * config.head_dim),
            k: normal(rng, batch * kv_heads * keys * config.head_dim),
            v: normal(rng, batch * kv_heads * keys * config.value_dim),
            sink_k: given.then(|| normal(rng, kv_heads * config.head_dim)),
            sink_v: given.then(|| normal(rng, kv_heads * config.value_dim)),
            sink_batch: 1,
            intervals: None,
            lengths: Lengths::Full,
        }
    }

    /// Intervals between 0 and 2, one in eight of them 0.
    pub fn with_intervals(mut self, rng: &mut fastrand::Rng) -> Self {
        let count = self.shape.batch * self.shape.keys;
        self.intervals = Some((0..count).map(|_| if rng.u8(..8) == 0 { 0.0 } else { 2.0 * rng.f32() }).collect());
        self
    }

    /// A sink of its own for every sequence of the batch.
    pub fn with_sink_per_sequence(mut self, rng: &mut fastrand::Rng) -> Self {
        if self.config.sink == Sink::Given {
            let AttentionShape { batch, kv_heads, .. } = self.shape;
            self.sink_batch = batch;
            self.sink_k = Some(normal(rng, batch * kv_heads * self.config.head_dim));
            self.sink_v = Some(normal(rng, batch * kv_heads * self.config.value_dim));
        }
        self
    }

    /// For messages.
    pub fn label(&self) -> String {
        let method = if self.config.method == Method::Softmax { "softmax" } else { "continuous" };
        let intervals = if self.intervals.is_some() { "intervals" } else { "no intervals" };
        format!("{method} attention, {intervals}, sink batch {}, {:?}, {:?}", self.sink_batch, self.config, self.shape)
    }

    /// Calls `work` with the inputs of the reference.
    fn with_inputs<T>(&self, work: impl FnOnce(&Inputs) -> T) -> T {
        let (q, k, v) = (widen(&self.q), widen(&self.k), widen(&self.v));
        let [sink_k, sink_v, intervals] =
            [&self.sink_k, &self.sink_v, &self.intervals].map(|x| x.as_deref().map(widen));
        work(&Inputs {
            q: &q,
            k: &k,
            v: &v,
            sink_k: sink_k.as_deref(),
            sink_v: sink_v.as_deref(),
            intervals: intervals.as_deref(),
        })
    }

    /// The right answer.
    pub fn reference(&self) -> Output {
        self.with_inputs(|inputs| forward(&self.config, &self.shape, inputs))
            .unwrap_or_else(|error| panic!("the reference refuses {}: {error}", self.label()))
    }

    /// The limit that the specification sets for this call.
    pub fn limit(&self) -> f64 {
        let largest = self.with_inputs(|inputs| largest_logit(&self.config, &self.shape, inputs)).unwrap();
        forward_limit() * attention_factor(largest)
    }

    /// Runs on the shared device.
    pub fn run(&self) -> AttentionOutput {
        self.run_on(gpu())
    }

    /// Runs with NaN in the outputs and in the workspace, every tensor at an odd offset.
    pub fn run_on(&self, gpu: &Gpu) -> AttentionOutput {
        self.try_run_on(gpu).unwrap_or_else(|error| panic!("{error}\n  in {}", self.label()))
    }

    fn try_run_on(&self, gpu: &Gpu) -> continuous_attention::Result<AttentionOutput> {
        let plan = Attention::new(gpu, self.config)?.plan_ragged(&self.shape, &self.lengths)?;
        let out = Guarded::new(gpu, Guarded::ODD, &self.out_shape());
        let lse = Guarded::new(gpu, Guarded::ODD + 2, &self.lse_shape());
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(plan.workspace_bytes() / 4) as usize]);
        let mut tensors = self.tensors(gpu, &out);
        tensors.lse = Some(lse.view());
        tensors.workspace = Some(workspace.view());
        submit(gpu, &plan.bind(&tensors)?);
        let label = self.label();
        workspace.read(gpu, &label);
        Ok(AttentionOutput { out: out.read(gpu, &label), lse: lse.read(gpu, &label) })
    }

    /// The inputs on the device, and where `out` goes.
    pub fn tensors(&self, gpu: &Gpu, out: &Guarded) -> AttentionTensors {
        let AttentionShape { batch, heads, kv_heads, queries, keys } = self.shape;
        let AttentionConfig { head_dim, value_dim, .. } = self.config;
        let optional = |values: &Option<Vec<f32>>, shape: &[usize], offset| {
            values.as_ref().map(|values| input(gpu, values, shape, offset))
        };
        AttentionTensors {
            q: input(gpu, &self.q, &[batch, heads, queries, head_dim], 5),
            k: input(gpu, &self.k, &[batch, kv_heads, keys, head_dim], 70),
            v: input(gpu, &self.v, &[batch, kv_heads, keys, value_dim], 131),
            sink_k: optional(&self.sink_k, &[self.sink_batch, kv_heads, head_dim], 1),
            sink_v: optional(&self.sink_v, &[self.sink_batch, kv_heads, value_dim], 66),
            intervals: optional(&self.intervals, &[batch, keys], 3),
            out: out.view(),
            lse: None,
            lengths: self.lengths.clone(),
            workspace: None,
        }
    }

    pub fn out_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.heads, self.shape.queries, self.config.value_dim]
    }

    pub fn lse_shape(&self) -> [usize; 3] {
        [self.shape.batch, self.shape.heads, self.shape.queries]
    }

    /// Runs and compares with the reference at the specification's limit.
    pub fn check(&self) {
        self.check_within(self.limit());
    }

    /// Runs and compares at another limit: a tighter one where the logits themselves are exact.
    pub fn check_within(&self, limit: f64) {
        self.judge(&self.run(), limit);
    }

    /// Compares a result with the reference.
    pub fn judge(&self, got: &AttentionOutput, limit: f64) {
        let (want, label) = (self.reference(), self.label());
        judge(&label, "out", &got.out, &want.out, limit);
        judge(&label, "lse", &got.lse, &want.lse, limit);
    }
}
