//! EFLA against an ODE solver and finite differences; its two forms against each other.

use super::{assert_close, assert_near, differences, one_after_another, random};
use crate::reference::efla::{Gradients, Inputs, Output, backward, backward_packed, forward, forward_packed, gate};
use crate::{EflaConfig, EflaShape, Error, Form, Integrator};

const INTEGRATORS: [Integrator; 4] =
    [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4];

/// A call with its tensors.
#[derive(Clone)]
struct Call {
    config: EflaConfig,
    shape: EflaShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    beta: Vec<f64>,
    log_decay: Option<Vec<f64>>,
    initial_state: Option<Vec<f64>>,
}

impl Call {
    fn random(seed: u64, config: EflaConfig, shape: EflaShape) -> Call {
        let mut rng = fastrand::Rng::with_seed(seed);
        let EflaConfig { key_dim, value_dim, .. } = config;
        let EflaShape { batch, heads, value_heads, tokens } = shape;
        Call {
            config,
            shape,
            q: random(&mut rng, batch * heads * tokens * key_dim, 1.0),
            k: random(&mut rng, batch * heads * tokens * key_dim, 1.0),
            v: random(&mut rng, batch * value_heads * tokens * value_dim, 1.0),
            beta: (0..batch * value_heads * tokens).map(|_| rng.f64()).collect(),
            initial_state: Some(random(&mut rng, batch * value_heads * key_dim * value_dim, 1.0)),
            log_decay: config.gated.then(|| (0..batch * value_heads * tokens).map(|_| -2.0 * rng.f64()).collect()),
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        let Call { q, k, v, beta, .. } = self;
        let (log_decay, initial_state) = (self.log_decay.as_deref(), self.initial_state.as_deref());
        Inputs { q, k, v, beta, log_decay, initial_state }
    }

    fn forward(&self) -> Output {
        forward(&self.config, &self.shape, &self.inputs()).unwrap()
    }

    fn forward_as(&self, form: Form, chunk: Option<usize>) -> Output {
        Call { config: EflaConfig { form, chunk, ..self.config }, ..self.clone() }.forward()
    }

    fn backward(&self, d_out: &[f64], d_final_state: Option<&[f64]>) -> Gradients {
        backward(&self.config, &self.shape, &self.inputs(), d_out, d_final_state).unwrap()
    }

    /// The same call on tokens `from..to` of every head.
    fn tokens(&self, from: usize, to: usize) -> Call {
        let EflaConfig { key_dim, value_dim, .. } = self.config;
        let cut = |x: &[f64], dim: usize| pick(x, self.shape.tokens, dim, from, to);
        Call {
            shape: EflaShape { tokens: to - from, ..self.shape },
            q: cut(&self.q, key_dim),
            k: cut(&self.k, key_dim),
            v: cut(&self.v, value_dim),
            beta: cut(&self.beta, 1),
            log_decay: self.log_decay.as_ref().map(|log_decay| cut(log_decay, 1)),
            ..self.clone()
        }
    }
}

/// Tokens `from..to` of a tensor `[heads, tokens, dim]`.
fn pick(x: &[f64], tokens: usize, dim: usize, from: usize, to: usize) -> Vec<f64> {
    x.chunks(tokens * dim).flat_map(|x| &x[from * dim..to * dim]).copied().collect()
}

fn config(integrator: Integrator) -> EflaConfig {
    EflaConfig { key_dim: 3, value_dim: 2, integrator, form: Form::Recurrent, ..Default::default() }
}

const SMALL: EflaShape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 5 };

#[test]
fn exact_solves_the_equation() {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 6 };
    let mut call = Call::random(2, config(Integrator::Exact), shape);
    call.k.iter_mut().for_each(|k| *k *= 1.5);
    call.k[6..9].fill(0.0);
    let want = call.forward();
    let mut state = call.initial_state.clone().unwrap();
    for t in 0..6 {
        let (k, v, beta) = (&call.k[3 * t..][..3], &call.v[2 * t..][..2], call.beta[t]);
        // dS/dτ = −β k kᵀ S + β k vᵀ, element by element.
        let slope = |state: &[f64]| -> Vec<f64> {
            let pulled = |c: usize| v[c] - (0..3).map(|j| k[j] * state[2 * j + c]).sum::<f64>();
            (0..6).map(|e| beta * k[e / 2] * pulled(e % 2)).collect()
        };
        let moved = |state: &[f64], slope: &[f64], h: f64| -> Vec<f64> {
            state.iter().zip(slope).map(|(state, slope)| state + h * slope).collect()
        };
        let steps = 2000;
        let h = 1.0 / f64::from(steps);
        for _ in 0..steps {
            let s1 = slope(&state);
            let s2 = slope(&moved(&state, &s1, h / 2.0));
            let s3 = slope(&moved(&state, &s2, h / 2.0));
            let s4 = slope(&moved(&state, &s3, h));
            for e in 0..6 {
                state[e] += h / 6.0 * (s1[e] + 2.0 * s2[e] + 2.0 * s3[e] + s4[e]);
            }
        }
        let q = &call.q[3 * t..][..3];
        let out: Vec<f64> =
            (0..2).map(|c| (0..3).map(|j| q[j] * state[2 * j + c]).sum::<f64>() / 3f64.sqrt()).collect();
        assert_close("out", &want.out[2 * t..][..2], &out, 1e-12);
    }
    assert_close("final_state", &want.final_state, &state, 1e-12);
}

/// The exponential of an n × n matrix: its Taylor series, after halving it often enough.
fn exponential(matrix: &[f64], n: usize) -> Vec<f64> {
    let product = |a: &[f64], b: &[f64]| -> Vec<f64> {
        (0..n * n).map(|at| (0..n).map(|j| a[at / n * n + j] * b[j * n + at % n]).sum()).collect()
    };
    const HALVINGS: i32 = 10;
    let small: Vec<f64> = matrix.iter().map(|x| x / f64::from(1 << HALVINGS)).collect();
    let mut term: Vec<f64> = (0..n * n).map(|at| if at / n == at % n { 1.0 } else { 0.0 }).collect();
    let mut sum = term.clone();
    for power in 1..12 {
        term = product(&term, &small).iter().map(|x| x / f64::from(power)).collect();
        sum.iter_mut().zip(&term).for_each(|(sum, x)| *sum += x);
    }
    (0..HALVINGS).fold(sum, |sum, _| product(&sum, &sum))
}

/// dS/dτ = −(β k kᵀ + κ) S + β k vᵀ is linear in (S, I): one exponential of the matrix of both solves it.
#[test]
fn a_gated_step_is_a_matrix_exponential() {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 9 };
    let mut call = Call::random(7, EflaConfig { gated: true, ..config(Integrator::Exact) }, shape);
    call.k[6..9].fill(0.0);
    call.log_decay = Some(vec![0.0, -1e-9, -0.3, -1e-3, -1.0, -4.0, -0.0, -12.0, -2.0]);
    call.k[24..].iter_mut().for_each(|k| *k *= 2.0);
    let want = call.forward();
    let mut state = call.initial_state.clone().unwrap();
    for t in 0..9 {
        let (k, v, beta) = (&call.k[3 * t..][..3], &call.v[2 * t..][..2], call.beta[t]);
        let kappa = -call.log_decay.as_ref().unwrap()[t];
        let mut matrix = vec![0.0; 25];
        for (at, x) in matrix[..15].iter_mut().enumerate() {
            let (i, j) = (at / 5, at % 5);
            let other = if j < 3 { -beta * k[j] } else { beta * v[j - 3] };
            *x = other * k[i] - if i == j { kappa } else { 0.0 };
        }
        let step = exponential(&matrix, 5);
        let moved = |i: usize, c: usize| (0..3).map(|j| step[5 * i + j] * state[2 * j + c]).sum::<f64>();
        state = (0..6).map(|e| moved(e / 2, e % 2) + step[5 * (e / 2) + 3 + e % 2]).collect();
        let q = &call.q[3 * t..][..3];
        let out: Vec<f64> =
            (0..2).map(|c| (0..3).map(|j| q[j] * state[2 * j + c]).sum::<f64>() / 3f64.sqrt()).collect();
        assert_close("out", &want.out[2 * t..][..2], &out, 1e-12);
    }
    assert_close("final_state", &want.final_state, &state, 1e-12);
}

/// S ← e^{−κ}(I − β k kᵀ) S + β k vᵀ.
#[test]
fn a_gated_euler_step_is_gated_deltanet() {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 1 };
    let call = Call::random(8, EflaConfig { gated: true, ..config(Integrator::Euler) }, shape);
    let (state, decay) = (call.initial_state.as_ref().unwrap(), call.log_decay.as_ref().unwrap()[0].exp());
    let found = |c: usize| (0..3).map(|j| call.k[j] * state[2 * j + c]).sum::<f64>();
    let step = |d: usize, c: usize| {
        decay * (state[2 * d + c] - call.beta[0] * call.k[d] * found(c)) + call.beta[0] * call.k[d] * call.v[c]
    };
    let want: Vec<f64> = (0..6).map(|e| step(e / 2, e % 2)).collect();
    assert_close("final_state", &call.forward().final_state, &want, 1e-14);
}

/// One step of the named Runge–Kutta scheme over the whole unit of time is what the other integrators are.
#[test]
fn the_other_integrators_are_single_steps() {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 1 };
    for (integrator, stages) in
        [(Integrator::Euler, &[][..]), (Integrator::RungeKutta2, &[0.5]), (Integrator::RungeKutta4, &[0.5, 0.5, 1.0])]
    {
        let call = Call::random(4, config(integrator), shape);
        let state = call.initial_state.clone().unwrap();
        let slope = |state: &[f64]| -> Vec<f64> {
            let pulled = |c: usize| call.v[c] - (0..3).map(|j| call.k[j] * state[2 * j + c]).sum::<f64>();
            (0..6).map(|e| call.beta[0] * call.k[e / 2] * pulled(e % 2)).collect()
        };
        let mut slopes = vec![slope(&state)];
        for h in stages {
            let last = slopes.last().unwrap();
            slopes.push(slope(&state.iter().zip(last).map(|(state, slope)| state + h * slope).collect::<Vec<_>>()));
        }
        let weights: &[f64] = match integrator {
            Integrator::RungeKutta4 => &[1.0 / 6.0, 1.0 / 3.0, 1.0 / 3.0, 1.0 / 6.0],
            Integrator::RungeKutta2 => &[0.0, 1.0],
            _ => &[1.0],
        };
        let want: Vec<f64> =
            (0..6).map(|e| state[e] + weights.iter().zip(&slopes).map(|(w, s)| w * s[e]).sum::<f64>()).collect();
        assert_close("final_state", &call.forward().final_state, &want, 1e-14);
    }
}

#[test]
fn gates() {
    for integrator in INTEGRATORS {
        for (beta, norm) in [(0.3, 1.2), (1.0, 1e-3), (0.0, 1.0), (0.7, 1.6)] {
            let plain = gate(integrator, beta, norm, 0.0);
            assert_close("gamma", &[plain.gamma], &[plain.alpha * norm * norm], 1e-15);
            assert_close("c", &[plain.c], &[plain.alpha * norm], 1e-15);
            assert_eq!((plain.write, plain.decay), (plain.alpha, 1.0));
            let gated = gate(integrator, beta, norm, -0.75);
            assert_eq!((gated.alpha, gated.gamma, gated.decay), (plain.alpha, plain.gamma, (-0.75f64).exp()));
            assert_close("c", &[gated.c], &[gated.write * norm], 1e-15);
        }
        let none = gate(integrator, 0.4, 0.0, 0.0);
        assert_eq!((none.alpha, none.gamma, none.c), (0.4, 0.0, 0.0));
    }
    let exact = gate(Integrator::Exact, 2.0, 1e30, 0.0);
    assert_close("gamma, c", &[exact.gamma, exact.c * 1e30], &[1.0, 1.0], 1e-15);
    let tiny = gate(Integrator::Exact, 2.0, 1e-30, 0.0);
    assert_close("gamma, c", &[tiny.gamma * 1e60, tiny.c * 1e30], &[2.0, 2.0], 1e-15);
    let strong = gate(Integrator::Exact, 2.0, 3.0, -1e3);
    assert_close("c", &[strong.c], &[6.0 / 1018.0], 1e-15);
    let wiped = gate(Integrator::Exact, 2.0, 3.0, f64::NEG_INFINITY);
    assert_eq!((wiped.decay, wiped.c, wiped.write), (0.0, 0.0, 0.0));
}

#[test]
fn chunked_is_recurrent() {
    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 100 };
    let mut seed = 0;
    for (integrator, gated) in INTEGRATORS.into_iter().flat_map(|integrator| [(integrator, false), (integrator, true)])
    {
        for (normalize_q, normalize_k) in [(false, false), (true, false), (false, true), (true, true)] {
            seed += 1;
            let config = EflaConfig { normalize_q, normalize_k, gated, ..config(integrator) };
            let mut call = Call::random(seed, config, shape);
            call.k[30..33].fill(0.0);
            call.q[60..63].fill(0.0);
            let want = call.forward();
            for chunk in [None, Some(16), Some(32), Some(64)] {
                let got = call.forward_as(Form::Chunked, chunk);
                assert_close("out", &got.out, &want.out, 1e-13);
                assert_close("final_state", &got.final_state, &want.final_state, 1e-13);
            }
            call.initial_state = None;
            let (got, want) = (call.forward_as(Form::Chunked, None), call.forward());
            assert_close("out", &got.out, &want.out, 1e-13);
        }
    }
}

/// A log decay of 0 everywhere changes nothing.
#[test]
fn no_decay_is_no_gate() {
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 4, tokens: 70 };
    for integrator in INTEGRATORS {
        for form in [Form::Recurrent, Form::Chunked] {
            let plain = Call::random(11, EflaConfig { form, ..config(integrator) }, shape);
            let mut gated = plain.clone();
            gated.config.gated = true;
            gated.log_decay = Some(vec![0.0; 4 * 70]);
            assert_eq!(gated.forward(), plain.forward());
            let mut rng = fastrand::Rng::with_seed(12);
            let (d_out, d_final) = (random(&mut rng, 4 * 70 * 2, 1.0), random(&mut rng, 24, 1.0));
            let (got, want) = (gated.backward(&d_out, Some(&d_final)), plain.backward(&d_out, Some(&d_final)));
            assert_eq!(got.d_log_decay.len(), 4 * 70);
            let got = Gradients { d_log_decay: vec![], ..got };
            if integrator == Integrator::Exact {
                assert_eq!(got, want);
            }
            assert_close("d_k", &got.d_k, &want.d_k, 1e-14);
            assert_close("d_beta", &got.d_beta, &want.d_beta, 1e-14);
        }
    }
}

/// The two forms agree row by row, and behind a log decay of −∞ the sequence starts anew.
#[test]
fn strong_decay() {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 150 };
    let mut rng = fastrand::Rng::with_seed(13);
    for integrator in [Integrator::Exact, Integrator::Euler] {
        for strengths in [&[0.0, 50.0, 1e-3][..], &[20.0], &[1e3], &[5e-324, 700.0, 1e300, 1.0]] {
            let mut call = Call::random(14, EflaConfig { gated: true, ..config(integrator) }, shape);
            call.log_decay = Some((0..150).map(|_| -strengths[rng.usize(..strengths.len())]).collect());
            let want = call.forward();
            assert!(want.out.iter().all(|x| x.is_finite()));
            for chunk in [16, 64] {
                let got = call.forward_as(Form::Chunked, Some(chunk));
                for (got, want) in got.out.chunks(2).zip(want.out.chunks(2)) {
                    assert_close("out", got, want, 1e-12);
                }
            }
            call.log_decay.as_mut().unwrap()[37] = f64::NEG_INFINITY;
            let mut later = call.tokens(37, 150);
            later.initial_state = None;
            later.log_decay.as_mut().unwrap()[0] = f64::NEG_INFINITY;
            let want = later.forward();
            for (form, chunk) in [(Form::Recurrent, None), (Form::Chunked, Some(16)), (Form::Chunked, Some(64))] {
                let got = call.forward_as(form, chunk);
                assert_close("out", &got.out[2 * 37..], &want.out, 1e-12);
                assert_close("final_state", &got.final_state, &want.final_state, 1e-12);
            }
            if integrator == Integrator::Exact {
                assert_eq!(want.out[..2], [0.0, 0.0]);
            }
            let gradients = call.backward(&[1.0; 300], Some(&[1.0; 6]));
            let d_log_decay = &gradients.d_log_decay;
            assert!(d_log_decay.iter().all(|x| x.is_finite()) && d_log_decay[37] == 0.0);
            assert!(gradients.d_beta.iter().chain(&gradients.d_k).all(|x| x.is_finite()));
        }
    }
}

/// Key norms from 1e-6 to 1e6, many of them all but parallel.
#[test]
fn chunked_is_recurrent_for_unequal_keys() {
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 200 };
    for seed in 0..10 {
        let mut call = Call::random(seed, EflaConfig { key_dim: 8, value_dim: 5, ..config(Integrator::Exact) }, shape);
        let mut rng = fastrand::Rng::with_seed(seed);
        let common = random(&mut rng, 8, 1.0);
        for key in call.k.chunks_mut(8) {
            let (size, apart) = (10f64.powf(12.0 * rng.f64() - 6.0), 10f64.powf(-8.0 * rng.f64()));
            key.iter_mut().zip(&common).for_each(|(k, common)| *k = size * (common + apart * *k));
        }
        let want = call.forward();
        for chunk in [16, 64] {
            let got = call.forward_as(Form::Chunked, Some(chunk));
            assert_close("out", &got.out, &want.out, 1e-11);
            assert_close("final_state", &got.final_state, &want.final_state, 1e-11);
        }
    }
}

#[test]
fn gradients_are_those_of_forward() {
    let mut seed = 100;
    for (integrator, gated) in INTEGRATORS.into_iter().flat_map(|integrator| [(integrator, false), (integrator, true)])
    {
        for (normalize_q, normalize_k) in [(false, false), (true, false), (false, true), (true, true)] {
            for (shape, zero_key) in [
                (SMALL, false),
                (SMALL, true),
                (EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 3 }, false),
                (EflaShape { batch: 1, heads: 1, value_heads: 3, tokens: 1 }, true),
            ] {
                seed += 1;
                let config = EflaConfig { normalize_q, normalize_k, gated, ..config(integrator) };
                let mut call = Call::random(seed, config, shape);
                if zero_key {
                    call.k[..3].fill(0.0);
                }
                let mut rng = fastrand::Rng::with_seed(seed);
                let output = call.forward();
                let d_out = random(&mut rng, output.out.len(), 1.0);
                let d_final = (seed % 3 != 0).then(|| random(&mut rng, output.final_state.len(), 1.0));
                let gradients = call.backward(&d_out, d_final.as_deref());
                // Differences of the chunked form, so that the two forms check each other here as well.
                let loss = |call: &Call| {
                    let output = call.forward_as(if seed % 2 == 0 { Form::Chunked } else { Form::Recurrent }, None);
                    let out: f64 = output.out.iter().zip(&d_out).map(|(x, d)| x * d).sum();
                    out + output.final_state.iter().zip(d_final.iter().flatten()).map(|(x, d)| x * d).sum::<f64>()
                };
                let check = |what: &str, got: &[f64], x: &[f64], set: &dyn Fn(&mut Call, &[f64])| {
                    let mut want = differences(
                        x,
                        |_| false,
                        |x| {
                            let mut call = call.clone();
                            set(&mut call, x);
                            loss(&call)
                        },
                    );
                    if what == "k" && zero_key && normalize_k {
                        want[..3].fill(0.0); // no derivative there; defined as 0
                    }
                    assert_near(&format!("{what}, {:?}, {shape:?}", call.config), got, &want);
                };
                check("q", &gradients.d_q, &call.q, &|call, x| call.q = x.to_vec());
                check("k", &gradients.d_k, &call.k, &|call, x| call.k = x.to_vec());
                check("v", &gradients.d_v, &call.v, &|call, x| call.v = x.to_vec());
                check("beta", &gradients.d_beta, &call.beta, &|call, x| call.beta = x.to_vec());
                let log_decay = call.log_decay.clone().unwrap_or_default();
                check("log_decay", &gradients.d_log_decay, &log_decay, &|call, x| call.log_decay = Some(x.to_vec()));
                let initial_state = call.initial_state.clone().unwrap();
                check("initial_state", &gradients.d_initial_state, &initial_state, &|call, x| {
                    call.initial_state = Some(x.to_vec())
                });
            }
        }
    }
}

/// Scaling keys by s and values, states to match leaves everything the same, up to the units: λ → 0 and λ → ∞ included.
#[test]
fn gradients_at_extreme_key_norms() {
    for integrator in INTEGRATORS {
        let call = Call::random(1, config(integrator), SMALL);
        let mut rng = fastrand::Rng::with_seed(8);
        let (d_out, d_final) = (random(&mut rng, 40, 1.0), random(&mut rng, 24, 1.0));
        let want = call.backward(&d_out, Some(&d_final));
        for s in [1e-30, 1e30] {
            // k → s k, β → β/s², S → S/s: x is unchanged, and so is kᵀS.
            let by = |x: &[f64], factor: f64| -> Vec<f64> { x.iter().map(|x| x * factor).collect() };
            let mut scaled = call.clone();
            scaled.k = by(&call.k, s);
            scaled.beta = by(&call.beta, 1.0 / (s * s));
            scaled.initial_state = call.initial_state.as_deref().map(|state| by(state, 1.0 / s));
            let got = scaled.backward(&by(&d_out, s), Some(&by(&d_final, s)));
            assert_close("d_q", &got.d_q, &want.d_q, 1e-12);
            assert_close("d_k", &by(&got.d_k, s), &want.d_k, 1e-12);
            assert_close("d_v", &got.d_v, &want.d_v, 1e-12);
            assert_close("d_beta", &by(&got.d_beta, 1.0 / (s * s)), &want.d_beta, 1e-12);
            assert_close("d_initial_state", &by(&got.d_initial_state, 1.0 / s), &want.d_initial_state, 1e-12);
        }
    }
}

/// Longer than the stretch between two kept states.
#[test]
fn splitting_changes_nothing() {
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 4, tokens: 150 };
    let (d_out, d_final) = {
        let mut rng = fastrand::Rng::with_seed(6);
        (random(&mut rng, 4 * 150 * 2, 1.0), random(&mut rng, 24, 1.0))
    };
    for (form, gated) in
        [(Form::Recurrent, false), (Form::Chunked, false), (Form::Recurrent, true), (Form::Chunked, true)]
    {
        let call = Call::random(5, EflaConfig { form, gated, normalize_q: true, ..config(Integrator::Exact) }, shape);
        let whole = call.forward();
        let want = call.backward(&d_out, Some(&d_final));
        for at in [0, 1, 63, 64, 65, 149, 150] {
            let (first, mut second) = (call.tokens(0, at), call.tokens(at, 150));
            let middle = first.forward().final_state;
            second.initial_state = Some(middle);
            let end = second.forward();
            assert_close("out", &end.out, &pick(&whole.out, 150, 2, at, 150), 1e-12);
            assert_close("final_state", &end.final_state, &whole.final_state, 1e-12);
            let later = second.backward(&pick(&d_out, 150, 2, at, 150), Some(&d_final));
            let earlier = first.backward(&pick(&d_out, 150, 2, 0, at), Some(&later.d_initial_state));
            assert_close("d_k", &later.d_k, &pick(&want.d_k, 150, 3, at, 150), 1e-12);
            assert_close("d_k", &earlier.d_k, &pick(&want.d_k, 150, 3, 0, at), 1e-12);
            assert_close("d_beta", &earlier.d_beta, &pick(&want.d_beta, 150, 1, 0, at), 1e-12);
            assert_close("d_initial_state", &earlier.d_initial_state, &want.d_initial_state, 1e-12);
            if gated {
                assert_close("d_log_decay", &later.d_log_decay, &pick(&want.d_log_decay, 150, 1, at, 150), 1e-12);
                assert_close("d_log_decay", &earlier.d_log_decay, &pick(&want.d_log_decay, 150, 1, 0, at), 1e-12);
            }
        }
    }
}

#[test]
fn packed_sequences_are_batches_taken_apart() {
    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 9 };
    let call = Call::random(8, EflaConfig { normalize_k: true, gated: true, ..config(Integrator::Exact) }, shape);
    let mut rng = fastrand::Rng::with_seed(9);
    let (d_out, d_final) = (random(&mut rng, 2 * 4 * 9 * 2, 1.0), random(&mut rng, 2 * 24, 1.0));
    let (want, gradients) = (call.forward(), call.backward(&d_out, Some(&d_final)));

    // A sequence of nothing stands between the two, with a state of its own.
    let (keys, values) = (|x: &[f64]| one_after_another(x, 2, 9 * 3), |x: &[f64]| one_after_another(x, 4, 9 * 2));
    let steps = |x: &[f64]| one_after_another(x, 4, 9);
    let states = |x: &[f64]| [&x[..24], &[7.0; 24], &x[24..]].concat();
    let cu_seqlens = [0, 9, 9, 18];
    let packed = Call {
        shape: EflaShape { batch: 1, tokens: 18, ..shape },
        q: keys(&call.q),
        k: keys(&call.k),
        v: values(&call.v),
        beta: steps(&call.beta),
        log_decay: call.log_decay.as_deref().map(steps),
        initial_state: call.initial_state.as_deref().map(states),
        ..call
    };
    let (config, shape, inputs) = (packed.config, packed.shape, packed.inputs());
    let got = forward_packed(&config, &shape, &cu_seqlens, &inputs).unwrap();
    assert_eq!(got, Output { out: values(&want.out), final_state: states(&want.final_state) });
    let (d_out, d_final) = (values(&d_out), states(&d_final));
    let got = backward_packed(&config, &shape, &cu_seqlens, &inputs, &d_out, Some(&d_final)).unwrap();
    assert_eq!((got.d_q, got.d_k), (keys(&gradients.d_q), keys(&gradients.d_k)));
    assert_eq!((got.d_v, got.d_beta), (values(&gradients.d_v), steps(&gradients.d_beta)));
    assert_eq!(got.d_log_decay, steps(&gradients.d_log_decay));
    assert_eq!(got.d_initial_state, states(&gradients.d_initial_state));

    let refused = |shape: &EflaShape, cu_seqlens: &[usize]| {
        let error = forward_packed(&config, shape, cu_seqlens, &inputs).expect_err("accepted").to_string();
        let backward = backward_packed(&config, shape, cu_seqlens, &inputs, &d_out, None);
        assert_eq!(error, backward.unwrap_err().to_string());
        error
    };
    assert!(refused(&shape, &[]).starts_with("cu_seqlens: got 0 entries"));
    assert!(refused(&shape, &[0, 12, 6, 18]).contains("not sorted"));
    assert!(refused(&shape, &[0, 17]).contains("the 18 tokens"));
    assert!(refused(&EflaShape { batch: 2, ..shape }, &[0, 18]).starts_with("batch: got 2"));
    assert!(refused(&shape, &[0, 18]).starts_with("initial_state: got 72 elements, needed 24"));
}

#[test]
fn a_zero_key_leaves_the_state_alone() {
    for integrator in INTEGRATORS {
        for form in [Form::Recurrent, Form::Chunked] {
            for normalize_k in [false, true] {
                let mut call = Call::random(3, EflaConfig { form, normalize_k, ..config(integrator) }, SMALL);
                call.k.fill(0.0);
                assert_eq!(Some(call.forward().final_state), call.initial_state);
            }
        }
    }
}

#[test]
fn empty_calls() {
    for form in [Form::Recurrent, Form::Chunked] {
        let config = EflaConfig { form, ..config(Integrator::Exact) };
        let mut call = Call::random(3, config, EflaShape { tokens: 0, ..SMALL });
        assert_eq!(Some(call.forward().final_state), call.initial_state);
        let d_final: Vec<f64> = (0..24).map(f64::from).collect();
        assert_eq!(call.backward(&[], Some(&d_final)).d_initial_state, d_final);
        assert_eq!(call.backward(&[], None).d_initial_state, [0.0; 24]);
        call.initial_state = None;
        assert_eq!(call.forward(), Output { out: vec![], final_state: vec![0.0; 24] });
        for shape in [
            EflaShape { batch: 0, ..SMALL },
            EflaShape { heads: 0, value_heads: 0, ..SMALL },
            EflaShape { batch: 1000, heads: 0, value_heads: 0, tokens: 0 },
        ] {
            let call = Call { initial_state: None, ..Call::random(3, config, EflaShape { batch: 0, ..shape }) };
            let call = Call { shape, ..call };
            assert_eq!(call.forward(), Output { out: vec![], final_state: vec![] });
            assert!(call.backward(&[], None).d_beta.is_empty());
        }
        let mut call = Call::random(3, config, EflaShape { value_heads: 0, ..SMALL });
        call.initial_state = None;
        assert_eq!(call.backward(&[], None).d_k, [0.0; 30]);
    }
}

#[test]
fn bad_arguments_are_refused() {
    let refused = |change: &dyn Fn(&mut Call)| {
        let mut call = Call::random(1, config(Integrator::Exact), SMALL);
        call.forward();
        change(&mut call);
        let name = |error: Error| match error {
            Error::Argument { argument, .. } => argument,
            other => panic!("{other}"),
        };
        let refused = name(forward(&call.config, &call.shape, &call.inputs()).expect_err("accepted"));
        assert_eq!(name(backward(&call.config, &call.shape, &call.inputs(), &[0.0; 40], None).unwrap_err()), refused);
        refused
    };
    assert_eq!(refused(&|call| call.config.key_dim = 257), "key_dim");
    assert_eq!(refused(&|call| call.config.chunk = Some(0)), "chunk");
    assert_eq!(refused(&|call| call.config.scale = Some(1e60)), "scale");
    assert_eq!(refused(&|call| (call.shape.heads, call.shape.value_heads) = (2, 3)), "value_heads");
    assert_eq!(refused(&|call| call.q.truncate(5)), "q");
    assert_eq!(refused(&|call| call.k.push(0.0)), "k");
    assert_eq!(refused(&|call| call.v.clear()), "v");
    assert_eq!(refused(&|call| call.beta.clear()), "beta");
    assert_eq!(refused(&|call| call.config.gated = true), "log_decay");
    assert_eq!(refused(&|call| call.log_decay = Some(vec![0.0; 20])), "log_decay");
    for bad in [vec![], vec![f64::NAN; 20], vec![f64::INFINITY; 20]] {
        let gated = |call: &mut Call| (call.config.gated, call.log_decay) = (true, Some(bad.clone()));
        assert_eq!(refused(&gated), "log_decay");
    }
    assert_eq!(refused(&|call| call.initial_state = Some(vec![])), "initial_state");
    assert_eq!(refused(&|call| call.shape.tokens = usize::MAX), "q");
    assert_eq!(refused(&|call| call.k[0] = 1e160), "k");
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(refused(&|call| call.q[3] = bad), "q");
        assert_eq!(refused(&|call| call.k[3] = bad), "k");
        assert_eq!(refused(&|call| call.v[3] = bad), "v");
        assert_eq!(refused(&|call| call.beta[3] = bad), "beta");
        assert_eq!(refused(&|call| call.initial_state.as_mut().unwrap()[3] = bad), "initial_state");
    }
    let huge = EflaShape { batch: usize::MAX / 2, heads: 1, value_heads: 1, tokens: 0 };
    let call = Call { shape: EflaShape { batch: 0, ..SMALL }, ..Call::random(1, config(Integrator::Exact), SMALL) };
    let inputs = Inputs { q: &[], k: &[], v: &[], beta: &[], initial_state: None, log_decay: None };
    assert!(forward(&call.config, &huge, &inputs).is_err());
    assert!(backward(&call.config, &huge, &inputs, &[], None).is_err());
    let call = Call::random(1, config(Integrator::Exact), SMALL);
    let run = |d_out: &[f64], d_final: &[f64]| backward(&call.config, &SMALL, &call.inputs(), d_out, Some(d_final));
    assert!(run(&[0.0; 40], &[0.0; 24]).is_ok());
    assert!(run(&[0.0; 39], &[0.0; 24]).is_err());
    assert!(run(&[0.0; 40], &[0.0; 25]).is_err());
    assert!(run(&[f64::NAN; 40], &[0.0; 24]).is_err());
    assert!(run(&[0.0; 40], &[f64::INFINITY; 24]).is_err());
}
