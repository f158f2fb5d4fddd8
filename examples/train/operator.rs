//! The part of the model that runs on the GPU: one operator, its forward and its backward call, bound once.

use continuous_attention::*;

/// Sizes of the operator's tensors; `heads · head_dim` is the model's width.
#[derive(Debug, Clone, Copy)]
pub struct Size {
    pub batch: usize,
    pub tokens: usize,
    pub heads: usize,
    pub head_dim: usize,
}

impl Size {
    pub fn width(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Tokens of all sequences.
    pub fn rows(&self) -> usize {
        self.batch * self.tokens
    }

    /// Elements of q, of k and of v.
    pub fn elements(&self) -> usize {
        self.rows() * self.width()
    }
}

/// What is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Continuous attention, the time between readings as `intervals`.
    Continuous,
    /// Ordinary softmax attention.
    Softmax,
    /// EFLA with raw keys: their length is free, it says how much a reading overwrites.
    Efla,
    /// DeltaNet as it is used, with queries and keys of length 1: raw keys leave the range in which Euler contracts.
    DeltaNet,
}

impl Kind {
    pub const ALL: [Kind; 4] = [Kind::Continuous, Kind::Softmax, Kind::Efla, Kind::DeltaNet];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Continuous => "continuous attention",
            Kind::Softmax => "softmax attention",
            Kind::Efla => "EFLA",
            Kind::DeltaNet => "DeltaNet",
        }
    }

    /// Whether tokens have a step strength β.
    pub fn has_beta(self) -> bool {
        matches!(self, Kind::Efla | Kind::DeltaNet)
    }
}

/// An operator with its tensors and bound calls: a training step only writes its inputs and submits.
pub struct Operator {
    gpu: Gpu,
    /// q, k, v as the projections give them, `[B, T, H, D]`, behind each other; then beta, `[B, H, T]`.
    inputs: Tensor,
    /// `[B, T]`, with continuous attention only.
    intervals: Option<Tensor>,
    /// `[B, T, H, D]`, like `d_out`.
    out: Tensor,
    d_out: Tensor,
    /// Laid out as `inputs`.
    gradients: Tensor,
    forward: Call,
    backward: Call,
}

impl Operator {
    pub fn new(gpu: &Gpu, kind: Kind, size: &Size) -> Result<Operator> {
        let beta = if kind.has_beta() { size.rows() * size.heads } else { 0 };
        let inputs = gpu.zeros(&[3 * size.elements() + beta])?;
        let gradients = gpu.zeros(inputs.shape())?;
        let [out, d_out] = [gpu.zeros(&[size.elements()])?, gpu.zeros(&[size.elements()])?];
        let mut intervals = None;

        // The operators want [B, H, T, D]. Strides say so; nothing is transposed.
        let heads = |tensor: &Tensor, part: usize| {
            let Size { batch, tokens, heads, head_dim } = *size;
            let (offset, strides) =
                (part * size.elements(), [tokens * heads * head_dim, head_dim, heads * head_dim, 1]);
            TensorView::strided(tensor.buffer(), offset as u64, &[batch, heads, tokens, head_dim], &strides)
        };
        let beta = |tensor: &Tensor| {
            let shape = [size.batch, size.heads, size.tokens];
            TensorView::new(tensor.buffer(), 3 * size.elements() as u64, &shape)
        };
        let [q, k, v] = [0, 1, 2].map(|part| heads(&inputs, part));
        let [d_q, d_k, d_v] = [0, 1, 2].map(|part| heads(&gradients, part));

        let (forward, backward) = match kind {
            Kind::Continuous | Kind::Softmax => {
                let (method, sink) = match kind {
                    Kind::Continuous => (Method::Continuous, Sink::Zero),
                    _ => (Method::Softmax, Sink::None),
                };
                if kind == Kind::Continuous {
                    intervals = Some(gpu.zeros(&[size.batch, size.tokens])?);
                }
                let (head_dim, value_dim) = (size.head_dim, size.head_dim);
                let config = AttentionConfig { head_dim, value_dim, method, sink, ..Default::default() };
                let attention = Attention::new(gpu, config)?;
                let lse = gpu.zeros(&[size.batch, size.heads, size.tokens])?;
                let tensors = AttentionTensors {
                    intervals: intervals.as_ref().map(Tensor::view),
                    lse: Some(lse.view()),
                    ..AttentionTensors::new(q, k, v, heads(&out, 0))
                };
                let shape = tensors.shape()?;
                let gradients = AttentionGradients::new(&tensors, lse.view(), heads(&d_out, 0), [d_q, d_k, d_v]);
                (attention.plan(&shape)?.bind(&tensors)?, attention.plan_backward(&shape)?.bind(&gradients)?)
            }
            Kind::Efla | Kind::DeltaNet => {
                let euler = kind == Kind::DeltaNet;
                let config = EflaConfig {
                    key_dim: size.head_dim,
                    value_dim: size.head_dim,
                    integrator: if euler { Integrator::Euler } else { Integrator::Exact },
                    normalize_q: euler,
                    normalize_k: euler,
                    // A query of length 1 is not to be made shorter.
                    scale: euler.then_some(1.0),
                    // Longer chunks than 16 pay with wider heads only.
                    chunk: Some(16),
                    ..Default::default()
                };
                let efla = Efla::new(gpu, config)?;
                let tensors = EflaTensors::new(q, k, v, beta(&inputs), heads(&out, 0));
                let shape = tensors.shape()?;
                let gradients = EflaGradients::new(&tensors, heads(&d_out, 0), [d_q, d_k, d_v, beta(&gradients)]);
                (efla.plan(&shape)?.bind(&tensors)?, efla.plan_backward(&shape)?.bind(&gradients)?)
            }
        };
        Ok(Operator { gpu: gpu.clone(), inputs, intervals, out, d_out, gradients, forward, backward })
    }

    /// `out`, `[B, T, H, D]`, from `inputs` (see [`Operator::inputs`]) and, where the operator reads them, `intervals`.
    pub fn forward(&self, inputs: &[f32], intervals: &[f32]) -> Result<Vec<f32>> {
        self.gpu.write(&self.inputs, inputs)?;
        if let Some(tensor) = &self.intervals {
            self.gpu.write(tensor, intervals)?;
        }
        self.submit(&self.forward);
        self.gpu.read(&self.out)
    }

    /// The gradients of the inputs of the last [`Operator::forward`], laid out alike.
    pub fn backward(&self, d_out: &[f32]) -> Result<Vec<f32>> {
        self.gpu.write(&self.d_out, d_out)?;
        self.submit(&self.backward);
        self.gpu.read(&self.gradients)
    }

    fn submit(&self, call: &Call) {
        let mut encoder = self.gpu.device().create_command_encoder(&Default::default());
        call.encode(&mut encoder);
        self.gpu.queue().submit([encoder.finish()]);
    }
}
