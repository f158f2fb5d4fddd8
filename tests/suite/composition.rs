//! Parts that make up a whole, calls that share buffers, and views of all kinds.

use continuous_attention::reference::attention::{Output, merge};
use continuous_attention::{
    Attention, AttentionConfig, AttentionGradients, AttentionShape, AttentionTensors, Efla, EflaConfig, EflaShape,
    EflaTensors, Form, Gpu, Method, Sink, Tensor, TensorView,
};

use crate::harness::{
    AttentionCase, AttentionOutput, EflaCase, EflaOutput, FORMS, Guarded, bits, gpu, judge, normal, rng, submit,
    submit_all, widen,
};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];

fn attention_config() -> AttentionConfig {
    AttentionConfig { head_dim: 5, value_dim: 4, ..Default::default() }
}

fn efla_config() -> EflaConfig {
    EflaConfig { key_dim: 9, value_dim: 6, ..Default::default() }
}

/// Rows `from..to` of tensors `[units, rows, width]`.
fn rows<T: Copy>(tensor: &[T], rows: usize, width: usize, from: usize, to: usize) -> Vec<T> {
    tensor.chunks(rows * width).flat_map(|unit| unit[from * width..to * width].to_vec()).collect()
}

#[test]
fn merged_shards_equal_the_whole() {
    let mut rng = rng(1);
    for sink in SINKS {
        for causal in [true, false] {
            for intervals in [false, true] {
                for (queries, keys, cut) in [(20, 80, 1), (20, 80, 31), (20, 80, 32), (20, 80, 60), (1, 70, 65)] {
                    let config = AttentionConfig { sink, causal, ..attention_config() };
                    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries, keys };
                    let mut whole = AttentionCase::random(config, shape, &mut rng).with_sink_per_sequence(&mut rng);
                    if intervals {
                        whole = whole.with_intervals(&mut rng);
                    }
                    let mut early = whole.clone();
                    early.shape.keys = cut;
                    early.config.causal = false;
                    early.k = rows(&whole.k, keys, 5, 0, cut);
                    early.v = rows(&whole.v, keys, 4, 0, cut);
                    early.intervals = whole.intervals.as_ref().map(|lengths| rows(lengths, keys, 1, 0, cut));
                    let mut late = whole.clone();
                    late.shape.keys = keys - cut;
                    late.config.sink = Sink::Given;
                    late.sink_batch = 2;
                    late.sink_k = Some(rows(&whole.k, keys, 5, cut - 1, cut));
                    late.sink_v = Some(rows(&whole.v, keys, 4, cut - 1, cut));
                    late.k = rows(&whole.k, keys, 5, cut, keys);
                    late.v = rows(&whole.v, keys, 4, cut, keys);
                    late.intervals = whole.intervals.as_ref().map(|lengths| rows(lengths, keys, 1, cut, keys));
                    let [early, late] = [early, late].map(|case| {
                        let AttentionOutput { out, lse } = case.run();
                        Output { out: widen(&out), lse: widen(&lse) }
                    });
                    let merged = merge(&early, &late, 4).unwrap();
                    let narrow = |values: &[f64]| values.iter().map(|&x| x as f32).collect();
                    let merged = AttentionOutput { out: narrow(&merged.out), lse: narrow(&merged.lse) };
                    whole.judge(&merged, whole.limit());
                }
            }
        }
    }
}

#[test]
fn chunked_prefill_equals_the_whole() {
    let mut rng = rng(2);
    let tokens = 100;
    for sink in SINKS {
        for window in [None, Some(20)] {
            let config = AttentionConfig { sink, window, ..attention_config() };
            let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: tokens, keys: tokens };
            let whole = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
            let want = whole.reference();
            for edges in [vec![0, 33, 64, 65, 100], vec![0, 1, 99, 100], vec![0, 50, 100]] {
                for part in edges.windows(2) {
                    let (from, to) = (part[0], part[1]);
                    // The cache so far, and the queries of this part at its end.
                    let mut case = whole.clone();
                    (case.shape.queries, case.shape.keys) = (to - from, to);
                    case.q = rows(&whole.q, tokens, 5, from, to);
                    case.k = rows(&whole.k, tokens, 5, 0, to);
                    case.v = rows(&whole.v, tokens, 4, 0, to);
                    case.intervals = whole.intervals.as_ref().map(|lengths| rows(lengths, tokens, 1, 0, to));
                    let got = case.run();
                    let label = format!("rows {from}..{to} of {}", whole.label());
                    judge(&label, "out", &got.out, &rows(&want.out, tokens, 4, from, to), whole.limit());
                    judge(&label, "lse", &got.lse, &rows(&want.lse, tokens, 1, from, to), whole.limit());
                }
            }
        }
    }
}

#[test]
fn a_split_efla_sequence_equals_the_whole() {
    let mut rng = rng(3);
    let tokens = 150;
    for normalize_k in [false, true] {
        let config = EflaConfig { normalize_k, ..efla_config() };
        let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens };
        let whole = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
        for (form, chunk) in FORMS {
            for edges in [vec![0, 1, 150], vec![0, 64, 150], vec![0, 17, 81, 82, 150], vec![0, 0, 33, 149, 150, 150]] {
                let mut joined = EflaOutput { out: Vec::new(), final_state: whole.initial_state.clone().unwrap() };
                let mut parts = Vec::new();
                for (index, part) in edges.windows(2).enumerate() {
                    let (from, to) = (part[0], part[1]);
                    // Prefill in chunks and decode token by token, on one state.
                    let form = if index % 2 == 1 { Form::Recurrent } else { form };
                    let mut case = whole.in_form(form, chunk);
                    case.shape.tokens = to - from;
                    case.q = rows(&whole.q, tokens, 9, from, to);
                    case.k = rows(&whole.k, tokens, 9, from, to);
                    case.v = rows(&whole.v, tokens, 6, from, to);
                    case.beta = rows(&whole.beta, tokens, 1, from, to);
                    case.initial_state = Some(joined.final_state);
                    let got = case.run();
                    joined.final_state = got.final_state;
                    parts.push((got.out, (to - from) * 6));
                }
                for unit in 0..4 {
                    for (out, length) in &parts {
                        joined.out.extend_from_slice(&out[unit * length..(unit + 1) * length]);
                    }
                }
                whole.in_form(form, chunk).judge(&joined);
            }
        }
    }
}

#[test]
fn a_repeated_run_is_bit_equal() {
    let mut rng = rng(4);
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 100, keys: 130 };
    for sink in SINKS {
        let config = AttentionConfig { sink, ..attention_config() };
        let case = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
        let (first, second) = (case.run(), case.run());
        assert_eq!((bits(&first.out), bits(&first.lse)), (bits(&second.out), bits(&second.lse)));
    }
    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 130 };
    for (form, chunk) in FORMS {
        let case = EflaCase::random(EflaConfig { form, chunk, ..efla_config() }, shape, &mut rng);
        let (first, second) = (case.run(), case.run());
        assert_eq!((bits(&first.out), bits(&first.final_state)), (bits(&second.out), bits(&second.final_state)));
    }
}

/// Two calls of one operator in one pass, of different sizes, with one workspace between them.
#[test]
fn calls_of_one_operator_do_not_disturb_each_other() {
    let mut rng = rng(5);
    let gpu = gpu();
    let config = AttentionConfig { sink: Sink::Given, ..attention_config() };
    let attention = Attention::new(gpu, config).unwrap();
    let shapes = [(40, 70), (33, 20), (1, 100)].map(|(queries, keys)| AttentionShape {
        batch: 2,
        heads: 2,
        kv_heads: 1,
        queries,
        keys,
    });
    let cases = shapes.map(|shape| AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng));
    let plans = shapes.map(|shape| attention.plan(&shape).unwrap());
    let bytes = plans.iter().map(|plan| plan.workspace_bytes()).max().unwrap();
    let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(bytes / 4) as usize]);
    let outs = cases.each_ref().map(|case| Guarded::new(gpu, Guarded::ODD, &case.out_shape()));
    let lses = cases.each_ref().map(|case| Guarded::new(gpu, Guarded::ODD, &case.lse_shape()));
    let calls: Vec<_> = (0..3)
        .map(|at| {
            let mut tensors = cases[at].tensors(gpu, &outs[at]);
            tensors.lse = Some(lses[at].view());
            tensors.workspace = Some(workspace.view());
            plans[at].bind(&tensors).unwrap()
        })
        .collect();
    submit_all(gpu, &[&calls[0], &calls[1], &calls[2], &calls[0]]);
    for (at, case) in cases.iter().enumerate() {
        let label = case.label();
        let got = AttentionOutput { out: outs[at].read(gpu, &label), lse: lses[at].read(gpu, &label) };
        case.judge(&got, case.limit());
    }
    workspace.read(gpu, "a shared workspace");

    for (form, chunk) in FORMS {
        let config = EflaConfig { form, chunk, ..efla_config() };
        let efla = Efla::new(gpu, config).unwrap();
        let shapes = [70, 33, 1].map(|tokens| EflaShape { batch: 2, heads: 1, value_heads: 2, tokens });
        let cases = shapes.map(|shape| EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng));
        let plans = shapes.map(|shape| efla.plan(&shape).unwrap());
        let bytes = plans.iter().map(|plan| plan.workspace_bytes()).max().unwrap();
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(bytes / 4) as usize]);
        let outs = cases.each_ref().map(|case| Guarded::new(gpu, Guarded::ODD, &case.out_shape()));
        let states = cases.each_ref().map(|case| Guarded::new(gpu, Guarded::ODD, &case.state_shape()));
        let calls: Vec<_> = (0..3)
            .map(|at| {
                let mut tensors = cases[at].tensors(gpu, &outs[at]);
                tensors.final_state = Some(states[at].view());
                tensors.workspace = Some(workspace.view());
                plans[at].bind(&tensors).unwrap()
            })
            .collect();
        submit_all(gpu, &[&calls[0], &calls[1], &calls[2], &calls[0]]);
        for (at, case) in cases.iter().enumerate() {
            let label = case.label();
            case.judge(&EflaOutput { out: outs[at].read(gpu, &label), final_state: states[at].read(gpu, &label) });
        }
    }
}

/// What a call reads is what the buffers hold when it runs, not when it was bound.
#[test]
fn a_call_can_be_recorded_again() {
    let mut rng = rng(6);
    let gpu = gpu();
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 20, keys: 40 };
    let config = AttentionConfig { sink: Sink::Given, ..attention_config() };
    let mut case = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
    let q = gpu.upload(&case.q, &[1, 2, 20, 5]).unwrap();
    let sink_v = gpu.upload(case.sink_v.as_ref().unwrap(), &[1, 1, 4]).unwrap();
    let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
    let lse = Guarded::new(gpu, Guarded::ODD, &case.lse_shape());
    let mut tensors = case.tensors(gpu, &out);
    (tensors.q, tensors.sink_v, tensors.lse) = (q.view(), Some(sink_v.view()), Some(lse.view()));
    let call = Attention::new(gpu, config).unwrap().plan(&shape).unwrap().bind(&tensors).unwrap();
    for _ in 0..2 {
        submit(gpu, &call);
        let got = AttentionOutput { out: out.read(gpu, "a call"), lse: lse.read(gpu, "a call") };
        case.judge(&got, case.limit());
        let new = AttentionCase::random(config, shape, &mut rng);
        (case.q, case.sink_v) = (new.q, new.sink_v);
        gpu.queue().write_buffer(q.buffer(), 0, bytemuck::cast_slice(&case.q));
        gpu.queue().write_buffer(sink_v.buffer(), 0, bytemuck::cast_slice(case.sink_v.as_ref().unwrap()));
    }
}

/// Optional tensors may be left out: nothing else changes.
#[test]
fn optional_tensors_are_optional() {
    let mut rng = rng(7);
    let gpu = gpu();
    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 40, keys: 50 };
    let case = AttentionCase::random(attention_config(), shape, &mut rng);
    let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    Attention::new(gpu, case.config).unwrap().forward(&mut encoder, &case.tensors(gpu, &out)).unwrap();
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(bits(&out.read(gpu, "no lse, no workspace")), bits(&case.run().out));

    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 70 };
    for (form, chunk) in FORMS {
        let case = EflaCase::random(EflaConfig { form, chunk, ..efla_config() }, shape, &mut rng);
        let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        Efla::new(gpu, case.config).unwrap().forward(&mut encoder, &case.tensors(gpu, &out)).unwrap();
        gpu.queue().submit([encoder.finish()]);
        assert_eq!(bits(&out.read(gpu, "no final state, no workspace")), bits(&case.run().out));
    }
}

/// One buffer that every tensor of a call is a range of, with guards between them.
struct Arena {
    content: Vec<f32>,
    ranges: Vec<std::ops::Range<usize>>,
}

impl Arena {
    fn guard(at: usize) -> f32 {
        f32::from_bits(0x4b00_0000 + at as u32)
    }

    fn new() -> Self {
        Arena { content: Vec::new(), ranges: Vec::new() }
    }

    /// Appends a range that starts at a multiple of `align` elements plus `shift`.
    fn push(&mut self, values: &[f32], align: usize, shift: usize) -> u64 {
        let start = (self.content.len() + 40).next_multiple_of(align) + shift;
        self.content.extend((self.content.len()..start).map(Self::guard));
        self.content.extend_from_slice(values);
        self.ranges.push(start..self.content.len());
        start as u64
    }

    fn upload(&mut self, gpu: &Gpu) -> Tensor {
        let end = self.content.len();
        self.content.extend((end..end + 4099).map(Self::guard));
        gpu.upload(&self.content, &[self.content.len()]).unwrap()
    }

    /// The ranges `written` after a run; everything else must be what it was.
    fn read(&self, gpu: &Gpu, tensor: &Tensor, written: &[usize]) -> Vec<Vec<f32>> {
        let got = gpu.read(tensor).unwrap();
        let written: Vec<_> = written.iter().map(|&index| self.ranges[index].clone()).collect();
        for (at, (got, was)) in got.iter().zip(&self.content).enumerate() {
            let free = written.iter().any(|range| range.contains(&at));
            assert!(free || got.to_bits() == was.to_bits(), "element {at} was {was} and is {got}");
        }
        written.into_iter().map(|range| got[range].to_vec()).collect()
    }
}

#[test]
fn attention_within_one_arena() {
    let mut rng = rng(8);
    let gpu = gpu();
    for method in [Method::Continuous, Method::Softmax] {
        let continuous = method == Method::Continuous;
        let sink = if continuous { Sink::Given } else { Sink::None };
        let config = AttentionConfig { method, sink, ..attention_config() };
        let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 50, keys: 70 };
        let mut case = AttentionCase::random(config, shape, &mut rng).with_sink_per_sequence(&mut rng);
        if continuous {
            case = case.with_intervals(&mut rng);
        }
        let plan = Attention::new(gpu, config).unwrap().plan(&shape).unwrap();
        let mut arena = Arena::new();
        let out = arena.push(&vec![f32::NAN; 2 * 4 * 50 * 4], 64, 3);
        let q = arena.push(&case.q, 64, 1);
        let k = arena.push(&case.k, 64, 62);
        let lse = arena.push(&vec![f32::NAN; 2 * 4 * 50], 64, 5);
        let v = arena.push(&case.v, 64, 0);
        let workspace = arena.push(&vec![f32::NAN; (plan.workspace_bytes() / 4) as usize], 64, 0);
        let [sink_k, sink_v, intervals] =
            [&case.sink_k, &case.sink_v, &case.intervals].map(|x| x.as_ref().map(|values| arena.push(values, 64, 7)));
        let buffer = arena.upload(gpu);
        let view = |offset: u64, shape: &[usize]| TensorView::new(buffer.buffer(), offset, shape);
        let tensors = AttentionTensors {
            q: view(q, &[2, 4, 50, 5]),
            k: view(k, &[2, 2, 70, 5]),
            v: view(v, &[2, 2, 70, 4]),
            sink_k: sink_k.map(|offset| view(offset, &[2, 2, 5])),
            sink_v: sink_v.map(|offset| view(offset, &[2, 2, 4])),
            intervals: intervals.map(|offset| view(offset, &[2, 70])),
            out: view(out, &case.out_shape()),
            lse: Some(view(lse, &case.lse_shape())),
            lengths: Default::default(),
            workspace: Some(view(workspace, &[(plan.workspace_bytes() / 4) as usize])),
        };
        submit(gpu, &plan.bind(&tensors).unwrap());
        let written = arena.read(gpu, &buffer, &[0, 3, 5]);
        case.judge(&AttentionOutput { out: written[0].clone(), lse: written[1].clone() }, case.limit());
    }
}

#[test]
fn efla_within_one_arena() {
    let mut rng = rng(9);
    let gpu = gpu();
    for in_place in [false, true] {
        for (form, chunk) in FORMS {
            let config = EflaConfig { form, chunk, ..efla_config() };
            let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 70 };
            let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
            let plan = Efla::new(gpu, config).unwrap().plan(&shape).unwrap();
            let mut arena = Arena::new();
            let out = arena.push(&vec![f32::NAN; 2 * 4 * 70 * 6], 64, 3);
            let q = arena.push(&case.q, 64, 1);
            let k = arena.push(&case.k, 64, 62);
            let state = arena.push(case.initial_state.as_ref().unwrap(), 64, 5);
            let v = arena.push(&case.v, 64, 0);
            let workspace = arena.push(&vec![f32::NAN; (plan.workspace_bytes() / 4) as usize], 64, 0);
            let beta = arena.push(&case.beta, 64, 9);
            let other_state = arena.push(&vec![f32::NAN; 2 * 4 * 9 * 6], 64, 11);
            let buffer = arena.upload(gpu);
            let view = |offset: u64, shape: &[usize]| TensorView::new(buffer.buffer(), offset, shape);
            let tensors = EflaTensors {
                q: view(q, &[2, 2, 70, 9]),
                k: view(k, &[2, 2, 70, 9]),
                v: view(v, &[2, 4, 70, 6]),
                beta: view(beta, &[2, 4, 70]),
                log_decay: None,
                initial_state: Some(view(state, &case.state_shape())),
                out: view(out, &case.out_shape()),
                final_state: Some(view(if in_place { state } else { other_state }, &case.state_shape())),
                cu_seqlens: None,
                workspace: Some(view(workspace, &[(plan.workspace_bytes() / 4) as usize])),
            };
            submit(gpu, &plan.bind(&tensors).unwrap());
            let written = arena.read(gpu, &buffer, &[0, if in_place { 3 } else { 7 }, 5]);
            case.judge(&EflaOutput { out: written[0].clone(), final_state: written[1].clone() });
        }
    }
}

/// The state of a decoder: one buffer, updated call after call.
#[test]
fn a_state_updated_in_place() {
    let mut rng = rng(10);
    let gpu = gpu();
    for (form, chunk) in FORMS {
        for (key_dim, value_dim, tokens) in
            [(9, 6, 70), (33, 65, 3), (70, 40, 130), (9, 6, 300), (9, 6, 0), (200, 100, 1)]
        {
            let config = EflaConfig { key_dim, value_dim, form, chunk, ..Default::default() };
            let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens };
            let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
            let apart = case.run();
            let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
            let state = Guarded::with(gpu, Guarded::ODD, &case.state_shape(), case.initial_state.as_ref().unwrap());
            let mut tensors = case.tensors(gpu, &out);
            (tensors.initial_state, tensors.final_state) = (Some(state.view()), Some(state.view()));
            let call = Efla::new(gpu, config).unwrap().plan(&shape).unwrap().bind(&tensors).unwrap();
            submit(gpu, &call);
            let label = format!("in place, {}", case.label());
            assert_eq!(bits(&out.read(gpu, &label)), bits(&apart.out), "{label}");
            let first = state.read(gpu, &label);
            assert_eq!(bits(&first), bits(&apart.final_state), "{label}");
            // Once more: from where the first call ended.
            submit(gpu, &call);
            let mut next = case.clone();
            next.initial_state = Some(first);
            let got = EflaOutput { out: out.read(gpu, &label), final_state: state.read(gpu, &label) };
            next.judge(&got);
        }
    }
}

/// `[B, H, T, D]` values in the storage order `[B, T, H, D]`, every row followed by `gap` guard elements.
struct Interleaved {
    tensor: Tensor,
    shape: [usize; 4],
    strides: [usize; 4],
    start: usize,
}

impl Interleaved {
    fn new(gpu: &Gpu, values: Option<&[f32]>, shape: [usize; 4], gap: usize) -> Self {
        let [batch, heads, tokens, dim] = shape;
        let width = dim + gap;
        let strides = [tokens * heads * width, width, heads * width, 1];
        let start = 13;
        let mut content: Vec<f32> = (0..start + batch * strides[0] + 300).map(Arena::guard).collect();
        for (at, place) in Self::places(shape, strides, start).enumerate() {
            content[place] = values.map_or(f32::NAN, |values| values[at]);
        }
        Interleaved { tensor: gpu.upload(&content, &[content.len()]).unwrap(), shape, strides, start }
    }

    fn places(
        [batch, heads, tokens, dim]: [usize; 4],
        strides: [usize; 4],
        start: usize,
    ) -> impl Iterator<Item = usize> {
        let all = (0..batch * heads * tokens * dim)
            .map(move |at| [at / dim / tokens / heads, at / dim / tokens % heads, at / dim % tokens, at % dim]);
        all.map(move |index| start + (0..4).map(|d| index[d] * strides[d]).sum::<usize>())
    }

    fn view(&self) -> TensorView {
        TensorView::strided(self.tensor.buffer(), self.start as u64, &self.shape, &self.strides)
    }

    fn read(&self, gpu: &Gpu) -> Vec<f32> {
        let content = gpu.read(&self.tensor).unwrap();
        let mut guards = content.clone();
        let mut values = Vec::new();
        for place in Self::places(self.shape, self.strides, self.start) {
            values.push(content[place]);
            guards[place] = Arena::guard(place);
        }
        let wrong = (0..guards.len()).find(|&at| guards[at].to_bits() != Arena::guard(at).to_bits());
        assert_eq!(wrong, None, "an element between the rows of a strided output was overwritten");
        values
    }
}

#[test]
fn strided_attention() {
    let mut rng = rng(11);
    let gpu = gpu();
    for gap in [0, 3] {
        let config = AttentionConfig { sink: Sink::Given, ..attention_config() };
        let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 40, keys: 70 };
        let case = AttentionCase::random(config, shape, &mut rng);
        let [q, k, v] = [(&case.q, [2, 4, 40, 5]), (&case.k, [2, 2, 70, 5]), (&case.v, [2, 2, 70, 4])]
            .map(|(values, shape)| Interleaved::new(gpu, Some(values), shape, gap));
        // [B or 1, H, D] and [B, T] as views of four-dimensional ones.
        let sink_k = Interleaved::new(gpu, case.sink_k.as_deref(), [1, 2, 1, 5], gap);
        let intervals: Vec<f32> = (0..2 * 70).map(|_| rng.f32()).collect();
        let lengths = Interleaved::new(gpu, Some(&intervals), [1, 1, 2, 70], gap);
        let out = Interleaved::new(gpu, None, case.out_shape(), gap);
        let lse = Interleaved::new(gpu, None, [1, 2, 40, 4], gap);
        let case = AttentionCase { intervals: Some(intervals), ..case };
        let spare = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
        let mut tensors = case.tensors(gpu, &spare);
        (tensors.q, tensors.k, tensors.v, tensors.out) = (q.view(), k.view(), v.view(), out.view());
        let strided = |of: &Interleaved, shape: &[usize], strides: &[usize]| {
            Some(TensorView::strided(of.tensor.buffer(), of.start as u64, shape, strides))
        };
        tensors.sink_k = strided(&sink_k, &[1, 2, 5], &[sink_k.strides[0], sink_k.strides[1], 1]);
        tensors.intervals = strided(&lengths, &[2, 70], &[lengths.strides[2], 1]);
        // lse in the storage order [B, T, H]: no row of it is read or written as a whole.
        tensors.lse = strided(&lse, &[2, 4, 40], &[lse.strides[1], 1, lse.strides[2]]);
        submit(gpu, &Attention::new(gpu, config).unwrap().plan(&shape).unwrap().bind(&tensors).unwrap());
        let by_token = lse.read(gpu);
        let lse = (0..2 * 4 * 40).map(|at| by_token[at / 160 * 160 + at % 40 * 4 + at / 40 % 4]).collect();
        case.judge(&AttentionOutput { out: out.read(gpu), lse }, case.limit());
    }
}

#[test]
fn expanded_attention() {
    let mut rng = rng(12);
    let gpu = gpu();
    let shape = AttentionShape { batch: 3, heads: 4, kv_heads: 2, queries: 40, keys: 45 };
    let mut case = AttentionCase::random(attention_config(), shape, &mut rng).with_intervals(&mut rng);
    // One sequence of keys and values for the batch, one head of queries for all, one interval for every segment.
    let (k, v, q) = (case.k[..2 * 45 * 5].to_vec(), case.v[..2 * 45 * 4].to_vec(), case.q[..40 * 5].to_vec());
    case.k = k.repeat(3);
    case.v = v.repeat(3);
    case.q = q.repeat(12);
    case.intervals = Some(case.intervals.as_ref().unwrap()[..45].repeat(3));
    let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
    let lse = Guarded::new(gpu, Guarded::ODD, &case.lse_shape());
    let mut tensors = case.tensors(gpu, &out);
    let expand = |values: &[f32], shape: &[usize], strides: &[usize]| {
        TensorView::strided(gpu.upload(values, &[values.len()]).unwrap().buffer(), 0, shape, strides)
    };
    tensors.k = expand(&k, &[3, 2, 45, 5], &[0, 45 * 5, 5, 1]);
    tensors.v = expand(&v, &[3, 2, 45, 4], &[0, 45 * 4, 4, 1]);
    tensors.q = expand(&q, &[3, 4, 40, 5], &[0, 0, 5, 1]);
    tensors.intervals = Some(expand(&case.intervals.as_ref().unwrap()[..45], &[3, 45], &[0, 1]));
    tensors.lse = Some(lse.view());
    submit(gpu, &Attention::new(gpu, case.config).unwrap().plan(&shape).unwrap().bind(&tensors).unwrap());
    let got = AttentionOutput { out: out.read(gpu, "expanded"), lse: lse.read(gpu, "expanded") };
    case.judge(&got, case.limit());
}

#[test]
fn strided_and_expanded_efla() {
    let mut rng = rng(13);
    let gpu = gpu();
    for gap in [0, 3] {
        for (form, chunk) in FORMS {
            let config = EflaConfig { form, chunk, ..efla_config() };
            let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 70 };
            let mut case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
            // One rate for all heads of all sequences, one initial state for the batch.
            let beta = case.beta[..70].to_vec();
            case.beta = beta.repeat(8);
            let state = case.initial_state.as_ref().unwrap()[..4 * 54].to_vec();
            case.initial_state = Some(state.repeat(2));
            let [q, k, v] = [(&case.q, [2, 2, 70, 9]), (&case.k, [2, 2, 70, 9]), (&case.v, [2, 4, 70, 6])]
                .map(|(values, shape)| Interleaved::new(gpu, Some(values), shape, gap));
            let out = Interleaved::new(gpu, None, case.out_shape(), gap);
            let final_state = Interleaved::new(gpu, None, case.state_shape(), gap);
            let (beta, state) = (gpu.upload(&beta, &[70]).unwrap(), gpu.upload(&state, &[4 * 54]).unwrap());
            let tensors = EflaTensors {
                q: q.view(),
                k: k.view(),
                v: v.view(),
                beta: TensorView::strided(beta.buffer(), 0, &[2, 4, 70], &[0, 0, 1]),
                log_decay: None,
                initial_state: Some(TensorView::strided(state.buffer(), 0, &[2, 4, 9, 6], &[0, 54, 6, 1])),
                out: out.view(),
                final_state: Some(final_state.view()),
                cu_seqlens: None,
                workspace: None,
            };
            submit(gpu, &Efla::new(gpu, config).unwrap().plan(&shape).unwrap().bind(&tensors).unwrap());
            case.judge(&EflaOutput { out: out.read(gpu), final_state: final_state.read(gpu) });
        }
    }
}

/// Decoding: a growing cache in one preallocated buffer, one token a step.
#[test]
fn decoding_equals_the_whole() {
    let mut rng = rng(14);
    let gpu = gpu();
    let tokens = 70;
    let config = AttentionConfig { window: Some(50), ..attention_config() };
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: tokens, keys: tokens };
    let whole = AttentionCase::random(config, shape, &mut rng);
    let want = whole.reference();
    let q = gpu.upload(&whole.q, &[2, 4, tokens, 5]).unwrap();
    let [k, v] = [(&whole.k, 5), (&whole.v, 4)].map(|(x, dim)| gpu.upload(x, &[2, 2, tokens, dim]).unwrap());
    let attention = Attention::new(gpu, config).unwrap();
    for at in [0, 1, 31, 32, 63, 64, 69] {
        let shape = AttentionShape { queries: 1, keys: at + 1, ..shape };
        let out = Guarded::new(gpu, Guarded::ODD, &[2, 4, 1, 4]);
        let cache = |of: &Tensor, dim: usize| {
            let strides = [2 * tokens * dim, tokens * dim, dim, 1];
            TensorView::strided(of.buffer(), 0, &[2, 2, at + 1, dim], &strides)
        };
        let strides = [4 * tokens * 5, tokens * 5, 5, 1];
        let q = TensorView::strided(q.buffer(), at as u64 * 5, &[2, 4, 1, 5], &strides);
        let tensors = AttentionTensors::new(q, cache(&k, 5), cache(&v, 4), out.view());
        submit(gpu, &attention.plan(&shape).unwrap().bind(&tensors).unwrap());
        let label = format!("token {at} of {}", whole.label());
        judge(&label, "out", &out.read(gpu, &label), &rows(&want.out, tokens, 4, at, at + 1), whole.limit());
    }
}

/// q, k and v, and their gradients, as parts of one fused tensor, `[B, T, 3, H, D]` or `[B, T, H, 3, D]`.
#[test]
fn fused_inputs_and_gradients() {
    let gpu = gpu();
    let (batch, heads, tokens, dim) = (2, 3, 37, 8);
    let shape = [batch, heads, tokens, dim];
    let config = AttentionConfig { head_dim: dim, value_dim: dim, ..Default::default() };
    let attention = Attention::new(gpu, config).unwrap();
    let mut rng = rng(77);
    let count = batch * heads * tokens * dim;
    let fused_values = normal(&mut rng, 3 * count);
    let d_out = gpu.upload(&normal(&mut rng, count), &shape).unwrap();
    let run = |qkv: [TensorView; 3], gradients: [TensorView; 3]| {
        let [q, k, v] = qkv;
        let (out, lse) = (gpu.zeros(&shape).unwrap(), gpu.zeros(&shape[..3]).unwrap());
        let forward = AttentionTensors { lse: Some(lse.view()), ..AttentionTensors::new(q, k, v, out.view()) };
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        attention.forward(&mut encoder, &forward).unwrap();
        let backward = AttentionGradients::new(&forward, lse.view(), d_out.view(), gradients);
        attention.backward(&mut encoder, &backward).unwrap();
        gpu.queue().submit([encoder.finish()]);
        gpu.read(&out).unwrap()
    };
    for per_head in [false, true] {
        let (part, head) = if per_head { (dim, 3 * dim) } else { (heads * dim, dim) };
        let strides = [tokens * 3 * heads * dim, head, 3 * heads * dim, 1];
        let parts = |buffer: &wgpu::Buffer| {
            [0, 1, 2].map(|index: usize| TensorView::strided(buffer, (index * part) as u64, &shape, &strides))
        };
        let qkv = gpu.upload(&fused_values, &[3 * count]).unwrap();
        let gradients = gpu.upload(&vec![f32::NAN; 3 * count], &[3 * count]).unwrap();
        let out = run(parts(qkv.buffer()), parts(gradients.buffer()));
        // The same values in tensors of their own.
        let dense = [(); 3].map(|()| gpu.zeros(&shape).unwrap());
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        for (from, to) in parts(qkv.buffer()).iter().zip(&dense) {
            gpu.copy(&mut encoder, from, &to.view()).unwrap();
        }
        gpu.queue().submit([encoder.finish()]);
        let separate = [(); 3].map(|()| gpu.zeros(&shape).unwrap());
        let want = run(dense.each_ref().map(Tensor::view), separate.each_ref().map(Tensor::view));
        assert_eq!(bits(&out), bits(&want));
        let fused = gpu.read(&gradients).unwrap();
        for (index, separate) in separate.iter().enumerate() {
            for (at, value) in gpu.read(separate).unwrap().iter().enumerate() {
                let (b, h, t, d) = (at / dim / tokens / heads, at / dim / tokens % heads, at / dim % tokens, at % dim);
                let got = fused[index * part + b * strides[0] + h * strides[1] + t * strides[2] + d];
                assert_eq!(got.to_bits(), value.to_bits(), "gradient {index}, element {at}");
            }
        }
    }
}

/// Views of one buffer, drawn at random: none that share an element are let through.
#[test]
fn overlaps_are_found() {
    let gpu = gpu();
    let buffer = gpu.zeros(&[4096]).unwrap();
    let mut rng = rng(78);
    let (mut refused, mut interleaved) = (0, 0);
    for _ in 0..3000 {
        let shape: Vec<usize> = (0..3).map(|_| rng.usize(1..4)).collect();
        let period = rng.usize(1..9);
        let mut view = || {
            let strides: Vec<usize> =
                (0..3).map(|_| if rng.bool() { period * rng.usize(1..12) } else { rng.usize(1..12) }).collect();
            let offset = rng.usize(..40);
            let mut elements: Vec<usize> = Vec::new();
            for a in 0..shape[0] {
                for b in 0..shape[1] {
                    elements.extend((0..shape[2]).map(|c| offset + a * strides[0] + b * strides[1] + c * strides[2]));
                }
            }
            (TensorView::strided(buffer.buffer(), offset as u64, &shape, &strides), elements)
        };
        let ((from, read), (to, written)) = (view(), view());
        let result = gpu.bind_copy(&from, &to);
        if read.iter().any(|at| written.contains(at)) {
            refused += 1;
            assert!(result.is_err(), "{from:?} {to:?}");
        } else if result.is_ok() && read.iter().max() > written.iter().min() && written.iter().max() > read.iter().min()
        {
            interleaved += 1;
        }
    }
    assert!(refused > 500 && interleaved > 20, "{refused} {interleaved}");
}
