//! NaN and infinities spoil the rows that see them, and no other.

use continuous_attention::reference::attention::visible_nodes;
use continuous_attention::{AttentionConfig, AttentionShape, EflaConfig, EflaShape, Method, Sink};

use crate::harness::{AttentionCase, AttentionOutput, EflaCase, EflaOutput, FORMS, bits, rng};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];
const BAD: [f32; 3] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY];
const KEYS: usize = 75;
const QUERIES: usize = 70;
// Multiples of 8: on adapters that have them the kernels of one subgroup a workgroup run.
const HEAD_DIM: usize = 8;
const VALUE_DIM: usize = 8;

fn configs() -> Vec<AttentionConfig> {
    let base = AttentionConfig { head_dim: HEAD_DIM, value_dim: VALUE_DIM, ..Default::default() };
    let mut configs = Vec::new();
    for window in [None, Some(9)] {
        configs.extend(SINKS.map(|sink| AttentionConfig { sink, window, ..base }));
        configs.push(AttentionConfig { sink: Sink::None, method: Method::Softmax, window, ..base });
    }
    configs
}

/// The nodes that hold token `token` (from 0), as a row that sees up to `last` reads them.
fn sees(config: &AttentionConfig, shape: &AttentionShape, row: usize, token: usize) -> bool {
    let Some((first, last)) = visible_nodes(config, shape, row) else { return false };
    let copied = config.sink == Sink::First && token == 0 && first == 0;
    copied || (first..=last).contains(&(token + 1))
}

fn row(output: &AttentionOutput, row: usize) -> (&[f32], f32) {
    (&output.out[row * VALUE_DIM..(row + 1) * VALUE_DIM], output.lse[row])
}

#[test]
fn only_rows_that_see_a_bad_token_are_spoiled() {
    let mut rng = rng(1);
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: QUERIES, keys: KEYS };
    for config in configs() {
        let case = AttentionCase::random(config, shape, &mut rng);
        let clean = case.run();
        for token in [0, 1, 5, 30, 31, 32, 40, 63, 64, KEYS - 1] {
            for bad in BAD {
                for in_values in [false, true] {
                    let mut spoiled = case.clone();
                    match in_values {
                        true => spoiled.v[token * VALUE_DIM + 2] = bad,
                        false => spoiled.k[token * HEAD_DIM + 1] = bad,
                    }
                    let got = spoiled.run();
                    let mut seeing = 0;
                    for at in 0..QUERIES {
                        let ((out, lse), (clean_out, clean_lse)) = (row(&got, at), row(&clean, at));
                        let label = format!("row {at}, {bad} in token {token}, value {in_values}, {}", case.label());
                        if !sees(&config, &shape, at, token) {
                            assert_eq!(bits(out), bits(clean_out), "{label}");
                            assert_eq!(lse.to_bits(), clean_lse.to_bits(), "{label}");
                            continue;
                        }
                        seeing += 1;
                        if in_values {
                            // One column of the values: the others and the weights are untouched.
                            assert!(!out[2].is_finite(), "{label}: {out:?}");
                            assert_eq!(lse.to_bits(), clean_lse.to_bits(), "{label}");
                            for column in [0, 1, 3] {
                                assert_eq!(out[column].to_bits(), clean_out[column].to_bits(), "{label}");
                            }
                        } else if bad.is_nan() {
                            let one_node = clean_lse == f32::NEG_INFINITY;
                            assert!(one_node || (out.iter().all(|x| x.is_nan()) && lse.is_nan()), "{label}: {out:?}");
                        }
                    }
                    assert!(seeing > 0);
                }
            }
        }
    }
}

#[test]
fn only_rows_that_see_a_bad_interval_are_spoiled() {
    let mut rng = rng(2);
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: QUERIES, keys: KEYS };
    for config in configs() {
        if config.method == Method::Softmax {
            continue;
        }
        let case = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
        let clean = case.run();
        for at in [0, 1, 5, 30, 31, 32, 33, 63, 64, KEYS - 1] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -1.0] {
                let mut spoiled = case.clone();
                spoiled.intervals.as_mut().unwrap()[at] = bad;
                let got = spoiled.run();
                for query in 0..QUERIES {
                    // Entry i − 1 is the length of segment i, from node i − 1 to node i.
                    let visible = visible_nodes(&config, &shape, query);
                    if visible.is_some_and(|(first, last)| first <= at && at < last) {
                        continue;
                    }
                    let label = format!("row {query}, {bad} in interval {at}, {}", case.label());
                    assert_eq!(bits(row(&got, query).0), bits(row(&clean, query).0), "{label}");
                    assert_eq!(row(&got, query).1.to_bits(), row(&clean, query).1.to_bits(), "{label}");
                }
            }
        }
    }
}

#[test]
fn a_bad_query_spoils_its_row_only() {
    let mut rng = rng(3);
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: QUERIES, keys: KEYS };
    for config in configs() {
        let case = AttentionCase::random(config, shape, &mut rng);
        let clean = case.run();
        for at in [7, 31, 32, QUERIES - 1] {
            let mut spoiled = case.clone();
            spoiled.q[at * HEAD_DIM + 3] = f32::NAN;
            let got = spoiled.run();
            for query in 0..QUERIES {
                let equal = bits(row(&got, query).0) == bits(row(&clean, query).0);
                assert_eq!(equal, query != at, "row {query}, NaN in query {at}, {}", case.label());
            }
            assert!(row(&got, at).0.iter().all(|x| x.is_nan()) && row(&got, at).1.is_nan());
        }
    }
}

#[test]
fn bad_sinks_spoil_the_rows_that_see_them() {
    let mut rng = rng(4);
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: QUERIES, keys: KEYS };
    let base = AttentionConfig { head_dim: HEAD_DIM, value_dim: VALUE_DIM, sink: Sink::Given, ..Default::default() };
    for window in [None, Some(40)] {
        let config = AttentionConfig { window, ..base };
        let case = AttentionCase::random(config, shape, &mut rng);
        let clean = case.run();
        let mut spoiled = case.clone();
        spoiled.sink_k.as_mut().unwrap().fill(f32::NAN);
        spoiled.sink_v.as_mut().unwrap().fill(f32::NAN);
        let got = spoiled.run();
        for query in 0..QUERIES {
            let sees = visible_nodes(&config, &shape, query).is_some_and(|(first, _)| first == 0);
            let equal = bits(row(&got, query).0) == bits(row(&clean, query).0);
            assert_eq!(equal, !sees, "row {query} of {}", case.label());
        }
    }
}

/// Sequences and heads are strangers to each other, whatever one of them holds.
#[test]
fn heads_and_sequences_are_isolated() {
    let mut rng = rng(5);
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 40, keys: 45 };
    for config in configs() {
        let continuous = config.method == Method::Continuous;
        let mut case = AttentionCase::random(config, shape, &mut rng).with_sink_per_sequence(&mut rng);
        if continuous {
            case = case.with_intervals(&mut rng);
        }
        let clean = case.run();
        for (batch, kv_head) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let mut spoiled = case.clone();
            let unit = batch * 2 + kv_head;
            spoiled.k.chunks_mut(45 * HEAD_DIM).nth(unit).unwrap().fill(f32::NAN);
            spoiled.v.chunks_mut(45 * VALUE_DIM).nth(unit).unwrap().fill(f32::NAN);
            let got = spoiled.run();
            for head in 0..8 {
                let spoiled = head / 2 == unit;
                let range = head * 40 * VALUE_DIM..(head + 1) * 40 * VALUE_DIM;
                let (got, clean) = (&got.out[range.clone()], &clean.out[range]);
                let label = format!("head {head}, NaN in sequence {batch}, kv head {kv_head} of {}", case.label());
                assert_eq!(bits(got) != bits(clean), spoiled, "{label}");
            }
        }
        if let Some(lengths) = &case.intervals {
            let mut spoiled = case.clone();
            let mut lengths = lengths.clone();
            lengths[45..].fill(f32::NAN);
            spoiled.intervals = Some(lengths);
            let half = clean.out.len() / 2;
            assert_eq!(bits(&spoiled.run().out[..half]), bits(&clean.out[..half]), "{}", case.label());
        }
    }
}

const TOKENS: usize = 100;

fn efla_case(rng: &mut fastrand::Rng) -> EflaCase {
    let config = EflaConfig { key_dim: 24, value_dim: 8, ..Default::default() };
    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: TOKENS };
    EflaCase::random(config, shape, rng).with_initial_state(rng)
}

/// Which rows of one sequence differ from the clean run.
fn spoiled_rows(got: &EflaOutput, clean: &EflaOutput, sequence: usize) -> Vec<usize> {
    let rows =
        |output: &EflaOutput| output.out.chunks(8).skip(sequence * TOKENS).take(TOKENS).map(bits).collect::<Vec<_>>();
    let (got, clean) = (rows(got), rows(clean));
    (0..TOKENS).filter(|&row| got[row] != clean[row]).collect()
}

#[test]
fn a_bad_token_spoils_its_efla_sequence_from_there_on() {
    let mut rng = rng(6);
    let case = efla_case(&mut rng);
    for normalize_k in [false, true] {
        for (form, chunk) in FORMS {
            let mut case = case.in_form(form, chunk);
            case.config.normalize_k = normalize_k;
            let clean = case.run();
            for token in [0, 1, 15, 16, 31, 33, 63, 70, TOKENS - 1] {
                for name in ["q", "k", "v", "beta"] {
                    let mut spoiled = case.clone();
                    // Query/key head 1 of sequence 0 serves value heads 2 and 3; v and beta belong to value head 2.
                    let (tensor, at) = match name {
                        "q" => (&mut spoiled.q, (TOKENS + token) * 24 + 4),
                        "k" => (&mut spoiled.k, (TOKENS + token) * 24 + 4),
                        "v" => (&mut spoiled.v, (2 * TOKENS + token) * 8 + 4),
                        _ => (&mut spoiled.beta, 2 * TOKENS + token),
                    };
                    tensor[at] = f32::NAN;
                    let got = spoiled.run();
                    for sequence in 0..8 {
                        let reached = match name {
                            "q" | "k" => sequence == 2 || sequence == 3,
                            _ => sequence == 2,
                        };
                        let expected: Vec<usize> = match (reached, name) {
                            (false, _) => vec![],
                            (true, "q") => vec![token],
                            (true, _) => (token..TOKENS).collect(),
                        };
                        let label = format!("NaN in {name} of token {token}, sequence {sequence}, {}", case.label());
                        assert_eq!(spoiled_rows(&got, &clean, sequence), expected, "{label}");
                        let state = sequence * 192..(sequence + 1) * 192;
                        let (state, clean) = (&got.final_state[state.clone()], &clean.final_state[state]);
                        let state_spoiled = reached && name != "q";
                        assert_eq!(bits(state) != bits(clean), state_spoiled, "final state, {label}");
                        assert_eq!(state.iter().any(|x| x.is_nan()), state_spoiled, "final state, {label}");
                    }
                }
            }
        }
    }
}

/// A value column never meets another one.
#[test]
fn a_bad_value_stays_in_its_column() {
    let mut rng = rng(7);
    let case = efla_case(&mut rng);
    for (form, chunk) in FORMS {
        let case = case.in_form(form, chunk);
        let clean = case.run();
        for (bad, token) in BAD.into_iter().zip([39, 41, 42]) {
            let mut spoiled = case.clone();
            spoiled.v[token * 8 + 3] = bad;
            let got = spoiled.run();
            for (at, (got, clean)) in got.out.iter().zip(&clean.out).enumerate() {
                let reached = at < TOKENS * 8 && at / 8 >= token && at % 8 == 3;
                let label = format!("row {}, column {}, {bad}, {}", at / 8, at % 8, case.label());
                assert_eq!(got.to_bits() != clean.to_bits(), reached, "{label}");
            }
        }
    }
}

#[test]
fn a_bad_initial_state_stays_in_its_sequence() {
    let mut rng = rng(8);
    let case = efla_case(&mut rng);
    for (form, chunk) in FORMS {
        let case = case.in_form(form, chunk);
        let clean = case.run();
        let mut spoiled = case.clone();
        spoiled.initial_state.as_mut().unwrap()[3 * 192..4 * 192].fill(f32::NAN);
        let got = spoiled.run();
        for sequence in 0..8 {
            let expected = if sequence == 3 { TOKENS } else { 0 };
            assert_eq!(spoiled_rows(&got, &clean, sequence).len(), expected, "sequence {sequence}, {}", case.label());
        }
    }
}
