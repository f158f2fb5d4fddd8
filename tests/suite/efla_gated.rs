//! EFLA with a log decay per token and value head: forward in every form, backward with every chunk length.

use continuous_attention::reference::compare::{Quantity, limit};
use continuous_attention::reference::efla;
use continuous_attention::*;

use crate::harness::{
    EDGES, EflaCase, FORMS, Guarded, bits, case_count, gpu, input, judge, normal, pick, plain_gpu, rng, submit, widen,
};

const INTEGRATORS: [Integrator; 4] =
    [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4];
const NAMES: [&str; 6] = ["d_q", "d_k", "d_v", "d_beta", "d_log_decay", "d_initial_state"];

/// A call with the gradients of what it returns.
#[derive(Clone)]
struct Trained {
    case: EflaCase,
    d_out: Vec<f32>,
    d_final_state: Option<Vec<f32>>,
}

impl Trained {
    fn new(case: EflaCase, rng: &mut fastrand::Rng) -> Self {
        let d_out = normal(rng, case.out_shape().iter().product());
        let d_final_state = Some(normal(rng, case.state_shape().iter().product()));
        Trained { case, d_out, d_final_state }
    }

    fn shapes(&self) -> [Vec<usize>; 6] {
        let EflaShape { batch, heads, value_heads, tokens } = self.case.shape;
        let key = vec![batch, heads, tokens, self.case.config.key_dim];
        let beta = vec![batch, value_heads, tokens];
        [key.clone(), key, self.case.out_shape().to_vec(), beta.clone(), beta, self.case.state_shape().to_vec()]
    }

    fn run(&self) -> [Vec<f32>; 6] {
        self.run_on(gpu())
    }

    /// Runs with NaN in the outputs and in the workspace.
    fn run_on(&self, gpu: &Gpu) -> [Vec<f32>; 6] {
        let case = &self.case;
        let plan = Efla::new(gpu, case.config).unwrap().plan_backward(&case.shape).unwrap();
        let outputs = self.shapes().map(|shape| Guarded::new(gpu, Guarded::ODD, &shape));
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(plan.workspace_bytes() / 4) as usize]);
        let [d_q, d_k, d_v, d_beta, d_log_decay, d_initial_state] = outputs.each_ref().map(Guarded::view);
        let forward = case.tensors(gpu, &outputs[2]);
        let tensors = EflaGradients {
            d_final_state: self.d_final_state.as_ref().map(|state| input(gpu, state, &case.state_shape(), 9)),
            d_log_decay: case.config.gated.then_some(d_log_decay),
            d_initial_state: Some(d_initial_state),
            workspace: Some(workspace.view()),
            ..EflaGradients::new(&forward, input(gpu, &self.d_out, &case.out_shape(), 7), [d_q, d_k, d_v, d_beta])
        };
        submit(gpu, &plan.bind(&tensors).unwrap_or_else(|error| panic!("{error}\n  in {}", case.label())));
        workspace.read(gpu, &case.label());
        outputs.map(|output| output.read(gpu, &case.label()))
    }

    fn reference(&self) -> [Vec<f64>; 6] {
        let EflaCase { config, shape, .. } = self.case;
        let [q, k, v, beta, d_out] =
            [&self.case.q, &self.case.k, &self.case.v, &self.case.beta, &self.d_out].map(|x| widen(x));
        let optional = |x: &Option<Vec<f32>>| x.as_deref().map(widen);
        let (log_decay, initial_state) = (optional(&self.case.log_decay), optional(&self.case.initial_state));
        let (log_decay, initial_state) = (log_decay.as_deref(), initial_state.as_deref());
        let inputs = efla::Inputs { q: &q, k: &k, v: &v, beta: &beta, log_decay, initial_state };
        let d_final_state = optional(&self.d_final_state);
        let want = efla::backward(&config, &shape, &inputs, &d_out, d_final_state.as_deref()).unwrap();
        [want.d_q, want.d_k, want.d_v, want.d_beta, want.d_log_decay, want.d_initial_state]
    }

    fn judge(&self, got: &[Vec<f32>; 6], want: &[Vec<f64>; 6]) {
        for (name, (got, want)) in NAMES.iter().zip(got.iter().zip(want)) {
            // Decayed beyond float32, or nearly.
            if want.iter().all(|x| x.abs() < 1e-30) && want.iter().any(|x| *x != 0.0) {
                assert!(got.iter().all(|x| x.abs() < 2e-30), "{name} is not next to nothing in {}", self.case.label());
                continue;
            }
            let quantity =
                if matches!(*name, "d_beta" | "d_log_decay") { Quantity::BetaGradient } else { Quantity::Gradient };
            judge(&self.case.label(), name, got, want, limit(quantity, DType::F32));
        }
    }

    /// Forward in every form, backward with every chunk length.
    fn check(&self) {
        self.case.check_all_forms();
        let want = self.reference();
        for chunk in [16, 32, 64] {
            let mut trained = self.clone();
            trained.case.config.chunk = Some(chunk);
            self.judge(&trained.run(), &want);
        }
    }
}

fn config(integrator: Integrator) -> EflaConfig {
    EflaConfig { key_dim: 20, value_dim: 12, integrator, gated: true, ..Default::default() }
}

fn tokens(tokens: usize) -> EflaShape {
    EflaShape { batch: 1, heads: 1, value_heads: 2, tokens }
}

/// Steps x at which every integrator is judged, |1 − γ| ≤ 0.9.
fn judged(config: EflaConfig, shape: EflaShape, rng: &mut fastrand::Rng) -> EflaCase {
    let (low, high) = match config.integrator {
        Integrator::Exact => (0.0, 6.0),
        Integrator::Euler => (0.1, 1.9),
        Integrator::RungeKutta2 => (0.11, 1.89),
        Integrator::RungeKutta4 => (0.11, 2.7),
    };
    let case = EflaCase::random(config, shape, rng);
    let mut steps = rng.fork();
    case.with_key_lengths(|| 0.5 + 2.0 * rng.f64()).with_steps(|| low + (high - low) * steps.f64())
}

/// How strongly tokens decay.
const STRENGTHS: [&[f32]; 12] = [
    &[0.0],
    &[1e-6],
    &[1e-4],
    &[1e-2],
    &[0.1, 0.3],
    &[1.0],
    &[5.0, 4.0, 6.0],
    &[20.0],
    &[1e3],
    &[f32::INFINITY],
    &[0.0, 1e-3, 50.0, 1.0, 0.0, 1e-6],
    &[0.0, 0.0, 1e-3, 0.1, 1e3, f32::INFINITY, 1.4, 1.6, 30.0],
];

#[test]
fn every_strength() {
    let mut rng = rng(1);
    for integrator in [Integrator::Exact, Integrator::Euler] {
        for strengths in STRENGTHS {
            let mut draw = rng.fork();
            let case = judged(config(integrator), tokens(150), &mut rng)
                .with_decay(|| pick(&mut draw, strengths) * (0.8 + 0.4 * draw.f32()));
            Trained::new(case.with_initial_state(&mut rng), &mut rng).check();
        }
    }
}

/// Over many chunks, where errors would gather.
#[test]
fn a_thousand_tokens() {
    let mut rng = rng(2);
    for strengths in [&[1e-4][..], &[5.0, 4.5, 5.5], &[0.0, 50.0, 10.0, 1.0], &[0.0, 1e-3, 1e-4]] {
        for steps in [0.3, 1e-3] {
            let case = EflaCase::random(config(Integrator::Exact), tokens(1000), &mut rng).with_steps(|| steps);
            let case = case.with_decay(|| pick(&mut rng, strengths));
            Trained::new(case.with_initial_state(&mut rng), &mut rng).check();
        }
    }
}

/// Every option, size and kind of decay at random.
#[test]
fn random_cases() {
    for seed in 0..case_count(24) {
        println!("seed {seed}");
        let mut rng = rng(3000 + seed as u64);
        let dim = |rng: &mut fastrand::Rng| if rng.u8(..4) == 0 { pick(rng, &EDGES) } else { rng.usize(1..=40) };
        let integrator = INTEGRATORS[seed % 4];
        let heads = rng.usize(1..=2);
        let config = EflaConfig {
            key_dim: dim(&mut rng),
            value_dim: dim(&mut rng),
            normalize_q: rng.bool(),
            normalize_k: rng.bool(),
            scale: pick(&mut rng, &[None, Some(0.4)]),
            ..config(integrator)
        };
        let shape = EflaShape {
            batch: rng.usize(1..=2),
            heads,
            value_heads: heads * rng.usize(1..=3),
            tokens: if rng.bool() { pick(&mut rng, &EDGES) } else { rng.usize(..200) },
        };
        let mut strengths = pick(&mut rng, &STRENGTHS);
        if matches!(integrator, Integrator::RungeKutta2 | Integrator::RungeKutta4) {
            // The range of x is that of x + κ.
            strengths = pick(&mut rng, &[&[1e-3][..], &[0.0, 0.1, 0.4]]);
        }
        let mut draw = rng.fork();
        let mut case = judged(config, shape, &mut rng).with_decay(|| pick(&mut draw, strengths) * draw.f32());
        if rng.bool() {
            case = case.with_initial_state(&mut rng);
        }
        let mut trained = Trained::new(case, &mut rng);
        if rng.bool() {
            trained.d_final_state = None;
        }
        trained.case.check_all_forms();
        trained.case.config.chunk = Some(pick(&mut rng, &[16, 32, 64]));
        trained.judge(&trained.run(), &trained.reference());
    }
}

/// Keys of 0 and from 1e-10 to 1e10 where x, κ and both are small and large.
#[test]
fn keys_and_rates_of_every_size() {
    let mut rng = rng(4);
    for lengths in [&[1e-10, 1e-3][..], &[1.0, 0.0, 3.0], &[1e3, 1e10], &[1e-10, 1.0, 0.0, 1e10]] {
        for strengths in [&[1e-3][..], &[3.0], &[1e-3, 0.5, 2.0, 8.0, 1e4]] {
            let (mut draw, mut lengths_of) = (rng.fork(), rng.fork());
            let case = EflaCase::random(config(Integrator::Exact), tokens(100), &mut rng)
                .with_key_lengths(|| pick(&mut lengths_of, lengths))
                .with_decay(|| pick(&mut draw, strengths));
            Trained::new(case, &mut rng).check();
        }
    }
}

/// Zeros as log decay are what no decay is.
#[test]
fn no_decay() {
    // By the same kernels: others round otherwise.
    let mut rng = rng(5);
    for integrator in INTEGRATORS {
        let plain = judged(EflaConfig { gated: false, ..config(integrator) }, tokens(100), &mut rng);
        let plain = Trained::new(plain.with_initial_state(&mut rng), &mut rng);
        let mut gated = plain.clone();
        gated.case = gated.case.with_decay(|| 0.0);
        for (form, chunk) in FORMS {
            let run = |case: &EflaCase| case.in_form(form, chunk).run_on(plain_gpu());
            let (got, want) = (run(&gated.case), run(&plain.case));
            judge("no decay", "out", &got.out, &widen(&want.out), 1e-7);
            judge("no decay", "final_state", &got.final_state, &widen(&want.final_state), 1e-7);
        }
        for (at, (got, want)) in
            gated.run_on(plain_gpu()).iter().zip(plain.run_on(plain_gpu())).enumerate().filter(|(at, _)| *at != 4)
        {
            judge("no decay", NAMES[at], got, &widen(&want), 1e-6);
        }
    }
}

/// Where the state is wiped out, what was before leaves no trace, and gradients stop.
#[test]
fn a_wiped_state() {
    let mut rng = rng(6);
    for integrator in [Integrator::Exact, Integrator::Euler] {
        let case = judged(config(integrator), tokens(100), &mut rng).with_decay(|| 0.1);
        let mut case = case.with_initial_state(&mut rng);
        for sequence in case.log_decay.as_mut().unwrap().chunks_mut(100) {
            sequence[57] = f32::NEG_INFINITY;
        }
        let mut other = case.clone();
        other.initial_state = Some(normal(&mut rng, 2 * 20 * 12));
        other.v[..50 * 12].fill(3.0);
        for (form, chunk) in FORMS {
            let (one, other) = (case.in_form(form, chunk).run(), other.in_form(form, chunk).run());
            for (one, other) in one.out.chunks(100 * 12).zip(other.out.chunks(100 * 12)) {
                assert_eq!(bits(&one[57 * 12..]), bits(&other[57 * 12..]), "{}", case.label());
                assert_ne!(bits(&one[..57 * 12]), bits(&other[..57 * 12]));
            }
            assert_eq!(bits(&one.final_state), bits(&other.final_state), "{}", case.label());
            if integrator == Integrator::Exact {
                assert!(one.out[57 * 12..58 * 12].iter().all(|&x| x == 0.0), "nothing is written either");
            }
        }
        let mut trained = Trained::new(case, &mut rng);
        trained.check();
        for sequence in trained.d_out.chunks_mut(100 * 12) {
            sequence[..57 * 12].fill(0.0);
        }
        let [d_q, d_k, d_v, d_beta, d_log_decay, d_initial_state] = trained.run();
        for (gradient, width) in [(&d_q, 20), (&d_k, 20), (&d_v, 12), (&d_beta, 1), (&d_log_decay, 1)] {
            assert!(gradient.chunks(100 * width).all(|rows| rows[..57 * width].iter().all(|&x| x == 0.0)));
        }
        assert!(d_initial_state.iter().all(|&x| x == 0.0));
    }
}

#[test]
fn nothing_gives_exactly_nothing() {
    let mut rng = rng(7);
    let case = judged(config(Integrator::Exact), tokens(70), &mut rng).with_decay(|| 0.1).with_initial_state(&mut rng);
    let mut trained = Trained::new(case, &mut rng);
    trained.d_out.fill(0.0);
    trained.d_final_state = None;
    for (name, got) in NAMES.iter().zip(trained.run()) {
        assert!(got.iter().all(|&x| x == 0.0), "{name}");
    }
}

/// Tokens `range` of a tensor of sequences.
fn cut(tensor: &[f32], tokens: usize, sequences: usize, range: std::ops::Range<usize>) -> Vec<f32> {
    let width = tensor.len() / sequences / tokens;
    tensor.chunks(tokens * width).flat_map(|rows| &rows[range.start * width..range.end * width]).copied().collect()
}

/// A sequence in two calls is the whole, forward and backward.
#[test]
fn split_and_resumed() {
    let mut rng = rng(8);
    let case = judged(config(Integrator::Exact), tokens(100), &mut rng).with_decay(|| 0.3 * rng.f32());
    let whole = Trained::new(case.with_initial_state(&mut rng), &mut rng);
    let (want, gradients) = (whole.case.reference(), whole.reference());
    let part = |range: std::ops::Range<usize>| {
        let (mut part, case) = (whole.clone(), &whole.case);
        part.case.shape.tokens = range.len();
        part.case.q = cut(&case.q, 100, 1, range.clone());
        part.case.k = cut(&case.k, 100, 1, range.clone());
        part.case.v = cut(&case.v, 100, 2, range.clone());
        part.case.beta = cut(&case.beta, 100, 2, range.clone());
        part.case.log_decay = Some(cut(case.log_decay.as_ref().unwrap(), 100, 2, range.clone()));
        part.d_out = cut(&whole.d_out, 100, 2, range);
        part
    };
    let join = |a: &[f32], b: &[f32], sequences: usize| -> Vec<f32> {
        let (a_rows, b_rows) = (a.chunks(a.len() / sequences), b.chunks(b.len() / sequences));
        a_rows.zip(b_rows).flat_map(|(a, b)| [a, b].concat()).collect()
    };
    for (at, (form, chunk)) in [37, 64, 1, 99].into_iter().zip(FORMS) {
        let (mut first, mut second) = (part(0..at), part(at..100));
        let begun = first.case.in_form(form, chunk).run();
        second.case.initial_state = Some(begun.final_state);
        let ended = second.case.in_form(form, chunk).run();
        judge("split", "out", &join(&begun.out, &ended.out, 2), &want.out, 2e-6);
        judge("split", "final_state", &ended.final_state, &want.final_state, 2e-6);
        let later = second.run();
        first.d_final_state = Some(later[5].clone());
        let earlier = first.run();
        let mut joined: [Vec<f32>; 6] =
            std::array::from_fn(|i| join(&earlier[i], &later[i], if i < 2 { 1 } else { 2 }));
        joined[5] = earlier[5].clone();
        whole.judge(&joined, &gradients);
    }
}

/// A decoder's state, updated where it is, one token a call.
#[test]
fn decoding_in_place() {
    let mut rng = rng(9);
    let case = judged(config(Integrator::Exact), tokens(20), &mut rng).with_decay(|| 0.2);
    let case = case.with_initial_state(&mut rng);
    let want = case.reference();
    let plan = Efla::new(gpu(), case.config).unwrap().plan_step(&EflaShape { tokens: 1, ..case.shape }).unwrap();
    let upload = |values: &[f32]| gpu().upload(values, &[values.len()]).unwrap();
    let [q, k, v, beta] = [&case.q, &case.k, &case.v, &case.beta].map(|x| upload(x));
    let log_decay = upload(case.log_decay.as_ref().unwrap());
    let state = gpu().upload(case.initial_state.as_ref().unwrap(), &case.state_shape()).unwrap();
    let out = gpu().zeros(&case.out_shape()).unwrap();
    for at in 0..20 {
        let row = |tensor: &Tensor, sequences: usize, width: usize| {
            let strides = [0, 20 * width, width, 1];
            TensorView::strided(tensor.buffer(), (at * width) as u64, &[1, sequences, 1, width], &strides)
        };
        let number = |tensor: &Tensor| TensorView::strided(tensor.buffer(), at as u64, &[1, 2, 1], &[0, 20, 1]);
        let tensors = EflaTensors {
            log_decay: Some(number(&log_decay)),
            initial_state: Some(state.view()),
            final_state: Some(state.view()),
            ..EflaTensors::new(row(&q, 1, 20), row(&k, 1, 20), row(&v, 2, 12), number(&beta), row(&out, 2, 12))
        };
        submit(gpu(), &plan.bind(&tensors).unwrap());
    }
    judge("decoding", "out", &gpu().read(&out).unwrap(), &want.out, 2e-6);
    judge("decoding", "final_state", &gpu().read(&state).unwrap(), &want.final_state, 2e-6);
}

/// A NaN or an infinity spoils its own sequence from its token on, and its sequence's gradients.
#[test]
fn a_bad_decay_spoils_its_sequence_from_there_on() {
    let mut rng = rng(10);
    let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 100 };
    let case = judged(config(Integrator::Exact), shape, &mut rng).with_decay(|| 0.1).with_initial_state(&mut rng);
    let clean_gradients = Trained::new(case.clone(), &mut rng.clone()).run();
    for (form, chunk) in FORMS {
        let case = case.in_form(form, chunk);
        let clean = case.run();
        for token in [0, 1, 15, 16, 31, 33, 63, 70, 99] {
            let mut spoiled = case.clone();
            spoiled.log_decay.as_mut().unwrap()[2 * 100 + token] = f32::NAN;
            let got = spoiled.run();
            for (row, (got, clean)) in got.out.chunks(12).zip(clean.out.chunks(12)).enumerate() {
                let reached = row / 100 == 2 && row % 100 >= token;
                assert_eq!(bits(got) != bits(clean), reached, "row {row}, NaN at {token}, {}", case.label());
                assert_eq!(got.iter().all(|x| x.is_nan()), reached, "row {row}, NaN at {token}, {}", case.label());
            }
            for (sequence, (got, clean)) in got.final_state.chunks(240).zip(clean.final_state.chunks(240)).enumerate() {
                assert_eq!(bits(got) != bits(clean), sequence == 2, "state of {sequence}, {}", case.label());
            }
        }
    }
    let mut spoiled = Trained::new(case, &mut rng);
    spoiled.case.log_decay.as_mut().unwrap()[2 * 100 + 40] = f32::NAN;
    let got = spoiled.run();
    for ((name, got), clean) in NAMES.iter().zip(&got).zip(&clean_gradients) {
        // Each of the two query/key heads serves the two value heads of its batch.
        let sequences = if matches!(*name, "d_q" | "d_k") { 2 } else { 4 };
        let rows = got.len() / sequences;
        for (sequence, (got, clean)) in got.chunks(rows).zip(clean.chunks(rows)).enumerate() {
            let reached = sequence == sequences / 2;
            assert_eq!(bits(got) != bits(clean), reached, "{name} of sequence {sequence}");
        }
    }
}

/// The decay of a head for the whole batch, gradients between other tensors' rows.
#[test]
fn strided_decays() {
    let mut rng = rng(11);
    let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 50 };
    let mut case = judged(config(Integrator::Exact), shape, &mut rng).with_decay(|| 1.0);
    let decays: Vec<f32> = (0..100).map(|_| -rng.f32()).collect();
    case.log_decay = Some(decays.repeat(2));
    let trained = Trained::new(case, &mut rng);
    let want = trained.run();
    let outputs = trained.shapes().map(|shape| Guarded::new(gpu(), Guarded::ODD, &shape));
    let [d_q, d_k, d_v, d_beta, ..] = outputs.each_ref().map(Guarded::view);
    // [T, H_v, B] in memory, of H_v and T.
    let transposed: Vec<f32> = (0..100).map(|at| decays[at % 2 * 50 + at / 2]).collect();
    let log_decay = gpu().upload(&transposed, &[100]).unwrap();
    let d_log_decay = gpu().zeros(&[50, 2, 2]).unwrap();
    let forward = EflaTensors {
        log_decay: Some(TensorView::strided(log_decay.buffer(), 0, &[2, 2, 50], &[0, 1, 2])),
        ..trained.case.tensors(gpu(), &outputs[2])
    };
    let tensors = EflaGradients {
        d_log_decay: Some(TensorView::strided(d_log_decay.buffer(), 0, &[2, 2, 50], &[1, 2, 4])),
        d_final_state: trained.d_final_state.as_ref().map(|state| input(gpu(), state, &trained.case.state_shape(), 9)),
        ..EflaGradients::new(
            &forward,
            input(gpu(), &trained.d_out, &trained.case.out_shape(), 7),
            [d_q, d_k, d_v, d_beta],
        )
    };
    let operator = Efla::new(gpu(), trained.case.config).unwrap();
    let mut encoder = gpu().device().create_command_encoder(&Default::default());
    operator.backward(&mut encoder, &tensors).unwrap();
    gpu().queue().submit([encoder.finish()]);
    let got: Vec<f32> = gpu().read(&d_log_decay).unwrap();
    for (at, want) in want[4].iter().enumerate() {
        let (batch, head, token) = (at / 100, at / 50 % 2, at % 50);
        assert_eq!(got[token * 4 + head * 2 + batch].to_bits(), want.to_bits());
    }
    assert_eq!(bits(&outputs[0].read(gpu(), "strided")), bits(&want[0]));
}

/// With wgpu's bounds checks results are the same numbers; and so they are again.
#[test]
fn checked_and_repeated() {
    let mut rng = rng(12);
    let checked = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    for chunk in [16, 64] {
        let config = EflaConfig { chunk: Some(chunk), ..config(Integrator::Exact) };
        let case = judged(config, tokens(75), &mut rng).with_decay(|| 0.2).with_initial_state(&mut rng);
        let trained = Trained::new(case, &mut rng);
        trained.case.judge(&trained.case.run_on(&checked));
        trained.judge(&trained.run_on(&checked), &trained.reference());
        assert_eq!(trained.run().map(|x| bits(&x)), trained.run().map(|x| bits(&x)));
    }
}

#[test]
fn no_token() {
    let mut rng = rng(13);
    let case = EflaCase::random(config(Integrator::Exact), tokens(0), &mut rng).with_decay(|| 0.2);
    let trained = Trained::new(case.with_initial_state(&mut rng), &mut rng);
    for (form, chunk) in FORMS {
        let got = trained.case.in_form(form, chunk).run();
        assert_eq!(Some(got.final_state), trained.case.initial_state);
    }
    let [.., d_log_decay, d_initial_state] = trained.run();
    assert!(d_log_decay.is_empty());
    assert_eq!(Some(d_initial_state), trained.d_final_state);
}

#[test]
fn what_is_refused() {
    let mut rng = rng(14);
    let gated = judged(config(Integrator::Exact), tokens(20), &mut rng).with_decay(|| 0.2);
    let out = Guarded::new(gpu(), Guarded::ODD, &gated.out_shape());
    let refused = |gated_operator: bool, change: &dyn Fn(&mut EflaGradients), words: &[&str]| {
        let config = EflaConfig { gated: gated_operator, ..gated.config };
        let operator = Efla::new(gpu(), config).unwrap();
        let forward = gated.tensors(gpu(), &out);
        let outputs = Trained::new(gated.clone(), &mut fastrand::Rng::with_seed(1))
            .shapes()
            .map(|shape| gpu().zeros(&shape).unwrap().view());
        let [d_q, d_k, d_v, d_beta, d_log_decay, _] = outputs;
        let mut tensors = EflaGradients {
            d_log_decay: Some(d_log_decay),
            ..EflaGradients::new(&forward, gpu().zeros(&gated.out_shape()).unwrap().view(), [d_q, d_k, d_v, d_beta])
        };
        change(&mut tensors);
        let error = operator.plan_backward(&gated.shape).unwrap().bind(&tensors).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
        let forward = EflaTensors { log_decay: tensors.log_decay, ..forward };
        operator.plan(&gated.shape).unwrap().bind(&forward).map(|_| ()).map_err(|error| error.to_string())
    };
    let error = refused(true, &|t| t.log_decay = None, &["log_decay", "gated"]).unwrap_err();
    assert!(error.contains("log_decay"), "{error}");
    let error = refused(false, &|_| (), &["log_decay", "not gated"]).unwrap_err();
    assert!(error.contains("not gated"), "{error}");
    let error = refused(true, &|t| t.log_decay = Some(t.v.clone()), &["log_decay", "shape"]).unwrap_err();
    assert!(error.contains("shape"), "{error}");
    refused(false, &|t| t.log_decay = None, &["d_log_decay", "not gated"]).unwrap();
    refused(true, &|t| t.d_log_decay = Some(t.d_v.clone()), &["d_log_decay", "shape"]).unwrap();
    refused(true, &|t| t.d_log_decay = Some(t.d_beta.clone()), &["d_log_decay", "d_beta", "overlap"]).unwrap();
    refused(true, &|t| t.d_log_decay = t.log_decay.clone(), &["d_log_decay", "log_decay", "overlap"]).unwrap();
}

/// The gates of a gated operator take 4 elements a token more, 10 more backward, and what passes through chunks.
#[test]
fn the_workspace_is_larger_only_if_gated() {
    let bytes = |gated: bool, form: Form| {
        let config = EflaConfig { gated, form, chunk: Some(16), key_dim: 64, value_dim: 64, ..Default::default() };
        let operator = Efla::new(gpu(), config).unwrap();
        let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 1024 };
        (operator.plan(&shape).unwrap().workspace_bytes(), operator.plan_backward(&shape).unwrap().workspace_bytes())
    };
    for form in [Form::Chunked, Form::Recurrent] {
        let ((forward, backward), (gated_forward, gated_backward)) = (bytes(false, form), bytes(true, form));
        let tokens = 2 * 4 * 1024;
        assert_eq!(gated_forward - forward, 4 * 4 * tokens);
        // 64 chunks, 2 blocks of 32 columns, 8 parts.
        assert_eq!(gated_backward - backward, 4 * (10 * tokens + 2 * 4 * 64 * 2 * 8));
    }
}
