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

use super::phi::{phi_bar, phi_bar_derivative};
use super::support::{
    add_at, add_scaled, check_finite, check_size, check_tensor, dot, gather, map_heads, part, part_mut, places, zeros,
};
use crate::attention::check_cumulative;
use crate::efla::{EflaConfig, EflaShape, Form, Integrator};
use crate::error::{Error, Result};
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
    /// `[B, H_v, D_k, D_v]`, also when no initial state was given.
    pub d_initial_state: Vec<f64>,
}

/// How strongly one token writes, in three units.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gate {
    /// α: S_t = S − α k (kᵀS − vᵀ).
    pub alpha: f64,
    /// γ = α|k|²: the part of the state along k that is forgotten; in [0, 1] for [`Integrator::Exact`] and β ≥ 0.
    pub gamma: f64,
    /// c = α|k|: S_t = (I − γ k̂k̂ᵀ) S + c k̂ vᵀ.
    pub c: f64,
}

/// The gate of a token with rate `beta` and a key of length `key_norm`, with x = β|k|²; 0 for a key of length 0, save
/// α.
pub fn gate(integrator: Integrator, beta: f64, key_norm: f64) -> Gate {
    let x = beta * key_norm * key_norm;
    let shrink = match integrator {
        Integrator::Exact => phi_bar(x),
        Integrator::Euler => 1.0,
        Integrator::RungeKutta2 => 1.0 - x / 2.0,
        Integrator::RungeKutta4 => 1.0 - x / 2.0 + x * x / 6.0 - x * x * x / 24.0,
    };
    let gamma = match integrator {
        Integrator::Exact => -(-x).exp_m1(),
        _ => x * shrink,
    };
    Gate { alpha: beta * shrink, gamma, c: beta * key_norm * shrink }
}

/// ∂α/∂β and ∂α/∂λ at rate `beta` and λ = |k|².
fn alpha_derivatives(integrator: Integrator, beta: f64, lambda: f64) -> (f64, f64) {
    let x = beta * lambda;
    match integrator {
        Integrator::Exact => ((-x).exp(), beta * beta * phi_bar_derivative(x)),
        Integrator::Euler => (1.0, 0.0),
        Integrator::RungeKutta2 => (1.0 - x, -beta * beta / 2.0),
        Integrator::RungeKutta4 => {
            (1.0 - x + x * x / 2.0 - x * x * x / 6.0, beta * beta * (-0.5 + x / 3.0 - x * x / 8.0))
        }
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
/// Backwards over the tokens, with G the gradient of S_t (o_t's share scale·q d_outᵀ included) and e = v − S_{t−1}ᵀk:
///
/// ```text
/// d_q = scale S_t d_out     d_v = α Gᵀk     d_α = (Gᵀk)·e     d_k = α (G e − S_{t−1} Gᵀk) + 2k d_α ∂α/∂λ
/// d_β = d_α ∂α/∂β           gradient of S_{t−1} = G − α k (Gᵀk)ᵀ
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
    /// In beta.
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
        let initial_state = inputs.initial_state.map(|states| self.state(config, states));
        work(&Inputs { q: &q, k: &k, v: &v, beta: &beta, initial_state })
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
    check_size("q", inputs.q, &[batch, heads, tokens, key_dim])?;
    check_size("k", inputs.k, &[batch, heads, tokens, key_dim])?;
    check_size("v", inputs.v, &[batch, value_heads, tokens, value_dim])?;
    check_size("beta", inputs.beta, &[batch, value_heads, tokens])?;
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

    /// v − Sᵀk: what the token finds missing in the state.
    fn missing(&self, state: &[f64], token: usize) -> Vec<f64> {
        let stored = transpose_times(state, self.key(token), self.config.value_dim);
        self.value(token).iter().zip(stored).map(|(v, stored)| v - stored).collect()
    }

    fn alpha(&self, token: usize) -> f64 {
        gate(self.config.integrator, self.beta[token], unit(self.key(token)).1).alpha
    }

    /// S ← S + α k (v − Sᵀk)ᵀ.
    fn step(&self, state: &mut [f64], token: usize) {
        let missing = self.missing(state, token);
        add_outer(state, self.alpha(token), self.key(token), &missing);
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

    /// One chunk at once; returns its out, `[C, D_v]`. Per row i of the chunk, with k̂ = k/|k|:
    ///
    /// ```text
    /// A = strict_lower(diag(γ) K̂K̂ᵀ)     (I + A) W = diag(γ) K̂     (I + A) U = diag(c) V     V_new = U − W S
    /// O = scale (Q S + lower_incl(Q K̂ᵀ) V_new)                      S ← S + K̂ᵀ V_new
    /// ```
    fn chunk(&self, state: &mut [f64], tokens: Range<usize>) -> Vec<f64> {
        let value_dim = self.config.value_dim;
        let mut keys: Vec<Vec<f64>> = Vec::new();
        let [mut w, mut u]: [Vec<Vec<f64>>; 2] = Default::default();
        for token in tokens.clone() {
            let (key, norm) = unit(self.key(token));
            let gate = gate(self.config.integrator, self.beta[token], norm);
            let mut w_row: Vec<f64> = key.iter().map(|x| gate.gamma * x).collect();
            let mut u_row: Vec<f64> = self.value(token).iter().map(|x| gate.c * x).collect();
            for (j, earlier) in keys.iter().enumerate() {
                let a = gate.gamma * dot(&key, earlier);
                add_scaled(&mut w_row, -a, &w[j]);
                add_scaled(&mut u_row, -a, &u[j]);
            }
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
            let mut read = transpose_times(state, query, value_dim);
            for j in 0..=i {
                add_scaled(&mut read, dot(query, &keys[j]), &v_new[j]);
            }
            out.extend(read.iter().map(|x| self.scale * x));
        }
        for (key, v_new) in keys.iter().zip(&v_new) {
            add_outer(state, 1.0, key, v_new);
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
                let (query, key, beta) = (self.query(token), self.key(token), self.beta[token]);
                let alpha = self.alpha(token);
                add_outer(&mut d_state, self.scale, query, d_out);

                let d_query: Vec<f64> = times(&after, d_out).iter().map(|x| self.scale * x).collect();
                let missing = self.missing(&before, token);
                let d_write = transpose_times(&d_state, key, value_dim);
                let d_alpha = dot(&d_write, &missing);
                let (by_beta, by_lambda) = alpha_derivatives(self.config.integrator, beta, dot(key, key));
                let mut d_key = vec![0.0; key_dim];
                add_scaled(&mut d_key, alpha, &times(&d_state, &missing));
                add_scaled(&mut d_key, -alpha, &times(&before, &d_write));
                add_scaled(&mut d_key, 2.0 * d_alpha * by_lambda, key);

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
                add_scaled(part_mut(&mut gradients.d_v, token, value_dim), alpha, &d_write);
                gradients.d_beta[token] = by_beta * d_alpha;
                add_outer(&mut d_state, -alpha, key, &d_write);
                after = before;
            }
        }
        gradients.d_initial_state = d_state;
        gradients
    }
}
