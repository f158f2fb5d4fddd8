//! Whole configurations drawn at random: options, sizes, storage types and places in memory all at once, forward and
//! backward, each compared with the float64 reference that was fed what the device holds. Everything written starts as
//! NaN between guards, and so does the workspace. The suite runs some, `demo -- soak` as many as time allows.

mod placed;

pub use placed::{Place, Placed};

use continuous_attention::reference::compare::{Comparison, Quantity, Scale, attention_factor, compare, limit};
use continuous_attention::reference::{attention, efla};
use continuous_attention::*;

/// So many seeds in a row share all that kernels are compiled for: options, dimensions, storage types, places. Sizes and
/// values differ. Software adapters take seconds to compile what they then run in a tenth of one.
pub const RUN: u64 = 16;

/// Lengths and dimensions around the edges of every tile in use.
pub const EDGES: [usize; 16] = [1, 2, 3, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 255, 256];

/// A generator with a seed of its own for every test.
pub fn rng(seed: u64) -> fastrand::Rng {
    fastrand::Rng::with_seed(seed)
}

/// Normally distributed values (Box–Muller).
pub fn normal(rng: &mut fastrand::Rng, count: usize) -> Vec<f32> {
    let draw =
        |rng: &mut fastrand::Rng| (-2.0 * (1.0 - rng.f64()).ln()).sqrt() * (std::f64::consts::TAU * rng.f64()).cos();
    (0..count).map(|_| draw(rng) as f32).collect()
}

/// One of `choices`.
pub fn pick<T: Copy>(rng: &mut fastrand::Rng, choices: &[T]) -> T {
    choices[rng.usize(..choices.len())]
}

/// What the reference is fed: exactly the values the device got.
pub fn widen(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&value| value.into()).collect()
}

/// Records `call` in a pass of its own and submits it.
pub fn submit(gpu: &Gpu, call: &Call) {
    submit_all(gpu, &[call]);
}

/// Records calls into one pass and submits it.
pub fn submit_all(gpu: &Gpu, calls: &[&Call]) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    calls.iter().for_each(|call| call.record(&mut pass));
    drop(pass);
    gpu.queue().submit([encoder.finish()]);
}

/// A tensor that was compared with the reference.
pub struct Judged<'a> {
    /// The configuration.
    pub label: &'a str,
    pub tensor: &'static str,
    pub dtype: DType,
    pub comparison: Comparison,
}

/// What hears of every tensor judged.
pub type Watch<'a> = &'a mut dyn FnMut(&Judged);

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Storage types of a case's tensors: often one for all.
struct Types(Option<DType>);

impl Types {
    fn draw(rng: &mut fastrand::Rng) -> Self {
        Types((rng.u8(..4) > 0).then(|| pick(rng, &TYPES)))
    }

    fn input(&self, rng: &mut fastrand::Rng) -> DType {
        self.0.unwrap_or_else(|| pick(rng, &TYPES))
    }

    /// Outputs of 16 bits have an even last dimension.
    fn output(&self, rng: &mut fastrand::Rng, shape: &[usize]) -> DType {
        if shape[shape.len() - 1].is_multiple_of(2) { self.input(rng) } else { DType::F32 }
    }
}

/// An input: what the device holds of it, and where.
struct Given {
    view: TensorView,
    values: Vec<f64>,
}

struct Drawer {
    /// Draws what the seeds of a run share.
    form: fastrand::Rng,
    /// Draws all else.
    rng: fastrand::Rng,
    types: Types,
    /// Whether all is of one type and in whole vectors: what most callers have, and some kernels demand.
    usual: bool,
    /// Whether sequences are long, and few.
    long: bool,
}

impl Drawer {
    fn new(seed: u64) -> Self {
        let (mut form, mut rng) = (rng(seed / RUN), rng(seed));
        let usual = form.bool();
        let types = if usual { Types(Some(pick(&mut form, &TYPES))) } else { Types::draw(&mut form) };
        let long = rng.u8(..24) == 0;
        Drawer { form, rng, types, usual, long }
    }

    fn place(&mut self, dtype: DType, shape: &[usize], written: bool) -> Place {
        Place::random(&mut self.form, dtype, shape, written, self.usual)
    }

    fn given(&mut self, gpu: &Gpu, dtype: DType, shape: &[usize], values: &[f32]) -> Given {
        let place = self.place(dtype, shape, false);
        Given { view: place.upload(gpu, values), values: widen(&place.rounded(values)) }
    }

    fn stored(&mut self, gpu: &Gpu, shape: &[usize]) -> Given {
        let dtype = self.types.input(&mut self.form);
        let values = normal(&mut self.rng, shape.iter().product());
        self.given(gpu, dtype, shape, &values)
    }

    /// As [`Drawer::stored`], with NaN in the tokens (of every sequence) that `own` denies.
    fn stored_where(&mut self, gpu: &Gpu, shape: &[usize; 4], own: &[bool]) -> Given {
        let dtype = self.types.input(&mut self.form);
        let mut values = normal(&mut self.rng, shape.iter().product());
        for (at, value) in values.iter_mut().enumerate() {
            let (batch, token) = (at / shape[3] / shape[2] / shape[1], at / shape[3] % shape[2]);
            if !own[batch * shape[2] + token] {
                *value = f32::NAN;
            }
        }
        self.given(gpu, dtype, shape, &values)
    }

    fn f32(&mut self, gpu: &Gpu, shape: &[usize], draw: impl Fn(&mut fastrand::Rng) -> f32) -> Given {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw(&mut self.rng)).collect();
        self.given(gpu, DType::F32, shape, &values)
    }

    fn output(&mut self, gpu: &Gpu, shape: &[usize]) -> Placed {
        let dtype = self.types.output(&mut self.form, shape);
        self.place(dtype, shape, true).output(gpu)
    }

    fn f32_output(&mut self, gpu: &Gpu, shape: &[usize]) -> Placed {
        self.place(DType::F32, shape, true).output(gpu)
    }

    fn dim(&mut self) -> usize {
        let dim = match self.form.u8(..4) {
            0 => pick(&mut self.form, &EDGES),
            1 => self.form.usize(1..=256),
            _ => self.form.usize(1..=40),
        };
        if self.usual { dim.next_multiple_of(4) } else { dim }
    }

    fn length(&mut self) -> usize {
        match self.rng.u8(..4) {
            0 | 1 if self.long => self.rng.usize(500..2500),
            0 | 2 => pick(&mut self.rng, &EDGES),
            _ => self.rng.usize(..150),
        }
    }

    /// A count of heads or sequences up to `most`.
    fn few(&mut self, most: usize) -> usize {
        if self.long { 1 } else { self.rng.usize(1..=most) }
    }
}

/// The workspace of a plan, poisoned.
fn workspace(gpu: &Gpu, bytes: u64) -> Placed {
    // At an offset that can be bound.
    Place::dense(DType::F32, &[(bytes / 4) as usize], 192).output(gpu)
}

/// Judges the tensors of one configuration.
struct Judge<'a> {
    gpu: &'a Gpu,
    label: String,
    watch: Watch<'a>,
}

impl Judge<'_> {
    /// The strictest limit that holds: that of the storage type written.
    fn judge(&mut self, tensor: &'static str, output: &Placed, want: &[f64], factor: f64) {
        let quantity = match tensor {
            "d_beta" | "d_log_decay" => Quantity::BetaGradient,
            _ if tensor.starts_with("d_") => Quantity::Gradient,
            _ => Quantity::Forward,
        };
        let scale = if tensor == "lse" { Scale::Lse } else { Scale::Tensor };
        let (dtype, label) = (output.view().dtype(), &self.label[..]);
        let limit = limit(quantity, dtype) * factor;
        let comparison = compare(&output.read(self.gpu, label), want, limit, scale);
        let judged = Judged { label, tensor, dtype, comparison };
        (self.watch)(&judged);
        let failure = judged.comparison.failure.unwrap_or_default();
        assert!(failure.is_empty(), "{tensor} {dtype:?}: {failure}\n  in {label}");
    }
}

/// The keys of one sequence of a call.
struct Sequence {
    batch: usize,
    keys: std::ops::Range<usize>,
}

/// Cumulative lengths of sequences, of which many a one is empty or has one token.
fn draw_cumulative(rng: &mut fastrand::Rng, total: usize, count: usize) -> Vec<usize> {
    let mut ends: Vec<usize> = (1..count).map(|_| rng.usize(..=total)).collect();
    if count > 2 {
        ends[0] = ends[1].saturating_sub(1);
    }
    ends.sort_unstable();
    [&[0], &ends[..], &[total][..count.min(1)]].concat()
}

/// Draws lengths for a shape, whose batch has to be 1 if they are packed.
fn draw_lengths(draw: &mut Drawer, shape: &mut AttentionShape) -> (Lengths, Vec<Sequence>) {
    let AttentionShape { batch, queries, keys, .. } = *shape;
    let rng = &mut draw.rng;
    match draw.form.u8(..4) {
        0 => {
            shape.batch = 1;
            let count = if queries + keys == 0 { rng.usize(..3) } else { rng.usize(1..6) };
            let [cu_seqlens_q, cu_seqlens_k] = [queries, keys].map(|total| draw_cumulative(rng, total, count));
            let sequences = cu_seqlens_k.windows(2).map(|ends| Sequence { batch: 0, keys: ends[0]..ends[1] }).collect();
            (Lengths::Packed { cu_seqlens_q, cu_seqlens_k }, sequences)
        }
        1 => {
            let kv_lens: Vec<usize> =
                (0..batch).map(|_| if rng.bool() { rng.usize(..=keys) } else { keys.min(rng.usize(..3)) }).collect();
            let sequence = |(batch, &length): (usize, &usize)| Sequence { batch, keys: 0..length };
            let sequences = kv_lens.iter().enumerate().map(sequence).collect();
            (Lengths::Cache { kv_lens }, sequences)
        }
        _ => (Lengths::Full, (0..batch).map(|batch| Sequence { batch, keys: 0..keys }).collect()),
    }
}

/// A configuration of either operator, drawn but not yet run.
pub enum Case {
    Attention(AttentionCase),
    Efla(EflaCase),
}

impl Case {
    /// Runs of seeds are of either operator in turn.
    pub fn draw(seed: u64) -> Self {
        match (seed / RUN).is_multiple_of(2) {
            true => Case::Attention(AttentionCase::draw(seed)),
            false => Case::Efla(EflaCase::draw(seed)),
        }
    }

    /// In a few words.
    pub fn kind(&self) -> String {
        let words = match self {
            Case::Attention(case) => {
                let method = if case.config.method == Method::Softmax { "softmax" } else { "continuous" };
                let lengths = match case.lengths {
                    Lengths::Full => "",
                    Lengths::Packed { .. } => "packed",
                    Lengths::Cache { .. } => "cache",
                };
                [method, "attention", lengths, ""]
            }
            Case::Efla(case) => {
                let form = if case.config.form == Form::Recurrent { "recurrent" } else { "chunked" };
                let gated = if case.config.gated { "gated" } else { "" };
                ["efla", form, gated, if case.cu_seqlens.is_some() { "packed" } else { "" }]
            }
        };
        words.iter().filter(|word| !word.is_empty()).copied().collect::<Vec<_>>().join(" ")
    }

    /// Computes both passes and judges every tensor that they write.
    ///
    /// # Panics
    /// When one misses its limit, or something outside of it was written to.
    pub fn run(self, gpu: &Gpu, watch: Watch) {
        match self {
            Case::Attention(case) => case.run(gpu, watch),
            Case::Efla(case) => case.run(gpu, watch),
        }
    }
}

pub struct AttentionCase {
    seed: u64,
    draw: Drawer,
    config: AttentionConfig,
    shape: AttentionShape,
    lengths: Lengths,
    sequences: Vec<Sequence>,
}

impl AttentionCase {
    fn draw(seed: u64) -> Self {
        let mut draw = Drawer::new(seed);
        let softmax = draw.form.u8(..4) == 0;
        let (queries, keys) = (draw.length(), draw.length());
        let config = AttentionConfig {
            head_dim: draw.dim(),
            value_dim: draw.dim(),
            method: if softmax { Method::Softmax } else { Method::Continuous },
            sink: if softmax {
                Sink::None
            } else {
                pick(&mut draw.form, &[Sink::Zero, Sink::First, Sink::Given, Sink::None])
            },
            causal: draw.rng.bool(),
            // Few segments make small differences of gradients, which no relative error can judge.
            window: draw.rng.bool().then(|| draw.rng.usize(5..keys.max(5) + 4)),
            scale: pick(&mut draw.rng, &[None, None, Some(0.2), Some(-0.3)]),
            block_q: pick(&mut draw.form, &[None, None, None, Some(64)]),
        };
        let kv_heads = draw.few(3);
        let heads = kv_heads * draw.few(3);
        let batch = draw.few(3);
        let mut shape = AttentionShape { batch, heads, kv_heads, queries, keys };
        let (lengths, sequences) = draw_lengths(&mut draw, &mut shape);
        AttentionCase { seed, draw, config, shape, lengths, sequences }
    }

    fn run(self, gpu: &Gpu, watch: Watch) {
        let AttentionCase { seed, mut draw, config, shape, lengths, sequences } = self;
        let label = format!("seed {seed}: {config:?} {shape:?} {lengths:?}");
        let AttentionShape { batch, heads, kv_heads, queries, keys } = shape;
        let softmax = config.method == Method::Softmax;

        let (head_dim, value_dim) = (config.head_dim, config.value_dim);
        let out_shape = [batch, heads, queries, value_dim];
        let rows_shape = [batch, heads, queries];
        let q = draw.stored(gpu, &[batch, heads, queries, head_dim]);
        // What no sequence has is NaN.
        let own: Vec<bool> = (0..batch * keys)
            .map(|at| {
                sequences.iter().any(|sequence| sequence.batch == at / keys && sequence.keys.contains(&(at % keys)))
            })
            .collect();
        let k = draw.stored_where(gpu, &[batch, kv_heads, keys, head_dim], &own);
        let v = draw.stored_where(gpu, &[batch, kv_heads, keys, value_dim], &own);
        let sinks = if draw.rng.bool() { 1 } else { sequences.len() };
        let sink = (config.sink == Sink::Given)
            .then(|| (draw.stored(gpu, &[sinks, kv_heads, head_dim]), draw.stored(gpu, &[sinks, kv_heads, value_dim])));
        let intervals = (!softmax && draw.form.bool())
            .then(|| draw.f32(gpu, &[batch, keys], |rng| if rng.u8(..8) == 0 { 0.0 } else { 0.01 + 2.0 * rng.f32() }));
        let d_out = draw.stored(gpu, &out_shape);
        let d_lse = draw.form.bool().then(|| draw.f32(gpu, &rows_shape, |rng| normal(rng, 1)[0]));

        let out = draw.output(gpu, &out_shape);
        let lse = draw.f32_output(gpu, &rows_shape);
        let gradients = [&q, &k, &v].map(|of| draw.output(gpu, of.view.shape()));
        let d_sink = sink.as_ref().map(|(k, v)| (draw.output(gpu, k.view.shape()), draw.output(gpu, v.view.shape())));
        let d_intervals = intervals.as_ref().map(|intervals| draw.f32_output(gpu, intervals.view.shape()));

        let operator = Attention::new(gpu, config).unwrap();
        let plan = operator.plan_ragged(&shape, &lengths).unwrap();
        let backward = operator.plan_backward_ragged(&shape, &lengths).unwrap();
        let (forward_space, backward_space) =
            (workspace(gpu, plan.workspace_bytes()), workspace(gpu, backward.workspace_bytes()));
        let forward = AttentionTensors {
            sink_k: sink.as_ref().map(|(k, _)| k.view.clone()),
            sink_v: sink.as_ref().map(|(_, v)| v.view.clone()),
            intervals: intervals.as_ref().map(|intervals| intervals.view.clone()),
            lse: Some(lse.view()),
            lengths,
            workspace: Some(forward_space.view()),
            ..AttentionTensors::new(q.view.clone(), k.view.clone(), v.view.clone(), out.view())
        };
        submit(gpu, &plan.bind(&forward).unwrap_or_else(|error| panic!("{error} in {label}")));
        let tensors = AttentionGradients {
            d_lse: d_lse.as_ref().map(|d_lse| d_lse.view.clone()),
            d_sink_k: d_sink.as_ref().map(|(k, _)| k.view()),
            d_sink_v: d_sink.as_ref().map(|(_, v)| v.view()),
            d_intervals: d_intervals.as_ref().map(Placed::view),
            workspace: Some(backward_space.view()),
            ..AttentionGradients::new(&forward, lse.view(), d_out.view.clone(), gradients.each_ref().map(Placed::view))
        };
        submit(gpu, &backward.bind(&tensors).unwrap_or_else(|error| panic!("{error} in {label}")));
        forward_space.read(gpu, &label);
        backward_space.read(gpu, &label);
        let mut judge = Judge { gpu, label, watch };

        let inputs = attention::Inputs {
            q: &q.values,
            k: &k.values,
            v: &v.values,
            sink_k: sink.as_ref().map(|(k, _)| &k.values[..]),
            sink_v: sink.as_ref().map(|(_, v)| &v.values[..]),
            intervals: intervals.as_ref().map(|intervals| &intervals.values[..]),
        };
        let d_lse = d_lse.as_ref().map(|d_lse| &d_lse.values[..]);
        let lengths = &forward.lengths;
        let factor = attention_factor(attention::largest_logit_ragged(&config, &shape, lengths, &inputs).unwrap());
        let want = attention::forward_ragged(&config, &shape, lengths, &inputs).unwrap();
        judge.judge("out", &out, &want.out, factor);
        judge.judge("lse", &lse, &want.lse, factor);
        let want = attention::backward_ragged(&config, &shape, lengths, &inputs, &d_out.values, d_lse).unwrap();
        // Gradients of rows with few nodes are such differences too.
        if sequences.iter().map(|sequence| sequence.keys.len()).max() >= Some(5) {
            for ((name, got), want) in
                ["d_q", "d_k", "d_v"].iter().zip(&gradients).zip([&want.d_q, &want.d_k, &want.d_v])
            {
                judge.judge(name, got, want, factor);
            }
            if let Some((d_sink_k, d_sink_v)) = &d_sink {
                judge.judge("d_sink_k", d_sink_k, want.d_sink_k.as_ref().unwrap(), factor);
                judge.judge("d_sink_v", d_sink_v, want.d_sink_v.as_ref().unwrap(), factor);
            }
            if let Some(d_intervals) = &d_intervals {
                judge.judge("d_intervals", d_intervals, want.d_intervals.as_ref().unwrap(), factor);
            }
        }
    }
}

pub struct EflaCase {
    seed: u64,
    draw: Drawer,
    config: EflaConfig,
    shape: EflaShape,
    cu_seqlens: Option<Vec<usize>>,
}

impl EflaCase {
    fn draw(seed: u64) -> Self {
        let mut draw = Drawer::new(seed);
        let form = &mut draw.form;
        let integrator = pick(
            form,
            &[
                Integrator::Exact,
                Integrator::Exact,
                Integrator::Euler,
                Integrator::RungeKutta2,
                Integrator::RungeKutta4,
            ],
        );
        let config = EflaConfig {
            key_dim: 12 + draw.dim().min(200),
            value_dim: draw.dim(),
            integrator,
            normalize_q: draw.rng.bool(),
            normalize_k: draw.rng.bool(),
            scale: pick(&mut draw.rng, &[None, None, Some(0.2)]),
            chunk: pick(&mut draw.form, &[None, Some(16), Some(32), Some(64)]),
            form: if draw.form.u8(..4) == 0 { Form::Recurrent } else { Form::Chunked },
            gated: draw.form.bool(),
        };
        let heads = draw.few(2);
        let value_heads = heads * draw.few(3);
        let (mut batch, tokens) = (draw.few(2), draw.length());
        let cu_seqlens = (draw.form.u8(..3) == 0).then(|| {
            batch = 1;
            let count = if tokens == 0 { draw.rng.usize(..3) } else { draw.rng.usize(1..6) };
            draw_cumulative(&mut draw.rng, tokens, count)
        });
        let shape = EflaShape { batch, heads, value_heads, tokens };
        EflaCase { seed, draw, config, shape, cu_seqlens }
    }

    fn run(self, gpu: &Gpu, watch: Watch) {
        let EflaCase { seed, mut draw, config, shape, cu_seqlens } = self;
        let label = format!("seed {seed}: {config:?} {shape:?} {cu_seqlens:?}");
        let EflaShape { batch, heads, value_heads, tokens } = shape;
        let sequences = cu_seqlens.as_ref().map_or(batch, |cumulative| cumulative.len() - 1);

        let (key_dim, value_dim) = (config.key_dim, config.value_dim);
        let value_shape = [batch, value_heads, tokens, value_dim];
        let beta_shape = [batch, value_heads, tokens];
        let state_shape = [sequences, value_heads, key_dim, value_dim];
        let q = draw.stored(gpu, &[batch, heads, tokens, key_dim]);
        let k = draw.stored(gpu, &[batch, heads, tokens, key_dim]);
        let v = draw.stored(gpu, &value_shape);
        // x = β|k|² up to 1 for raw keys of about √D_k, where every integrator contracts.
        let largest = if config.normalize_k { 0.9 } else { 0.6 / key_dim as f32 };
        let beta = draw.f32(gpu, &beta_shape, |rng| largest * rng.f32());
        // From none to strong, and with a state wiped out now and then; the range of x is that of x + κ.
        let strengths: &[f32] = match config.integrator {
            Integrator::Exact | Integrator::Euler => &[0.0, 1e-4, 0.1, 1.0, 30.0, f32::INFINITY],
            _ => &[0.0, 1e-4, 0.1],
        };
        let log_decay =
            config.gated.then(|| draw.f32(gpu, &beta_shape, |rng| -pick(rng, strengths) * (0.5 + rng.f32())));
        let state = draw.form.bool().then(|| draw.f32(gpu, &state_shape, |rng| normal(rng, 1)[0]));
        let d_out = draw.stored(gpu, &value_shape);
        let d_state = draw.form.bool().then(|| draw.f32(gpu, &state_shape, |rng| normal(rng, 1)[0]));

        let out = draw.output(gpu, &value_shape);
        let final_state = draw.f32_output(gpu, &state_shape);
        let [d_q, d_k, d_v] = [&q, &k, &v].map(|of| draw.output(gpu, of.view.shape()));
        let d_beta = draw.f32_output(gpu, &beta_shape);
        let d_log_decay = config.gated.then(|| draw.f32_output(gpu, &beta_shape));
        let d_initial_state = draw.f32_output(gpu, &state_shape);

        let operator = Efla::new(gpu, config).unwrap();
        let (plan, backward) = match &cu_seqlens {
            None => (operator.plan(&shape), operator.plan_backward(&shape)),
            Some(cumulative) => {
                (operator.plan_packed(&shape, cumulative), operator.plan_backward_packed(&shape, cumulative))
            }
        };
        let (plan, backward) = (plan.unwrap(), backward.unwrap());
        let (forward_space, backward_space) =
            (workspace(gpu, plan.workspace_bytes()), workspace(gpu, backward.workspace_bytes()));
        let forward = EflaTensors {
            log_decay: log_decay.as_ref().map(|log_decay| log_decay.view.clone()),
            initial_state: state.as_ref().map(|state| state.view.clone()),
            final_state: Some(final_state.view()),
            cu_seqlens: cu_seqlens.clone(),
            workspace: Some(forward_space.view()),
            ..EflaTensors::new(q.view.clone(), k.view.clone(), v.view.clone(), beta.view.clone(), out.view())
        };
        submit(gpu, &plan.bind(&forward).unwrap_or_else(|error| panic!("{error} in {label}")));
        let outputs = [&d_q, &d_k, &d_v, &d_beta];
        let tensors = EflaGradients {
            d_final_state: d_state.as_ref().map(|state| state.view.clone()),
            d_log_decay: d_log_decay.as_ref().map(Placed::view),
            d_initial_state: Some(d_initial_state.view()),
            workspace: Some(backward_space.view()),
            ..EflaGradients::new(&forward, d_out.view.clone(), outputs.map(Placed::view))
        };
        submit(gpu, &backward.bind(&tensors).unwrap_or_else(|error| panic!("{error} in {label}")));
        forward_space.read(gpu, &label);
        backward_space.read(gpu, &label);
        let mut judge = Judge { gpu, label, watch };

        let inputs = efla::Inputs {
            q: &q.values,
            k: &k.values,
            v: &v.values,
            beta: &beta.values,
            log_decay: log_decay.as_ref().map(|log_decay| &log_decay.values[..]),
            initial_state: state.as_ref().map(|state| &state.values[..]),
        };
        let reference = EflaConfig { form: Form::Recurrent, chunk: None, ..config };
        let cumulative = cu_seqlens.unwrap_or_default();
        let want = match cumulative.is_empty() {
            true => efla::forward(&reference, &shape, &inputs).unwrap(),
            false => efla::forward_packed(&reference, &shape, &cumulative, &inputs).unwrap(),
        };
        judge.judge("out", &out, &want.out, 1.0);
        judge.judge("final_state", &final_state, &want.final_state, 1.0);
        let d_state = d_state.as_ref().map(|state| &state.values[..]);
        let want = match cumulative.is_empty() {
            true => efla::backward(&reference, &shape, &inputs, &d_out.values, d_state).unwrap(),
            false => efla::backward_packed(&reference, &shape, &cumulative, &inputs, &d_out.values, d_state).unwrap(),
        };
        judge.judge("d_q", &d_q, &want.d_q, 1.0);
        judge.judge("d_k", &d_k, &want.d_k, 1.0);
        judge.judge("d_v", &d_v, &want.d_v, 1.0);
        judge.judge("d_beta", &d_beta, &want.d_beta, 1.0);
        judge.judge("d_initial_state", &d_initial_state, &want.d_initial_state, 1.0);
        if let Some(d_log_decay) = &d_log_decay {
            judge.judge("d_log_decay", d_log_decay, &want.d_log_decay, 1.0);
        }
    }
}
