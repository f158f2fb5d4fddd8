//! EFLA's gradients against the float64 reference, and against each other where one must follow from another.

use continuous_attention::reference::compare::{Comparison, Quantity, Scale, compare, limit};
use continuous_attention::reference::efla;
use continuous_attention::*;

use crate::harness::{EflaCase, gpu, plain_gpu, rng};

const NAMES: [&str; 5] = ["d_q", "d_k", "d_v", "d_beta", "d_initial_state"];

/// Tokens of one call with everything it reads.
#[derive(Clone)]
struct Problem {
    config: EflaConfig,
    shape: EflaShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
    initial_state: Option<Vec<f32>>,
    d_out: Vec<f32>,
    d_final_state: Option<Vec<f32>>,
}

fn normal(random: &mut fastrand::Rng) -> f32 {
    (0..12).map(|_| random.f32()).sum::<f32>() - 6.0
}

fn normals(random: &mut fastrand::Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| normal(random)).collect()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&x| x.into()).collect()
}

impl Problem {
    /// Random tensors. x = β|k|² is of the size that the integrator contracts for, with keys of 0.1 to 10 times the
    /// usual length if it is exact.
    fn new(config: EflaConfig, shape: EflaShape, seed: u64) -> Self {
        let random = &mut fastrand::Rng::with_seed(seed);
        let EflaShape { batch, heads, value_heads, tokens } = shape;
        let (key_dim, value_dim) = (config.key_dim, config.value_dim);
        let mut k = normals(random, batch * heads * tokens * key_dim);
        for row in k.chunks_exact_mut(key_dim) {
            let norm = row.iter().map(|x| x * x).sum::<f32>().sqrt().max(1e-3);
            let length = match config.integrator {
                Integrator::Exact => 10f32.powf(random.f32() * 2.0 - 1.0),
                _ => 0.4 + random.f32(),
            };
            row.iter_mut().for_each(|x| *x *= length / norm);
        }
        let state = batch * value_heads * key_dim * value_dim;
        let values = batch * value_heads * tokens * value_dim;
        Problem {
            config,
            shape,
            q: normals(random, batch * heads * tokens * key_dim),
            k,
            v: normals(random, values),
            beta: (0..batch * value_heads * tokens).map(|_| random.f32() * 0.9).collect(),
            initial_state: Some(normals(random, state)),
            d_out: normals(random, values),
            d_final_state: Some(normals(random, state)),
        }
    }

    fn state_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.value_heads, self.config.key_dim, self.config.value_dim]
    }

    /// Shapes of the gradients, in the order of NAMES.
    fn shapes(&self) -> [Vec<usize>; 5] {
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        let key = vec![batch, heads, tokens, self.config.key_dim];
        let value = vec![batch, value_heads, tokens, self.config.value_dim];
        [key.clone(), key, value, vec![batch, value_heads, tokens], self.state_shape().to_vec()]
    }

    /// The call on buffers of its own; outputs and workspace start as NaN.
    fn tensors(&self, gpu: &Gpu) -> (EflaGradients, [Tensor; 5]) {
        let up = |values: &[f32], shape: &[usize]| gpu.upload(values, shape).unwrap().view();
        let nan = |shape: &[usize]| gpu.upload(&vec![f32::NAN; shape.iter().product()], shape).unwrap();
        let [key, _, value, beta, state] = self.shapes();
        let outputs = self.shapes().map(|shape| nan(&shape));
        let plan = Efla::new(gpu, self.config).unwrap().plan_backward(&self.shape).unwrap();
        let [d_q, d_k, d_v, d_beta, d_initial_state] = outputs.each_ref().map(Tensor::view);
        let tensors = EflaGradients {
            q: up(&self.q, &key),
            k: up(&self.k, &key),
            v: up(&self.v, &value),
            beta: up(&self.beta, &beta),
            log_decay: None,
            initial_state: self.initial_state.as_ref().map(|values| up(values, &state)),
            d_out: up(&self.d_out, &value),
            d_final_state: self.d_final_state.as_ref().map(|values| up(values, &state)),
            d_q,
            d_k,
            d_v,
            d_beta,
            d_log_decay: None,
            d_initial_state: Some(d_initial_state),
            cu_seqlens: None,
            workspace: Some(nan(&[plan.workspace_bytes() as usize / 4]).view()),
        };
        (tensors, outputs)
    }

    fn run(&self) -> [Vec<f32>; 5] {
        self.run_on(gpu())
    }

    fn run_on(&self, gpu: &Gpu) -> [Vec<f32>; 5] {
        let (tensors, outputs) = self.tensors(gpu);
        let efla = Efla::new(gpu, self.config).unwrap();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        efla.backward(&mut encoder, &tensors).unwrap();
        gpu.queue().submit([encoder.finish()]);
        outputs.map(|tensor| gpu.read(&tensor).unwrap())
    }

    fn reference(&self) -> [Vec<f64>; 5] {
        let [q, k, v, beta, d_out] = [&self.q, &self.k, &self.v, &self.beta, &self.d_out].map(|x| wide(x));
        let initial_state = self.initial_state.as_deref().map(wide);
        let inputs =
            efla::Inputs { q: &q, k: &k, v: &v, beta: &beta, initial_state: initial_state.as_deref(), log_decay: None };
        let d_final_state = self.d_final_state.as_deref().map(wide);
        let gradients = efla::backward(&self.config, &self.shape, &inputs, &d_out, d_final_state.as_deref()).unwrap();
        [gradients.d_q, gradients.d_k, gradients.d_v, gradients.d_beta, gradients.d_initial_state]
    }

    /// Tokens `range` of every sequence, without its states.
    fn tokens(&self, range: std::ops::Range<usize>) -> Problem {
        let tokens = self.shape.tokens;
        let cut = |values: &[f32]| -> Vec<f32> {
            let sequences = match values.len() {
                length if length == self.beta.len() => self.shape.batch * self.shape.value_heads,
                length if length == self.q.len() => self.shape.batch * self.shape.heads,
                _ => self.shape.batch * self.shape.value_heads,
            };
            let width = values.len() / sequences / tokens;
            values
                .chunks(tokens * width)
                .flat_map(|rows| &rows[range.start * width..range.end * width])
                .copied()
                .collect()
        };
        Problem {
            shape: EflaShape { tokens: range.len(), ..self.shape },
            q: cut(&self.q),
            k: cut(&self.k),
            v: cut(&self.v),
            beta: cut(&self.beta),
            d_out: cut(&self.d_out),
            initial_state: None,
            d_final_state: None,
            ..self.clone()
        }
    }

    fn check(&self) {
        judge(&self.label(), &self.run(), &self.reference());
    }

    fn label(&self) -> String {
        let EflaConfig { key_dim, value_dim, integrator, chunk, normalize_q, normalize_k, .. } = self.config;
        let EflaShape { batch, heads, value_heads, tokens } = self.shape;
        format!(
            "{integrator:?} B{batch} H{heads} Hv{value_heads} T{tokens} D{key_dim} Dv{value_dim} chunk {chunk:?} \
             normalize {normalize_q} {normalize_k}"
        )
    }
}

fn judge_one(label: &str, name: &str, got: &[f32], want: &[f64]) -> Comparison {
    let quantity = if name == "d_beta" { Quantity::BetaGradient } else { Quantity::Gradient };
    let comparison = compare(got, want, limit(quantity, DType::F32), Scale::Tensor);
    println!("{label} {name}: rms {:.1e}, max {:.1e}", comparison.rms, comparison.max);
    comparison
}

fn judge(label: &str, got: &[Vec<f32>; 5], want: &[Vec<f64>; 5]) {
    let comparisons = [0, 1, 2, 3, 4].map(|i| judge_one(label, NAMES[i], &got[i], &want[i]));
    for (name, comparison) in NAMES.iter().zip(comparisons) {
        assert!(comparison.passed(), "{label} {name}: {comparison:?}");
    }
}

fn config(key_dim: usize, value_dim: usize, chunk: usize) -> EflaConfig {
    EflaConfig { key_dim, value_dim, chunk: Some(chunk), ..Default::default() }
}

fn shape(batch: usize, heads: usize, value_heads: usize, tokens: usize) -> EflaShape {
    EflaShape { batch, heads, value_heads, tokens }
}

/// Rows `rows` of a tensor of one sequence.
fn rows<T: Copy>(tensor: &[T], tokens: usize, rows: std::ops::Range<usize>) -> Vec<T> {
    let width = tensor.len() / tokens;
    tensor[rows.start * width..rows.end * width].to_vec()
}

#[test]
fn given_cases() {
    for name in ["efla_euler_normalized", "efla_exact_raw_keys", "efla_grouped_values", "efla_rk4"] {
        for chunk in [16, 32, 64] {
            let overrides = [("chunk".to_string(), chunk.to_string())].into();
            let case = case::Case::load(format!("tests/cases/{name}.safetensors"), &overrides).unwrap();
            let case::Operation::Efla { config, shape, .. } = case.operation else { panic!("{name} is not EFLA") };
            let get = |name: &str| case.inputs.get(name).map(|tensor| tensor.values.clone());
            let problem = Problem {
                config,
                shape,
                q: get("q").unwrap(),
                k: get("k").unwrap(),
                v: get("v").unwrap(),
                beta: get("beta").unwrap(),
                initial_state: get("initial_state"),
                d_out: get("d_out").unwrap(),
                d_final_state: get("d_final_state"),
            };
            let got = problem.run();
            let mut judged = 0;
            for (name_of, got) in NAMES.iter().zip(&got) {
                if let Some(expected) = case.expected.get(*name_of) {
                    let label = format!("{name} chunk {chunk}");
                    let comparison = judge_one(&label, name_of, got, &wide(&expected.values));
                    assert!(comparison.passed(), "{label} {name_of}: {comparison:?}");
                    judged += 1;
                }
            }
            assert!(judged >= 4, "{name} has gradients");
            judge(&format!("{name} chunk {chunk} (reference)"), &got, &problem.reference());
        }
    }
}

/// How many random cases: EFLA_BACKWARD_CASES, or 40.
#[test]
fn random_cases() {
    let count = std::env::var("EFLA_BACKWARD_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(40);
    for seed in 0..count {
        let random = &mut fastrand::Rng::with_seed(1000 + seed);
        let integrators = [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4];
        let config = EflaConfig {
            key_dim: random.usize(1..=70),
            value_dim: random.usize(1..=70),
            integrator: integrators[seed as usize % 4],
            normalize_q: random.bool(),
            normalize_k: random.bool(),
            scale: random.bool().then(|| random.f64() + 0.1),
            chunk: Some([16, 32, 64][random.usize(0..3)]),
            form: if random.bool() { Form::Chunked } else { Form::Recurrent },
            gated: false,
        };
        let heads = random.usize(1..=2);
        let shape = shape(random.usize(1..=2), heads, heads * random.usize(1..=3), random.usize(1..=150));
        let mut problem = Problem::new(config, shape, seed);
        if random.bool() {
            problem.initial_state = None;
        }
        if random.bool() {
            problem.d_final_state = None;
        }
        problem.check();
    }
}

/// Few sequences of many chunks are scanned in groups of chunks, from the first and from the last, whatever the ends of the
/// state are and whether the last group is full.
#[test]
fn scans_in_two_levels() {
    for (chunk, tokens, value_dim) in [(16, 256, 12), (16, 290, 70), (32, 530, 3)] {
        let mut problem = Problem::new(config(20, value_dim, chunk), shape(1, 1, 2, tokens), 40);
        for ends in [true, false] {
            if !ends {
                (problem.initial_state, problem.d_final_state) = (None, None);
            }
            let label = format!("two levels, chunk {chunk}, {tokens} tokens, ends {ends}");
            judge(&label, &problem.run_on(plain_gpu()), &problem.reference());
            let mut case = EflaCase::random(problem.config, problem.shape, &mut rng(41));
            if ends {
                case = case.with_initial_state(&mut rng(42));
            }
            case.judge(&case.run_on(plain_gpu()));
        }
    }
}

#[test]
fn every_size_of_row_and_chunk() {
    for (key_dim, value_dim) in [(1, 1), (1, 256), (256, 3), (33, 128), (128, 31), (192, 96), (256, 256)] {
        for chunk in [16, 32, 64] {
            Problem::new(config(key_dim, value_dim, chunk), shape(1, 1, 1, 70), 7).check();
        }
    }
    for chunk in [16, 32, 64] {
        for tokens in [1, chunk - 1, chunk, chunk + 1, 2 * chunk, 3 * chunk - 1] {
            Problem::new(config(20, 12, chunk), shape(1, 2, 2, tokens), 8).check();
        }
    }
}

#[test]
fn a_thousand_tokens_of_64() {
    for normalize_k in [false, true] {
        let config = EflaConfig { normalize_k, ..config(64, 64, 64) };
        Problem::new(config, shape(1, 1, 2, 1000), 9).check();
    }
}

/// More chunks than llvmpipe's loops go through in one dispatch: the last scan has one level.
#[test]
fn more_chunks_than_loops_have_rounds() {
    Problem::new(config(13, 5, 16), shape(1, 1, 1, 22_000), 10).check();
}

/// One chunk from a state of zeros with nearly equal keys: every token depends on all before it through T alone.
#[test]
fn path_of_the_triangular_inverse() {
    for chunk in [16, 32, 64] {
        let config = EflaConfig { integrator: Integrator::Euler, normalize_k: true, ..config(24, 16, chunk) };
        let mut problem = Problem::new(config, shape(1, 1, 1, chunk), 10);
        let first: Vec<f32> = problem.k[..24].to_vec();
        for (row, token) in problem.k.chunks_exact_mut(24).zip(0..) {
            row.iter_mut().zip(&first).for_each(|(x, first)| *x = first + *x * 0.1 * (token % 3) as f32);
        }
        // Only the last token is read.
        let length = problem.d_out.len();
        problem.d_out[..length - 16].fill(0.0);
        (problem.initial_state, problem.d_final_state) = (None, None);
        problem.check();
    }
}

/// Only the last chunk is read, and only the first is judged: everything it has came through the states.
#[test]
fn path_of_the_states() {
    for chunk in [16, 32, 64] {
        let tokens = 4 * chunk;
        let mut problem = Problem::new(config(24, 16, chunk), shape(1, 1, 1, tokens), 11);
        problem.beta.iter_mut().for_each(|beta| *beta *= 0.05);
        problem.d_out[..3 * chunk * 16].fill(0.0);
        problem.d_final_state = None;
        let (got, want) = (problem.run(), problem.reference());
        for i in 1..4 {
            let (got, want) = (rows(&got[i], tokens, 0..chunk), rows(&want[i], tokens, 0..chunk));
            assert!(want.iter().any(|x| x.abs() > 1e-6), "{} of the first chunk is not nothing", NAMES[i]);
            let comparison = judge_one("first chunk", NAMES[i], &got, &want);
            assert!(comparison.passed(), "chunk {chunk} {}: {comparison:?}", NAMES[i]);
        }
        assert!(got[0][..3 * chunk * 24].iter().all(|&x| x == 0.0), "d_q where nothing is read");
    }
}

/// One token read by a query along its key: L = scale α (q·k)(v·d), so d_k has a part along k by α(λ) alone. For
/// λ → 0 ∂α/∂λ is −β²/2.
#[test]
fn path_of_alpha() {
    let derivative = |x: f64| match x {
        // φ̄′ by its series where the closed form cancels.
        _ if x < 1e-2 => -0.5 + x / 3.0 - x * x / 8.0 + x * x * x / 30.0 - x.powi(4) / 144.0,
        _ => ((-x).exp() * (1.0 + x) - 1.0) / (x * x),
    };
    for length in [1e-12, 1e-4, 1e-2, 0.3, 1.0, 1.2, 1.3, 2.0, 5.0, 30.0, 1e4f64] {
        let config = EflaConfig { scale: Some(1.0), ..config(2, 1, 16) };
        let (beta, v, d) = (0.9f32, 1.25f32, 0.75f32);
        let k = [(0.6 * length) as f32, (0.8 * length) as f32];
        let problem = Problem {
            config,
            shape: shape(1, 1, 1, 1),
            // q·k = 0.6 |k|: the part of d_k across k has α, the part along k has α and ∂α/∂λ.
            q: vec![1.0, 0.0],
            k: k.to_vec(),
            v: vec![v],
            beta: vec![beta],
            initial_state: None,
            d_out: vec![d],
            d_final_state: None,
        };
        let got = problem.run();
        let k = k.map(f64::from);
        let [beta, v, d] = [beta, v, d].map(f64::from);
        let lambda = k[0] * k[0] + k[1] * k[1];
        let x = beta * lambda;
        let phi = if x < 1e-8 { 1.0 - x / 2.0 } else { -(-x).exp_m1() / x };
        let alpha = beta * phi;
        let slope = 2.0 * beta * beta * derivative(x) * k[0];
        let want_k = [v * d * (alpha + slope * k[0]), v * d * slope * k[1]];
        for (got, want) in got[1].iter().zip(want_k) {
            // What cancels in the first component is of the size of α.
            let error = (f64::from(*got) - want).abs() / want.abs().max(v * d * alpha * 0.1);
            assert!(error < 1e-5, "length {length}: d_k {got} is not {want}");
        }
        let want_beta = (-x).exp() * k[0] * v * d;
        let error = (f64::from(got[3][0]) - want_beta).abs() / want_beta.abs().max(1e-30);
        assert!(error < 2e-5 || want_beta.abs() < 1e-30, "length {length}: d_beta {} is not {want_beta}", got[3][0]);
        // λ alone: what the two components have in common beside α.
        let along = (f64::from(got[1][1]) - want_k[1]).abs() / want_k[1].abs().max(1e-30);
        assert!(along < 5e-6 || want_k[1].abs() < 1e-30, "length {length}: ∂α/∂λ off by {along}");
    }
}

/// Weak updates of which the state keeps nearly all, over many chunks: errors have nowhere to decay.
#[test]
fn a_state_that_persists() {
    for chunk in [16, 64] {
        let tokens = 40 * chunk;
        let config = EflaConfig { normalize_k: true, ..config(16, 16, chunk) };
        let mut problem = Problem::new(config, shape(1, 1, 1, tokens), 12);
        problem.beta.iter_mut().for_each(|beta| *beta *= 1e-3);
        let (got, want) = (problem.run(), problem.reference());
        judge(&problem.label(), &got, &want);
        // Gradients travel to the first tokens, the state to the last.
        for half in [0..tokens / 2, tokens / 2..tokens] {
            for i in 0..4 {
                let (got, want) = (rows(&got[i], tokens, half.clone()), rows(&want[i], tokens, half.clone()));
                let comparison = judge_one(&format!("{half:?}"), NAMES[i], &got, &want);
                assert!(comparison.passed(), "chunk {chunk} {half:?} {}: {comparison:?}", NAMES[i]);
            }
        }
    }
}

/// Keys of length 0, 1e-30, 1e-10 and 1e15 among ordinary ones. Every kind is judged by itself.
#[test]
fn keys_of_every_length() {
    for chunk in [16, 64] {
        for normalize_k in [false, true] {
            let tokens = 150;
            let config = EflaConfig { normalize_k, normalize_q: normalize_k, ..config(24, 20, chunk) };
            let mut problem = Problem::new(config, shape(1, 1, 1, tokens), 13);
            let lengths = [0.0, 1e-30, 1.0, 1e-10, 1.0, 1e15, 1.0];
            let kind = |token: usize| token % lengths.len();
            for (token, row) in problem.k.chunks_exact_mut(24).enumerate() {
                row.iter_mut().for_each(|x| *x *= lengths[kind(token)]);
            }
            problem.q[..24].fill(0.0);
            let (got, want) = (problem.run(), problem.reference());
            for (which, length) in lengths.iter().enumerate() {
                for i in 0..4 {
                    let width = got[i].len() / tokens;
                    let of = |at: &usize| kind(at / width) == which && (i > 0 || *at >= width);
                    let got: Vec<_> = (0..got[i].len()).filter(of).map(|at| got[i][at]).collect();
                    let want: Vec<_> = (0..want[i].len()).filter(of).map(|at| want[i][at]).collect();
                    let label = format!("chunk {chunk} normalize {normalize_k} length {length:e}");
                    let comparison = judge_one(&label, NAMES[i], &got, &want);
                    assert!(comparison.passed(), "{label} {}: {comparison:?}", NAMES[i]);
                }
            }
            let comparison = judge_one("state", NAMES[4], &got[4], &want[4]);
            assert!(comparison.passed(), "{comparison:?}");
        }
    }
}

#[test]
fn a_split_sequence_has_the_gradients_of_the_whole() {
    for (chunk, at) in [(16, 37), (64, 64), (32, 1)] {
        let mut problem = Problem::new(config(24, 16, chunk), shape(2, 1, 2, 100), 14);
        problem.beta.iter_mut().for_each(|beta| *beta *= 0.1);
        let want = problem.reference();
        let mut first = problem.tokens(0..at);
        let mut second = problem.tokens(at..100);
        first.initial_state = problem.initial_state.clone();
        second.d_final_state = problem.d_final_state.clone();
        second.initial_state = Some(final_state(&first));
        let second = second.run();
        first.d_final_state = Some(second[4].clone());
        let first = first.run();
        let joined = [0, 1, 2, 3].map(|i| -> Vec<f32> {
            let sequences = if i < 2 { 2 } else { 4 };
            let (a, b) = (first[i].len() / sequences, second[i].len() / sequences);
            (0..sequences)
                .flat_map(|s| [&first[i][s * a..(s + 1) * a], &second[i][s * b..(s + 1) * b]].concat())
                .collect()
        });
        let [d_q, d_k, d_v, d_beta] = joined;
        let [.., d_initial_state] = first;
        judge(&format!("chunk {chunk}, split at {at}"), &[d_q, d_k, d_v, d_beta, d_initial_state], &want);
    }
}

/// What the forward pass leaves.
fn final_state(problem: &Problem) -> Vec<f32> {
    let [key, _, value, beta, state] = problem.shapes();
    let gpu = gpu();
    let up = |values: &[f32], shape: &[usize]| gpu.upload(values, shape).unwrap().view();
    let final_state = gpu.zeros(&state).unwrap();
    let tensors = EflaTensors {
        initial_state: problem.initial_state.as_ref().map(|values| up(values, &state)),
        final_state: Some(final_state.view()),
        ..EflaTensors::new(
            up(&problem.q, &key),
            up(&problem.k, &key),
            up(&problem.v, &value),
            up(&problem.beta, &beta),
            gpu.zeros(&value).unwrap().view(),
        )
    };
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    Efla::new(gpu, problem.config).unwrap().forward(&mut encoder, &tensors).unwrap();
    gpu.queue().submit([encoder.finish()]);
    gpu.read(&final_state).unwrap()
}

#[test]
fn nothing_gives_exactly_nothing() {
    for normalize in [false, true] {
        let config = EflaConfig { normalize_q: normalize, normalize_k: normalize, ..config(24, 16, 16) };
        let mut problem = Problem::new(config, shape(1, 1, 2, 50), 15);
        problem.d_out.fill(0.0);
        problem.d_final_state = None;
        for (name, got) in NAMES.iter().zip(problem.run()) {
            assert!(got.iter().all(|&x| x == 0.0), "{name}");
        }
    }
}

#[test]
fn gradients_are_linear_in_what_is_given() {
    let problem = Problem::new(config(24, 16, 32), shape(1, 1, 2, 100), 16);
    let other = Problem::new(problem.config, problem.shape, 17);
    let with = |d_out: Vec<f32>, d_final_state: Vec<f32>| {
        Problem { d_out, d_final_state: Some(d_final_state), ..problem.clone() }.run()
    };
    let mix =
        |f: f32, a: &[f32], g: f32, b: &[f32]| -> Vec<f32> { a.iter().zip(b).map(|(a, b)| f * a + g * b).collect() };
    let [a, b] = [&problem, &other].map(|p| (p.d_out.clone(), p.d_final_state.clone().unwrap()));
    let of_a = with(a.0.clone(), a.1.clone());
    let of_b = with(b.0.clone(), b.1.clone());
    let of_both = with(mix(1.0, &a.0, -3.0, &b.0), mix(1.0, &a.1, -3.0, &b.1));
    let sums = [0, 1, 2, 3, 4].map(|i| wide(&mix(1.0, &of_a[i], -3.0, &of_b[i])));
    judge("a − 3b", &of_both, &sums);
    // A power of two changes no rounding.
    let of_quarter = with(mix(0.25, &a.0, 0.0, &b.0), mix(0.25, &a.1, 0.0, &b.1));
    for (name, (quarter, whole)) in NAMES.iter().zip(of_quarter.iter().zip(&of_a)) {
        assert!(quarter.iter().zip(whole).all(|(quarter, whole)| *quarter == 0.25 * whole), "{name}");
    }
}

#[test]
fn no_token() {
    let mut problem = Problem::new(config(24, 16, 16), shape(2, 1, 2, 0), 18);
    let [d_q, d_k, d_v, d_beta, d_initial_state] = problem.run();
    assert!(d_q.is_empty() && d_k.is_empty() && d_v.is_empty() && d_beta.is_empty());
    assert_eq!(Some(d_initial_state), problem.d_final_state);
    problem.d_final_state = None;
    assert!(problem.run()[4].iter().all(|&x| x == 0.0));
}

/// Queries and keys that no value head reads still get their gradient: zeros.
#[test]
fn no_value_head() {
    for normalize in [false, true] {
        let config = EflaConfig { normalize_q: normalize, normalize_k: normalize, ..config(24, 16, 16) };
        let [d_q, d_k, ..] = Problem::new(config, shape(1, 3, 0, 5), 24).run();
        assert!(d_q.len() == 3 * 5 * 24 && d_k.len() == d_q.len());
        assert!(d_q.iter().chain(&d_k).all(|&x| x == 0.0), "normalize {normalize}");

        // Packed too.
        let problem = Problem::new(config, shape(1, 3, 0, 5), 24);
        let (mut tensors, [d_q, d_k, ..]) = problem.tensors(gpu());
        tensors.cu_seqlens = Some(vec![0, 2, 5]);
        (tensors.initial_state, tensors.d_final_state, tensors.d_initial_state) = (None, None, None);
        let mut encoder = gpu().device().create_command_encoder(&Default::default());
        Efla::new(gpu(), config).unwrap().backward(&mut encoder, &tensors).unwrap();
        gpu().queue().submit([encoder.finish()]);
        for gradient in [d_q, d_k] {
            assert!(gpu().read(&gradient).unwrap().iter().all(|&x| x == 0.0), "packed, normalize {normalize}");
        }
    }
}

#[test]
fn a_repeated_run_is_bit_equal() {
    let problem = Problem::new(config(40, 36, 64), shape(1, 2, 6, 150), 19);
    let bits = |got: [Vec<f32>; 5]| got.map(|x| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>());
    let first = bits(problem.run());
    for _ in 0..3 {
        assert_eq!(first, bits(problem.run()));
    }
}

/// With wgpu's bounds checks, which would turn a stray access into a wrong number, results are the same numbers.
#[test]
fn shaders_with_checks() {
    let gpu = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    for (chunk, normalize) in [(16, true), (64, false)] {
        let config = EflaConfig { normalize_q: normalize, normalize_k: normalize, ..config(37, 21, chunk) };
        let problem = Problem::new(config, shape(1, 1, 2, 75), 23);
        judge(&format!("checked, {}", problem.label()), &problem.run_on(&gpu), &problem.reference());
    }
}

/// Everything, the workspace too, in ranges of one buffer; the state's gradient in place.
#[test]
fn one_buffer_for_everything() {
    for in_place in [false, true] {
        let problem = Problem::new(config(24, 20, 32), shape(1, 2, 4, 70), 20);
        let gpu = gpu();
        let efla = Efla::new(gpu, problem.config).unwrap();
        let plan = efla.plan_backward(&problem.shape).unwrap();
        let workspace = plan.workspace_bytes() as usize / 4;
        let shapes = problem.shapes();
        let mut data: Vec<f32> = vec![f32::NAN; workspace];
        let mut ranges = Vec::new();
        let initial = problem.initial_state.as_ref().unwrap();
        let d_final = problem.d_final_state.as_ref().unwrap();
        let inputs = [&problem.q, &problem.k, &problem.v, &problem.beta, initial, &problem.d_out, d_final];
        for values in inputs {
            // Offsets of whole vectors, as in `run`, but of no larger alignment; and NaN between the ranges.
            data.resize((data.len() + 3).next_multiple_of(4), f32::NAN);
            ranges.push(data.len() as u64);
            data.extend(values);
        }
        for shape in &shapes {
            data.resize((data.len() + 3).next_multiple_of(4), f32::NAN);
            ranges.push(data.len() as u64);
            data.resize(data.len() + shape.iter().product::<usize>(), f32::NAN);
        }
        let arena = gpu.upload(&data, &[data.len()]).unwrap();
        let view = |range: usize, shape: &[usize]| TensorView::new(arena.buffer(), ranges[range], shape);
        let [key, _, value, beta, state] = &shapes;
        let tensors = EflaGradients {
            q: view(0, key),
            k: view(1, key),
            v: view(2, value),
            beta: view(3, beta),
            log_decay: None,
            initial_state: Some(view(4, state)),
            d_out: view(5, value),
            d_final_state: Some(view(6, state)),
            d_q: view(7, key),
            d_k: view(8, key),
            d_v: view(9, value),
            d_beta: view(10, beta),
            d_log_decay: None,
            d_initial_state: Some(view(if in_place { 6 } else { 11 }, state)),
            cu_seqlens: None,
            workspace: Some(TensorView::new(arena.buffer(), 0, &[workspace])),
        };
        let call = plan.bind(&tensors).unwrap();
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        call.record(&mut encoder.begin_compute_pass(&Default::default()));
        gpu.queue().submit([encoder.finish()]);
        let after = gpu.read(&arena).unwrap();
        let mut covered = vec![false; data.len()];
        covered[..workspace].fill(true);
        for (i, want) in problem.run().iter().enumerate() {
            let start = ranges[if in_place && i == 4 { 6 } else { 7 + i }] as usize;
            let got = &after[start..start + want.len()];
            assert!(got.iter().zip(want).all(|(got, want)| got.to_bits() == want.to_bits()), "{}", NAMES[i]);
            covered[start..start + want.len()].fill(true);
        }
        let untouched = (0..data.len()).filter(|&at| !covered[at]);
        assert!(untouched.into_iter().all(|at| after[at].to_bits() == data[at].to_bits()), "written out of bounds");
    }
}

#[test]
fn strided_views() {
    let problem = Problem::new(config(24, 20, 32), shape(1, 3, 3, 50), 21);
    let gpu = gpu();
    let efla = Efla::new(gpu, problem.config).unwrap();
    let (mut tensors, outputs) = problem.tensors(gpu);
    // d_out is the same row for every token, d_k is written as [B, T, H, D].
    let row = gpu.upload(&problem.d_out[..20], &[20]).unwrap();
    tensors.d_out = TensorView::strided(row.buffer(), 0, &[1, 3, 50, 20], &[0, 0, 0, 1]);
    tensors.d_k = TensorView::strided(outputs[1].buffer(), 0, &[1, 3, 50, 24], &[3600, 24, 72, 1]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    efla.backward(&mut encoder, &tensors).unwrap();
    gpu.queue().submit([encoder.finish()]);
    let want = Problem { d_out: problem.d_out[..20].repeat(150), ..problem.clone() }.run();
    let got = gpu.read(&outputs[1]).unwrap();
    for (at, want) in want[1].iter().enumerate() {
        let (head, token, d) = (at / 1200, at / 24 % 50, at % 24);
        assert_eq!(got[token * 72 + head * 24 + d].to_bits(), want.to_bits());
    }
    assert_eq!(gpu.read(&outputs[0]).unwrap(), want[0]);
}

#[test]
fn what_is_refused() {
    let problem = Problem::new(config(24, 16, 16), shape(1, 1, 1, 20), 22);
    let efla = Efla::new(gpu(), problem.config).unwrap();
    let plan = efla.plan_backward(&problem.shape).unwrap();
    let refused = |change: &dyn Fn(&mut EflaGradients), words: &[&str]| {
        let (mut tensors, _) = problem.tensors(gpu());
        change(&mut tensors);
        let error = plan.bind(&tensors).unwrap_err().to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    };
    refused(&|t| t.d_q = t.q.clone(), &["d_q", "overlap"]);
    refused(&|t| t.d_k = t.d_q.clone(), &["d_k", "d_q", "overlap"]);
    refused(&|t| t.d_initial_state = t.initial_state.clone(), &["d_initial_state", "initial_state", "overlap"]);
    refused(&|t| t.d_beta = t.d_v.clone(), &["d_beta", "shape"]);
    refused(&|t| t.d_out = t.q.clone(), &["d_out", "shape"]);
    refused(&|t| t.d_final_state = Some(t.v.clone()), &["d_final_state", "shape"]);
    refused(&|t| t.workspace = Some(t.q.clone()), &["workspace"]);
    let error = efla.plan_backward(&shape(1, 2, 3, 20)).unwrap_err().to_string();
    assert!(error.contains("value_heads"), "{error}");
    let error = efla.plan_backward(&shape(1 << 20, 1 << 10, 1 << 10, 1 << 29)).unwrap_err().to_string();
    assert!(error.contains("workspace"), "{error}");
}
