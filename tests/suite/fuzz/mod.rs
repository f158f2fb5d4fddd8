//! What a fuzzer calls with any bytes: nothing may panic, overflow or take long. The suite does so for a few seconds, the
//! targets of `fuzz/` for as long as you like.

use std::collections::BTreeMap;

use continuous_attention::case::Case;
use continuous_attention::reference::{attention, efla};
use continuous_attention::*;

/// Reads bytes as a case file. What is accepted means the same with every key explicit.
pub fn case(data: &[u8]) {
    let Ok(case) = Case::from_bytes("fuzzed", data, &BTreeMap::new()) else { return };
    let metadata = case.metadata();
    let again = Case::from_bytes("fuzzed", data, &metadata).expect("its own metadata are accepted");
    assert_eq!(again.metadata(), metadata);
}

/// Decisions made of bytes; zeros when they are used up.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    /// Whether something happens that does so once in `n` times, never when all bytes are used up.
    fn once_in(&mut self, n: u8) -> bool {
        self.byte() % n == 1
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.byte()) % choices.len()]
    }

    /// A number that something may go wrong with.
    fn number(&mut self) -> usize {
        let power = 1usize << (self.byte() % 64);
        match self.byte() % 6 {
            0 => usize::from(self.byte()),
            1 => power,
            2 => power - 1,
            3 => power + 1,
            4 => usize::MAX - power + 1,
            _ => u64::from_le_bytes([(); 8].map(|()| self.byte())) as usize,
        }
    }

    /// A size: mostly a small one.
    fn size(&mut self) -> usize {
        if self.once_in(8) { self.number() } else { usize::from(self.byte() % 4) }
    }

    fn scale(&mut self) -> Option<f64> {
        self.once_in(3).then(|| f64::from_le_bytes([(); 8].map(|()| self.byte())))
    }

    /// Cumulative lengths: mostly those of `total` tokens.
    fn cumulative(&mut self, total: usize) -> Vec<usize> {
        match self.byte() % 4 {
            0 => (0..self.byte() % 4).map(|_| self.number()).collect(),
            1 => vec![0],
            2 => vec![0, total],
            _ => {
                let middle = self.number().checked_rem(total).unwrap_or(0);
                vec![0, middle, middle, total]
            }
        }
    }
}

/// Views of one buffer, each of its own range; one of them is spoiled.
struct Views<'a, 'b> {
    bytes: &'b mut Bytes<'a>,
    buffer: wgpu::Buffer,
    offset: u64,
    spoiled: u8,
}

impl<'a, 'b> Views<'a, 'b> {
    fn new(gpu: &Gpu, bytes: &'b mut Bytes<'a>) -> Self {
        let spoiled = bytes.byte() % 16;
        Views { bytes, buffer: gpu.zeros(&[1 << 14]).unwrap().buffer().clone(), offset: 0, spoiled }
    }

    fn view(&mut self, shape: &[usize]) -> TensorView {
        let view = TensorView::new(&self.buffer, self.offset, shape);
        // Far enough apart for the tensors that fit.
        self.offset += 640;
        self.spoiled = self.spoiled.wrapping_sub(1);
        if self.spoiled == 0 { self.spoil(shape) } else { view }
    }

    fn spoil(&mut self, shape: &[usize]) -> TensorView {
        let bytes = &mut self.bytes;
        let mut shape = shape.to_vec();
        if bytes.once_in(4) {
            let at = bytes.byte() as usize % (shape.len() + 1);
            match shape.get_mut(at) {
                Some(size) => *size = bytes.number(),
                None => shape.push(bytes.number()),
            }
        }
        let strides: Vec<usize> = (0..shape.len() + usize::from(bytes.once_in(16))).map(|_| bytes.size()).collect();
        let offset = if bytes.once_in(2) { bytes.number() as u64 } else { self.offset };
        let dtype = if bytes.once_in(8) { DType::F16 } else { DType::F32 };
        let view = TensorView::strided(&self.buffer, offset, &shape, &strides).with_dtype(dtype);
        let narrowed = view.narrow(bytes.size(), bytes.number(), bytes.number());
        let _ = view.transposed(bytes.size(), bytes.size());
        narrowed.unwrap_or(view)
    }

    fn some(&mut self, shape: &[usize]) -> Option<TensorView> {
        self.bytes.once_in(2).then(|| self.view(shape))
    }
}

/// Plans and binds calls of any sizes and views. Dimensions that would need other shaders are validated only.
pub fn calls(gpu: &Gpu, data: &[u8]) {
    let mut bytes = Bytes(data);
    match bytes.byte() % 4 {
        0 => attention_calls(gpu, &mut bytes),
        1 => efla_calls(gpu, &mut bytes),
        2 => copies(gpu, &mut bytes),
        _ => others(gpu, &mut bytes),
    }
}

fn attention_calls(gpu: &Gpu, bytes: &mut Bytes) {
    let config = AttentionConfig {
        head_dim: bytes.number(),
        value_dim: bytes.number(),
        method: bytes.pick(&[Method::Continuous, Method::Softmax]),
        sink: bytes.pick(&[Sink::Zero, Sink::First, Sink::Given, Sink::None]),
        causal: bytes.once_in(2),
        window: bytes.once_in(2).then(|| bytes.number()),
        scale: bytes.scale(),
        block_q: bytes.once_in(2).then(|| bytes.number()),
    };
    let _ = config.validate();
    let config = AttentionConfig { head_dim: 5, value_dim: 3, block_q: None, ..config };
    let Ok(operator) = Attention::new(gpu, config) else { return };
    let [batch, kv_heads, group, queries, keys] = [(); 5].map(|()| bytes.size());
    let heads = if bytes.once_in(8) { bytes.number() } else { kv_heads.saturating_mul(group) };
    let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
    let lengths = match bytes.byte() % 4 {
        0 => Lengths::Packed { cu_seqlens_q: bytes.cumulative(queries), cu_seqlens_k: bytes.cumulative(keys) },
        1 => Lengths::Cache { kv_lens: (0..batch.min(5)).map(|_| bytes.size()).collect() },
        _ => Lengths::Full,
    };
    let inputs = attention::Inputs { q: &[], k: &[], v: &[], sink_k: None, sink_v: None, intervals: None };
    let _ = attention::forward_ragged(&config, &shape, &lengths, &inputs);
    let _ = attention::backward_ragged(&config, &shape, &lengths, &inputs, &[], None);
    let plans = (operator.plan_ragged(&shape, &lengths), operator.plan_backward_ragged(&shape, &lengths));

    let mut views = Views::new(gpu, bytes);
    let mut view = |shape: &[usize]| views.view(shape);
    let [q, k] = [[batch, heads, queries, 5], [batch, kv_heads, keys, 5]];
    let [v, out] = [[batch, kv_heads, keys, 3], [batch, heads, queries, 3]];
    let lse = view(&[batch, heads, queries]);
    let given = |view: TensorView| (config.sink == Sink::Given).then_some(view);
    let forward = AttentionTensors {
        sink_k: given(view(&[1, kv_heads, 5])),
        sink_v: given(view(&[batch, kv_heads, 3])),
        lse: Some(lse.clone()),
        lengths,
        ..AttentionTensors::new(view(&q), view(&k), view(&v), view(&out))
    };
    let gradients = [view(&q), view(&k), view(&v)];
    let backward = AttentionGradients {
        d_sink_k: given(view(&[1, kv_heads, 5])),
        d_sink_v: given(view(&[batch, kv_heads, 3])),
        ..AttentionGradients::new(&forward, lse, view(&out), gradients)
    };
    let forward = AttentionTensors { intervals: views.some(&[batch, keys]), ..forward };
    if let Ok(plan) = plans.0 {
        let _ = plan.bind(&forward);
    }
    if let Ok(plan) = plans.1 {
        let _ = plan.bind(&backward);
    }
    let _ = (forward.shape(), backward.shape());
}

fn efla_calls(gpu: &Gpu, bytes: &mut Bytes) {
    let config = EflaConfig {
        key_dim: bytes.number(),
        value_dim: bytes.number(),
        integrator: bytes.pick(&[Integrator::Exact, Integrator::Euler, Integrator::RungeKutta4]),
        normalize_q: bytes.once_in(2),
        normalize_k: bytes.once_in(2),
        scale: bytes.scale(),
        chunk: bytes.once_in(2).then(|| bytes.number()),
        form: bytes.pick(&[Form::Chunked, Form::Recurrent]),
        gated: bytes.once_in(2),
    };
    let _ = config.validate();
    // One chunk length: shaders are made for each.
    let config = EflaConfig { key_dim: 5, value_dim: 3, chunk: Some(16), ..config };
    let Ok(operator) = Efla::new(gpu, config) else { return };
    let [batch, heads, group, tokens] = [(); 4].map(|()| bytes.size());
    let value_heads = if bytes.once_in(8) { bytes.number() } else { heads.saturating_mul(group) };
    let shape = EflaShape { batch, heads, value_heads, tokens };
    let cu_seqlens = bytes.once_in(3).then(|| bytes.cumulative(tokens));
    let states = cu_seqlens.as_ref().map_or(batch, |cumulative| cumulative.len().saturating_sub(1));
    let inputs = efla::Inputs { q: &[], k: &[], v: &[], beta: &[], log_decay: None, initial_state: None };
    let (plan, backward) = match &cu_seqlens {
        None => {
            let _ = efla::forward(&config, &shape, &inputs);
            let _ = efla::backward(&config, &shape, &inputs, &[], None);
            (operator.plan(&shape), operator.plan_backward(&shape))
        }
        Some(cumulative) => {
            let _ = efla::forward_packed(&config, &shape, cumulative, &inputs);
            let _ = efla::backward_packed(&config, &shape, cumulative, &inputs, &[], None);
            (operator.plan_packed(&shape, cumulative), operator.plan_backward_packed(&shape, cumulative))
        }
    };
    let _ = operator.plan_step(&shape);

    let mut views = Views::new(gpu, bytes);
    let [k, v, beta] =
        [&[batch, heads, tokens, 5][..], &[batch, value_heads, tokens, 3], &[batch, value_heads, tokens]];
    let state = [states, value_heads, 5, 3];
    let mut view = |shape: &[usize]| views.view(shape);
    let forward = EflaTensors {
        log_decay: config.gated.then(|| view(beta)),
        initial_state: Some(view(&state)),
        final_state: Some(view(&state)),
        cu_seqlens,
        ..EflaTensors::new(view(k), view(k), view(v), view(beta), view(v))
    };
    let outputs = [view(k), view(k), view(v), view(beta)];
    let gradients = EflaGradients {
        d_final_state: Some(view(&state)),
        d_initial_state: Some(view(&state)),
        d_log_decay: config.gated.then(|| view(beta)),
        ..EflaGradients::new(&forward, view(v), outputs)
    };
    if let Ok(plan) = plan {
        let _ = plan.bind(&forward);
    }
    if let Ok(plan) = backward {
        let _ = plan.bind(&gradients);
    }
    let _ = (forward.shape(), gradients.shape());
}

fn copies(gpu: &Gpu, bytes: &mut Bytes) {
    let shape: Vec<usize> = (0..bytes.byte() % 6).map(|_| bytes.size()).collect();
    let mut views = Views::new(gpu, bytes);
    let (from, to) = (views.view(&shape), views.view(&shape));
    let _ = gpu.bind_copy(&from, &to);
    // A tensor of its own is allocated only where it is small: one that is not fills the memory.
    if shape.iter().try_fold(1usize, |product, size| product.checked_mul(*size)).is_none_or(|size| size > 1 << 40) {
        assert!(gpu.zeros(&shape).is_err());
    }
}

fn others(gpu: &Gpu, bytes: &mut Bytes) {
    let config = RotaryConfig {
        dim: bytes.number(),
        rotary_dim: bytes.once_in(2).then(|| bytes.number()),
        base: bytes.scale().unwrap_or(10_000.0),
        pairing: bytes.pick(&[Pairing::Interleaved, Pairing::HalfSplit]),
    };
    let _ = config.validate();
    let [batch, heads, tokens] = [(); 3].map(|()| bytes.size());
    let offset = bytes.number() as u32;
    if let Ok(plan) = Rotary::new(gpu, RotaryConfig { dim: 6, rotary_dim: None, ..config })
        .and_then(|rotary| rotary.plan(&RotaryShape { batch, heads, tokens, offset }))
    {
        let mut views = Views::new(gpu, bytes);
        let (x, out) = (views.view(&[batch, heads, tokens, 6]), views.view(&[batch, heads, tokens, 6]));
        let positions = views.some(&[batch, tokens]);
        let _ = plan.bind(&RotaryTensors { positions, ..RotaryTensors::new(x, out) });
    }
    let value_dim = if bytes.once_in(2) { bytes.number() } else { 3 };
    let shape = MergeShape { batch, heads, queries: tokens, value_dim };
    if let Ok(plan) = Merge::new(gpu).and_then(|merge| merge.plan(&shape)) {
        let mut views = Views::new(gpu, bytes);
        let (out, lse) = ([batch, heads, tokens, value_dim], [batch, heads, tokens]);
        let mut view = |shape: &[usize]| views.view(shape);
        let (out_a, lse_a, out_b, lse_b) = (view(&out), view(&lse), view(&out), view(&lse));
        let _ = plan.bind(&MergeTensors { out_a, lse_a, out_b, lse_b, out: view(&out), lse: view(&lse) });
    }
}
