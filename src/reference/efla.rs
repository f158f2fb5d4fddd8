//! Error-free linear attention (EFLA, arXiv 2512.12602) in float64.
//!
//! Per token the state S, `[D_k, D_v]`, obeys dS/dτ = −β k kᵀ S + β k vᵀ for one unit of time. Solved exactly, with
//! λ = |k|², x = βλ and φ̄(x) = (1 − e^{−x})/x:
//!
//! ```text
//! α = β φ̄(βλ)      S_t = (I − α k kᵀ) S_{t−1} + α k vᵀ      o_t = scale · S_tᵀ q_t
//! ```
//!
//! The other integrators differ in α only, see [`Integrator`]. The recurrent form and the gradients are written in α
//! and k, exactly as above; the chunked form in the unit key and the bounded quantities of [`Gate`]. So the two forms
//! check each other.
//!
//! # With decay
//!
//! A gated operator ([`EflaConfig::gated`]) also has a log decay per token and value head, κ = −log_decay ≥ 0, solved
//! together with the rest over the same unit of time:
//!
//! ```text
//! dS/dτ = −(β k kᵀ + κ) S + β k vᵀ
//! S(1) = e^{−κ} e^{−β k kᵀ} S(0) + ∫₀¹ e^{−(β k kᵀ + κ)s} ds β k vᵀ
//! ```
//!
//! κ is a number, so the two exponentials commute: the erase factor stays what it was and the whole state is multiplied
//! by g = e^{−κ}. The input only ever meets the eigenvector k, of eigenvalue x + κ, and the integral is φ̄(x + κ):
//!
//! ```text
//! α = β φ̄(x)    α' = β φ̄(x + κ)    S_t = g (I − α k kᵀ) S_{t−1} + α' k vᵀ
//! ```
//!
//! The other integrators put x + κ into the polynomial that stands for φ̄; g is exact for all of them. With
//! [`Integrator::Euler`] α = α' = β: Gated DeltaNet. A log decay of −∞ wipes the state out: g = 0 and, if exact, α' = 0.

use super::phi::{phi_bar, phi_bar_derivative};
use super::support::{
    add_at, add_scaled, check_finite, check_heads, check_size, check_tensor, dot, gather, map_heads, part, part_mut,
    places, zeros,
};
use crate::efla::{EflaConfig, EflaShape, Form, Integrator};
use crate::error::{Error, Result};
use crate::tensor::check_cumulative;
use std::ops::Range;

/// Input tensors, dense and row-major.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a> {
    /// `[B, H, T, D_k]`.
    pub q: &'a [f64],
    /// `[B, H, T, D_k]`.
    pub k: &'a [f64],
    /// `[B, H_v, T, D_v]`.
    pub v: &'a [f64],
    /// `[B, H_v, T]`.
    pub beta: &'a [f64],
    /// `[B, H_v, T]`, finite or −∞; present exactly when the operator is gated.
    pub log_decay: Option<&'a [f64]>,
    /// `[B, H_v, D_k, D_v]`; zeros if absent.
    pub initial_state: Option<&'a [f64]>,
}

/// What EFLA computes.
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// `[B, H_v, T, D_v]`.
    pub out: Vec<f64>,
    /// `[B, H_v, D_k, D_v]`, the state after the last token.
    pub final_state: Vec<f64>,
}

/// Gradients of Σ d_out·out + Σ d_final_state·final_state, each in the shape of its input.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients {
    /// `[B, H, T, D_k]`.
    pub d_q: Vec<f64>,
    /// `[B, H, T, D_k]`.
    pub d_k: Vec<f64>,
    /// `[B, H_v, T, D_v]`.
    pub d_v: Vec<f64>,
    /// `[B, H_v, T]`.
    pub d_beta: Vec<f64>,
    /// `[B, H_v, T]`; empty if the operator is not gated.
    pub d_log_decay: Vec<f64>,
    /// `[B, H_v, D_k, D_v]`, also when no initial state was given.
    pub d_initial_state: Vec<f64>,
}

/// How strongly one token forgets and writes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    /// α: S_t = g (S − α k kᵀS) + α' k vᵀ.
    pub alpha: f64,
    /// α', equal to α without decay.
    pub write: f64,
    /// γ = α|k|²: the part of the state along k that is forgotten; in [0, 1] for [`Integrator::Exact`] and β ≥ 0.
    pub gamma: f64,
    /// c = α'|k|: S_t = g (I − γ k̂k̂ᵀ) S + c k̂ vᵀ.
    pub c: f64,
    /// g = e^{log_decay}: the part of the whole state that is kept.
    pub decay: f64,
}

/// The gate of a token with rate `beta`, a key of length `key_norm` and a log decay (0 for none), with x = β|k|²;
/// γ = c = 0 for a key of length 0.
pub fn gate(integrator: Integrator, beta: f64, key_norm: f64, log_decay: f64) -> Gate {
    let x = beta * key_norm * key_norm;
    let gamma = match integrator {
        Integrator::Exact => -(-x).exp_m1(),
        _ => x * shrink(integrator, x),
    };
    let alpha = beta * shrink(integrator, x);
    let write = beta * shrink(integrator, x - log_decay);
    Gate { alpha, write, gamma, c: write * key_norm, decay: log_decay.exp() }
}

/// φ̄, or what stands for it: how much less than β a token writes at `x`.
fn shrink(integrator: Integrator, x: f64) -> f64 {
    match integrator {
        Integrator::Exact => phi_bar(x),
        Integrator::Euler => 1.0,
        Integrator::RungeKutta2 => 1.0 - x / 2.0,
        Integrator::RungeKutta4 => 1.0 - x / 2.0 + x * x / 6.0 - x * x * x / 24.0,
    }
}

/// Derivatives of β·shrink(βλ + κ).
struct Slopes {
    by_beta: f64,
    by_lambda: f64,
    by_kappa: f64,
}

impl Slopes {
    /// At rate `beta`, λ = |k|² and κ = −`log_decay`.
    fn new(integrator: Integrator, beta: f64, lambda: f64, log_decay: f64) -> Slopes {
        let x = beta * lambda - log_decay;
        let slope = match integrator {
            Integrator::Exact => phi_bar_derivative(x),
            Integrator::Euler => 0.0,
            Integrator::RungeKutta2 => -0.5,
            Integrator::RungeKutta4 => -0.5 + x / 3.0 - x * x / 8.0,
        };
        let by_beta = match integrator {
            // φ̄(x) + x φ̄'(x) = e^{−x}. A slope of 0 is that of κ = ∞.
            Integrator::Exact if slope == 0.0 => 0.0,
            Integrator::Exact => (-x).exp() + log_decay * slope,
            Integrator::Euler => 1.0,
            _ => shrink(integrator, x) + beta * lambda * slope,
        };
        Slopes { by_beta, by_lambda: beta * beta * slope, by_kappa: beta * slope }
    }
}

/// out of every token and the state after the last one, in the form that `config.form` says; chunks have
/// `config.chunk` tokens, 64 by default.
///
/// Errors: anything about sizes that is not as [`Inputs`] says, non-finite values, keys whose |k|² is beyond float64.
pub fn forward(config: &EflaConfig, shape: &EflaShape, inputs: &Inputs) -> Result<Output> {
    check(config, shape, inputs)?;
    let EflaConfig { key_dim, value_dim, .. } = *config;
    let mut out = zeros("out", &[shape.batch, shape.value_heads, shape.tokens, value_dim])?;
    let mut final_state = zeros("final_state", &[shape.batch, shape.value_heads, key_dim, value_dim])?;
    let heads = map_heads(shape.batch * shape.value_heads, |unit| {
        let head = Head::new(config, shape, inputs, unit);
        match config.form {
            Form::Recurrent => head.forward_recurrent(),
            Form::Chunked => head.forward_chunked(config.chunk.unwrap_or(64)),
        }
    });
    for (unit, head) in heads.into_iter().enumerate() {
        part_mut(&mut out, unit, head.out.len()).copy_from_slice(&head.out);
        part_mut(&mut final_state, unit, head.final_state.len()).copy_from_slice(&head.final_state);
    }
    Ok(Output { out, final_state })
}

/// Gradients of Σ d_out·out + Σ d_final_state·final_state: the adjoint of the token recurrence, whatever `config.form`.
///
/// Backwards over the tokens, with G the gradient of S_t (o_t's share scale·q d_outᵀ included), y = Gᵀk, R = g S_{t−1}
/// what decay leaves of the state before and p = Rᵀk:
///
/// ```text
/// d_q = scale S_t d_out     d_v = α' y     d_α = −y·p     d_α' = y·v
/// d_k = G (α' v − α p) − α R y + 2k (d_α ∂α/∂λ + d_α' ∂α'/∂λ)     d_β = d_α ∂α/∂β + d_α' ∂α'/∂β
/// d_log_decay = ⟨G, (I − α k kᵀ) R⟩ − d_α' ∂α'/∂κ                 gradient of S_{t−1} = g (G − α k yᵀ)
/// ```
///
/// With normalize_q, normalize_k the gradient d of x/|x| becomes (d − x̂(x̂·d))/|x|, and 0 for x = 0.
///
/// Errors: as [`forward`], and the same checks on `d_out` and `d_final_state`.
pub fn backward(
    config: &EflaConfig,
    shape: &EflaShape,
    inputs: &Inputs,
    d_out: &[f64],
    d_final_state: Option<&[f64]>,
) -> Result<Gradients> {
    check(config, shape, inputs)?;
    let EflaConfig { key_dim, value_dim, .. } = *config;
    let EflaShape { batch, value_heads, tokens, .. } = *shape;
    check_tensor("d_out", d_out, &[batch, value_heads, tokens, value_dim])?;
    if let Some(d_final_state) = d_final_state {
        check_tensor("d_final_state", d_final_state, &[batch, value_heads, key_dim, value_dim])?;
    }
    let mut sum = Gradients {
        d_q: vec![0.0; inputs.q.len()],
        d_k: vec![0.0; inputs.k.len()],
        d_v: vec![0.0; inputs.v.len()],
        d_beta: vec![0.0; inputs.beta.len()],
        d_log_decay: vec![0.0; inputs.log_decay.map_or(0, <[f64]>::len)],
        d_initial_state: zeros("d_initial_state", &[batch, value_heads, key_dim, value_dim])?,
    };
    let heads = map_heads(batch * value_heads, |unit| {
        let d_state = match d_final_state {
            Some(d_final_state) => part(d_final_state, unit, key_dim * value_dim).to_vec(),
            None => vec![0.0; key_dim * value_dim],
        };
        Head::new(config, shape, inputs, unit).backward(part(d_out, unit, tokens * value_dim), d_state)
    });
    for (unit, head) in heads.into_iter().enumerate() {
        let key_unit = unit / shape.group();
        add_scaled(part_mut(&mut sum.d_q, key_unit, tokens * key_dim), 1.0, &head.d_q);
        add_scaled(part_mut(&mut sum.d_k, key_unit, tokens * key_dim), 1.0, &head.d_k);
        part_mut(&mut sum.d_v, unit, tokens * value_dim).copy_from_slice(&head.d_v);
        part_mut(&mut sum.d_beta, unit, tokens).copy_from_slice(&head.d_beta);
        part_mut(&mut sum.d_log_decay, unit, head.d_log_decay.len()).copy_from_slice(&head.d_log_decay);
        part_mut(&mut sum.d_initial_state, unit, key_dim * value_dim).copy_from_slice(&head.d_initial_state);
    }
    Ok(sum)
}

/// As [`forward`], of N sequences that stand one after another in a batch of 1: sequence n has tokens
/// `cu_seqlens[n]..cu_seqlens[n + 1]`. States are `[N, H_v, D_k, D_v]`.
///
/// Errors: as [`forward`], and cumulative lengths that don't rise from 0 to all tokens.
pub fn forward_packed(config: &EflaConfig, shape: &EflaShape, cu_seqlens: &[usize], inputs: &Inputs) -> Result<Output> {
    let sequences = sequences(config, shape, cu_seqlens, inputs)?;
    let EflaConfig { key_dim, value_dim, .. } = *config;
    let mut out = zeros("out", &[1, shape.value_heads, shape.tokens, value_dim])?;
    let mut final_state = zeros("final_state", &[sequences.len(), shape.value_heads, key_dim, value_dim])?;
    for sequence in &sequences {
        let output = sequence.with(config, inputs, |inputs| forward(config, &sequence.shape, inputs))?;
        add_at(&mut out, &sequence.values, &output.out);
        part_mut(&mut final_state, sequence.index, output.final_state.len()).copy_from_slice(&output.final_state);
    }
    Ok(Output { out, final_state })
}

/// As [`backward`], of N sequences as [`forward_packed`] has them.
///
/// Errors: as [`backward`], and cumulative lengths that don't rise from 0 to all tokens.
pub fn backward_packed(
    config: &EflaConfig,
    shape: &EflaShape,
    cu_seqlens: &[usize],
    inputs: &Inputs,
    d_out: &[f64],
    d_final_state: Option<&[f64]>,
) -> Result<Gradients> {
    let sequences = sequences(config, shape, cu_seqlens, inputs)?;
    let EflaConfig { key_dim, value_dim, .. } = *config;
    check_tensor("d_out", d_out, &[1, shape.value_heads, shape.tokens, value_dim])?;
    if let Some(d_final_state) = d_final_state {
        check_tensor("d_final_state", d_final_state, &[sequences.len(), shape.value_heads, key_dim, value_dim])?;
    }
    let mut sum = Gradients {
        d_q: vec![0.0; inputs.q.len()],
        d_k: vec![0.0; inputs.k.len()],
        d_v: vec![0.0; inputs.v.len()],
        d_beta: vec![0.0; inputs.beta.len()],
        d_log_decay: vec![0.0; inputs.log_decay.map_or(0, <[f64]>::len)],
        d_initial_state: zeros("d_initial_state", &[sequences.len(), shape.value_heads, key_dim, value_dim])?,
    };
    for sequence in &sequences {
        let d_out = gather(d_out, &sequence.values);
        let d_final_state = d_final_state.map(|states| sequence.state(config, states));
        let gradients =
            sequence.with(config, inputs, |inputs| backward(config, &sequence.shape, inputs, &d_out, d_final_state))?;
        add_at(&mut sum.d_q, &sequence.keys, &gradients.d_q);
        add_at(&mut sum.d_k, &sequence.keys, &gradients.d_k);
        add_at(&mut sum.d_v, &sequence.values, &gradients.d_v);
        add_at(&mut sum.d_beta, &sequence.steps, &gradients.d_beta);
        add_at(&mut sum.d_log_decay, &sequence.steps, &gradients.d_log_decay);
        part_mut(&mut sum.d_initial_state, sequence.index, gradients.d_initial_state.len())
            .copy_from_slice(&gradients.d_initial_state);
    }
    Ok(sum)
}

/// One sequence of a packed batch: where its elements stand in the tensors of the call.
struct Sequence {
    index: usize,
    /// A batch of one.
    shape: EflaShape,
    /// In q and k.
    keys: Vec<usize>,
    /// In v and out.
    values: Vec<usize>,
    /// In beta and log_decay.
    steps: Vec<usize>,
}

impl Sequence {
    /// The sequence's own part of `[N, H_v, D_k, D_v]`.
    fn state<'a>(&self, config: &EflaConfig, states: &'a [f64]) -> &'a [f64] {
        part(states, self.index, self.shape.value_heads * config.key_dim * config.value_dim)
    }

    /// Calls `work` with the sequence's own inputs.
    fn with<T>(&self, config: &EflaConfig, inputs: &Inputs, work: impl FnOnce(&Inputs) -> Result<T>) -> Result<T> {
        let (q, k, v) = (gather(inputs.q, &self.keys), gather(inputs.k, &self.keys), gather(inputs.v, &self.values));
        let beta = gather(inputs.beta, &self.steps);
        let log_decay = inputs.log_decay.map(|log_decay| gather(log_decay, &self.steps));
        let initial_state = inputs.initial_state.map(|states| self.state(config, states));
        work(&Inputs { q: &q, k: &k, v: &v, beta: &beta, log_decay: log_decay.as_deref(), initial_state })
    }
}

/// The sequences of a packed call whose tensors have the sizes they should; their values are not looked at.
fn sequences(config: &EflaConfig, shape: &EflaShape, cu_seqlens: &[usize], inputs: &Inputs) -> Result<Vec<Sequence>> {
    let EflaShape { batch, heads, value_heads, tokens } = *shape;
    if batch != 1 {
        return Err(Error::argument("batch", batch, "1 with packed sequences"));
    }
    check_cumulative("cu_seqlens", cu_seqlens, tokens)?;
    check_sizes(config, shape, cu_seqlens.len() - 1, inputs)?;
    let sequence = |(index, ends): (usize, &[usize])| {
        let own = ends[0]..ends[1];
        Sequence {
            index,
            shape: EflaShape { tokens: own.len(), ..*shape },
            keys: places([0, heads, tokens, config.key_dim], &own),
            values: places([0, value_heads, tokens, config.value_dim], &own),
            steps: places([0, value_heads, tokens, 1], &own),
        }
    };
    Ok(cu_seqlens.windows(2).enumerate().map(sequence).collect())
}

fn check(config: &EflaConfig, shape: &EflaShape, inputs: &Inputs) -> Result<()> {
    check_sizes(config, shape, shape.batch, inputs)?;
    check_finite("q", inputs.q)?;
    check_finite("k", inputs.k)?;
    check_finite("v", inputs.v)?;
    check_finite("beta", inputs.beta)?;
    // −∞ is allowed.
    let finite = |x: &f64| if *x == f64::NEG_INFINITY { 0.0 } else { *x };
    check_finite("log_decay", &inputs.log_decay.unwrap_or_default().iter().map(finite).collect::<Vec<_>>())?;
    check_finite("initial_state", inputs.initial_state.unwrap_or_default())?;
    if !config.normalize_k && inputs.k.chunks_exact(config.key_dim).any(|key| !dot(key, key).is_finite()) {
        return Err(Error::argument("k", "a key whose |k|² overflows", "|k|² within float64"));
    }
    Ok(())
}

/// `sequences` of the call each have a state.
fn check_sizes(config: &EflaConfig, shape: &EflaShape, sequences: usize, inputs: &Inputs) -> Result<()> {
    config.validate()?;
    shape.validate()?;
    let EflaConfig { key_dim, value_dim, .. } = *config;
    let EflaShape { batch, heads, value_heads, tokens } = *shape;
    check_heads(batch.max(sequences), heads.max(value_heads))?;
    check_size("q", inputs.q, &[batch, heads, tokens, key_dim])?;
    check_size("k", inputs.k, &[batch, heads, tokens, key_dim])?;
    check_size("v", inputs.v, &[batch, value_heads, tokens, value_dim])?;
    check_size("beta", inputs.beta, &[batch, value_heads, tokens])?;
    config.check_gated(inputs.log_decay.is_some())?;
    if let Some(log_decay) = inputs.log_decay {
        check_size("log_decay", log_decay, &[batch, value_heads, tokens])?;
    }
    if let Some(initial_state) = inputs.initial_state {
        check_size("initial_state", initial_state, &[sequences, value_heads, key_dim, value_dim])?;
    }
    Ok(())
}

/// x/|x| and |x|; zero stays zero. Scaled by the largest component first, so nothing under- or overflows.
fn unit(x: &[f64]) -> (Vec<f64>, f64) {
    let largest = x.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
    if largest == 0.0 {
        return (x.to_vec(), 0.0);
    }
    let scaled: Vec<f64> = x.iter().map(|x| x / largest).collect();
    let norm = dot(&scaled, &scaled).sqrt();
    (scaled.iter().map(|x| x / norm).collect(), largest * norm)
}

/// Gradient with respect to x from the gradient `d` with respect to x/|x|.
fn d_unit(x: &[f64], d: &[f64]) -> Vec<f64> {
    let (direction, norm) = unit(x);
    if norm == 0.0 {
        return vec![0.0; x.len()];
    }
    let along = dot(&direction, d);
    direction.iter().zip(d).map(|(x, d)| (d - x * along) / norm).collect()
}

/// Mᵀx for a matrix of rows of `x.len()` × `columns`.
fn transpose_times(matrix: &[f64], x: &[f64], columns: usize) -> Vec<f64> {
    let mut product = vec![0.0; columns];
    for (x, row) in x.iter().zip(matrix.chunks_exact(columns)) {
        add_scaled(&mut product, *x, row);
    }
    product
}

/// M y.
fn times(matrix: &[f64], y: &[f64]) -> Vec<f64> {
    matrix.chunks_exact(y.len()).map(|row| dot(row, y)).collect()
}

/// M += factor · x yᵀ.
fn add_outer(matrix: &mut [f64], factor: f64, x: &[f64], y: &[f64]) {
    for (x, row) in x.iter().zip(matrix.chunks_exact_mut(y.len())) {
        add_scaled(row, factor * x, y);
    }
}

/// One value head with the queries and keys it reads, normalised where that was asked for.
struct Head<'a> {
    config: &'a EflaConfig,
    tokens: usize,
    scale: f64,
    /// `[T, D_k]`, as given.
    given: (&'a [f64], &'a [f64]),
    /// `[T, D_k]`.
    q: Vec<f64>,
    /// `[T, D_k]`.
    k: Vec<f64>,
    /// `[T, D_v]`.
    v: &'a [f64],
    /// `[T]`.
    beta: &'a [f64],
    /// `[T]`, if gated.
    log_decay: Option<&'a [f64]>,
    /// `[D_k, D_v]`.
    initial_state: Vec<f64>,
}

impl<'a> Head<'a> {
    /// Value head `index % H_v` of batch `index / H_v`.
    fn new(config: &'a EflaConfig, shape: &EflaShape, inputs: &Inputs<'a>, index: usize) -> Self {
        let EflaConfig { key_dim, value_dim, .. } = *config;
        let tokens = shape.tokens;
        // H_v = group·H, so this is batch·H + head / group.
        let key_index = index / shape.group();
        let q = part(inputs.q, key_index, tokens * key_dim);
        let k = part(inputs.k, key_index, tokens * key_dim);
        let prepare = |rows: &[f64], normalize: bool| match normalize {
            true => rows.chunks_exact(key_dim).flat_map(|row| unit(row).0).collect(),
            false => rows.to_vec(),
        };
        Head {
            config,
            tokens,
            scale: config.scale(),
            given: (q, k),
            q: prepare(q, config.normalize_q),
            k: prepare(k, config.normalize_k),
            v: part(inputs.v, index, tokens * value_dim),
            beta: part(inputs.beta, index, tokens),
            log_decay: inputs.log_decay.map(|log_decay| part(log_decay, index, tokens)),
            initial_state: match inputs.initial_state {
                Some(state) => part(state, index, key_dim * value_dim).to_vec(),
                None => vec![0.0; key_dim * value_dim],
            },
        }
    }

    fn query(&self, token: usize) -> &[f64] {
        part(&self.q, token, self.config.key_dim)
    }

    fn key(&self, token: usize) -> &[f64] {
        part(&self.k, token, self.config.key_dim)
    }

    fn value(&self, token: usize) -> &[f64] {
        part(self.v, token, self.config.value_dim)
    }

    fn log_decay(&self, token: usize) -> f64 {
        self.log_decay.map_or(0.0, |log_decay| log_decay[token])
    }

    fn gate(&self, token: usize) -> Gate {
        gate(self.config.integrator, self.beta[token], unit(self.key(token)).1, self.log_decay(token))
    }

    /// S ← R + k (α' v − α Rᵀk)ᵀ with R = g S.
    fn step(&self, state: &mut [f64], token: usize) {
        let gate = self.gate(token);
        state.iter_mut().for_each(|x| *x *= gate.decay);
        let change = self.change(&gate, state, token);
        add_outer(state, 1.0, self.key(token), &change);
    }

    /// α' v − α Rᵀk.
    fn change(&self, gate: &Gate, kept: &[f64], token: usize) -> Vec<f64> {
        let found = transpose_times(kept, self.key(token), self.config.value_dim);
        self.value(token).iter().zip(found).map(|(v, found)| gate.write * v - gate.alpha * found).collect()
    }

    fn forward_recurrent(&self) -> Output {
        let mut state = self.initial_state.clone();
        let mut out = Vec::new();
        for token in 0..self.tokens {
            self.step(&mut state, token);
            let read = transpose_times(&state, self.query(token), self.config.value_dim);
            out.extend(read.iter().map(|x| self.scale * x));
        }
        Output { out, final_state: state }
    }

    fn forward_chunked(&self, chunk: usize) -> Output {
        let mut state = self.initial_state.clone();
        let mut out = Vec::new();
        for start in (0..self.tokens).step_by(chunk) {
            out.extend(self.chunk(&mut state, start..self.tokens.min(start + chunk)));
        }
        Output { out, final_state: state }
    }

    /// One chunk at once; returns its out, `[C, D_v]`. Rows are tokens, k̂ = k/|k|, ∘ the product by elements; D_{ij}, the
    /// product of the decays behind token j up to token i, is what i sees of what j wrote, and G_i the product of
    /// all up to token i, what it sees of S:
    ///
    /// ```text
    /// A = strict_lower(D ∘ diag(γ) K̂K̂ᵀ)     (I + A) W = diag(γ G) K̂     (I + A) U = diag(c) V     V_new = U − W S
    /// O = scale (diag(G) Q S + lower_incl(D ∘ QK̂ᵀ) V_new)                S ← G_C S + (diag(D_C) K̂)ᵀ V_new
    /// ```
    ///
    /// Without decay D = G = 1.
    fn chunk(&self, state: &mut [f64], tokens: Range<usize>) -> Vec<f64> {
        let value_dim = self.config.value_dim;
        let mut keys: Vec<Vec<f64>> = Vec::new();
        let [mut w, mut u, mut d]: [Vec<Vec<f64>>; 3] = Default::default();
        let mut g = Vec::new();
        for token in tokens.clone() {
            let (key, norm) = unit(self.key(token));
            let gate = gate(self.config.integrator, self.beta[token], norm, self.log_decay(token));
            // Row i of D from row i − 1, the diagonal included.
            let mut d_row: Vec<f64> = d.last().map_or(vec![], |last| last.iter().map(|d| d * gate.decay).collect());
            let before: f64 = g.last().copied().unwrap_or(1.0);
            g.push(before * gate.decay);
            let mut w_row: Vec<f64> = key.iter().map(|x| gate.gamma * before * gate.decay * x).collect();
            let mut u_row: Vec<f64> = self.value(token).iter().map(|x| gate.c * x).collect();
            for (j, earlier) in keys.iter().enumerate() {
                let a = d_row[j] * gate.gamma * dot(&key, earlier);
                add_scaled(&mut w_row, -a, &w[j]);
                add_scaled(&mut u_row, -a, &u[j]);
            }
            d_row.push(1.0);
            d.push(d_row);
            keys.push(key);
            w.push(w_row);
            u.push(u_row);
        }
        let mut v_new = u;
        for (v_new, w) in v_new.iter_mut().zip(&w) {
            add_scaled(v_new, -1.0, &transpose_times(state, w, value_dim));
        }
        let mut out = Vec::new();
        for (i, token) in tokens.enumerate() {
            let query = self.query(token);
            let mut read: Vec<f64> = transpose_times(state, query, value_dim).iter().map(|x| g[i] * x).collect();
            for j in 0..=i {
                add_scaled(&mut read, d[i][j] * dot(query, &keys[j]), &v_new[j]);
            }
            out.extend(read.iter().map(|x| self.scale * x));
        }
        if let (Some(g), Some(d)) = (g.last(), d.last()) {
            state.iter_mut().for_each(|x| *x *= g);
            for ((key, v_new), d) in keys.iter().zip(&v_new).zip(d) {
                add_outer(state, *d, key, v_new);
            }
        }
        out
    }

    /// The adjoint of [`Head::step`] over all tokens; `d_state` is the gradient of the final state.
    fn backward(&self, d_out: &[f64], mut d_state: Vec<f64>) -> Gradients {
        /// Tokens between two kept states; those between are recomputed, so that long sequences fit.
        const SPAN: usize = 64;
        let EflaConfig { key_dim, value_dim, .. } = *self.config;
        let mut kept = Vec::new();
        let mut state = self.initial_state.clone();
        for token in 0..self.tokens {
            if token % SPAN == 0 {
                kept.push(state.clone());
            }
            self.step(&mut state, token);
        }
        let mut gradients = Gradients {
            d_q: vec![0.0; self.q.len()],
            d_k: vec![0.0; self.k.len()],
            d_v: vec![0.0; self.v.len()],
            d_beta: vec![0.0; self.beta.len()],
            d_log_decay: vec![0.0; self.log_decay.map_or(0, <[f64]>::len)],
            d_initial_state: Vec::new(),
        };
        for (index, mut state) in kept.into_iter().enumerate().rev() {
            let span = index * SPAN..self.tokens.min((index + 1) * SPAN);
            let mut befores = Vec::new();
            for token in span.clone() {
                befores.push(state.clone());
                self.step(&mut state, token);
            }
            let mut after = state;
            for (token, before) in span.zip(befores).rev() {
                let d_out = part(d_out, token, value_dim);
                let (query, key, value) = (self.query(token), self.key(token), self.value(token));
                let (beta, log_decay) = (self.beta[token], self.log_decay(token));
                let gate = self.gate(token);
                add_outer(&mut d_state, self.scale, query, d_out);
                let d_query: Vec<f64> = times(&after, d_out).iter().map(|x| self.scale * x).collect();

                let kept: Vec<f64> = before.iter().map(|x| gate.decay * x).collect();
                let (y, p) = (transpose_times(&d_state, key, value_dim), transpose_times(&kept, key, value_dim));
                let (d_alpha, d_write) = (-dot(&y, &p), dot(&y, value));
                let lambda = dot(key, key);
                let alpha_slopes = Slopes::new(self.config.integrator, beta, lambda, 0.0);
                let write_slopes = Slopes::new(self.config.integrator, beta, lambda, log_decay);
                let d_lambda = d_alpha * alpha_slopes.by_lambda + d_write * write_slopes.by_lambda;
                let mut d_key = times(&d_state, &self.change(&gate, &kept, token));
                add_scaled(&mut d_key, -gate.alpha, &times(&kept, &y));
                add_scaled(&mut d_key, 2.0 * d_lambda, key);

                let d_query = match self.config.normalize_q {
                    true => d_unit(part(self.given.0, token, key_dim), &d_query),
                    false => d_query,
                };
                let d_key = match self.config.normalize_k {
                    true => d_unit(part(self.given.1, token, key_dim), &d_key),
                    false => d_key,
                };
                part_mut(&mut gradients.d_q, token, key_dim).copy_from_slice(&d_query);
                part_mut(&mut gradients.d_k, token, key_dim).copy_from_slice(&d_key);
                add_scaled(part_mut(&mut gradients.d_v, token, value_dim), gate.write, &y);
                gradients.d_beta[token] = d_alpha * alpha_slopes.by_beta + d_write * write_slopes.by_beta;
                if self.log_decay.is_some() {
                    let passed = dot(&d_state, &kept) - gate.alpha * dot(&y, &p);
                    gradients.d_log_decay[token] = passed - d_write * write_slopes.by_kappa;
                }
                add_outer(&mut d_state, -gate.alpha, key, &y);
                d_state.iter_mut().for_each(|x| *x *= gate.decay);
                after = before;
            }
        }
        gradients.d_initial_state = d_state;
        gradients
    }
}
