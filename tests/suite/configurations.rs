//! Whole configurations drawn at random: options, sizes, storage types and places in memory all at once, forward and
//! backward, each compared with the float64 reference that was fed what the device holds. Everything written starts as
//! NaN between guards, and so does the workspace.

use continuous_attention::reference::compare::{Quantity, Scale, attention_factor, compare, limit};
use continuous_attention::reference::{attention, efla};
use continuous_attention::*;

use crate::harness::{EDGES, Guarded, Place, Placed, case_count, gpu, normal, pick, rng, submit, widen};

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

fn given(rng: &mut fastrand::Rng, dtype: DType, shape: &[usize], values: &[f32]) -> Given {
    let place = Place::random(rng, dtype, shape, false);
    Given { view: place.upload(gpu(), values), values: widen(&place.rounded(values)) }
}

struct Drawer {
    rng: fastrand::Rng,
    types: Types,
}

impl Drawer {
    fn stored(&mut self, shape: &[usize]) -> Given {
        let dtype = self.types.input(&mut self.rng);
        let values = normal(&mut self.rng, shape.iter().product());
        given(&mut self.rng, dtype, shape, &values)
    }

    /// As [`Drawer::stored`], with NaN in the tokens (of every sequence) that `own` denies.
    fn stored_where(&mut self, shape: &[usize; 4], own: &[bool]) -> Given {
        let dtype = self.types.input(&mut self.rng);
        let mut values = normal(&mut self.rng, shape.iter().product());
        for (at, value) in values.iter_mut().enumerate() {
            let (batch, token) = (at / shape[3] / shape[2] / shape[1], at / shape[3] % shape[2]);
            if !own[batch * shape[2] + token] {
                *value = f32::NAN;
            }
        }
        given(&mut self.rng, dtype, shape, &values)
    }

    fn f32(&mut self, shape: &[usize], draw: impl Fn(&mut fastrand::Rng) -> f32) -> Given {
        let values: Vec<f32> = (0..shape.iter().product()).map(|_| draw(&mut self.rng)).collect();
        given(&mut self.rng, DType::F32, shape, &values)
    }

    fn output(&mut self, shape: &[usize]) -> Placed {
        let dtype = self.types.output(&mut self.rng, shape);
        Place::random(&mut self.rng, dtype, shape, true).output(gpu())
    }

    fn f32_output(&mut self, shape: &[usize]) -> Placed {
        Place::random(&mut self.rng, DType::F32, shape, true).output(gpu())
    }

    fn dim(&mut self) -> usize {
        if self.rng.u8(..4) == 0 { pick(&mut self.rng, &EDGES) } else { self.rng.usize(1..=40) }
    }

    fn length(&mut self) -> usize {
        if self.rng.bool() { pick(&mut self.rng, &EDGES) } else { self.rng.usize(..150) }
    }
}

/// The workspace of a plan, poisoned.
fn workspace(bytes: u64) -> Guarded {
    Guarded::new(gpu(), Guarded::ALIGNED, &[(bytes / 4) as usize])
}

/// The strictest limit that holds: that of the storage type written.
fn judge(label: &str, name: &str, output: &Placed, want: &[f64], factor: f64) {
    let quantity = match name {
        "d_beta" | "d_log_decay" => Quantity::BetaGradient,
        _ if name.starts_with("d_") => Quantity::Gradient,
        _ => Quantity::Forward,
    };
    let scale = if name == "lse" { Scale::Lse } else { Scale::Tensor };
    let dtype = output.view().dtype();
    let limit = limit(quantity, dtype) * factor;
    let result = compare(&output.read(gpu(), label), want, limit, scale);
    println!("accuracy {name} {dtype:?} rms/limit {:.4} rms {:.2e}: {label}", result.rms / limit, result.rms);
    assert!(result.passed(), "{name} {dtype:?}: {}\n  in {label}", result.failure.unwrap_or_default());
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
fn draw_lengths(rng: &mut fastrand::Rng, shape: &mut AttentionShape) -> (Lengths, Vec<Sequence>) {
    let AttentionShape { batch, queries, keys, .. } = *shape;
    match rng.u8(..4) {
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

fn attention_case(seed: u64) {
    let mut rng = rng(seed);
    let types = Types::draw(&mut rng);
    let mut draw = Drawer { rng, types };
    let softmax = draw.rng.u8(..4) == 0;
    let (queries, keys) = (draw.length(), draw.length());
    let config = AttentionConfig {
        head_dim: draw.dim(),
        value_dim: draw.dim(),
        method: if softmax { Method::Softmax } else { Method::Continuous },
        sink: if softmax {
            Sink::None
        } else {
            pick(&mut draw.rng, &[Sink::Zero, Sink::First, Sink::Given, Sink::None])
        },
        causal: draw.rng.bool(),
        // Few segments make small differences of gradients, which no relative error can judge.
        window: draw.rng.bool().then(|| draw.rng.usize(5..keys.max(5) + 4)),
        scale: pick(&mut draw.rng, &[None, None, Some(0.2), Some(-0.3)]),
    };
    let kv_heads = draw.rng.usize(1..=3);
    let heads = kv_heads * draw.rng.usize(1..=3);
    let batch = draw.rng.usize(1..=3);
    let mut shape = AttentionShape { batch, heads, kv_heads, queries, keys };
    let (lengths, sequences) = draw_lengths(&mut draw.rng, &mut shape);
    let batch = shape.batch;
    let label = format!("seed {seed}: {config:?} {shape:?} {lengths:?}");

    let (head_dim, value_dim) = (config.head_dim, config.value_dim);
    let out_shape = [batch, heads, queries, value_dim];
    let rows_shape = [batch, heads, queries];
    let q = draw.stored(&[batch, heads, queries, head_dim]);
    // What no sequence has is NaN.
    let own: Vec<bool> = (0..batch * keys)
        .map(|at| sequences.iter().any(|sequence| sequence.batch == at / keys && sequence.keys.contains(&(at % keys))))
        .collect();
    let k = draw.stored_where(&[batch, kv_heads, keys, head_dim], &own);
    let v = draw.stored_where(&[batch, kv_heads, keys, value_dim], &own);
    let sinks = if draw.rng.bool() { 1 } else { sequences.len() };
    let sink = (config.sink == Sink::Given)
        .then(|| (draw.stored(&[sinks, kv_heads, head_dim]), draw.stored(&[sinks, kv_heads, value_dim])));
    let intervals = (!softmax && draw.rng.bool())
        .then(|| draw.f32(&[batch, keys], |rng| if rng.u8(..8) == 0 { 0.0 } else { 0.01 + 2.0 * rng.f32() }));
    let d_out = draw.stored(&out_shape);
    let d_lse = draw.rng.bool().then(|| draw.f32(&rows_shape, |rng| normal(rng, 1)[0]));

    let out = draw.output(&out_shape);
    let lse = draw.f32_output(&rows_shape);
    let gradients = [&q, &k, &v].map(|of| draw.output(of.view.shape()));
    let d_sink = sink.as_ref().map(|(k, v)| (draw.output(k.view.shape()), draw.output(v.view.shape())));
    let d_intervals = intervals.as_ref().map(|intervals| draw.f32_output(intervals.view.shape()));

    let operator = Attention::new(gpu(), config).unwrap();
    let plan = operator.plan_ragged(&shape, &lengths).unwrap();
    let backward = operator.plan_backward_ragged(&shape, &lengths).unwrap();
    let (forward_space, backward_space) = (workspace(plan.workspace_bytes()), workspace(backward.workspace_bytes()));
    let forward = AttentionTensors {
        sink_k: sink.as_ref().map(|(k, _)| k.view.clone()),
        sink_v: sink.as_ref().map(|(_, v)| v.view.clone()),
        intervals: intervals.as_ref().map(|intervals| intervals.view.clone()),
        lse: Some(lse.view()),
        lengths,
        workspace: Some(forward_space.view()),
        ..AttentionTensors::new(q.view.clone(), k.view.clone(), v.view.clone(), out.view())
    };
    submit(gpu(), &plan.bind(&forward).unwrap_or_else(|error| panic!("{error} in {label}")));
    let tensors = AttentionGradients {
        d_lse: d_lse.as_ref().map(|d_lse| d_lse.view.clone()),
        d_sink_k: d_sink.as_ref().map(|(k, _)| k.view()),
        d_sink_v: d_sink.as_ref().map(|(_, v)| v.view()),
        d_intervals: d_intervals.as_ref().map(Placed::view),
        workspace: Some(backward_space.view()),
        ..AttentionGradients::new(&forward, lse.view(), d_out.view.clone(), gradients.each_ref().map(Placed::view))
    };
    submit(gpu(), &backward.bind(&tensors).unwrap_or_else(|error| panic!("{error} in {label}")));
    forward_space.read(gpu(), &label);
    backward_space.read(gpu(), &label);

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
    judge(&label, "out", &out, &want.out, factor);
    judge(&label, "lse", &lse, &want.lse, factor);
    let want = attention::backward_ragged(&config, &shape, lengths, &inputs, &d_out.values, d_lse).unwrap();
    // Gradients of rows with few nodes are such differences too.
    if sequences.iter().map(|sequence| sequence.keys.len()).max() >= Some(5) {
        for ((name, got), want) in ["d_q", "d_k", "d_v"].iter().zip(&gradients).zip([&want.d_q, &want.d_k, &want.d_v]) {
            judge(&label, name, got, want, factor);
        }
        if let Some((d_sink_k, d_sink_v)) = &d_sink {
            judge(&label, "d_sink_k", d_sink_k, want.d_sink_k.as_ref().unwrap(), factor);
            judge(&label, "d_sink_v", d_sink_v, want.d_sink_v.as_ref().unwrap(), factor);
        }
        if let Some(d_intervals) = &d_intervals {
            judge(&label, "d_intervals", d_intervals, want.d_intervals.as_ref().unwrap(), factor);
        }
    }
}

fn efla_case(seed: u64) {
    let mut rng = rng(seed);
    let types = Types::draw(&mut rng);
    let mut draw = Drawer { rng, types };
    let integrator = pick(
        &mut draw.rng,
        &[Integrator::Exact, Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4],
    );
    let config = EflaConfig {
        key_dim: 12 + draw.dim().min(200),
        value_dim: draw.dim(),
        integrator,
        normalize_q: draw.rng.bool(),
        normalize_k: draw.rng.bool(),
        scale: pick(&mut draw.rng, &[None, None, Some(0.2)]),
        chunk: pick(&mut draw.rng, &[None, Some(16), Some(32), Some(64)]),
        form: if draw.rng.u8(..4) == 0 { Form::Recurrent } else { Form::Chunked },
        gated: draw.rng.bool(),
    };
    let heads = draw.rng.usize(1..=2);
    let value_heads = heads * draw.rng.usize(1..=3);
    let (mut batch, tokens) = (draw.rng.usize(1..=2), draw.length());
    let cu_seqlens = (draw.rng.u8(..3) == 0).then(|| {
        batch = 1;
        let count = if tokens == 0 { draw.rng.usize(..3) } else { draw.rng.usize(1..6) };
        draw_cumulative(&mut draw.rng, tokens, count)
    });
    let sequences = cu_seqlens.as_ref().map_or(batch, |cumulative| cumulative.len() - 1);
    let shape = EflaShape { batch, heads, value_heads, tokens };
    let label = format!("seed {seed}: {config:?} {shape:?} {cu_seqlens:?}");

    let (key_dim, value_dim) = (config.key_dim, config.value_dim);
    let value_shape = [batch, value_heads, tokens, value_dim];
    let beta_shape = [batch, value_heads, tokens];
    let state_shape = [sequences, value_heads, key_dim, value_dim];
    let q = draw.stored(&[batch, heads, tokens, key_dim]);
    let k = draw.stored(&[batch, heads, tokens, key_dim]);
    let v = draw.stored(&value_shape);
    // x = β|k|² up to 1 for raw keys of about √D_k, where every integrator contracts.
    let largest = if config.normalize_k { 0.9 } else { 0.6 / key_dim as f32 };
    let beta = draw.f32(&beta_shape, |rng| largest * rng.f32());
    // From none to strong, and with a state wiped out now and then; the range of x is that of x + κ.
    let strengths: &[f32] = match config.integrator {
        Integrator::Exact | Integrator::Euler => &[0.0, 1e-4, 0.1, 1.0, 30.0, f32::INFINITY],
        _ => &[0.0, 1e-4, 0.1],
    };
    let log_decay = config.gated.then(|| draw.f32(&beta_shape, |rng| -pick(rng, strengths) * (0.5 + rng.f32())));
    let state = draw.rng.bool().then(|| draw.f32(&state_shape, |rng| normal(rng, 1)[0]));
    let d_out = draw.stored(&value_shape);
    let d_state = draw.rng.bool().then(|| draw.f32(&state_shape, |rng| normal(rng, 1)[0]));

    let out = draw.output(&value_shape);
    let final_state = draw.f32_output(&state_shape);
    let [d_q, d_k, d_v] = [&q, &k, &v].map(|of| draw.output(of.view.shape()));
    let d_beta = draw.f32_output(&beta_shape);
    let d_log_decay = config.gated.then(|| draw.f32_output(&beta_shape));
    let d_initial_state = draw.f32_output(&state_shape);

    let operator = Efla::new(gpu(), config).unwrap();
    let (plan, backward) = match &cu_seqlens {
        None => (operator.plan(&shape), operator.plan_backward(&shape)),
        Some(cumulative) => {
            (operator.plan_packed(&shape, cumulative), operator.plan_backward_packed(&shape, cumulative))
        }
    };
    let (plan, backward) = (plan.unwrap(), backward.unwrap());
    let (forward_space, backward_space) = (workspace(plan.workspace_bytes()), workspace(backward.workspace_bytes()));
    let forward = EflaTensors {
        log_decay: log_decay.as_ref().map(|log_decay| log_decay.view.clone()),
        initial_state: state.as_ref().map(|state| state.view.clone()),
        final_state: Some(final_state.view()),
        cu_seqlens: cu_seqlens.clone(),
        workspace: Some(forward_space.view()),
        ..EflaTensors::new(q.view.clone(), k.view.clone(), v.view.clone(), beta.view.clone(), out.view())
    };
    submit(gpu(), &plan.bind(&forward).unwrap_or_else(|error| panic!("{error} in {label}")));
    let outputs = [&d_q, &d_k, &d_v, &d_beta];
    let tensors = EflaGradients {
        d_final_state: d_state.as_ref().map(|state| state.view.clone()),
        d_log_decay: d_log_decay.as_ref().map(Placed::view),
        d_initial_state: Some(d_initial_state.view()),
        workspace: Some(backward_space.view()),
        ..EflaGradients::new(&forward, d_out.view.clone(), outputs.map(Placed::view))
    };
    submit(gpu(), &backward.bind(&tensors).unwrap_or_else(|error| panic!("{error} in {label}")));
    forward_space.read(gpu(), &label);
    backward_space.read(gpu(), &label);

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
    judge(&label, "out", &out, &want.out, 1.0);
    judge(&label, "final_state", &final_state, &want.final_state, 1.0);
    let d_state = d_state.as_ref().map(|state| &state.values[..]);
    let want = match cumulative.is_empty() {
        true => efla::backward(&reference, &shape, &inputs, &d_out.values, d_state).unwrap(),
        false => efla::backward_packed(&reference, &shape, &cumulative, &inputs, &d_out.values, d_state).unwrap(),
    };
    judge(&label, "d_q", &d_q, &want.d_q, 1.0);
    judge(&label, "d_k", &d_k, &want.d_k, 1.0);
    judge(&label, "d_v", &d_v, &want.d_v, 1.0);
    judge(&label, "d_beta", &d_beta, &want.d_beta, 1.0);
    judge(&label, "d_initial_state", &d_initial_state, &want.d_initial_state, 1.0);
    if let Some(d_log_decay) = &d_log_decay {
        judge(&label, "d_log_decay", d_log_decay, &want.d_log_decay, 1.0);
    }
}

#[test]
fn attention_of_every_kind() {
    (0..case_count(16)).for_each(|seed| attention_case(50_000 + seed as u64));
}

#[test]
fn efla_of_every_kind() {
    (0..case_count(12)).for_each(|seed| efla_case(60_000 + seed as u64));
}
