//! Every option of EFLA, in both forms, at every chunk edge.

use continuous_attention::{Efla, EflaConfig, EflaShape, Form, Integrator};

use crate::harness::{
    EDGES, EflaCase, EflaOutput, FORMS, Guarded, bits, case_count, forward_limit, gpu, judge, pick, rng, submit,
};

const INTEGRATORS: [Integrator; 4] =
    [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4];

fn config(key_dim: usize, value_dim: usize) -> EflaConfig {
    EflaConfig { key_dim, value_dim, ..Default::default() }
}

fn tokens(tokens: usize) -> EflaShape {
    EflaShape { batch: 1, heads: 1, value_heads: 1, tokens }
}

/// The steps x = β|k|² at which every integrator is judged: |1 − γ| ≤ 0.9.
fn judged_step(integrator: Integrator, rng: &mut fastrand::Rng) -> f64 {
    let (low, high) = match integrator {
        Integrator::Exact => (0.0, 6.0),
        Integrator::Euler => (0.1, 1.9),
        Integrator::RungeKutta2 => (0.11, 1.89),
        Integrator::RungeKutta4 => (0.11, 2.7),
    };
    low + (high - low) * rng.f64()
}

/// A case whose steps its integrator can be judged at.
fn judged(config: EflaConfig, shape: EflaShape, rng: &mut fastrand::Rng) -> EflaCase {
    let case = EflaCase::random(config, shape, rng);
    let mut steps = rng.fork();
    case.with_key_lengths(|| 0.5 + 2.0 * rng.f64()).with_steps(|| judged_step(config.integrator, &mut steps))
}

#[test]
fn options_together() {
    let mut rng = rng(1);
    let mut turn = 0;
    for integrator in INTEGRATORS {
        for (normalize_q, normalize_k) in [(false, false), (true, false), (false, true), (true, true)] {
            for initial_state in [false, true] {
                for length in [5, 64, 70, 150] {
                    turn += 1;
                    let base = config(3 + turn % 7, 2 + turn % 5);
                    let config = EflaConfig { integrator, normalize_q, normalize_k, ..base };
                    let (heads, value_heads) = [(1, 1), (2, 4), (1, 3), (2, 2)][turn % 4];
                    let shape = EflaShape { batch: 1 + turn % 2, heads, value_heads, tokens: length };
                    let mut case = judged(config, shape, &mut rng);
                    if initial_state {
                        case = case.with_initial_state(&mut rng);
                    }
                    case.check_all_forms();
                }
            }
        }
    }
}

#[test]
fn lengths_around_chunk_edges() {
    let mut rng = rng(2);
    for length in EDGES.into_iter().chain([15, 16, 17, 47, 48, 49, 192, 193]) {
        let shape = EflaShape { value_heads: 2, ..tokens(length) };
        EflaCase::random(config(5, 4), shape, &mut rng).with_initial_state(&mut rng).check_all_forms();
    }
}

/// The state passes through, bit by bit, or starts as zeros.
#[test]
fn no_token() {
    let mut rng = rng(3);
    for (key_dim, value_dim) in [(5, 4), (33, 65), (100, 7), (256, 256)] {
        let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 0 };
        let fresh = EflaCase::random(config(key_dim, value_dim), shape, &mut rng);
        let resumed = fresh.clone().with_initial_state(&mut rng);
        for (form, chunk) in FORMS {
            let got = fresh.in_form(form, chunk).run();
            assert!(got.out.is_empty());
            assert!(got.final_state.iter().all(|x| x.to_bits() == 0), "{}", fresh.label());
            let got = resumed.in_form(form, chunk).run();
            assert_eq!(bits(&got.final_state), bits(resumed.initial_state.as_ref().unwrap()), "{}", resumed.label());
        }
    }
}

#[test]
fn no_sequence() {
    let mut rng = rng(4);
    let base = EflaShape { batch: 2, heads: 2, value_heads: 2, tokens: 3 };
    for shape in [
        EflaShape { batch: 0, ..base },
        EflaShape { heads: 0, value_heads: 0, ..base },
        EflaShape { value_heads: 0, ..base },
        EflaShape { batch: 0, tokens: 0, ..base },
    ] {
        for initial_state in [false, true] {
            for (form, chunk) in FORMS {
                let mut case = EflaCase::random(config(5, 4), shape, &mut rng);
                if initial_state {
                    case = case.with_initial_state(&mut rng);
                }
                let got = case.in_form(form, chunk).run();
                assert!(got.out.is_empty() && got.final_state.is_empty());
            }
        }
    }
}

#[test]
fn key_dims_around_tile_edges() {
    let mut rng = rng(5);
    for key_dim in EDGES {
        let config = EflaConfig { normalize_k: key_dim % 2 == 0, ..config(key_dim, 5) };
        EflaCase::random(config, tokens(70), &mut rng).with_initial_state(&mut rng).check_all_forms();
    }
}

#[test]
fn value_dims_around_tile_edges() {
    let mut rng = rng(6);
    for value_dim in EDGES {
        EflaCase::random(config(5, value_dim), tokens(70), &mut rng).with_initial_state(&mut rng).check_all_forms();
    }
}

#[test]
fn unequal_and_large_dims() {
    let mut rng = rng(7);
    for (key_dim, value_dim) in [(256, 256), (255, 1), (1, 255), (65, 129), (129, 65), (64, 64), (1, 1)] {
        let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 67 };
        EflaCase::random(config(key_dim, value_dim), shape, &mut rng).with_initial_state(&mut rng).check_all_forms();
    }
}

#[test]
fn scales() {
    let mut rng = rng(8);
    for scale in [0.0, -0.7, 1e-3, 3.0] {
        let config = EflaConfig { scale: Some(scale), ..config(6, 5) };
        EflaCase::random(config, tokens(50), &mut rng).check_all_forms();
    }
}

#[test]
fn many_heads_and_sequences() {
    let mut rng = rng(9);
    for (batch, heads, value_heads) in [(1, 1, 32), (7, 3, 6), (3, 5, 5), (33, 1, 2)] {
        let shape = EflaShape { batch, heads, value_heads, tokens: 20 };
        EflaCase::random(config(4, 3), shape, &mut rng).with_initial_state(&mut rng).check_all_forms();
    }
}

fn draw(rng: &mut fastrand::Rng) -> EflaCase {
    let dim = |rng: &mut fastrand::Rng| if rng.u8(..4) == 0 { pick(rng, &EDGES) } else { rng.usize(1..=40) };
    let heads = rng.usize(1..=3);
    let config = EflaConfig {
        key_dim: dim(rng),
        value_dim: dim(rng),
        integrator: pick(rng, &INTEGRATORS),
        normalize_q: rng.bool(),
        normalize_k: rng.bool(),
        scale: pick(rng, &[None, None, Some(0.2), Some(1.0), Some(-0.3)]),
        chunk: None,
        form: Form::Chunked,
        gated: false,
    };
    let length = if rng.bool() { pick(rng, &EDGES) } else { rng.usize(..200) };
    let value_heads = heads * rng.usize(1..=3);
    let shape = EflaShape { batch: rng.usize(1..=3), heads, value_heads, tokens: length };
    let mut case = judged(config, shape, rng);
    if rng.bool() {
        case = case.with_initial_state(rng);
    }
    case
}

#[test]
fn random_cases() {
    for seed in 0..case_count(30) {
        println!("seed {seed}");
        draw(&mut rng(2000 + seed as u64)).check_all_forms();
    }
}

/// A measured chunk length is one that can be configured, is kept, and gives what that gives.
#[test]
fn a_measured_chunk() {
    let gpu = gpu();
    let config = config(24, 16);
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 100 };
    let efla = Efla::measured(gpu, config, &shape).unwrap();
    assert!([16, 32, 64].contains(&efla.config().chunk.unwrap()));
    for _ in 0..3 {
        assert_eq!(Efla::measured(gpu, config, &shape).unwrap().config(), efla.config());
    }
    let case = EflaCase::random(*efla.config(), shape, &mut rng(30));
    case.judge(&case.run());
    let configured = EflaConfig { chunk: Some(16), ..config };
    assert_eq!(Efla::measured(gpu, configured, &shape).unwrap().config(), &configured);
    let recurrent = EflaConfig { form: Form::Recurrent, ..config };
    assert_eq!(Efla::measured(gpu, recurrent, &shape).unwrap().config(), &recurrent);
    // Nothing to measure is no reason to fail.
    Efla::measured(gpu, config, &EflaShape { tokens: 0, ..shape }).unwrap();
    let error = Efla::measured(gpu, EflaConfig { key_dim: 0, ..config }, &shape).unwrap_err().to_string();
    assert!(error.contains("key_dim"), "{error}");
}

/// Token by token over more tokens than one dispatch does. llvmpipe used to leave rows unwritten from where an invocation
/// had been through 65,535 iterations. Found by `demo -- soak`.
#[test]
fn long_sequences_token_by_token() {
    for (initial, key_dim) in [(false, 149), (true, 256)] {
        let config =
            EflaConfig { key_dim, value_dim: 20, form: Form::Recurrent, normalize_k: true, ..Default::default() };
        let shape = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: 900 };
        let mut rng = rng(7);
        let case = EflaCase::random(config, shape, &mut rng);
        let case = if initial { case.with_initial_state(&mut rng) } else { case };
        case.judge_against(&case.run(), &case.reference());
        // With nowhere to leave the state it goes through the workspace.
        let out = Guarded::new(gpu(), Guarded::ODD, &case.out_shape());
        let plan = Efla::new(gpu(), config).unwrap().plan(&shape).unwrap();
        submit(gpu(), &plan.bind(&case.tensors(gpu(), &out)).unwrap());
        let label = case.label();
        judge(&label, "out", &out.read(gpu(), &label), &case.reference().out, forward_limit());
    }
}

/// More chunks than llvmpipe's loops go through in one dispatch; packed sequences are not scanned in groups.
#[test]
fn long_sequences_chunk_by_chunk() {
    let config = EflaConfig { key_dim: 13, value_dim: 5, chunk: Some(16), ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 22_000 };
    let case = EflaCase::random(config, shape, &mut rng(8));
    let out = Guarded::new(gpu(), Guarded::ODD, &case.out_shape());
    let mut tensors = case.tensors(gpu(), &out);
    tensors.cu_seqlens = Some(vec![0, shape.tokens]);
    let final_state = Guarded::new(gpu(), Guarded::ODD, &case.state_shape());
    tensors.final_state = Some(final_state.view());
    let plan = Efla::new(gpu(), config).unwrap().plan_packed(&shape, &[0, shape.tokens]).unwrap();
    submit(gpu(), &plan.bind(&tensors).unwrap());
    let label = case.label();
    let (out, final_state) = (out.read(gpu(), &label), final_state.read(gpu(), &label));
    case.judge(&EflaOutput { out, final_state });
}
