//! Every option of attention, alone and together, at every tile edge.

use continuous_attention::{Attention, AttentionConfig, AttentionShape, Error, Gpu, Method, Sink, wgpu};

use crate::devices::host_device;
use crate::errors::refused;
use crate::harness::{AttentionCase, EDGES, bits, case_count, gpu, pick, plain_gpu, rng};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];

fn config(head_dim: usize, value_dim: usize) -> AttentionConfig {
    AttentionConfig { head_dim, value_dim, ..Default::default() }
}

fn lengths(queries: usize, keys: usize) -> AttentionShape {
    AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries, keys }
}

#[test]
fn options_together() {
    let mut rng = rng(1);
    let mut turn = 0;
    for sink in SINKS {
        for causal in [true, false] {
            for window in [None, Some(1), Some(5), Some(40), Some(usize::MAX)] {
                for intervals in [false, true] {
                    for (queries, keys) in [(37, 37), (33, 70), (70, 33)] {
                        turn += 1;
                        let config = AttentionConfig { sink, causal, window, ..config(5 + turn % 7, 3 + turn % 5) };
                        let (heads, kv_heads) = [(1, 1), (4, 2), (3, 1), (2, 2)][turn % 4];
                        let shape = AttentionShape { batch: 1 + turn % 2, heads, kv_heads, queries, keys };
                        let mut case = AttentionCase::random(config, shape, &mut rng);
                        if intervals {
                            case = case.with_intervals(&mut rng);
                        }
                        if turn % 3 == 0 {
                            case = case.with_sink_per_sequence(&mut rng);
                        }
                        case.check();
                    }
                }
            }
        }
    }
}

#[test]
fn ordinary_softmax() {
    let mut rng = rng(2);
    for causal in [true, false] {
        for window in [None, Some(1), Some(2), Some(33), Some(1000)] {
            for (queries, keys) in [(1, 1), (37, 37), (33, 70), (70, 33), (65, 129), (5, 0)] {
                let base = AttentionConfig { method: Method::Softmax, sink: Sink::None, ..config(9, 6) };
                let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, ..lengths(queries, keys) };
                AttentionCase::random(AttentionConfig { causal, window, ..base }, shape, &mut rng).check();
            }
        }
    }
}

#[test]
fn lengths_around_tile_edges() {
    let mut rng = rng(3);
    for length in EDGES {
        for causal in [true, false] {
            let config = AttentionConfig { causal, ..config(4, 3) };
            AttentionCase::random(config, lengths(length, length), &mut rng).check();
        }
        // A cache longer than the queries, and rows that see nothing of it.
        let other = pick(&mut rng, &EDGES);
        let sink = pick(&mut rng, &SINKS);
        let config = AttentionConfig { sink, ..config(4, 3) };
        for (queries, keys) in [(1, length), (length, 1), (other, length)] {
            AttentionCase::random(config, lengths(queries, keys), &mut rng).with_intervals(&mut rng).check();
        }
    }
}

#[test]
fn windows_around_tile_edges() {
    let mut rng = rng(4);
    for window in [1, 2, 30, 31, 32, 33, 34, 63, 64, 65, 66] {
        for sink in SINKS {
            let config = AttentionConfig { sink, window: Some(window), ..config(4, 3) };
            AttentionCase::random(config, lengths(130, 130), &mut rng).check();
            let config = AttentionConfig { causal: false, ..config };
            AttentionCase::random(config, lengths(3, 130), &mut rng).check();
        }
        let ordinary = AttentionConfig { method: Method::Softmax, sink: Sink::None, ..config(4, 3) };
        let ordinary = AttentionConfig { window: Some(window), ..ordinary };
        AttentionCase::random(ordinary, lengths(130, 130), &mut rng).check();
    }
}

#[test]
fn head_dims_around_tile_edges() {
    let mut rng = rng(5);
    for head_dim in EDGES {
        AttentionCase::random(config(head_dim, 4), lengths(40, 45), &mut rng).check();
        let given = AttentionConfig { sink: Sink::Given, ..config(head_dim, 7) };
        AttentionCase::random(given, lengths(3, 5), &mut rng).check();
    }
}

#[test]
fn value_dims_around_tile_edges() {
    let mut rng = rng(6);
    for value_dim in EDGES {
        AttentionCase::random(config(5, value_dim), lengths(40, 45), &mut rng).check();
        let given = AttentionConfig { sink: Sink::Given, ..config(3, value_dim) };
        AttentionCase::random(given, lengths(3, 5), &mut rng).check();
    }
}

#[test]
fn softmax_value_dims() {
    let mut rng = rng(7);
    for value_dim in [1, 33, 65, 97, 129, 161, 193, 256] {
        let config = AttentionConfig { method: Method::Softmax, sink: Sink::None, ..config(8, value_dim) };
        AttentionCase::random(config, lengths(35, 40), &mut rng).check();
    }
}

#[test]
fn the_largest_of_both() {
    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 65, keys: 97 };
    AttentionCase::random(config(256, 256), shape, &mut rng(8)).check();
}

#[test]
fn scales() {
    let mut rng = rng(9);
    for scale in [0.0, -0.7, 1e-3, 3.0] {
        let config = AttentionConfig { scale: Some(scale), ..config(6, 5) };
        AttentionCase::random(config, lengths(50, 50), &mut rng).with_intervals(&mut rng).check();
    }
}

#[test]
fn many_heads_and_sequences() {
    let mut rng = rng(10);
    for (batch, heads, kv_heads) in [(1, 32, 1), (7, 6, 3), (3, 5, 5), (33, 2, 1)] {
        let shape = AttentionShape { batch, heads, kv_heads, queries: 5, keys: 9 };
        let given = AttentionConfig { sink: Sink::Given, ..config(4, 3) };
        let case = AttentionCase::random(given, shape, &mut rng).with_intervals(&mut rng);
        case.check();
        case.with_sink_per_sequence(&mut rng).check();
    }
}

fn draw(rng: &mut fastrand::Rng) -> AttentionCase {
    let method = pick(rng, &[Method::Continuous, Method::Continuous, Method::Continuous, Method::Softmax]);
    let softmax = method == Method::Softmax;
    let dim = |rng: &mut fastrand::Rng| if rng.u8(..4) == 0 { pick(rng, &EDGES) } else { rng.usize(1..=40) };
    let length = |rng: &mut fastrand::Rng| if rng.bool() { pick(rng, &EDGES) } else { rng.usize(..150) };
    let (queries, keys) = (length(rng), length(rng));
    let kv_heads = rng.usize(1..=3);
    let config = AttentionConfig {
        head_dim: dim(rng),
        value_dim: dim(rng),
        method,
        sink: if softmax { Sink::None } else { pick(rng, &SINKS) },
        causal: rng.bool(),
        window: rng.bool().then(|| rng.usize(1..keys + 4)),
        scale: pick(rng, &[None, None, Some(0.2), Some(1.0), Some(-0.3)]),
        block_q: None,
    };
    let heads = kv_heads * rng.usize(1..=3);
    let shape = AttentionShape { batch: rng.usize(1..=3), heads, kv_heads, queries, keys };
    let mut case = AttentionCase::random(config, shape, rng);
    if !softmax && rng.bool() {
        case = case.with_intervals(rng);
    }
    if rng.bool() {
        case = case.with_sink_per_sequence(rng);
    }
    case
}

#[test]
fn random_cases() {
    for seed in 0..case_count(60) {
        println!("seed {seed}");
        draw(&mut rng(1000 + seed as u64)).check();
    }
}

/// Tiles of 64 rows give what those of 32 give.
#[test]
fn rows_of_a_tile() {
    let mut rng = rng(50);
    for (method, sink) in [(Method::Continuous, Sink::Given), (Method::Softmax, Sink::None)] {
        for (head_dim, value_dim, queries, keys) in [(20, 7, 130, 130), (64, 64, 200, 77), (33, 140, 64, 300)] {
            let config = AttentionConfig { method, sink, head_dim, value_dim, ..Default::default() };
            let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries, keys };
            let case = AttentionCase::random(config, shape, &mut rng);
            let case = if method == Method::Continuous { case.with_intervals(&mut rng) } else { case };
            let run = |block_q: usize, gpu: &Gpu| {
                let mut case = case.clone();
                case.config.block_q = Some(block_q);
                let result = case.run_on(gpu);
                case.judge(&result, case.limit());
                result
            };
            let [small, large] = [32, 64].map(|block_q| run(block_q, plain_gpu()));
            assert_eq!(bits(&small.out), bits(&large.out));
            assert_eq!(bits(&small.lse), bits(&large.lse));
            // The kernels of one subgroup a workgroup have 32.
            run(64, gpu());
        }
    }
    let attention = |block_q| Attention::new(gpu(), AttentionConfig { block_q: Some(block_q), ..Default::default() });
    refused(attention(48), "block_q", &["48", "32 or 64"]);
    let limits = wgpu::Limits::default();
    let (device, queue, _) = host_device(limits);
    let gpu = Gpu::from_wgpu(device, queue).unwrap();
    let error = Attention::new(&gpu, AttentionConfig { block_q: Some(64), ..Default::default() }).unwrap_err();
    assert!(matches!(error, Error::Limit { got: 23296, limit: 16384, .. }), "{error}");
}

/// A measured tile is one that can be configured, is kept, and gives what that gives.
#[test]
fn measured_rows_of_a_tile() {
    let gpu = plain_gpu();
    let config = AttentionConfig { head_dim: 24, value_dim: 16, sink: Sink::Given, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 2, queries: 100, keys: 100 };
    let attention = Attention::measured(gpu, config, &shape).unwrap();
    assert!([32, 64].contains(&attention.config().block_q.unwrap()));
    for _ in 0..3 {
        assert_eq!(Attention::measured(gpu, config, &shape).unwrap().config(), attention.config());
    }
    let configured = AttentionConfig { block_q: Some(32), ..config };
    assert_eq!(Attention::measured(gpu, configured, &shape).unwrap().config(), &configured);
    // Nothing to measure is no reason to fail.
    Attention::measured(gpu, config, &AttentionShape { keys: 0, ..shape }).unwrap();
    let few = Attention::measured(gpu, config, &AttentionShape { queries: 8, ..shape }).unwrap();
    assert_eq!(few.config().block_q, None);
    let error = Attention::measured(gpu, AttentionConfig { head_dim: 0, ..config }, &shape).unwrap_err().to_string();
    assert!(error.contains("head_dim"), "{error}");
}
