//! Nothing a row does not see can move a bit of it.

use continuous_attention::reference::attention::visible_nodes;
use continuous_attention::{AttentionConfig, AttentionShape, EflaConfig, EflaShape, Method, Sink};

use crate::harness::{AttentionCase, EflaCase, FORMS, bits, normal, rng};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];
const KEYS: usize = 97;

fn configs() -> Vec<AttentionConfig> {
    let base = AttentionConfig { head_dim: 8, value_dim: 8, ..Default::default() };
    let mut configs = Vec::new();
    for window in [None, Some(1), Some(7), Some(33)] {
        configs.extend(SINKS.map(|sink| AttentionConfig { sink, window, ..base }));
        configs.push(AttentionConfig { sink: Sink::None, method: Method::Softmax, window, ..base });
    }
    configs
}

/// Compares the rows of two runs: those for which `same` holds must not differ in a bit, some of the others must.
fn compare_rows(
    case: &AttentionCase,
    changed: &AttentionCase,
    what: &str,
    same: impl Fn(Option<(usize, usize)>) -> bool,
) {
    let (before, after) = (case.run(), changed.run());
    let mut seen = [0, 0];
    let width = case.config.value_dim;
    for (row, (lse, changed_lse)) in before.lse.iter().zip(&after.lse).enumerate() {
        let range = row * width..(row + 1) * width;
        let equal =
            bits(&before.out[range.clone()]) == bits(&after.out[range]) && lse.to_bits() == changed_lse.to_bits();
        let visible = visible_nodes(&case.config, &case.shape, row % case.shape.queries);
        if same(visible) {
            seen[0] += 1;
            assert!(equal, "{what} moved row {row}, which sees {visible:?}, in {}", case.label());
        } else {
            seen[1] += usize::from(!equal);
        }
    }
    assert!(seen[0] > 0 && seen[1] > 0, "{what} shows nothing ({seen:?}) in {}", case.label());
}

/// Overwrites tokens `from..to` (from 0) of every sequence, and the intervals at `intervals`, by other values.
fn change(
    case: &AttentionCase,
    tokens: std::ops::Range<usize>,
    intervals: std::ops::Range<usize>,
    rng: &mut fastrand::Rng,
) -> AttentionCase {
    let mut changed = case.clone();
    let AttentionConfig { head_dim, value_dim, .. } = case.config;
    for (tensor, width) in [(&mut changed.k, head_dim), (&mut changed.v, value_dim)] {
        for sequence in tensor.chunks_mut(KEYS * width) {
            let range = tokens.start * width..tokens.end * width;
            let new: Vec<f32> = normal(rng, range.len()).iter().map(|x| x * 20.0).collect();
            sequence[range].copy_from_slice(&new);
        }
    }
    if let Some(lengths) = &mut changed.intervals {
        for sequence in lengths.chunks_mut(KEYS) {
            sequence[intervals.clone()].iter_mut().for_each(|length| *length = rng.f32() * 100.0);
        }
    }
    changed
}

#[test]
fn later_nodes_do_not_reach_a_row() {
    let mut rng = rng(1);
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 90, keys: KEYS };
    for config in configs() {
        for intervals in [false, true] {
            if intervals && config.method == Method::Softmax {
                continue;
            }
            for cut in [9, 31, 32, 33, 63, 64, 65, 95, 96] {
                let mut case = AttentionCase::random(config, shape, &mut rng);
                if intervals {
                    case = case.with_intervals(&mut rng);
                }
                // Node n is token n − 1: tokens from `cut` on are the nodes behind node `cut`.
                let changed = change(&case, cut..KEYS, cut..KEYS, &mut rng);
                let what = format!("what lies behind node {cut}");
                compare_rows(&case, &changed, &what, |visible| visible.is_none_or(|(_, last)| last <= cut));
            }
        }
    }
}

#[test]
fn nodes_before_the_window_do_not_reach_a_row() {
    let mut rng = rng(2);
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: KEYS, keys: KEYS };
    for config in configs() {
        if config.window.is_none() {
            continue;
        }
        for cut in [1, 9, 31, 32, 33, 60] {
            let mut case = AttentionCase::random(config, shape, &mut rng);
            let mut lengths = 0..0;
            if config.method == Method::Continuous {
                case = case.with_intervals(&mut rng);
                // Segment i ends in node i: those up to the first visible node are invisible.
                lengths = 0..cut + 1;
            }
            let mut changed = change(&case, 0..cut, lengths, &mut rng);
            if let Some(sink) = &mut changed.sink_v {
                sink.iter_mut().for_each(|x| *x = 100.0);
            }
            let what = format!("what lies before node {}", cut + 1);
            compare_rows(&case, &changed, &what, |visible| visible.is_none_or(|(first, _)| first > cut));
        }
    }
}

#[test]
fn without_a_sink_the_first_interval_is_not_used() {
    let mut rng = rng(3);
    let config = AttentionConfig { head_dim: 8, value_dim: 8, sink: Sink::None, ..Default::default() };
    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 40, keys: 40 };
    let case = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
    let mut changed = case.clone();
    for length in [0.0, 1e30, f32::NAN, f32::INFINITY] {
        changed.intervals.as_mut().unwrap().chunks_mut(40).for_each(|sequence| sequence[0] = length);
        assert_eq!(case.run(), changed.run(), "first interval {length}");
    }
}

#[test]
fn rows_do_not_depend_on_other_queries() {
    let mut rng = rng(4);
    let config = AttentionConfig { head_dim: 8, value_dim: 8, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 70, keys: 70 };
    let case = AttentionCase::random(config, shape, &mut rng);
    let mut changed = case.clone();
    changed.q[33 * 8..34 * 8].fill(1e6);
    let (before, after) = (case.run(), changed.run());
    for row in (0..70).filter(|&row| row != 33) {
        assert_eq!(bits(&before.out[row * 8..row * 8 + 8]), bits(&after.out[row * 8..row * 8 + 8]), "row {row}");
        assert_eq!(before.lse[row].to_bits(), after.lse[row].to_bits(), "row {row}");
    }
    assert_ne!(before.lse[33], after.lse[33]);
}

#[test]
fn later_tokens_do_not_reach_an_efla_row() {
    let mut rng = rng(5);
    let tokens = 150;
    let config = EflaConfig { key_dim: 24, value_dim: 8, ..Default::default() };
    let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens };
    let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
    for (form, chunk) in FORMS {
        let case = case.in_form(form, chunk);
        let before = case.run();
        for cut in [1, 15, 16, 17, 31, 32, 33, 64, 65, 149] {
            let mut changed = case.clone();
            for (tensor, width) in
                [(&mut changed.q, 24), (&mut changed.k, 24), (&mut changed.v, 8), (&mut changed.beta, 1)]
            {
                for sequence in tensor.chunks_mut(tokens * width) {
                    sequence[cut * width..].iter_mut().for_each(|x| *x = rng.f32() * 10.0);
                }
            }
            let after = changed.run();
            for (sequence, (before, after)) in
                before.out.chunks(tokens * 8).zip(after.out.chunks(tokens * 8)).enumerate()
            {
                let label = format!("sequence {sequence}, tokens from {cut} on changed, {}", case.label());
                assert_eq!(bits(&before[..cut * 8]), bits(&after[..cut * 8]), "{label}");
                assert_ne!(before[cut * 8..], after[cut * 8..], "{label}");
            }
        }
    }
}
