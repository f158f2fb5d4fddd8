//! Keys, rates and steps at the ends of what float32 can hold.

use continuous_attention::{EflaConfig, EflaShape, Form, Integrator};

use crate::harness::{EflaCase, FORMS, bits, forward_limit, judge, normal, pick, rng};

const TOKENS: usize = 140;

fn case(config: EflaConfig, rng: &mut fastrand::Rng) -> EflaCase {
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: TOKENS };
    EflaCase::random(config, shape, rng)
}

fn config() -> EflaConfig {
    EflaConfig { key_dim: 24, value_dim: 8, ..Default::default() }
}

#[test]
fn keys_of_every_length() {
    let mut rng = rng(1);
    for normalize_k in [false, true] {
        for length in [1e-30, 1e-20, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e20, 1e30] {
            let config = EflaConfig { normalize_k, ..config() };
            let case = case(config, &mut rng).with_key_lengths(|| length);
            case.check_all_forms();
        }
    }
}

/// Long keys write next to nothing and wipe the initial state out. A chunk does so by a difference whose rounding is
/// relative to the state at its start: judged with as many key dimensions as tokens in a chunk, where it keeps a third.
#[test]
fn an_initial_state_under_keys_of_every_length() {
    let mut rng = rng(14);
    for normalize_k in [false, true] {
        for length in [1e-30, 1e-10, 1e-3, 1.0, 1e3, 1e10, 1e30] {
            let config = EflaConfig { key_dim: 64, normalize_k, ..config() };
            let case = case(config, &mut rng).with_key_lengths(|| length);
            case.with_initial_state(&mut rng).check_all_forms();
        }
    }
}

/// The default chunk keeps within the limits for shorter keys too.
#[test]
fn the_default_chunk_wipes_out_an_initial_state_well_enough() {
    let mut rng = rng(15);
    for key_dim in [12, 16, 17, 20, 32, 33, 48] {
        for length in [1.0, 1e3, 1e10, 1e30] {
            for form in [Form::Chunked, Form::Recurrent] {
                let config = EflaConfig { key_dim, chunk: None, form, ..config() };
                let case = case(config, &mut rng).with_key_lengths(|| length).with_initial_state(&mut rng);
                case.judge(&case.run());
            }
        }
    }
}

#[test]
fn keys_of_wildly_unequal_length() {
    let mut rng = rng(2);
    for span in [4.0, 16.0, 56.0] {
        let mut lengths = rng.fork();
        let case = case(config(), &mut rng).with_key_lengths(|| 10f64.powf((lengths.f64() - 0.5) * span));
        case.check_all_forms();
        case.with_initial_state(&mut rng).check_all_forms();
    }
}

#[test]
fn queries_of_every_length() {
    let mut rng = rng(3);
    for size in [1e-30, 1e-10, 1e10, 1e30] {
        for normalize_q in [false, true] {
            let mut case = case(EflaConfig { normalize_q, ..config() }, &mut rng);
            case.q.iter_mut().for_each(|x| *x *= size);
            case.check_all_forms();
        }
    }
}

/// The largest component dwarfs the others.
#[test]
fn norms_of_unequal_components() {
    let mut rng = rng(4);
    for normalize in [false, true] {
        for size in [1e-30, 1e-10, 1e10, 1e30] {
            let config = EflaConfig { normalize_q: normalize, normalize_k: normalize, ..config() };
            let mut case = case(config, &mut rng);
            for vector in case.k.chunks_mut(20).chain(case.q.chunks_mut(20)) {
                vector[rng.usize(..20)] *= size;
            }
            case.check_all_forms();
        }
    }
}

/// k = 0 leaves the state exactly unchanged.
#[test]
fn zero_keys() {
    let mut rng = rng(5);
    for normalize_k in [false, true] {
        for integrator in [Integrator::Exact, Integrator::Euler] {
            let config = EflaConfig { normalize_k, integrator, ..config() };
            let mut zeros = case(config, &mut rng).with_initial_state(&mut rng);
            zeros.k.fill(0.0);
            zeros.check_all_forms();
            for (form, chunk) in FORMS {
                let got = zeros.in_form(form, chunk).run();
                assert_eq!(bits(&got.final_state), bits(zeros.initial_state.as_ref().unwrap()), "{}", zeros.label());
            }
        }
        let mut some = case(EflaConfig { normalize_k, ..config() }, &mut rng).with_initial_state(&mut rng);
        some.k.chunks_mut(20).filter(|_| rng.u8(..3) == 0).for_each(|key| key.fill(0.0));
        some.q.chunks_mut(20).filter(|_| rng.u8(..3) == 0).for_each(|query| query.fill(0.0));
        some.config.normalize_q = normalize_k;
        some.check_all_forms();
    }
}

#[test]
fn identical_keys() {
    let mut rng = rng(6);
    for length in [1e-30, 1e-2, 1.0, 4.0, 1e30] {
        for noise in [0.0, 1e-6, 1e-3] {
            let mut case = case(config(), &mut rng);
            let key = normal(&mut rng, 20);
            for (at, x) in case.k.iter_mut().enumerate() {
                *x = key[at % 20] + noise * *x;
            }
            case.with_key_lengths(|| length).check_all_forms();
        }
    }
}

/// Keys along one axis: the state along it is replaced, exactly, token by token.
#[test]
fn keys_along_axes() {
    let mut rng = rng(7);
    let mut case = case(config(), &mut rng).with_initial_state(&mut rng);
    for key in case.k.chunks_mut(20) {
        key.fill(0.0);
        key[rng.usize(..20)] = pick(&mut rng, &[1.0, -1.0, 100.0, 0.01]);
    }
    case.check_all_forms();
}

#[test]
fn rates_at_their_extremes() {
    let mut rng = rng(8);
    let kinds: [fn(&mut fastrand::Rng) -> f32; 6] = [
        |_| 0.0,
        |_| 1e-30,
        |_| 1e30,
        |rng| if rng.bool() { 0.0 } else { 1.0 },
        |rng| 10f32.powf(rng.f32() * 60.0 - 30.0),
        |rng| 10f32.powf(rng.f32() * 4.0 - 2.0),
    ];
    for kind in kinds {
        for normalize_k in [false, true] {
            let mut case = case(EflaConfig { normalize_k, ..config() }, &mut rng);
            case.beta.iter_mut().for_each(|beta| *beta = kind(&mut rng));
            case.check_all_forms();
            case.with_initial_state(&mut rng).check_all_forms();
        }
    }
}

/// β = 0 writes nothing and forgets nothing.
#[test]
fn zero_rates_leave_the_state_alone() {
    let mut rng = rng(9);
    for integrator in [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4] {
        let mut case = case(EflaConfig { integrator, ..config() }, &mut rng).with_initial_state(&mut rng);
        case.beta.fill(0.0);
        for (form, chunk) in FORMS {
            let got = case.in_form(form, chunk).run();
            assert_eq!(bits(&got.final_state), bits(case.initial_state.as_ref().unwrap()), "{}", case.label());
        }
    }
}

#[test]
fn steps_around_the_change_of_branch() {
    let mut rng = rng(10);
    let near = [1.5, 1.5 - 1e-7, 1.5 + 1e-7, 1.4, 1.6, 1e-30, 1e-9, 1e-4, 0.1, 5.0, 16.0, 50.0, 88.0, 104.0, 1e4];
    for step in near {
        let case = case(config(), &mut rng).with_steps(|| step);
        case.check_all_forms();
        case.with_initial_state(&mut rng).check_all_forms();
    }
    for _ in 0..4 {
        let mut steps = rng.fork();
        case(config(), &mut rng).with_steps(|| pick(&mut steps, &near)).check_all_forms();
    }
}

/// The integrators at the ends of the range they are judged in.
#[test]
fn the_ends_of_contraction() {
    let mut rng = rng(11);
    for (integrator, ends) in [
        (Integrator::Euler, [0.1, 1.9]),
        (Integrator::RungeKutta2, [0.106, 1.894]),
        (Integrator::RungeKutta4, [0.106, 2.705]),
    ] {
        for normalize_k in [false, true] {
            let config = EflaConfig { key_dim: 64, integrator, normalize_k, ..config() };
            for step in ends {
                for length in [0.01, 1.0, 100.0] {
                    // At these ends the rounding of x itself adds up along every direction.
                    let case = case(config, &mut rng).with_key_lengths(|| length).with_steps(|| step);
                    case.with_initial_state(&mut rng).check_all_forms();
                }
            }
        }
    }
}

/// A state that forgets slowly gathers the rounding of many chunks.
#[test]
fn a_state_that_persists() {
    let mut rng = rng(12);
    for step in [1e-3, 1e-5] {
        let mut case = case(config(), &mut rng);
        let tokens = 2000;
        case.shape.tokens = tokens;
        let case = EflaCase::random(case.config, case.shape, &mut rng).with_steps(|| step).with_initial_state(&mut rng);
        let want = case.reference();
        for (form, chunk) in FORMS {
            let case = case.in_form(form, chunk);
            let (got, label) = (case.run(), case.label());
            case.judge(&got);
            let half = tokens / 2 * 8;
            let sequences = got.out.chunks(tokens * 8).zip(want.out.chunks(tokens * 8));
            for (got, want) in sequences {
                judge(&label, "last half of out", &got[half..], &want[half..], forward_limit());
            }
        }
    }
}

#[test]
fn a_long_sequence() {
    let mut rng = rng(13);
    let config = EflaConfig { key_dim: 16, value_dim: 16, normalize_q: true, ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 3001 };
    EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng).check_all_forms();
}
