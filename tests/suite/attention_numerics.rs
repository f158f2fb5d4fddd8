//! Logits, steps and intervals at the ends of what float32 can hold.

use continuous_attention::{AttentionConfig, AttentionShape, Method, Sink};

use crate::harness::{AttentionCase, EDGES, forward_limit, normal, pick, rng, widen};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];

/// One head whose logits are exactly the given ones in every row: D = 1, q = 1, scale 1. Node 0 is the first of them
/// with [`Sink::Given`].
fn with_logits(logits: &[f32], config: AttentionConfig, queries: usize, rng: &mut fastrand::Rng) -> AttentionCase {
    let config = AttentionConfig { head_dim: 1, value_dim: 5, scale: Some(1.0), ..config };
    let given = config.sink == Sink::Given;
    let nodes = &logits[usize::from(given)..];
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries, keys: nodes.len() };
    let mut case = AttentionCase::random(config, shape, rng);
    case.q.fill(1.0);
    case.k = nodes.to_vec();
    case.sink_k = given.then(|| vec![logits[0]]);
    case
}

/// All four sinks, causal and not, and ordinary attention.
fn configs() -> Vec<AttentionConfig> {
    let mut configs = Vec::new();
    for causal in [true, false] {
        configs.extend(SINKS.map(|sink| AttentionConfig { causal, sink, ..Default::default() }));
        let sink = Sink::None;
        configs.push(AttentionConfig { causal, sink, method: Method::Softmax, ..Default::default() });
    }
    configs
}

/// Checks logits that are exact and whose results do not depend on the rounding of their differences: the limit is not
/// widened by their size.
fn check_exact(logits: &[f32], config: AttentionConfig, rng: &mut fastrand::Rng) {
    with_logits(logits, config, logits.len(), rng).check_within(forward_limit());
}

#[test]
fn equal_logits() {
    let mut rng = rng(1);
    for logit in [0.0, 1.0, -1.0, 89.0, -104.0, 1e4, -1e4, 3e30, -3e30, -1e32, 1e32, -1e38, 1e38] {
        for config in configs() {
            // The article's sink has the logit 0: far below or above the others it has a test of its own.
            if config.sink != Sink::Zero || logit == 0.0 {
                check_exact(&[logit; 70], config, &mut rng);
            }
        }
    }
}

#[test]
fn one_outlier() {
    let mut rng = rng(2);
    for size in [1e2, 1e4, 1e6, 1e10, 1e15, 1e18] {
        for size in [size, -size] {
            for at in [0, 1, 31, 32, 33, 69] {
                for config in configs() {
                    let mut logits = [0.0; 70];
                    logits[at] = size;
                    check_exact(&logits, config, &mut rng);
                }
            }
        }
    }
}

#[test]
fn opposite_logits() {
    let mut rng = rng(3);
    for size in [50.0, 1e4, 1e8, 1e18] {
        for period in [2, 3, 5] {
            for config in configs() {
                let logits: Vec<f32> = (0..70).map(|at| if at % period == 0 { -size } else { size }).collect();
                check_exact(&logits, config, &mut rng);
            }
        }
    }
}

#[test]
fn the_zero_sink_far_from_the_tokens() {
    let mut rng = rng(4);
    for logit in [-1e18, -1e6, -200.0, -90.0, 90.0, 200.0, 1e6, 1e18] {
        for causal in [true, false] {
            check_exact(&[logit; 40], AttentionConfig { causal, ..Default::default() }, &mut rng);
        }
    }
}

/// Steps whose square is beyond float32.
#[test]
fn steps_beyond_the_square_root_of_float32() {
    let mut rng = rng(5);
    for size in [1e20, 1e25, 1e32] {
        for config in configs() {
            for size in [size, -size] {
                let mut logits = [0.0; 70];
                logits[33] = size;
                check_exact(&logits, config, &mut rng);
                let falling: Vec<f32> = (0..70).map(|at| -size * at as f32).collect();
                check_exact(&falling, config, &mut rng);
            }
        }
    }
}

#[test]
fn steps_around_the_change_of_branch() {
    let mut rng = rng(6);
    let edge = 1.5f32;
    let near = [edge, edge.next_down(), edge.next_up(), 1.4, 1.6, 0.0, f32::MIN_POSITIVE, 1e-30, 1e-7, 1e-3, 0.1, 2.5];
    for step in near {
        for config in configs() {
            // Up and down again, so that no logit gets large.
            let logits: Vec<f32> = (0..70).map(|at| if at % 2 == 0 { 0.0 } else { step }).collect();
            check_exact(&logits, config, &mut rng);
            let logits: Vec<f32> = (0..70).map(|at| if at % 2 == 0 { 0.0 } else { -step }).collect();
            check_exact(&logits, config, &mut rng);
        }
    }
    for _ in 0..20 {
        let mut logit = 0.0;
        let logits: Vec<f32> = (0..70)
            .map(|_| {
                logit += pick(&mut rng, &near) * if logit > 0.0 { -1.0 } else { 1.0 };
                logit
            })
            .collect();
        for config in configs() {
            check_exact(&logits, config, &mut rng);
        }
    }
}

#[test]
fn random_logits_of_every_size() {
    let mut rng = rng(7);
    for size in [1e-4, 1.0, 10.0, 100.0, 1e3, 1e4, 1e6] {
        for config in configs() {
            let logits: Vec<f32> = normal(&mut rng, 100).iter().map(|x| x * size).collect();
            with_logits(&logits, config, 100, &mut rng).check();
        }
    }
}

/// From one tile to the next the maximum only rises, only falls, or jumps.
#[test]
fn rising_and_falling_maxima() {
    let mut rng = rng(8);
    let shapes: [fn(f32) -> f32; 4] =
        [|x| x, |x| -x, |x| (x * 0.7).sin() * x, |x| if x as u32 % 33 == 32 { x } else { -x }];
    for logit in shapes {
        for slope in [0.05, 1.0, 30.0] {
            for config in configs() {
                let logits: Vec<f32> = (0..130).map(|at| logit(at as f32) * slope).collect();
                with_logits(&logits, config, 130, &mut rng).check();
            }
        }
    }
}

#[test]
fn intervals_at_their_extremes() {
    let mut rng = rng(9);
    let kinds: [fn(&mut fastrand::Rng) -> f32; 7] = [
        |_| 1e-30,
        |_| 0.0,
        |_| 1e30,
        |rng| if rng.u8(..3) == 0 { 0.0 } else { 1.0 },
        |rng| if rng.u8(..20) == 0 { 1.0 } else { 0.0 },
        |rng| 10f32.powf(rng.f32() * 40.0 - 20.0),
        |rng| 10f32.powf(rng.f32() * 6.0 - 3.0),
    ];
    for kind in kinds {
        for sink in SINKS {
            for causal in [true, false] {
                for window in [None, Some(3), Some(33)] {
                    let config =
                        AttentionConfig { head_dim: 8, value_dim: 8, sink, causal, window, ..Default::default() };
                    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 70, keys: 75 };
                    let mut case = AttentionCase::random(config, shape, &mut rng);
                    case.intervals = Some((0..2 * 75).map(|_| kind(&mut rng)).collect());
                    case.check();
                }
            }
        }
    }
}

/// A segment of length 0 joins two nodes that the row reads from either side only.
#[test]
fn huge_logits_at_inactive_segments() {
    let mut rng = rng(10);
    for logit in [1e4, -1e4, 1e18, -1e18, 1e38] {
        for sink in [Sink::First, Sink::None, Sink::Zero] {
            for causal in [true, false] {
                let config = AttentionConfig { sink, causal, ..Default::default() };
                let mut logits = vec![0.0f32; 100];
                // Token 41 (at index 40) belongs to no active segment.
                logits[40] = logit;
                let mut case = with_logits(&logits, config, 100, &mut rng);
                let mut intervals = vec![1.0; 100];
                intervals[40] = 0.0;
                intervals[41] = 0.0;
                case.intervals = Some(intervals);
                case.check_within(forward_limit());
                // An inactive segment may even be steeper than float32 can say.
                case.k[40] = logit.signum() * 3e38;
                case.k[41] = -case.k[40];
                case.intervals.as_mut().unwrap()[42] = 0.0;
                case.check_within(forward_limit());
            }
        }
    }
}

#[test]
fn only_the_last_segment_is_active() {
    let mut rng = rng(11);
    for logit in [0.0, -1e4, -1e30] {
        let mut case = with_logits(&[logit; 66], AttentionConfig { causal: false, ..Default::default() }, 4, &mut rng);
        let mut intervals = vec![0.0; 66];
        intervals[65] = 1.0;
        case.intervals = Some(intervals);
        case.check_within(forward_limit());
    }
}

/// Rows with one node return its value, rows without one return 0; lse is −∞ for both.
#[test]
fn rows_with_one_node_or_none() {
    let mut rng = rng(12);
    for sink in SINKS {
        for (queries, keys) in [(9, 4), (40, 1), (65, 32), (5, 0), (1, 0), (40, 0), (1, 1)] {
            for causal in [true, false] {
                for intervals in [false, true] {
                    let config = AttentionConfig { head_dim: 8, value_dim: 8, sink, causal, ..Default::default() };
                    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 2, queries, keys };
                    let mut case = AttentionCase::random(config, shape, &mut rng);
                    if intervals {
                        case = case.with_intervals(&mut rng);
                    }
                    let got = case.run();
                    case.judge(&got, case.limit());
                    let last =
                        |row: usize| if causal { row as i64 + 1 + keys as i64 - queries as i64 } else { keys as i64 };
                    for row in 0..queries {
                        let (out, lse) = (&got.out[row * 8..row * 8 + 8], got.lse[row]);
                        let expected = match (sink, last(row)) {
                            (_, last) if last < 0 => [0.0; 8],
                            (Sink::Given, 0) => case.sink_v.as_ref().unwrap()[..8].try_into().unwrap(),
                            (Sink::None, 1) => case.v[..8].try_into().unwrap(),
                            (_, 0) => [0.0; 8],
                            _ => continue,
                        };
                        assert_eq!(out, expected, "row {row} of {}", case.label());
                        assert_eq!(lse, f32::NEG_INFINITY, "row {row} of {}", case.label());
                    }
                }
            }
        }
    }
}

#[test]
fn nothing_to_compute() {
    let mut rng = rng(13);
    for sink in SINKS {
        let config = AttentionConfig { head_dim: 3, value_dim: 4, sink, ..Default::default() };
        let base = AttentionShape { batch: 2, heads: 2, kv_heads: 2, queries: 3, keys: 5 };
        for shape in [
            AttentionShape { batch: 0, ..base },
            AttentionShape { heads: 0, kv_heads: 0, ..base },
            AttentionShape { heads: 0, ..base },
            AttentionShape { queries: 0, ..base },
            AttentionShape { queries: 0, keys: 0, ..base },
        ] {
            for intervals in [false, true] {
                let mut case = AttentionCase::random(config, shape, &mut rng);
                if intervals {
                    case = case.with_intervals(&mut rng);
                }
                let got = case.run();
                assert!(got.out.is_empty() && got.lse.is_empty());
            }
        }
    }
}

#[test]
fn no_key_but_intervals() {
    let mut rng = rng(15);
    for sink in SINKS {
        for causal in [false, true] {
            let config = AttentionConfig { head_dim: 8, value_dim: 8, sink, causal, ..Default::default() };
            let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 2, queries: 3, keys: 0 };
            AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng).check();
        }
    }
}

#[test]
fn zero_and_identical_tensors() {
    let mut rng = rng(14);
    for config in configs() {
        let config = AttentionConfig { head_dim: 7, value_dim: 6, ..config };
        let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 50, keys: 60 };
        let clean = AttentionCase::random(config, shape, &mut rng);
        let mut case = clean.clone();
        case.q.fill(0.0);
        case.check();
        let mut case = clean.clone();
        case.v.fill(0.0);
        case.check();
        let mut case = clean.clone();
        case.k = clean.k[..7].repeat(60);
        case.check();
    }
}

#[test]
fn a_long_sequence() {
    let mut rng = rng(15);
    for sink in [Sink::Zero, Sink::Given] {
        let config = AttentionConfig { head_dim: 16, value_dim: 16, sink, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 3001, keys: 3001 };
        AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng).check();
    }
}

/// The mean of values with a large common part: the sum of the weights and the weighted sum have to agree.
#[test]
fn values_with_a_common_offset() {
    let mut rng = rng(16);
    for &keys in &EDGES[..13] {
        let config = AttentionConfig { head_dim: 4, value_dim: 3, sink: Sink::First, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: keys, keys };
        let mut case = AttentionCase::random(config, shape, &mut rng);
        case.v.fill(1000.0);
        let got = case.run();
        case.judge(&got, case.limit());
        let want = widen(&got.out);
        assert!(want.iter().all(|out| (out - 1000.0).abs() < 1e-3), "keys = {keys}: {:?}", &got.out);
    }
}
