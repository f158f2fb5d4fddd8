//! Decoding: prompts of different lengths are prefilled, then tokens arrive one by one. Attention appends rotated keys to
//! a padded cache, EFLA carries a state on where it lies. Every streamed row is compared with that of one pass over the
//! whole sequence and with float64. What was saved in the middle is restored and the rest replayed, bit by bit.
//! `cargo run --release --example decode`; it fails if anything differs.

use std::time::Instant;

use continuous_attention::reference::compare::{Quantity, Scale, compare, limit};
use continuous_attention::{
    Attention, AttentionConfig, AttentionShape, AttentionTensors, DType, Efla, EflaConfig, EflaShape, EflaTensors, Gpu,
    Lengths, Rotary, RotaryConfig, RotaryShape, RotaryTensors, Tensor, reference, wgpu,
};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tokens of each sequence's prompt; those of the first are enough to be split over workgroups.
const PROMPTS: [usize; 2] = [1100, 300];
const BATCH: usize = PROMPTS.len();
const STREAMED: usize = 16;
/// Streamed tokens before the snapshot.
const SAVED: usize = 9;
/// Room for the longest sequence. One pass is over as many tokens of both: a row does not see those that come later.
const TOKENS: usize = PROMPTS[0] + STREAMED;
const HEADS: usize = 2;
const KV_HEADS: usize = 1;
const DIM: usize = 32;

/// An input for all tokens, `[BATCH, heads, TOKENS, width]`. In a model it is what the layer before computes.
struct Input {
    host: Vec<f32>,
    all: Tensor,
    /// The token that is decoded, `[BATCH, heads, 1, width]`.
    token: Tensor,
    width: usize,
}

impl Input {
    /// β has no `dim`: it is one number a token.
    fn new(gpu: &Gpu, heads: usize, dim: Option<usize>, draw: &mut impl FnMut() -> f32) -> Result<Self> {
        let shape = |tokens| [BATCH, heads, tokens].into_iter().chain(dim).collect::<Vec<_>>();
        let host: Vec<f32> = (0..shape(TOKENS).iter().product()).map(|_| draw()).collect();
        let (all, token) = (gpu.upload(&host, &shape(TOKENS))?, gpu.zeros(&shape(1))?);
        Ok(Input { host, all, token, width: dim.unwrap_or(1) })
    }

    /// Streamed token `at` of every sequence comes in.
    fn arrive(&self, gpu: &Gpu, at: usize) -> Result<()> {
        Ok(gpu.write(&self.token, &token(&self.host, self.width, at))?)
    }

    fn float64(&self) -> Vec<f64> {
        self.host.iter().map(|&x| x.into()).collect()
    }
}

/// Streamed token `at` of every sequence, `[BATCH, heads, 1, width]`, out of `[BATCH, heads, TOKENS, width]`.
fn token<T: Copy>(x: &[T], width: usize, at: usize) -> Vec<T> {
    let of = |(sequence, prompt): (&[T], usize)| -> Vec<T> {
        sequence.chunks(TOKENS * width).flat_map(|head| &head[(prompt + at) * width..][..width]).copied().collect()
    };
    x.chunks(x.len() / BATCH).zip(PROMPTS).flat_map(of).collect()
}

fn submit(gpu: &Gpu, record: impl FnOnce(&mut wgpu::CommandEncoder) -> Result<()>) -> Result<()> {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    record(&mut encoder)?;
    gpu.queue().submit([encoder.finish()]);
    Ok(())
}

fn milliseconds(start: Instant) -> f64 {
    1e3 * start.elapsed().as_secs_f64()
}

/// Decodes with `step`, which returns the rows of a token, `[BATCH, HEADS, 1, DIM]`; goes back to the middle and decodes
/// the rest again. Judges the rows and prints a line; what went wrong.
fn decode(
    name: &str,
    step: impl Fn(usize) -> Result<Vec<f32>>,
    save: impl FnOnce() -> Result<()>,
    restore: impl FnOnce() -> Result<()>,
    one_pass: &[f32],
    float64: &[f64],
) -> Result<Vec<String>> {
    let (mut rows, mut times) = (Vec::new(), Vec::new());
    let mut timed_step = |at| -> Result<()> {
        let start = Instant::now();
        rows.push(step(at)?);
        times.push(milliseconds(start));
        Ok(())
    };
    (0..SAVED).try_for_each(&mut timed_step)?;
    save()?;
    (SAVED..STREAMED).try_for_each(&mut timed_step)?;
    restore()?;
    (SAVED..STREAMED).try_for_each(&mut timed_step)?;
    let (streamed, replayed) = rows.split_at(STREAMED);

    let mut failures = Vec::new();
    let mut largest = [0.0f64; 2];
    for (at, rows) in streamed.iter().enumerate() {
        let one_pass = token(one_pass, DIM, at).into_iter().map(f64::from).collect();
        for (index, want) in [one_pass, token(float64, DIM, at)].into_iter().enumerate() {
            // Logits of these inputs stay below 8, so that attention's limit is no larger.
            let outcome = compare(rows, &want, limit(Quantity::Forward, DType::F32), Scale::Tensor);
            largest[index] = largest[index].max(outcome.max);
            let against = ["one pass", "float64"][index];
            failures.extend(outcome.failure.map(|failure| format!("{name}, token {at} against {against}: {failure}")));
        }
    }
    let bits = |rows: &[Vec<f32>]| rows.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
    let replay = if bits(replayed) == bits(&streamed[SAVED..]) { "same bits" } else { "other bits" };
    if replay != "same bits" {
        failures.push(format!("{name}: the replay has other bits"));
    }
    times.sort_by(f64::total_cmp);
    let [one_pass, float64] = largest;
    println!("{name:<10} {STREAMED:>6} {:>9.2} {one_pass:>14.1e} {float64:>13.1e}  {replay}", times[times.len() / 2]);
    Ok(failures)
}

fn attention(gpu: &Gpu, draw: &mut impl FnMut() -> f32) -> Result<Vec<String>> {
    let rotary = Rotary::new(gpu, RotaryConfig { dim: DIM, ..Default::default() })?;
    let attention = Attention::new(gpu, AttentionConfig { head_dim: DIM, value_dim: DIM, ..Default::default() })?;
    let q = Input::new(gpu, HEADS, Some(DIM), draw)?;
    let k = Input::new(gpu, KV_HEADS, Some(DIM), draw)?;
    let v = Input::new(gpu, KV_HEADS, Some(DIM), draw)?;
    let out = gpu.zeros(&[BATCH, HEADS, TOKENS, DIM])?;

    // One pass: queries and keys are rotated where they lie.
    let (all_q, all_k) = (gpu.upload(&q.host, q.all.shape())?, gpu.upload(&k.host, k.all.shape())?);
    submit(gpu, |encoder| {
        rotary.forward(encoder, 0, &RotaryTensors::new(all_q.view(), all_q.view()))?;
        rotary.forward(encoder, 0, &RotaryTensors::new(all_k.view(), all_k.view()))?;
        Ok(attention.forward(encoder, &AttentionTensors::new(all_q.view(), all_k.view(), v.all.view(), out.view()))?)
    })?;
    let one_pass = gpu.read(&out)?;

    // Prefill: the rotated keys go straight into the cache.
    let cache = gpu.zeros(k.all.shape())?;
    let values = gpu.zeros(v.all.shape())?;
    for (b, prompt) in PROMPTS.into_iter().enumerate() {
        let part = |of: &Tensor| of.view().narrow(0, b, 1)?.narrow(2, 0, prompt);
        let prompt_q = gpu.zeros(&[1, HEADS, prompt, DIM])?.view();
        submit(gpu, |encoder| {
            rotary.forward(encoder, 0, &RotaryTensors::new(part(&q.all)?, prompt_q.clone()))?;
            rotary.forward(encoder, 0, &RotaryTensors::new(part(&k.all)?, part(&cache)?))?;
            gpu.copy(encoder, &part(&v.all)?, &part(&values)?)?;
            let tensors = AttentionTensors::new(prompt_q, part(&cache)?, part(&values)?, part(&out)?);
            Ok(attention.forward(encoder, &tensors)?)
        })?;
    }

    let positions = gpu.zeros(&[BATCH, 1])?;
    let row = gpu.zeros(q.token.shape())?;
    let step = |at: usize| {
        [&q, &k, &v].into_iter().try_for_each(|input| input.arrive(gpu, at))?;
        gpu.write(&positions, &PROMPTS.map(|prompt| (prompt + at) as f32))?;
        submit(gpu, |encoder| {
            for x in [&q.token, &k.token] {
                let positions = Some(positions.view());
                rotary.forward(encoder, 0, &RotaryTensors { positions, ..RotaryTensors::new(x.view(), x.view()) })?;
            }
            for (token, cache) in [(&k.token, &cache), (&v.token, &values)] {
                for (b, prompt) in PROMPTS.into_iter().enumerate() {
                    let end = cache.view().narrow(0, b, 1)?.narrow(2, prompt + at, 1)?;
                    gpu.copy(encoder, &token.view().narrow(0, b, 1)?, &end)?;
                }
            }
            let lengths = Lengths::Cache { kv_lens: PROMPTS.map(|prompt| prompt + at + 1).into() };
            let tensors = AttentionTensors::new(q.token.view(), cache.view(), values.view(), row.view());
            Ok(attention.forward(encoder, &AttentionTensors { lengths, ..tensors })?)
        })?;
        Ok(gpu.read(&row)?)
    };

    let rotated = |input: &Input, heads| {
        let shape = RotaryShape { batch: BATCH, heads, tokens: TOKENS, offset: 0 };
        reference::rotary::forward(rotary.config(), &shape, &input.float64(), None)
    };
    let (q64, k64, v64) = (rotated(&q, HEADS)?, rotated(&k, KV_HEADS)?, v.float64());
    let shape = AttentionShape { batch: BATCH, heads: HEADS, kv_heads: KV_HEADS, queries: TOKENS, keys: TOKENS };
    let inputs =
        reference::attention::Inputs { q: &q64, k: &k64, v: &v64, sink_k: None, sink_v: None, intervals: None };
    let float64 = reference::attention::forward(attention.config(), &shape, &inputs)?.out;
    // A cache is saved with its lengths, which `step` computes: what lies behind them is never looked at.
    decode("attention", step, || Ok(()), || Ok(()), &one_pass, &float64)
}

fn efla(gpu: &Gpu, draw: &mut impl FnMut() -> f32) -> Result<Vec<String>> {
    let config = EflaConfig { key_dim: DIM, value_dim: DIM, normalize_k: true, ..Default::default() };
    let efla = Efla::new(gpu, config)?;
    let q = Input::new(gpu, HEADS, Some(DIM), draw)?;
    let k = Input::new(gpu, HEADS, Some(DIM), draw)?;
    let v = Input::new(gpu, HEADS, Some(DIM), draw)?;
    let beta = Input::new(gpu, HEADS, None, &mut || draw().abs())?;
    let out = gpu.zeros(v.all.shape())?;
    let all = EflaTensors::new(q.all.view(), k.all.view(), v.all.view(), beta.all.view(), out.view());

    submit(gpu, |encoder| Ok(efla.forward(encoder, &all)?))?;
    let one_pass = gpu.read(&out)?;

    // Prefill: in chunks, from nothing to a state.
    let state = gpu.zeros(&[BATCH, HEADS, DIM, DIM])?;
    for (b, prompt) in PROMPTS.into_iter().enumerate() {
        let part = |of: &Tensor| of.view().narrow(0, b, 1)?.narrow(2, 0, prompt);
        let tensors = EflaTensors::new(part(&q.all)?, part(&k.all)?, part(&v.all)?, part(&beta.all)?, part(&out)?);
        let final_state = Some(state.view().narrow(0, b, 1)?);
        submit(gpu, |encoder| Ok(efla.forward(encoder, &EflaTensors { final_state, ..tensors })?))?;
    }

    // A step from state to state is bound once and recorded for every token.
    let row = gpu.zeros(v.token.shape())?;
    let tensors = EflaTensors::new(q.token.view(), k.token.view(), v.token.view(), beta.token.view(), row.view());
    let call = efla
        .plan_step(&EflaShape { batch: BATCH, heads: HEADS, value_heads: HEADS, tokens: 1 })?
        .bind(&EflaTensors { initial_state: Some(state.view()), final_state: Some(state.view()), ..tensors })?;
    let step = |at: usize| {
        [&q, &k, &v, &beta].into_iter().try_for_each(|input| input.arrive(gpu, at))?;
        submit(gpu, |encoder| {
            call.encode(encoder);
            Ok(())
        })?;
        Ok(gpu.read(&row)?)
    };
    let saved = gpu.zeros(state.shape())?;
    let copy = |from: &Tensor, to: &Tensor| submit(gpu, |encoder| Ok(gpu.copy(encoder, &from.view(), &to.view())?));

    let [q64, k64, v64, beta64] = [&q, &k, &v, &beta].map(Input::float64);
    let inputs =
        reference::efla::Inputs { q: &q64, k: &k64, v: &v64, beta: &beta64, log_decay: None, initial_state: None };
    let shape = EflaShape { batch: BATCH, heads: HEADS, value_heads: HEADS, tokens: TOKENS };
    let float64 = reference::efla::forward(&config, &shape, &inputs)?.out;
    decode("EFLA", step, || copy(&state, &saved), || copy(&saved, &state), &one_pass, &float64)
}

fn main() -> Result<()> {
    let gpu = Gpu::new()?;
    let mut rng = fastrand::Rng::with_seed(1);
    // Uniform, of variance 1.
    let mut draw = || (rng.f32() - 0.5) * 12f32.sqrt();
    println!(
        "{}: prompts of {PROMPTS:?} tokens, then {STREAMED} tokens, one of each sequence at a time",
        gpu.info().name
    );
    println!("{:<10} {:>6} {:>9} {:>14} {:>13}  replay", "", "tokens", "ms/token", "from one pass", "from float64");
    let mut failures = attention(&gpu, &mut draw)?;
    failures.extend(efla(&gpu, &mut draw)?);
    let allowed = 10.0 * limit(Quantity::Forward, DType::F32);
    println!("largest differences, relative to the largest element of a token's rows; {allowed:.0e} is allowed");
    failures.iter().for_each(|failure| eprintln!("{failure}"));
    if failures.is_empty() { Ok(()) } else { Err(format!("{} of the comparisons failed", failures.len()).into()) }
}
