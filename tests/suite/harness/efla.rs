//! One EFLA call from slices.

use continuous_attention::reference::efla::{Inputs, Output, forward};
use continuous_attention::{Efla, EflaConfig, EflaShape, EflaTensors, Form, Gpu};

use super::{Guarded, forward_limit, gpu, input, judge, normal, submit, widen};

/// A call with everything it reads.
#[derive(Clone)]
pub struct EflaCase {
    pub config: EflaConfig,
    pub shape: EflaShape,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub beta: Vec<f32>,
    pub log_decay: Option<Vec<f32>>,
    pub initial_state: Option<Vec<f32>>,
}

/// What a call wrote.
#[derive(Clone, Debug, PartialEq)]
pub struct EflaOutput {
    pub out: Vec<f32>,
    pub final_state: Vec<f32>,
}

impl EflaCase {
    /// Normally distributed tensors, β between 0 and 1, no initial state.
    pub fn random(config: EflaConfig, shape: EflaShape, rng: &mut fastrand::Rng) -> Self {
        let EflaShape { batch, heads, value_heads, tokens } = shape;
        EflaCase {
            config,
            shape,
            q: normal(rng, batch * heads * tokens * config.key_dim),
            k: normal(rng, batch * heads * tokens * config.key_dim),
            v: normal(rng, batch * value_heads * tokens * config.value_dim),
            beta: (0..batch * value_heads * tokens).map(|_| rng.f32()).collect(),
            log_decay: None,
            initial_state: None,
        }
    }

    pub fn with_initial_state(mut self, rng: &mut fastrand::Rng) -> Self {
        self.initial_state = Some(normal(rng, self.state_shape().iter().product()));
        self
    }

    /// Makes it gated: every token of every value head decays by what `strength` says, e^{−strength}.
    pub fn with_decay(mut self, mut strength: impl FnMut() -> f32) -> Self {
        self.config.gated = true;
        self.log_decay = Some(self.beta.iter().map(|_| -strength()).collect());
        self
    }

    /// Gives every token of every value head the x = β|k|² that `step` says; |k| stays what it is.
    pub fn with_steps(mut self, mut step: impl FnMut() -> f64) -> Self {
        let EflaShape { heads, value_heads, tokens, .. } = self.shape;
        for (at, beta) in self.beta.iter_mut().enumerate() {
            let (sequence, token) = (at / tokens, at % tokens);
            let (batch, head) = (sequence / value_heads, sequence % value_heads / (value_heads / heads));
            let key = ((batch * heads + head) * tokens + token) * self.config.key_dim;
            let square: f64 = self.k[key..key + self.config.key_dim].iter().map(|&x| f64::from(x).powi(2)).sum();
            *beta = (step() / if self.config.normalize_k { 1.0 } else { square }) as f32;
        }
        self
    }

    /// Makes every key as long as `length` says.
    pub fn with_key_lengths(mut self, mut length: impl FnMut() -> f64) -> Self {
        for key in self.k.chunks_mut(self.config.key_dim) {
            let norm = key.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt();
            let factor = length() / norm;
            key.iter_mut().for_each(|x| *x = (f64::from(*x) * factor) as f32);
        }
        self
    }

    /// The same tokens in another form or with another chunk length.
    pub fn in_form(&self, form: Form, chunk: Option<usize>) -> Self {
        let mut case = self.clone();
        case.config = EflaConfig { form, chunk, ..case.config };
        case
    }

    /// For messages.
    pub fn label(&self) -> String {
        let state = if self.initial_state.is_some() { "initial state" } else { "no initial state" };
        format!("EFLA, {state}, {:?}, {:?}", self.config, self.shape)
    }

    /// The right answer, token by token.
    pub fn reference(&self) -> Output {
        let (q, k, v, beta) = (widen(&self.q), widen(&self.k), widen(&self.v), widen(&self.beta));
        let (log_decay, initial_state) =
            (self.log_decay.as_deref().map(widen), self.initial_state.as_deref().map(widen));
        let (log_decay, initial_state) = (log_decay.as_deref(), initial_state.as_deref());
        let inputs = Inputs { q: &q, k: &k, v: &v, beta: &beta, log_decay, initial_state };
        let config = EflaConfig { form: Form::Recurrent, chunk: None, ..self.config };
        forward(&config, &self.shape, &inputs)
            .unwrap_or_else(|error| panic!("the reference refuses {}: {error}", self.label()))
    }

    /// Runs on the shared device.
    pub fn run(&self) -> EflaOutput {
        self.run_on(gpu())
    }

    /// Runs with NaN in the outputs and in the workspace, every tensor at an odd offset.
    pub fn run_on(&self, gpu: &Gpu) -> EflaOutput {
        self.try_run_on(gpu).unwrap_or_else(|error| panic!("{error}\n  in {}", self.label()))
    }

    fn try_run_on(&self, gpu: &Gpu) -> continuous_attention::Result<EflaOutput> {
        let plan = Efla::new(gpu, self.config)?.plan(&self.shape)?;
        let out = Guarded::new(gpu, Guarded::ODD, &self.out_shape());
        let final_state = Guarded::new(gpu, Guarded::ODD + 2, &self.state_shape());
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(plan.workspace_bytes() / 4) as usize]);
        let mut tensors = self.tensors(gpu, &out);
        tensors.final_state = Some(final_state.view());
        tensors.workspace = Some(workspace.view());
        submit(gpu, &plan.bind(&tensors)?);
        let label = self.label();
        workspace.read(gpu, &label);
        Ok(EflaOutput { out: out.read(gpu, &label), final_state: final_state.read(gpu, &label) })
    }

    /// The inputs on the device, and where `out` goes.
    pub fn tensors(&self, gpu: &Gpu, out: &Guarded) -> EflaTensors {
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        let EflaConfig { key_dim, value_dim, .. } = self.config;
        EflaTensors {
            q: input(gpu, &self.q, &[batch, heads, tokens, key_dim], 5),
            k: input(gpu, &self.k, &[batch, heads, tokens, key_dim], 70),
            v: input(gpu, &self.v, &[batch, value_heads, tokens, value_dim], 131),
            beta: input(gpu, &self.beta, &[batch, value_heads, tokens], 1),
            log_decay: self.log_decay.as_ref().map(|decay| input(gpu, decay, &[batch, value_heads, tokens], 3)),
            initial_state: self.initial_state.as_ref().map(|state| input(gpu, state, &self.state_shape(), 66)),
            out: out.view(),
            final_state: None,
            cu_seqlens: None,
            workspace: None,
        }
    }

    pub fn out_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.value_heads, self.shape.tokens, self.config.value_dim]
    }

    pub fn state_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.value_heads, self.config.key_dim, self.config.value_dim]
    }

    /// Checks the recurrent form and every chunk length.
    pub fn check_all_forms(&self) {
        let want = self.reference();
        for (form, chunk) in FORMS {
            let case = self.in_form(form, chunk);
            case.judge_against(&case.run(), &want);
        }
    }

    /// Compares a result with the reference.
    pub fn judge(&self, got: &EflaOutput) {
        self.judge_against(got, &self.reference());
    }

    pub fn judge_against(&self, got: &EflaOutput, want: &Output) {
        let label = self.label();
        judge(&label, "out", &got.out, &want.out, forward_limit());
        judge(&label, "final_state", &got.final_state, &want.final_state, forward_limit());
    }
}

/// Every way to walk a sequence.
pub const FORMS: [(Form, Option<usize>); 4] =
    [(Form::Recurrent, None), (Form::Chunked, Some(16)), (Form::Chunked, Some(32)), (Form::Chunked, Some(64))];
