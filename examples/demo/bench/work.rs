//! The kernels at their sizes: inputs, bound calls, what they cost at least, and whether they are right.

use super::measure::{Measured, Timed, Timer};
use continuous_attention::half::{bf16, f16};
use continuous_attention::reference::compare::{self, Quantity, Scale};
use continuous_attention::reference::{attention as exact_attention, efla as exact_efla};
use continuous_attention::{
    Attention, AttentionConfig, AttentionGradients, AttentionShape, AttentionTensors, Call, DType, Efla, EflaConfig,
    EflaGradients, EflaShape, EflaTensors, Form, Gpu, Integrator, Method, Result, Sink, Tensor, wgpu,
};

/// What is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kernel {
    /// Causal.
    Attention {
        method: Method,
        pass: Pass,
        block_q: Option<usize>,
    },
    /// One query against a cache.
    Decode {
        method: Method,
    },
    Efla {
        integrator: Integrator,
        form: Form,
        chunk: Option<usize>,
        pass: Pass,
    },
    /// One token from a resident state, updated in place.
    Step,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    Forward,
    Backward,
}

/// A kernel at a size: batch 1, D = D_v.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spec {
    pub kernel: Kernel,
    pub heads: usize,
    /// Keys; as many queries, but for [`Kernel::Decode`].
    pub tokens: usize,
    pub dim: usize,
    /// Of q, k, v, out and their gradients.
    pub dtype: DType,
}

impl Spec {
    fn is_backward(&self) -> bool {
        matches!(
            self.kernel,
            Kernel::Attention { pass: Pass::Backward, .. } | Kernel::Efla { pass: Pass::Backward, .. }
        )
    }

    /// T_q.
    fn queries(&self) -> usize {
        match self.kernel {
            Kernel::Decode { .. } | Kernel::Step => 1,
            _ => self.tokens,
        }
    }

    /// Keys, and rows of v.
    fn keys(&self) -> usize {
        if self.kernel == Kernel::Step { 1 } else { self.tokens }
    }

    /// How much longer it takes with `longer` times as many tokens.
    fn growth(&self, longer: f64) -> f64 {
        match self.kernel {
            Kernel::Attention { .. } => longer * longer,
            Kernel::Step => 1.0,
            _ => longer,
        }
    }

    /// Multiplications and additions that the algorithm needs; exponentials and gates come on top.
    pub fn flops(&self) -> f64 {
        let (heads, t, d) = (self.heads as f64, self.tokens as f64, self.dim as f64);
        // q·k and p·v: 2 D + 2 D_v for every pair of a row and a token that it sees.
        let pair = 4.0 * d;
        // Every product has two gradients.
        let backward =
            |products: f64, forward: f64| if self.is_backward() { 2.0 * products + forward } else { products };
        heads
            * match self.kernel {
                // ½ T (T + 1) pairs. Backward forms q·k again: 5 products instead of 2.
                Kernel::Attention { .. } => backward(pair, pair / 2.0) * t * (t + 1.0) / 2.0,
                Kernel::Decode { .. } => pair * t,
                // kᵀS, the update of S and qᵀS: 2 D_k D_v each.
                Kernel::Step => 6.0 * d * d,
                Kernel::Efla { form: Form::Recurrent, .. } => 6.0 * d * d * t,
                // A chunk of C tokens: W S, Q S and the update of S, 2 C D_k D_v each; below the diagonal K̂K̂ᵀ, QK̂ᵀ
                // and W, C² D_k each, U and the part of O within the chunk, C² D_v each; C³/3 for the inverse.
                // Backward forms all of it again.
                Kernel::Efla { chunk, .. } => {
                    let c = chunk.unwrap_or(64) as f64;
                    let token = 6.0 * d * d + 5.0 * c * d + c * c / 3.0;
                    backward(token, token) * t
                }
            }
    }

    /// Bytes that have to move if every tensor is read or written once.
    pub fn bytes(&self) -> f64 {
        let stored = self.dtype.bytes();
        let (queries, keys) = (self.queries() * self.dim * stored, self.keys() * self.dim * stored);
        // f32, whatever the rest is.
        let (row, state) = (4 * self.tokens, 4 * self.dim * self.dim);
        let head = match self.kernel {
            // q, k, v, out; d_out and three gradients on top, out and lse are then read.
            Kernel::Attention { pass: Pass::Forward, .. } | Kernel::Decode { .. } => 2 * queries + 2 * keys,
            Kernel::Attention { pass: Pass::Backward, .. } => 4 * queries + 4 * keys + row,
            Kernel::Efla { pass: Pass::Forward, .. } => 4 * keys + row,
            // q, k, v, d_out and three gradients; beta and its own.
            Kernel::Efla { pass: Pass::Backward, .. } => 7 * keys + 2 * row,
            Kernel::Step => 4 * keys + 2 * state,
        };
        (self.heads * head) as f64
    }

    fn attention(&self, method: Method) -> AttentionConfig {
        let sink = if method == Method::Continuous { Sink::Zero } else { Sink::None };
        let block_q = if let Kernel::Attention { block_q, .. } = self.kernel { block_q } else { None };
        AttentionConfig { head_dim: self.dim, value_dim: self.dim, method, sink, block_q, ..Default::default() }
    }

    fn efla(&self, integrator: Integrator, form: Form, chunk: Option<usize>) -> EflaConfig {
        EflaConfig { key_dim: self.dim, value_dim: self.dim, integrator, form, chunk, ..Default::default() }
    }

    /// With the chunk that EFLA takes where none is said: operations are counted by it.
    pub fn chosen(mut self, gpu: &Gpu) -> Result<Spec> {
        if let Kernel::Efla { integrator, form, chunk: chunk @ None, .. } = &mut self.kernel {
            let config = EflaConfig { key_dim: self.dim, integrator: *integrator, form: *form, ..Default::default() };
            *chunk = Some(Efla::new(gpu, config)?.chunk());
        }
        Ok(self)
    }

    /// Shape of a tensor of one head, without batch and heads.
    fn head_shape(&self, name: &str) -> Vec<usize> {
        match name {
            "k" | "v" | "d_k" | "d_v" => vec![self.keys(), self.dim],
            "beta" | "d_beta" => vec![self.keys()],
            "lse" => vec![self.queries()],
            "state" => vec![self.dim, self.dim],
            _ => vec![self.queries(), self.dim],
        }
    }

    fn shape(&self, name: &str) -> Vec<usize> {
        [vec![1, self.heads], self.head_shape(name)].concat()
    }

    fn stored(&self, name: &str) -> DType {
        if matches!(name, "beta" | "d_beta" | "lse" | "state") { DType::F32 } else { self.dtype }
    }

    /// What one head of an input holds, as it is stored: the same in every run.
    pub fn input(&self, name: &str, head: usize) -> Vec<f32> {
        let seed = name.bytes().fold(head as u64, |seed, byte| seed * 257 + u64::from(byte));
        let noise = noise(seed, self.head_shape(name).iter().product());
        let efla = matches!(self.kernel, Kernel::Efla { .. } | Kernel::Step);
        match (name, self.stored(name)) {
            ("beta", _) => noise.map(|x| (0.5 + 0.2 * x).clamp(0.05, 0.95)).collect(),
            ("state", _) => noise.map(|x| 0.1 * x).collect(),
            // |k|² about 1: Euler steps stay within their range.
            ("k", dtype) if efla => {
                let scale = 1.0 / (self.dim as f32).sqrt();
                noise.map(|x| rounded(dtype, scale * x)).collect()
            }
            (_, dtype) => noise.map(|x| rounded(dtype, x)).collect(),
        }
    }
}

/// Nearly normal numbers of mean 0 and variance 1: the sum of the bytes of a random word.
pub fn noise(seed: u64, count: usize) -> impl Iterator<Item = f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..count).map(move |_| {
        // xorshift64*.
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        let bytes = ((state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) as u32).to_le_bytes();
        (bytes.iter().map(|&byte| f32::from(byte)).sum::<f32>() - 510.0) / 147.8
    })
}

fn rounded(dtype: DType, value: f32) -> f32 {
    match dtype {
        DType::F32 => value,
        DType::F16 => f16::from_f32(value).to_f32(),
        DType::BF16 => bf16::from_f32(value).to_f32(),
    }
}

fn upload(gpu: &Gpu, dtype: DType, values: &[f32], shape: &[usize]) -> Result<Tensor> {
    match dtype {
        DType::F32 => gpu.upload(values, shape),
        DType::F16 => gpu.upload(&values.iter().map(|&value| f16::from_f32(value)).collect::<Vec<_>>(), shape),
        DType::BF16 => gpu.upload(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>(), shape),
    }
}

/// A bound call and what it reads and writes.
pub struct Work {
    pub spec: Spec,
    call: Call,
    /// By name; a resident state is none.
    outputs: Vec<(&'static str, Tensor)>,
    pub workspace_bytes: u64,
    /// Of the workspace and all tensors, by the device's own report where it makes one.
    pub memory_bytes: u64,
}

impl Work {
    /// Uploads inputs, plans and binds. Outputs start as NaN.
    pub fn new(gpu: &Gpu, spec: Spec) -> Measured<Work> {
        let spec = spec.chosen(gpu)?;
        let before = allocated(gpu);
        let mut tensor_bytes = 0;
        let mut sized = |tensor: Tensor| {
            tensor_bytes += tensor.buffer().size();
            tensor
        };
        let mut input = |name: &str| -> Result<Tensor> {
            let values: Vec<f32> = (0..spec.heads).flat_map(|head| spec.input(name, head)).collect();
            Ok(sized(upload(gpu, spec.stored(name), &values, &spec.shape(name))?))
        };
        let (q, k, v) = (input("q")?, input("k")?, input("v")?);
        let beta = if matches!(spec.kernel, Kernel::Efla { .. } | Kernel::Step) { Some(input("beta")?) } else { None };
        let state = if spec.kernel == Kernel::Step { Some(input("state")?) } else { None };
        let d_out = if spec.is_backward() { Some(input("d_out")?) } else { None };
        let mut outputs: Vec<(&'static str, Tensor)> = Vec::new();
        let mut output = |name: &'static str| -> Result<Tensor> {
            let shape = spec.shape(name);
            let tensor = upload(gpu, spec.stored(name), &vec![f32::NAN; shape.iter().product()], &shape)?;
            outputs.push((name, sized(tensor.clone())));
            Ok(tensor)
        };
        let out = output("out")?;
        let mut workspace_bytes = 0;
        let mut workspace = |bytes: u64| -> Result<_> {
            workspace_bytes = bytes;
            Ok(Some(gpu.zeros(&[(bytes / 4) as usize])?.view()))
        };
        let call = match spec.kernel {
            Kernel::Attention { method, .. } | Kernel::Decode { method } => {
                let attention = Attention::new(gpu, spec.attention(method))?;
                let mut tensors = AttentionTensors::new(q.view(), k.view(), v.view(), out.view());
                let shape = tensors.shape()?;
                match d_out {
                    None => {
                        let plan = attention.plan(&shape)?;
                        plan.bind(&AttentionTensors { workspace: workspace(plan.workspace_bytes())?, ..tensors })?
                    }
                    Some(d_out) => {
                        let lse = output("lse")?;
                        tensors.lse = Some(lse.view());
                        run(gpu, &attention.plan(&shape)?.bind(&tensors)?);
                        let gradients = [output("d_q")?.view(), output("d_k")?.view(), output("d_v")?.view()];
                        let gradients = AttentionGradients::new(&tensors, lse.view(), d_out.view(), gradients);
                        let plan = attention.plan_backward(&shape)?;
                        plan.bind(&AttentionGradients { workspace: workspace(plan.workspace_bytes())?, ..gradients })?
                    }
                }
            }
            Kernel::Efla { .. } | Kernel::Step => {
                let (integrator, form, chunk) = match spec.kernel {
                    Kernel::Efla { integrator, form, chunk, .. } => (integrator, form, chunk),
                    _ => (Integrator::Exact, Form::Recurrent, None),
                };
                let efla = Efla::new(gpu, spec.efla(integrator, form, chunk))?;
                let beta = beta.as_ref().unwrap_or(&q).view();
                let mut tensors = EflaTensors::new(q.view(), k.view(), v.view(), beta, out.view());
                let shape = tensors.shape()?;
                tensors.initial_state = state.as_ref().map(Tensor::view);
                tensors.final_state = state.as_ref().map(Tensor::view);
                let plan = if state.is_some() { efla.plan_step(&shape)? } else { efla.plan(&shape)? };
                match d_out {
                    None => plan.bind(&EflaTensors { workspace: workspace(plan.workspace_bytes())?, ..tensors })?,
                    Some(d_out) => {
                        run(gpu, &plan.bind(&tensors)?);
                        let gradients = [
                            output("d_q")?.view(),
                            output("d_k")?.view(),
                            output("d_v")?.view(),
                            output("d_beta")?.view(),
                        ];
                        let gradients = EflaGradients::new(&tensors, d_out.view(), gradients);
                        let plan = efla.plan_backward(&shape)?;
                        plan.bind(&EflaGradients { workspace: workspace(plan.workspace_bytes())?, ..gradients })?
                    }
                }
            }
        };
        let reported = allocated(gpu).zip(before).map(|(after, before)| after.saturating_sub(before));
        let memory_bytes = reported.unwrap_or(tensor_bytes + workspace_bytes);
        Ok(Work { spec, call, outputs, workspace_bytes, memory_bytes })
    }

    /// Records the call.
    pub fn record(&self, pass: &mut wgpu::ComputePass) {
        self.call.record(pass);
    }

    /// Ready to be timed.
    pub fn timed<'a>(&'a self, timer: &'a Timer) -> Measured<Timed<'a>> {
        Timed::new(timer, |pass| self.record(pass))
    }

    /// Runs once and compares with float64: of the first and the last head everything, but of attention over many tokens
    /// a few rows. Of all heads every result has to be finite. Before any other run: a resident state moves on.
    pub fn verify(&self, gpu: &Gpu) -> Measured<()> {
        run(gpu, &self.call);
        let mut got = Vec::new();
        for (name, tensor) in &self.outputs {
            let values = gpu.read(tensor)?;
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                return Err(format!("{name}: element {at} is {}", values[at]).into());
            }
            got.push((*name, values));
        }
        for head in [0, self.spec.heads - 1] {
            self.spec.judge(head, &got)?;
        }
        Ok(())
    }

    /// The values of an output: for benches/peers.
    #[allow(dead_code)]
    pub fn read(&self, gpu: &Gpu, output: &str) -> Measured<Vec<f32>> {
        let tensor = self.outputs.iter().find(|(name, _)| *name == output);
        let (_, tensor) = tensor.ok_or_else(|| format!("{output}: no such output"))?;
        Ok(gpu.read(tensor)?)
    }
}

/// Bytes that live allocations take, where the backend counts them.
pub fn allocated(gpu: &Gpu) -> Option<u64> {
    // What was dropped goes once nothing uses it any more, writes still to be submitted included.
    gpu.queue().submit([]);
    let _ = gpu.device().poll(wgpu::PollType::wait_indefinitely());
    gpu.device().generate_allocator_report().map(|report| report.total_allocated_bytes)
}

fn run(gpu: &Gpu, call: &Call) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    call.encode(&mut encoder);
    gpu.queue().submit([encoder.finish()]);
}

/// Up to so many tokens attention is compared as a whole.
const WHOLE: usize = 256;

/// Results of the reference: name, first row, values.
type Part = (&'static str, usize, Vec<f64>);

impl Spec {
    fn wide(&self, name: &str, head: usize) -> Vec<f64> {
        self.input(name, head).into_iter().map(f64::from).collect()
    }

    /// Compares one head of every output.
    fn judge(&self, head: usize, got: &[(&'static str, Vec<f32>)]) -> Measured<()> {
        let (parts, factor) = match self.kernel {
            Kernel::Attention { method, .. } | Kernel::Decode { method } => self.exact_attention(method, head)?,
            Kernel::Efla { integrator, .. } => (self.exact_efla(integrator, head)?, 1.0),
            Kernel::Step => (self.exact_efla(Integrator::Exact, head)?, 1.0),
        };
        for (name, values) in got {
            let size: usize = self.head_shape(name).iter().product();
            let width = self.head_shape(name).get(1).copied().unwrap_or(1);
            let (mut some, mut want) = (Vec::new(), Vec::new());
            for (_, row, part) in parts.iter().filter(|(part, ..)| part == name) {
                some.extend_from_slice(&values[head * size + row * width..][..part.len()]);
                want.extend_from_slice(part);
            }
            let quantity = match *name {
                "d_beta" => Quantity::BetaGradient,
                _ if name.starts_with("d_") => Quantity::Gradient,
                _ => Quantity::Forward,
            };
            let limit = factor * compare::limit(quantity, self.stored(name));
            let scale = if *name == "lse" { Scale::Lse } else { Scale::Tensor };
            if let Some(failure) = compare::compare(&some, &want, limit, scale).failure {
                return Err(format!("{name} of head {head}: {failure}").into());
            }
        }
        Ok(())
    }

    /// The whole head, or the first, the middle and the last row, and the last key, which only the last row sees. And by
    /// what the limits are multiplied.
    fn exact_attention(&self, method: Method, head: usize) -> Measured<(Vec<Part>, f64)> {
        let config = self.attention(method);
        let [q, k, v] = ["q", "k", "v"].map(|name| self.wide(name, head));
        let d_out = if self.is_backward() { Some(self.wide("d_out", head)) } else { None };
        let (queries, keys, width) = (self.queries(), self.keys(), self.dim);
        // (First row, rows, keys that the last of them sees).
        let blocks = match queries {
            _ if queries <= WHOLE => vec![(0, queries, keys)],
            _ => [0, queries / 2, queries - 1].map(|row| (row, 1, row + 1)).to_vec(),
        };
        let (mut parts, mut largest) = (Vec::new(), 0.0f64);
        for (row, rows, seen) in blocks {
            let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: rows, keys: seen };
            let inputs = exact_attention::Inputs {
                q: &q[row * width..][..rows * width],
                k: &k[..seen * width],
                v: &v[..seen * width],
                sink_k: None,
                sink_v: None,
                intervals: None,
            };
            largest = largest.max(exact_attention::largest_logit(&config, &shape, &inputs)?);
            let output = exact_attention::forward(&config, &shape, &inputs)?;
            parts.extend([("out", row, output.out), ("lse", row, output.lse)]);
            if let Some(d_out) = &d_out {
                let d_out = &d_out[row * width..][..rows * width];
                let gradients = exact_attention::backward(&config, &shape, &inputs, d_out, None)?;
                parts.push(("d_q", row, gradients.d_q));
                // Keys that rows outside the block see too are left out.
                if row + rows == queries {
                    let first = if rows == queries { 0 } else { keys - 1 };
                    parts.push(("d_k", first, gradients.d_k[first * width..].to_vec()));
                    parts.push(("d_v", first, gradients.d_v[first * width..].to_vec()));
                }
            }
        }
        Ok((parts, compare::attention_factor(largest)))
    }

    fn exact_efla(&self, integrator: Integrator, head: usize) -> Measured<Vec<Part>> {
        let config = self.efla(integrator, Form::Recurrent, None);
        let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: self.tokens };
        let [q, k, v, beta] = ["q", "k", "v", "beta"].map(|name| self.wide(name, head));
        let state = if self.kernel == Kernel::Step { Some(self.wide("state", head)) } else { None };
        let inputs =
            exact_efla::Inputs { q: &q, k: &k, v: &v, beta: &beta, log_decay: None, initial_state: state.as_deref() };
        let mut parts = vec![("out", 0, exact_efla::forward(&config, &shape, &inputs)?.out)];
        if self.is_backward() {
            let d_out = self.wide("d_out", head);
            let gradients = exact_efla::backward(&config, &shape, &inputs, &d_out, None)?;
            let exact_efla::Gradients { d_q, d_k, d_v, d_beta, .. } = gradients;
            parts.extend([("d_q", 0, d_q), ("d_k", 0, d_k), ("d_v", 0, d_v), ("d_beta", 0, d_beta)]);
        }
        Ok(parts)
    }
}

/// Tokens of the size at which everything is verified whole and tried out.
pub const SMALL: usize = 128;

/// Verifies each kernel at a small size, and says by what power of two their tokens have to be divided so that a run of
/// all takes no more than `seconds`.
pub fn shrink(gpu: &Gpu, timer: &Timer, specs: &[Spec], seconds: f64) -> Measured<usize> {
    let mut tried = Vec::new();
    for spec in specs {
        let small = Work::new(gpu, Spec { tokens: spec.tokens.min(SMALL), ..*spec })?;
        small.verify(gpu)?;
        tried.push(small.timed(timer)?.tried);
    }
    let fits = |divisor: usize| {
        let each = |(spec, tried): (&Spec, &f64)| {
            tried * spec.growth((spec.tokens / divisor) as f64 / spec.tokens.min(SMALL) as f64)
        };
        let least = specs.iter().map(|spec| spec.tokens / divisor).min().unwrap_or(0);
        least <= SMALL || specs.iter().zip(&tried).map(each).sum::<f64>() <= seconds
    };
    let mut divisor = 1;
    while !fits(divisor) {
        divisor *= 2;
    }
    Ok(divisor)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORWARD: Spec = Spec {
        kernel: Kernel::Attention { method: Method::Softmax, pass: Pass::Forward, block_q: None },
        heads: 2,
        tokens: 100,
        dim: 64,
        dtype: DType::F32,
    };

    #[test]
    fn costs_are_those_of_the_formulas() {
        assert_eq!(FORWARD.flops(), 2.0 * 4.0 * 64.0 * 5050.0);
        assert_eq!(FORWARD.bytes(), 2.0 * 4.0 * 100.0 * 64.0 * 4.0);
        let backward = Spec {
            kernel: Kernel::Attention { method: Method::Softmax, pass: Pass::Backward, block_q: None },
            ..FORWARD
        };
        assert_eq!(backward.flops(), 2.5 * FORWARD.flops());
        let decode = Spec { kernel: Kernel::Decode { method: Method::Softmax }, ..FORWARD };
        assert_eq!(decode.flops(), 2.0 * 4.0 * 64.0 * 100.0);
        assert!(Spec { dtype: DType::F16, ..FORWARD }.bytes() == FORWARD.bytes() / 2.0);
    }

    #[test]
    fn inputs_are_noise_and_the_same_every_time() {
        let values = FORWARD.input("q", 1);
        assert_eq!(values, FORWARD.input("q", 1));
        assert!(values != FORWARD.input("q", 0) && values != FORWARD.input("k", 1));
        let (mean, square) = values.iter().fold((0.0, 0.0), |(mean, square), x| (mean + x, square + x * x));
        let count = values.len() as f32;
        assert!((mean / count).abs() < 0.05 && (square / count - 1.0).abs() < 0.1, "{mean} {square} {count}");
        assert!(FORWARD.input("beta", 0).iter().all(|beta| (0.05..0.96).contains(beta)));
    }

    /// The rows that are compared at large sizes are those of the whole.
    #[test]
    fn rows_alone_are_rows_of_the_whole() {
        for method in [Method::Softmax, Method::Continuous] {
            let kernel = Kernel::Attention { method, pass: Pass::Backward, block_q: None };
            let spec = Spec { kernel, heads: 1, tokens: WHOLE + 1, dim: 4, dtype: DType::F32 };
            let (rows, _) = spec.exact_attention(method, 0).unwrap();
            let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: spec.tokens, keys: spec.tokens };
            let [q, k, v, d_out] = ["q", "k", "v", "d_out"].map(|name| spec.wide(name, 0));
            let inputs = exact_attention::Inputs { q: &q, k: &k, v: &v, sink_k: None, sink_v: None, intervals: None };
            let config = spec.attention(method);
            let output = exact_attention::forward(&config, &shape, &inputs).unwrap();
            let gradients = exact_attention::backward(&config, &shape, &inputs, &d_out, None).unwrap();
            for (name, row, values) in rows {
                let (all, width) = match name {
                    "out" => (&output.out, 4),
                    "lse" => (&output.lse, 1),
                    "d_q" => (&gradients.d_q, 4),
                    "d_k" => (&gradients.d_k, 4),
                    _ => (&gradients.d_v, 4),
                };
                for (got, want) in values.iter().zip(&all[row * width..]) {
                    assert!((got - want).abs() < 1e-12, "{name} {row}");
                }
            }
        }
    }

    #[test]
    fn a_wrong_result_is_refused() {
        let spec = Spec { tokens: 20, dim: 4, ..FORWARD };
        let (parts, _) = spec.exact_attention(Method::Softmax, 1).unwrap();
        let head: Vec<f32> = parts[0].2.iter().map(|&value| value as f32).collect();
        // The first head is not looked at here.
        let mut out = vec![0.0; head.len()];
        out.extend(&head);
        assert!(spec.judge(1, &[("out", out.clone())]).is_ok());
        out[head.len() + 70] += 0.01;
        let error = spec.judge(1, &[("out", out)]).unwrap_err().to_string();
        assert!(error.contains("out of head 1") && error.contains("element 70"), "{error}");
    }
}
