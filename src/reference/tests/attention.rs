//! Attention against quadrature of the integral, finite differences, and the properties it must have.

use super::{assert_close, assert_near, differences, one_after_another, random};
use crate::reference::attention::{
    Gradients, Inputs, Output, backward, backward_ragged, forward, forward_ragged, largest_logit, largest_logit_ragged,
    merge, merge_backward, visible_nodes,
};
use crate::reference::support::dot;
use crate::{AttentionConfig, AttentionShape, Error, Lengths, Method, Sink};

/// A call with its tensors.
#[derive(Clone)]
struct Call {
    config: AttentionConfig,
    shape: AttentionShape,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
    sink_k: Option<Vec<f64>>,
    sink_v: Option<Vec<f64>>,
    intervals: Option<Vec<f64>>,
}

impl Call {
    /// Random tensors; `sink_batch` is 1 or B, intervals are absent.
    fn random(seed: u64, config: AttentionConfig, shape: AttentionShape, sink_batch: usize) -> Call {
        let mut rng = fastrand::Rng::with_seed(seed);
        let AttentionConfig { head_dim, value_dim, sink, .. } = config;
        let AttentionShape { batch, heads, kv_heads, queries, keys } = shape;
        let mut sink = |dim| (sink == Sink::Given).then(|| random(&mut rng, sink_batch * kv_heads * dim, 1.5));
        let (sink_k, sink_v) = (sink(head_dim), sink(value_dim));
        Call {
            config,
            shape,
            q: random(&mut rng, batch * heads * queries * head_dim, 1.5),
            k: random(&mut rng, batch * kv_heads * keys * head_dim, 1.5),
            v: random(&mut rng, batch * kv_heads * keys * value_dim, 1.5),
            sink_k,
            sink_v,
            intervals: None,
        }
    }

    fn inputs(&self) -> Inputs<'_> {
        Inputs {
            q: &self.q,
            k: &self.k,
            v: &self.v,
            sink_k: self.sink_k.as_deref(),
            sink_v: self.sink_v.as_deref(),
            intervals: self.intervals.as_deref(),
        }
    }

    fn forward(&self) -> Output {
        forward(&self.config, &self.shape, &self.inputs()).unwrap()
    }

    fn backward(&self, d_out: &[f64], d_lse: Option<&[f64]>) -> Gradients {
        backward(&self.config, &self.shape, &self.inputs(), d_out, d_lse).unwrap()
    }

    /// The argument that is refused, by forward, backward and largest_logit alike.
    fn refused(&self) -> String {
        let name = |error: Error| match error {
            Error::Argument { argument, .. } => argument,
            other => panic!("{other}"),
        };
        let (config, shape, inputs) = (&self.config, &self.shape, self.inputs());
        let refused = name(forward(config, shape, &inputs).expect_err("accepted"));
        assert_eq!(name(backward(config, shape, &inputs, &[0.0; 24], None).unwrap_err()), refused);
        assert_eq!(name(largest_logit(config, shape, &inputs).unwrap_err()), refused);
        refused
    }
}

fn config(sink: Sink, causal: bool, window: Option<usize>) -> AttentionConfig {
    AttentionConfig { head_dim: 3, value_dim: 2, sink, causal, window, ..Default::default() }
}

/// All options on small shapes: sinks, windows, grouped heads, T_q ≠ T_k, intervals with zeros, both methods.
fn small_calls() -> Vec<Call> {
    let mut calls = Vec::new();
    let sizes = [(1, 1, 1, 4, 4), (2, 4, 2, 3, 5), (1, 2, 1, 5, 3), (2, 1, 1, 1, 6)];
    for (batch, heads, kv_heads, queries, keys) in sizes {
        let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
        for causal in [true, false] {
            for window in [None, Some(1), Some(2), Some(100)] {
                for (index, sink) in [Sink::Zero, Sink::First, Sink::Given, Sink::None].into_iter().enumerate() {
                    let seed = calls.len() as u64;
                    let sink_batch = if index % 2 == 0 { batch } else { 1 };
                    let mut call = Call::random(seed, config(sink, causal, window), shape, sink_batch);
                    calls.push(call.clone());
                    let mut rng = fastrand::Rng::with_seed(seed);
                    let mut intervals: Vec<f64> = (0..batch * keys).map(|_| 0.1 + 3.0 * rng.f64()).collect();
                    if window != Some(1) && keys > 2 {
                        // Every row that sees this segment sees another one as well.
                        for batch in 0..batch {
                            intervals[batch * keys + 2] = 0.0;
                        }
                    }
                    call.intervals = Some(intervals);
                    calls.push(call);
                }
                let softmax = AttentionConfig { method: Method::Softmax, ..config(Sink::None, causal, window) };
                calls.push(Call::random(calls.len() as u64, softmax, shape, 1));
            }
        }
    }
    let given = Call::random(7, config(Sink::Given, true, None), AttentionShape { batch: 3, ..calls[0].shape }, 1);
    calls.push(given);
    calls
}

/// Nodes and weights on [0, 1] of Gauss–Legendre quadrature with `n` points.
fn gauss_legendre(n: usize) -> Vec<(f64, f64)> {
    let node = |i: usize| {
        let mut x = (std::f64::consts::PI * (i as f64 + 0.75) / (n as f64 + 0.5)).cos();
        let mut slope = 0.0;
        for _ in 0..100 {
            let (mut p, mut before) = (1.0, 0.0);
            for j in 0..n {
                let j = j as f64;
                (p, before) = (((2.0 * j + 1.0) * x * p - j * before) / (j + 1.0), p);
            }
            slope = n as f64 * (x * p - before) / (x * x - 1.0);
            x -= p / slope;
        }
        ((1.0 + x) / 2.0, 1.0 / ((1.0 - x * x) * slope * slope))
    };
    (0..n).map(node).collect()
}

/// out and lse by quadrature of the integral, graded towards both ends of every segment; and the rows of one visible
/// node, of none, and of nothing but segments of length 0 by their definition.
fn by_quadrature(call: &Call) -> Output {
    let AttentionConfig { head_dim, value_dim, causal, window, sink, .. } = call.config;
    let AttentionShape { batch, heads, kv_heads, queries, keys } = call.shape;
    let rule = gauss_legendre(10);
    let mut grid = Vec::new();
    let mut ends = vec![0.0];
    ends.extend((1..40).rev().map(|j| 0.5f64.powi(j)));
    for pair in ends.windows(2) {
        for piece in 0..4 {
            let width = (pair[1] - pair[0]) / 4.0;
            grid.extend(rule.iter().map(|(x, w)| (pair[0] + width * (f64::from(piece) + x), width * w)));
        }
    }
    let mirrored: Vec<(f64, f64)> = grid.iter().map(|(x, w)| (1.0 - x, *w)).collect();
    grid.extend(mirrored);

    let mut output = Output { out: vec![], lse: vec![] };
    for (b, h, r) in (0..batch * heads * queries).map(|i| (i / queries / heads, i / queries % heads, i % queries)) {
        let kv = b * kv_heads + h / (heads / kv_heads);
        let node = |tokens: &[f64], zero: Option<&Vec<f64>>, dim: usize, i: isize| -> Vec<f64> {
            let token = |t: usize| tokens[(kv * keys + t) * dim..][..dim].to_vec();
            match (i, sink) {
                (1.., _) => token(i as usize - 1),
                (_, Sink::First) => token(0),
                (_, Sink::Given) => {
                    let given = zero.unwrap();
                    let shared = given.len() == kv_heads * dim;
                    given[if shared { kv % kv_heads } else { kv } * dim..][..dim].to_vec()
                }
                _ => vec![0.0; dim],
            }
        };
        let key = |i| node(&call.k, call.sink_k.as_ref(), head_dim, i);
        let value = |i| node(&call.v, call.sink_v.as_ref(), value_dim, i);
        let q = &call.q[((b * heads + h) * queries + r) * head_dim..][..head_dim];
        let last = if causal { (r + 1 + keys) as isize - queries as isize } else { keys as isize };
        let has_sink = sink != Sink::None && (sink != Sink::First || last >= 1);
        let mut first = if has_sink { 0 } else { 1 };
        if let Some(window) = window {
            first = first.max(last - window as isize);
        }
        let length = |i: isize| call.intervals.as_ref().map_or(1.0, |intervals| intervals[b * keys + i as usize - 1]);
        let logit = |key: &[f64]| call.config.scale() * q.iter().zip(key).map(|(q, k)| q * k).sum::<f64>();
        let active: Vec<isize> = (first + 1..=last).filter(|&i| length(i) > 0.0).collect();
        let level = active.iter().flat_map(|&i| [i - 1, i]).map(|i| logit(&key(i))).reduce(f64::max);
        let Some(level) = level else {
            output.out.extend(if first == last { value(first) } else { vec![0.0; value_dim] });
            output.lse.push(f64::NEG_INFINITY);
            continue;
        };
        let mut total = 0.0;
        let mut sum = vec![0.0; value_dim];
        for i in active {
            let (k0, k1, v0, v1) = (key(i - 1), key(i), value(i - 1), value(i));
            let (a0, a1) = (logit(&k0), logit(&k1));
            for &(s, w) in &grid {
                let weight = w * length(i) * ((1.0 - s) * (a0 - level) + s * (a1 - level)).exp();
                total += weight;
                for c in 0..value_dim {
                    sum[c] += weight * ((1.0 - s) * v0[c] + s * v1[c]);
                }
            }
        }
        output.out.extend(sum.iter().map(|x| x / total));
        output.lse.push(level + total.ln());
    }
    output
}

#[test]
fn forward_is_the_integral() {
    for (index, call) in small_calls().iter().enumerate().filter(|(_, call)| call.config.method == Method::Continuous) {
        let (got, want) = (call.forward(), by_quadrature(call));
        assert_close(&format!("out of {index}"), &got.out, &want.out, 1e-13);
        assert_close(&format!("lse of {index}"), &got.lse, &want.lse, 1e-13);
    }
}

/// Logits of ±1e4 and steps from 0 to 2e4, in every order.
#[test]
fn forward_is_the_integral_for_large_logits() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 40, keys: 40 };
    for (seed, sink) in [Sink::Zero, Sink::First, Sink::None].into_iter().enumerate() {
        for size in [1.0, 30.0, 1e3, 1e4] {
            let config = AttentionConfig { head_dim: 1, scale: Some(1.0), ..config(sink, seed != 1, None) };
            let mut call = Call::random(seed as u64, config, shape, 1);
            let mut rng = fastrand::Rng::with_seed(seed as u64);
            for (k, q) in call.k.iter_mut().zip(&mut call.q) {
                // Exact products, so that both sides integrate the same exponential.
                *k = (size * (2.0 * rng.f64() - 1.0) * 16.0).round() / 16.0;
                *q = if rng.bool() { 1.0 } else { -1.0 };
            }
            call.k[7] = call.k[6]; // a step of 0
            call.k[9] = call.k[8] + 1.0 / 1024.0;
            assert!(largest_logit(&call.config, &call.shape, &call.inputs()).unwrap() > 0.8 * size);
            let (got, want) = (call.forward(), by_quadrature(&call));
            assert_close(&format!("out, size {size}"), &got.out, &want.out, 2e-13);
            assert_close(&format!("lse, size {size}"), &got.lse, &want.lse, 2e-14);
        }
    }
}

#[test]
fn gradients_are_those_of_forward() {
    for (index, call) in small_calls().iter().enumerate() {
        let mut rng = fastrand::Rng::with_seed(index as u64);
        let output = call.forward();
        let d_out = random(&mut rng, output.out.len(), 1.0);
        let d_lse = (index % 3 != 0).then(|| random(&mut rng, output.lse.len(), 1.0));
        let gradients = call.backward(&d_out, d_lse.as_deref());
        let loss = |call: &Call| {
            let output = call.forward();
            let out: f64 = output.out.iter().zip(&d_out).map(|(x, d)| x * d).sum();
            let lse = d_lse.iter().flatten().zip(&output.lse).filter(|(_, lse)| lse.is_finite());
            out + lse.map(|(d, lse)| d * lse).sum::<f64>()
        };
        let check = |what: &str, got: &[f64], x: &[f64], set: &dyn Fn(&mut Call, &[f64])| {
            let want = differences(
                x,
                |x| what == "intervals" && x == 0.0,
                |x| {
                    let mut call = call.clone();
                    set(&mut call, x);
                    loss(&call)
                },
            );
            let what = format!("{what}, call {index}: {:?}, {:?}", call.config, call.shape);
            assert_near(&what, got, &want);
        };
        check("q", &gradients.d_q, &call.q, &|call, x| call.q = x.to_vec());
        check("k", &gradients.d_k, &call.k, &|call, x| call.k = x.to_vec());
        check("v", &gradients.d_v, &call.v, &|call, x| call.v = x.to_vec());
        assert_eq!(gradients.d_sink_k.is_some(), call.config.sink == Sink::Given);
        assert_eq!(gradients.d_sink_v.is_some(), call.config.sink == Sink::Given);
        assert_eq!(gradients.d_intervals.is_some(), call.intervals.is_some());
        if let (Some(d), Some(x)) = (&gradients.d_sink_k, &call.sink_k) {
            check("sink_k", d, x, &|call, x| call.sink_k = Some(x.to_vec()));
        }
        if let (Some(d), Some(x)) = (&gradients.d_sink_v, &call.sink_v) {
            check("sink_v", d, x, &|call, x| call.sink_v = Some(x.to_vec()));
        }
        if let (Some(d), Some(x)) = (&gradients.d_intervals, &call.intervals) {
            check("intervals", d, x, &|call, x| call.intervals = Some(x.to_vec()));
        }
    }
}

/// Rows far from each other in level: steep segments, where the products of the naive formulas overflow.
#[test]
fn gradients_for_large_logits() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 3, keys: 6 };
    for size in [20.0, 500.0] {
        let mut call = Call::random(3, AttentionConfig { head_dim: 1, ..config(Sink::Zero, true, None) }, shape, 1);
        call.q = vec![1.0, -1.0, 0.5];
        call.k = [0.3, 1.0, -1.0, 0.99, 1.0, -0.2].iter().map(|k| k * size).collect();
        call.intervals = Some(vec![1.0, 0.5, 2.0, 1.0, 1e-3, 1.0]);
        let mut rng = fastrand::Rng::with_seed(9);
        let (d_out, d_lse) = (random(&mut rng, 6, 1.0), random(&mut rng, 3, 1.0));
        let gradients = call.backward(&d_out, Some(&d_lse));
        let want = differences(
            &call.k,
            |_| false,
            |k| {
                let output = Call { k: k.to_vec(), ..call.clone() }.forward();
                let out: f64 = output.out.iter().zip(&d_out).map(|(x, d)| x * d).sum();
                out + output.lse.iter().zip(&d_lse).map(|(x, d)| x * d).sum::<f64>()
            },
        );
        assert_close("d_k", &gradients.d_k, &want, 1e-8);
    }
}

#[test]
fn softmax_is_the_plain_sum() {
    let calls = small_calls();
    for call in calls.iter().filter(|call| call.config.method == Method::Softmax) {
        let AttentionConfig { head_dim, value_dim, causal, window, .. } = call.config;
        let AttentionShape { heads, kv_heads, queries, keys, .. } = call.shape;
        let got = call.forward();
        for row in 0..got.lse.len() {
            let (unit, r) = (row / queries, row % queries);
            let kv = unit / heads * kv_heads + unit % heads / (heads / kv_heads);
            let q = &call.q[row * head_dim..][..head_dim];
            let (mut total, mut sum) = (0.0, vec![0.0; value_dim]);
            for t in 0..keys {
                let last = if causal { r as isize + keys as isize - queries as isize } else { keys as isize - 1 };
                let behind = last - t as isize;
                if behind >= 0 && behind < window.unwrap_or(1000) as isize {
                    let k = &call.k[(kv * keys + t) * head_dim..][..head_dim];
                    let weight = (call.config.scale() * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>()).exp();
                    total += weight;
                    (0..value_dim).for_each(|c| sum[c] += weight * call.v[(kv * keys + t) * value_dim + c]);
                }
            }
            let want: Vec<f64> = sum.iter().map(|x| if total == 0.0 { 0.0 } else { x / total }).collect();
            assert_close("out", &got.out[row * value_dim..][..value_dim], &want, 1e-14);
            assert_close("lse", &got.lse[row..=row], &[f64::ln(total)], 1e-14);
        }
    }
}

#[test]
fn merge_of_shards_is_the_whole() {
    for (sink, intervals) in [(Sink::Zero, false), (Sink::First, true), (Sink::None, true), (Sink::Given, false)] {
        let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 3, keys: 8 };
        let mut whole = Call::random(11, config(sink, true, None), shape, 2);
        whole.intervals = intervals.then(|| random(&mut fastrand::Rng::with_seed(5), 16, 2.0));
        whole.intervals.iter_mut().flatten().for_each(|length| *length = length.abs());
        for earlier_keys in 1..=6 {
            let tokens = |x: &[f64], dim: usize, from: usize, to: usize| -> Vec<f64> {
                x.chunks(8 * dim).flat_map(|x| &x[from * dim..to * dim]).copied().collect()
            };
            let shard = |config: AttentionConfig, from: usize, to: usize| Call {
                config,
                shape: AttentionShape { keys: to - from, ..shape },
                k: tokens(&whole.k, 3, from, to),
                v: tokens(&whole.v, 2, from, to),
                intervals: whole.intervals.as_ref().map(|intervals| tokens(intervals, 1, from, to)),
                ..whole.clone()
            };
            let earlier = shard(AttentionConfig { causal: false, ..whole.config }, 0, earlier_keys);
            let mut later = shard(AttentionConfig { sink: Sink::Given, ..whole.config }, earlier_keys, 8);
            later.sink_k = Some(tokens(&whole.k, 3, earlier_keys - 1, earlier_keys));
            later.sink_v = Some(tokens(&whole.v, 2, earlier_keys - 1, earlier_keys));
            let merged = merge(&earlier.forward(), &later.forward(), 2).unwrap();
            let want = whole.forward();
            assert_close("out", &merged.out, &want.out, 1e-14);
            assert_close("lse", &merged.lse, &want.lse, 1e-14);
        }
    }
}

#[test]
fn merge_of_nothing_and_of_wrong_lengths() {
    let nothing = Output { out: vec![1.0, 2.0], lse: vec![f64::NEG_INFINITY] };
    let some = Output { out: vec![5.0, 6.0], lse: vec![-2e4] };
    assert_eq!(merge(&nothing, &some, 2).unwrap(), some);
    assert_eq!(merge(&some, &nothing, 2).unwrap(), some);
    let both = merge(&nothing, &nothing, 2).unwrap();
    assert_eq!(both, Output { out: vec![2.0, 4.0], lse: vec![f64::NEG_INFINITY] });
    let empty = Output { out: vec![], lse: vec![] };
    assert_eq!(merge(&empty, &empty, 0).unwrap(), empty);
    assert!(merge(&some, &empty, 2).is_err());
    assert!(merge(&some, &some, 1).is_err());
    assert!(merge(&some, &Output { out: vec![5.0], ..some.clone() }, 2).is_err());
    assert!(merge(&some, &Output { lse: vec![f64::NAN], ..some.clone() }, 2).is_err());
    assert!(merge(&some, &Output { lse: vec![f64::INFINITY], ..some.clone() }, 2).is_err());
}

/// Six rows: lse of either side near the other, far above, far below, and −∞ on one side or both.
fn sides(rng: &mut fastrand::Rng) -> [Output; 2] {
    let none = f64::NEG_INFINITY;
    let lse = [[0.3, 90.0, -8.0, none, 2.0, none], [-0.2, 88.5, -5.0, 1.0, none, none]];
    lse.map(|lse| Output { out: random(rng, 6 * 3, 1.5), lse: lse.to_vec() })
}

#[test]
fn gradients_of_merge_are_differences() {
    let mut rng = fastrand::Rng::with_seed(21);
    let [a, b] = sides(&mut rng);
    let d_out = random(&mut rng, 6 * 3, 1.0);
    for d_lse in [None, Some(random(&mut rng, 6, 1.0))] {
        let loss = |a: &Output, b: &Output| {
            let merged = merge(a, b, 3).unwrap();
            let lse = merged.lse.iter().enumerate().filter(|(_, lse)| lse.is_finite());
            dot(&d_out, &merged.out)
                + lse.map(|(row, lse)| d_lse.as_ref().map_or(0.0, |d_lse| d_lse[row] * lse)).sum::<f64>()
        };
        let [d_a, d_b] = merge_backward(&a, &b, 3, &d_out, d_lse.as_deref()).unwrap();
        let with = |side: &Output, out: Option<&[f64]>, lse: Option<&[f64]>| Output {
            out: out.unwrap_or(&side.out).to_vec(),
            lse: lse.unwrap_or(&side.lse).to_vec(),
        };
        let never = |_| false;
        assert_near("d_out_a", &d_a.out, &differences(&a.out, never, |x| loss(&with(&a, Some(x), None), &b)));
        assert_near("d_out_b", &d_b.out, &differences(&b.out, never, |x| loss(&a, &with(&b, Some(x), None))));
        // Steps from −∞ lead nowhere: the difference is 0 there, as the gradient has to be.
        assert_near("d_lse_a", &d_a.lse, &differences(&a.lse, never, |x| loss(&with(&a, None, Some(x)), &b)));
        assert_near("d_lse_b", &d_b.lse, &differences(&b.lse, never, |x| loss(&a, &with(&b, None, Some(x)))));
    }
}

#[test]
fn gradients_of_merge_at_the_ends() {
    let mut rng = fastrand::Rng::with_seed(22);
    let [a, b] = sides(&mut rng);
    let (d_out, d_lse) = (random(&mut rng, 6 * 3, 1.0), random(&mut rng, 6, 1.0));
    let [d_a, d_b] = merge_backward(&a, &b, 3, &d_out, Some(&d_lse)).unwrap();
    // Only b, only a, neither.
    assert_eq!((&d_a.out[9..12], &d_b.out[9..12]), (&[0.0; 3][..], &d_out[9..12]));
    assert_eq!((&d_a.out[12..15], &d_b.out[12..15]), (&d_out[12..15], &[0.0; 3][..]));
    assert_eq!((&d_a.out[15..], &d_b.out[15..]), (&d_out[15..], &d_out[15..]));
    assert_eq!((&d_a.lse[3..], &d_b.lse[3..]), (&[0.0, d_lse[4], 0.0][..], &[d_lse[3], 0.0, 0.0][..]));
    // A weight of e^{−10⁴} is none.
    let far = Output { lse: a.lse.iter().map(|lse| lse - 1e4).collect(), ..a.clone() };
    let [d_far, d_b] = merge_backward(&far, &b, 3, &d_out, Some(&d_lse)).unwrap();
    assert_eq!((&d_far.out[..3], d_far.lse[0]), (&[0.0; 3][..], 0.0));
    assert_eq!((&d_b.out[..3], d_b.lse[0]), (&d_out[..3], d_lse[0]));

    assert!(merge_backward(&a, &b, 3, &d_out[1..], None).is_err());
    assert!(merge_backward(&a, &b, 3, &d_out, Some(&d_lse[1..])).is_err());
    assert!(merge_backward(&a, &b, 2, &d_out, None).is_err());
    assert!(merge_backward(&a, &b, 3, &[f64::NAN; 18], None).is_err());
}

/// Which nodes rows see, from the words of the definition.
#[test]
fn visibility() {
    let shape = |queries, keys| AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries, keys };
    let seen = |config: AttentionConfig, queries, keys| -> Vec<Option<(usize, usize)>> {
        (0..queries).map(|row| visible_nodes(&config, &shape(queries, keys), row)).collect()
    };
    let zero = |causal, window| config(Sink::Zero, causal, window);
    assert_eq!(seen(zero(true, None), 2, 2), [Some((0, 1)), Some((0, 2))]);
    assert_eq!(seen(zero(true, None), 4, 2), [None, Some((0, 0)), Some((0, 1)), Some((0, 2))]);
    assert_eq!(seen(zero(true, Some(2)), 2, 5), [Some((2, 4)), Some((3, 5))]);
    assert_eq!(seen(zero(false, Some(2)), 2, 5), [Some((3, 5)); 2]);
    assert_eq!(seen(zero(false, Some(usize::MAX)), 1, 5), [Some((0, 5))]);
    assert_eq!(seen(config(Sink::None, true, None), 3, 2), [None, Some((1, 1)), Some((1, 2))]);
    assert_eq!(seen(config(Sink::First, true, None), 3, 2), [None, Some((0, 1)), Some((0, 2))]);
    let softmax = |window| AttentionConfig { method: Method::Softmax, ..config(Sink::None, true, window) };
    assert_eq!(seen(softmax(Some(2)), 3, 3), [Some((1, 1)), Some((1, 2)), Some((2, 3))]);
    assert_eq!(seen(softmax(Some(1)), 2, 1), [None, Some((1, 1))]);
    assert_eq!(seen(softmax(Some(usize::MAX)), 1, 3), [Some((1, 3))]);
}

#[test]
fn rows_without_an_integral() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 3, keys: 2 };
    // Row 0 sees nothing, row 1 node 1 only, row 2 the segment between the two tokens.
    let call = Call::random(1, config(Sink::None, true, None), shape, 1);
    let output = call.forward();
    assert_eq!(output.out[..4], [0.0, 0.0, call.v[0], call.v[1]]);
    assert_eq!(output.lse[..2], [f64::NEG_INFINITY; 2]);
    assert!(output.lse[2].is_finite());
    let gradients = call.backward(&[1.0, 2.0, 3.0, 4.0, 0.0, 0.0], Some(&[5.0, 6.0, 0.0]));
    assert_eq!(gradients.d_v, [3.0, 4.0, 0.0, 0.0]);
    assert!(gradients.d_q.iter().chain(&gradients.d_k).all(|d| *d == 0.0));

    // With a given sink row 0 sees node 0 only.
    let call = Call::random(1, config(Sink::Given, true, None), shape, 1);
    assert_eq!(&call.forward().out[..2], call.sink_v.as_deref().unwrap());
    let gradients = call.backward(&[1.0, 2.0, 0.0, 0.0, 0.0, 0.0], Some(&[9.0, 0.0, 0.0]));
    assert_eq!(gradients.d_sink_v.unwrap(), [1.0, 2.0]);
    assert_eq!(gradients.d_sink_k.unwrap(), [0.0; 3]);

    // Nothing but segments of length 0: zeros, and no gradient at all.
    for sink in [Sink::Zero, Sink::First, Sink::Given, Sink::None] {
        let mut call = Call::random(1, config(sink, false, None), shape, 1);
        call.intervals = Some(vec![0.0; 2]);
        assert_eq!(call.forward(), Output { out: vec![0.0; 6], lse: vec![f64::NEG_INFINITY; 3] });
        let gradients = call.backward(&[1.0; 6], Some(&[1.0; 3]));
        let Gradients { d_q, d_k, d_v, d_sink_k, d_sink_v, d_intervals } = gradients;
        let optional = d_sink_k.into_iter().chain(d_sink_v).chain(d_intervals).flatten();
        assert!(d_q.into_iter().chain(d_k).chain(d_v).chain(optional).all(|d| d == 0.0));
    }
}

#[test]
fn nothing_to_attend_to() {
    for (sink, want) in
        [(Sink::Zero, [0.0; 2]), (Sink::First, [0.0; 2]), (Sink::Given, [7.0; 2]), (Sink::None, [0.0; 2])]
    {
        for causal in [true, false] {
            let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 1, keys: 0 };
            let mut call = Call::random(1, config(sink, causal, None), shape, 1);
            call.sink_v = call.sink_v.map(|_| vec![7.0; 2]);
            let output = call.forward();
            assert_eq!(output.out, want.repeat(4));
            assert_eq!(output.lse, [f64::NEG_INFINITY; 4]);
            let gradients = call.backward(&[1.0; 8], None);
            assert_eq!(gradients.d_q, [0.0; 12]);
            assert_eq!(gradients.d_sink_v, (sink == Sink::Given).then(|| vec![4.0; 2]));
        }
    }
}

#[test]
fn empty_calls() {
    let full = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 3, keys: 2 };
    let shapes = [
        AttentionShape { batch: 0, ..full },
        AttentionShape { heads: 0, ..full },
        AttentionShape { heads: 0, kv_heads: 0, ..full },
        AttentionShape { queries: 0, ..full },
        AttentionShape { queries: 0, keys: 0, ..full },
        AttentionShape { batch: 1000, heads: 0, kv_heads: 0, ..full },
        AttentionShape { batch: 1000, queries: 0, keys: 0, ..full },
    ];
    for shape in shapes {
        for sink in [Sink::Zero, Sink::First, Sink::None] {
            let AttentionShape { batch, kv_heads, keys, .. } = shape;
            let keys = if batch > 2 { 0 } else { batch * kv_heads * keys };
            let call = Call {
                config: config(sink, true, None),
                shape,
                q: vec![],
                k: vec![1.0; keys * 3],
                v: vec![1.0; keys * 2],
                sink_k: None,
                sink_v: None,
                intervals: None,
            };
            assert_eq!(call.forward(), Output { out: vec![], lse: vec![] });
            let gradients = call.backward(&[], Some(&[]));
            assert_eq!((gradients.d_k, gradients.d_v), (vec![0.0; keys * 3], vec![0.0; keys * 2]));
            assert_eq!(largest_logit(&call.config, &shape, &call.inputs()).unwrap(), 0.0);
        }
    }
}

/// Nodes beyond the last visible one may hold anything, and moving them changes no bit.
#[test]
fn the_future_is_not_read() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 4, keys: 4 };
    let mut call = Call::random(1, config(Sink::Zero, true, None), shape, 1);
    call.intervals = Some(vec![1.0, 2.0, 0.5, 1.0]);
    let want = call.forward();
    call.k[9..].fill(1e300);
    call.v[6..].fill(1e300);
    call.intervals = Some(vec![1.0, 2.0, 0.5, 1e300]);
    call.q[9..].fill(0.0);
    let got = call.forward();
    assert_eq!((&got.out[..6], &got.lse[..3]), (&want.out[..6], &want.lse[..3]));
}

/// Segments of length 0 may lie far above everything else; very short and very long ones count by their length.
#[test]
fn unequal_intervals() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1, keys: 4 };
    let config = AttentionConfig { head_dim: 1, value_dim: 1, scale: Some(1.0), ..config(Sink::None, true, None) };
    let mut call = Call::random(1, config, shape, 1);
    (call.q, call.k) = (vec![1.0], vec![0.0, 0.0, 1e4, 1e4]);
    (call.v, call.intervals) = (vec![1.0, 3.0, 1e9, 1e9], Some(vec![1.0, 1.0, 0.0, 0.0]));
    assert_eq!(call.forward(), Output { out: vec![2.0], lse: vec![0.0] });
    let gradients = call.backward(&[1.0], None);
    assert_eq!((gradients.d_v, gradients.d_k), (vec![0.5, 0.5, 0.0, 0.0], vec![-1.0 / 6.0, 1.0 / 6.0, 0.0, 0.0]));
    assert_eq!(gradients.d_intervals.unwrap()[3], f64::INFINITY);
    for length in [1e-300, 1e300] {
        call.intervals = Some(vec![1.0, length, 0.0, 0.0]);
        let output = call.forward();
        assert_eq!(output.out, [2.0]);
        assert_close("lse", &output.lse, &[length.ln()], 1e-15);
    }
}

/// Equal logits: a_i = 0 makes the weights those of the trapezoidal rule.
#[test]
fn zero_queries_give_the_trapezoidal_rule() {
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1, keys: 3 };
    let mut call = Call::random(1, AttentionConfig { value_dim: 1, ..config(Sink::Zero, false, None) }, shape, 1);
    (call.q, call.v) = (vec![0.0; 3], vec![1.0, 2.0, 4.0]);
    let output = call.forward();
    assert_close("out", &output.out, &[5.0 / 3.0], 1e-15);
    assert_close("lse", &output.lse, &[3f64.ln()], 1e-15);
}

/// Every `row` followed by `more` times `value`.
fn padded(x: &[f64], row: usize, value: f64, more: usize) -> Vec<f64> {
    if row == 0 { x.to_vec() } else { x.chunks(row).flat_map(|row| [row, &vec![value; more]].concat()).collect() }
}

#[test]
fn ragged_batches_are_batches_taken_apart() {
    for call in small_calls().into_iter().filter(|call| call.shape.batch == 2) {
        let (config, shape) = (call.config, call.shape);
        let AttentionShape { heads, kv_heads, queries, keys, .. } = shape;
        let AttentionConfig { head_dim, value_dim, .. } = config;
        let mut rng = fastrand::Rng::with_seed(keys as u64);
        let d_out = random(&mut rng, 2 * heads * queries * value_dim, 1.0);
        let d_lse = random(&mut rng, 2 * heads * queries, 1.0);
        let (want, gradients) = (call.forward(), call.backward(&d_out, Some(&d_lse)));
        let largest = largest_logit(&config, &shape, &call.inputs()).unwrap();

        let full = Lengths::Full;
        assert_eq!(forward_ragged(&config, &shape, &full, &call.inputs()).unwrap(), want);
        assert_eq!(largest_logit_ragged(&config, &shape, &full, &call.inputs()).unwrap(), largest);

        let rows = |x: &[f64], width| one_after_another(x, heads, queries * width);
        let tokens = |x: &[f64], width| one_after_another(x, kv_heads, keys * width);
        let packed = Call {
            shape: AttentionShape { batch: 1, queries: 2 * queries, keys: 2 * keys, ..shape },
            q: rows(&call.q, head_dim),
            k: tokens(&call.k, head_dim),
            v: tokens(&call.v, value_dim),
            ..call.clone()
        };
        let lengths = Lengths::Packed {
            cu_seqlens_q: vec![0, queries, queries, 2 * queries],
            cu_seqlens_k: vec![0, keys, keys, 2 * keys],
        };
        // A sequence of nothing stands between the two, with a sink of its own.
        let between = |sink: &Vec<f64>| {
            let (first, second) = sink.split_at(sink.len() / 2);
            if call.sink_k.as_ref().unwrap().len() == kv_heads * head_dim {
                sink.clone()
            } else {
                [first, &vec![9.0; first.len()], second].concat()
            }
        };
        let packed =
            Call { sink_k: call.sink_k.as_ref().map(between), sink_v: call.sink_v.as_ref().map(between), ..packed };
        let (shape, inputs) = (packed.shape, packed.inputs());
        let got = forward_ragged(&config, &shape, &lengths, &inputs).unwrap();
        assert_eq!((got.out, got.lse), (rows(&want.out, value_dim), rows(&want.lse, 1)));
        assert_eq!(largest_logit_ragged(&config, &shape, &lengths, &inputs).unwrap(), largest);
        let (d_out_packed, d_lse_packed) = (rows(&d_out, value_dim), rows(&d_lse, 1));
        let got = backward_ragged(&config, &shape, &lengths, &inputs, &d_out_packed, Some(&d_lse_packed)).unwrap();
        assert_eq!(got.d_q, rows(&gradients.d_q, head_dim));
        assert_eq!(got.d_k, tokens(&gradients.d_k, head_dim));
        assert_eq!(got.d_v, tokens(&gradients.d_v, value_dim));
        assert_eq!(got.d_intervals, gradients.d_intervals);
        for (got, want) in [(got.d_sink_k, &gradients.d_sink_k), (got.d_sink_v, &gradients.d_sink_v)] {
            let Some((got, want)) = got.zip(want.as_ref()) else { continue };
            let third = got.len() / 3;
            let got = if got.len() == want.len() { got } else { [&got[..third], &got[2 * third..]].concat() };
            assert_close("sinks", &got, want, 1e-14);
        }

        let cache = Call {
            shape: AttentionShape { keys: keys + 3, ..call.shape },
            k: padded(&call.k, keys * head_dim, f64::NAN, 3 * head_dim),
            v: padded(&call.v, keys * value_dim, f64::INFINITY, 3 * value_dim),
            intervals: call.intervals.as_ref().map(|intervals| padded(intervals, keys, -1.0, 3)),
            ..call.clone()
        };
        let (shape, inputs, lengths) = (cache.shape, cache.inputs(), Lengths::Cache { kv_lens: vec![keys; 2] });
        assert_eq!(forward_ragged(&config, &shape, &lengths, &inputs).unwrap(), want);
        assert_eq!(largest_logit_ragged(&config, &shape, &lengths, &inputs).unwrap(), largest);
        let got = backward_ragged(&config, &shape, &lengths, &inputs, &d_out, Some(&d_lse)).unwrap();
        assert_eq!(got.d_q, gradients.d_q);
        assert_eq!(got.d_k, padded(&gradients.d_k, keys * head_dim, 0.0, 3 * head_dim));
        assert_eq!(got.d_v, padded(&gradients.d_v, keys * value_dim, 0.0, 3 * value_dim));
        assert_eq!(got.d_intervals, gradients.d_intervals.map(|intervals| padded(&intervals, keys, 0.0, 3)));
    }
}

#[test]
fn bad_lengths_are_refused() {
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 3, keys: 4 };
    let call = Call::random(1, config(Sink::Given, true, None), shape, 1);
    let refused = |lengths: Lengths| {
        let error = forward_ragged(&call.config, &shape, &lengths, &call.inputs()).expect_err("accepted");
        let backward = backward_ragged(&call.config, &shape, &lengths, &call.inputs(), &[0.0; 12], None);
        assert_eq!(error.to_string(), backward.unwrap_err().to_string());
        error.to_string()
    };
    let packed =
        |q: &[usize], k: &[usize]| refused(Lengths::Packed { cu_seqlens_q: q.to_vec(), cu_seqlens_k: k.to_vec() });
    assert!(packed(&[0, 2], &[0, 4]).starts_with("cu_seqlens_q: got 2 entries from Some(0) to Some(2)"));
    assert!(packed(&[0, 3], &[0, 5, 4]).starts_with("cu_seqlens_k: got 3 entries from Some(0) to Some(4), not sorted"));
    assert!(packed(&[0, 3], &[0, 2, 4]).starts_with("cu_seqlens_k: got 3 entries, needed 2, as cu_seqlens_q"));
    assert!(refused(Lengths::Cache { kv_lens: vec![] }).starts_with("kv_lens: got 0 entries"));
    assert!(refused(Lengths::Cache { kv_lens: vec![5] }).starts_with("kv_lens: got 5"));
    // NaN counts only where a sequence has it.
    let mut spoilt = call.clone();
    spoilt.k[11] = f64::NAN;
    let run =
        |length| forward_ragged(&call.config, &shape, &Lengths::Cache { kv_lens: vec![length] }, &spoilt.inputs());
    assert!(run(3).is_ok() && run(4).is_err());
}

#[test]
fn bad_arguments_are_refused() {
    let shape = AttentionShape { batch: 2, heads: 2, kv_heads: 1, queries: 3, keys: 4 };
    let good = || {
        let mut call = Call::random(1, config(Sink::Given, true, Some(3)), shape, 1);
        call.intervals = Some(vec![1.0; 8]);
        call
    };
    good().forward();
    let refused = |change: &dyn Fn(&mut Call)| {
        let mut call = good();
        change(&mut call);
        call.refused()
    };
    assert_eq!(refused(&|call| call.config.head_dim = 0), "head_dim");
    assert_eq!(refused(&|call| call.config.window = Some(0)), "window");
    assert_eq!(refused(&|call| call.config.scale = Some(f64::NAN)), "scale");
    assert_eq!(refused(&|call| call.config.method = Method::Softmax), "sink");
    assert_eq!(refused(&|call| (call.shape.heads, call.shape.kv_heads) = (3, 2)), "heads");
    assert_eq!(refused(&|call| call.shape.kv_heads = 0), "heads");
    assert_eq!(refused(&|call| call.q.truncate(5)), "q");
    assert_eq!(refused(&|call| call.k.push(0.0)), "k");
    assert_eq!(refused(&|call| call.v.clear()), "v");
    assert_eq!(refused(&|call| call.intervals.as_mut().unwrap().truncate(5)), "intervals");
    assert_eq!(refused(&|call| call.sink_k = Some(vec![0.0; 5])), "sink_k");
    assert_eq!(refused(&|call| call.sink_v = None), "sink_v");
    assert_eq!(refused(&|call| call.config.sink = Sink::Zero), "sink_k");
    assert_eq!(refused(&|call| call.shape.queries = usize::MAX), "q");
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        assert_eq!(refused(&|call| call.q[3] = bad), "q");
        assert_eq!(refused(&|call| call.k[3] = bad), "k");
        assert_eq!(refused(&|call| call.v[3] = bad), "v");
        assert_eq!(refused(&|call| call.sink_k.as_mut().unwrap()[0] = bad), "sink_k");
        assert_eq!(refused(&|call| call.sink_v.as_mut().unwrap()[0] = bad), "sink_v");
        assert_eq!(refused(&|call| call.intervals.as_mut().unwrap()[7] = bad), "intervals");
    }
    assert_eq!(refused(&|call| call.intervals.as_mut().unwrap()[0] = -1e-300), "intervals");
    assert_eq!(refused(&|call| (call.q[0], call.sink_k.as_mut().unwrap()[0]) = (1e200, 1e200)), "q, k");
    let mut softmax = good();
    softmax.config = AttentionConfig { method: Method::Softmax, sink: Sink::None, ..softmax.config };
    (softmax.sink_k, softmax.sink_v) = (None, None);
    assert_eq!(softmax.refused(), "intervals");
    let call = good();
    let run = |d_out: &[f64], d_lse: &[f64]| backward(&call.config, &shape, &call.inputs(), d_out, Some(d_lse));
    assert!(run(&[0.0; 24], &[0.0; 12]).is_ok());
    assert!(run(&[0.0; 23], &[0.0; 12]).is_err());
    assert!(run(&[0.0; 24], &[0.0; 13]).is_err());
    assert!(run(&[f64::NAN; 24], &[0.0; 12]).is_err());
    assert!(run(&[0.0; 24], &[f64::NEG_INFINITY; 12]).is_err());
}
