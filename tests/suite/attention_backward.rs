//! Gradients of attention against the float64 reference and the given cases.

use continuous_attention::reference::attention as reference;
use continuous_attention::reference::compare::{Quantity, Scale, attention_factor, compare, limit};
use continuous_attention::*;

use crate::harness::{AttentionCase, Guarded, arithmetic, bits, case_count, gpu, normal, rng, widen};

#[derive(Clone, Debug)]
struct Problem {
    config: AttentionConfig,
    shape: AttentionShape,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    /// sink_k and sink_v, each with its leading size.
    sinks: Option<[(Vec<f32>, usize); 2]>,
    intervals: Option<Vec<f32>>,
    d_out: Vec<f32>,
    d_lse: Option<Vec<f32>>,
}

type Gradients = Vec<(&'static str, Vec<f32>)>;

impl Problem {
    fn random(rng: &mut fastrand::Rng, config: AttentionConfig, shape: AttentionShape, intervals: bool) -> Self {
        let mut normal = |count: usize| normal(rng, count);
        let AttentionShape { batch, heads, kv_heads, queries, keys } = shape;
        let (d, dv) = (config.head_dim, config.value_dim);
        let q = normal(batch * heads * queries * d);
        let k = normal(batch * kv_heads * keys * d);
        let v = normal(batch * kv_heads * keys * dv);
        let d_out = normal(batch * heads * queries * dv);
        let d_lse = normal(batch * heads * queries);
        let [k_batch, v_batch] = [d % 2 == 0, d % 3 == 0].map(|shared| if shared { 1 } else { batch });
        let sinks = (config.sink == Sink::Given)
            .then(|| [(normal(k_batch * kv_heads * d), k_batch), (normal(v_batch * kv_heads * dv), v_batch)]);
        let intervals = (intervals && config.method == Method::Continuous).then(|| {
            normal(batch * keys).into_iter().map(|x| if x < -0.6 { 0.0 } else { x.abs() + 0.01 }).collect::<Vec<_>>()
        });
        Problem { config, shape, q, k, v, sinks, intervals, d_out, d_lse: (d % 3 == 0).then_some(d_lse) }
    }

    /// Forward then backward in one encoder, outputs and workspaces full of NaN before.
    fn run(&self) -> Gradients {
        let gpu = gpu();
        let AttentionShape { batch, heads, kv_heads, queries, keys } = self.shape;
        let (d, dv) = (self.config.head_dim, self.config.value_dim);
        let nan = |shape: &[usize]| gpu.upload(&vec![f32::NAN; shape.iter().product()], shape).unwrap();
        let up = |data: &[f32], shape: &[usize]| gpu.upload(data, shape).unwrap().view();
        let q = up(&self.q, &[batch, heads, queries, d]);
        let k = up(&self.k, &[batch, kv_heads, keys, d]);
        let v = up(&self.v, &[batch, kv_heads, keys, dv]);
        let sink_k = self.sinks.as_ref().map(|[(sink, b), _]| up(sink, &[*b, kv_heads, d]));
        let sink_v = self.sinks.as_ref().map(|[_, (sink, b)]| up(sink, &[*b, kv_heads, dv]));
        let intervals = self.intervals.as_ref().map(|x| up(x, &[batch, keys]));
        let out = nan(&[batch, heads, queries, dv]);
        let lse = nan(&[batch, heads, queries]);
        let attention = Attention::new(gpu, self.config).unwrap();
        let plan = attention.plan_backward(&self.shape).unwrap();
        let guarded = |shape: &[usize]| Guarded::new(gpu, Guarded::ODD, shape);
        let mut outputs = vec![("d_q", guarded(q.shape())), ("d_k", guarded(k.shape())), ("d_v", guarded(v.shape()))];
        if let (Some(sink_k), Some(sink_v)) = (&sink_k, &sink_v) {
            outputs.push(("d_sink_k", guarded(sink_k.shape())));
            outputs.push(("d_sink_v", guarded(sink_v.shape())));
        }
        if let Some(intervals) = &intervals {
            outputs.push(("d_intervals", guarded(intervals.shape())));
        }
        let output = |name: &str| outputs.iter().find(|(n, _)| *n == name).map(|(_, tensor)| tensor.view());
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let forward = AttentionTensors {
            sink_k,
            sink_v,
            intervals,
            lse: Some(lse.view()),
            ..AttentionTensors::new(q, k, v, out.view())
        };
        attention.forward(&mut encoder, &forward).unwrap();
        let d_out = up(&self.d_out, &[batch, heads, queries, dv]);
        let required = ["d_q", "d_k", "d_v"].map(|name| output(name).unwrap());
        let backward = AttentionGradients {
            d_lse: self.d_lse.as_ref().map(|x| up(x, &[batch, heads, queries])),
            d_sink_k: output("d_sink_k"),
            d_sink_v: output("d_sink_v"),
            d_intervals: output("d_intervals"),
            workspace: Some(nan(&[plan.workspace_bytes() as usize / 4]).view()),
            ..AttentionGradients::new(&forward, lse.view(), d_out, required)
        };
        attention.backward(&mut encoder, &backward).unwrap();
        gpu.queue().submit([encoder.finish()]);
        outputs.into_iter().map(|(name, tensor)| (name, tensor.read(gpu, name))).collect()
    }

    fn check(&self) -> f64 {
        let (want, factor) = self.reference();
        let limit = limit(Quantity::Gradient, DType::F32) * factor;
        let mut worst = 0f64;
        for (name, got) in self.run() {
            let result = compare(&got, named(&want, name), limit, Scale::Tensor);
            println!("{name}: rms {:.2e} max {:.2e} limit {limit:.1e}", result.rms, result.max);
            assert!(result.passed(), "{name}: {:?}\n{:?} {:?}", result, self.config, self.shape);
            worst = worst.max(result.rms / limit);
        }
        worst
    }

    /// Calls `work` with the inputs of the reference.
    fn with_inputs<T>(&self, work: impl FnOnce(&reference::Inputs) -> Result<T>) -> T {
        let (q, k, v) = (widen(&self.q), widen(&self.k), widen(&self.v));
        let sinks = self.sinks.as_ref().map(|[(k, _), (v, _)]| (widen(k), widen(v)));
        let intervals = self.intervals.as_deref().map(widen);
        work(&reference::Inputs {
            q: &q,
            k: &k,
            v: &v,
            sink_k: sinks.as_ref().map(|(k, _)| &k[..]),
            sink_v: sinks.as_ref().map(|(_, v)| &v[..]),
            intervals: intervals.as_deref(),
        })
        .unwrap()
    }

    fn reference_forward(&self) -> reference::Output {
        self.with_inputs(|inputs| reference::forward(&self.config, &self.shape, inputs))
    }

    /// The float64 gradients and the factor on attention's limits.
    fn reference(&self) -> (reference::Gradients, f64) {
        let d_lse = self.d_lse.as_deref().map(widen);
        self.with_inputs(|inputs| {
            let d_out = widen(&self.d_out);
            let want = reference::backward(&self.config, &self.shape, inputs, &d_out, d_lse.as_deref())?;
            Ok((want, attention_factor(reference::largest_logit(&self.config, &self.shape, inputs)?)))
        })
    }
}

fn named<'a>(gradients: &'a reference::Gradients, name: &str) -> &'a [f64] {
    match name {
        "d_q" => &gradients.d_q,
        "d_k" => &gradients.d_k,
        "d_v" => &gradients.d_v,
        "d_sink_k" => gradients.d_sink_k.as_deref().unwrap(),
        "d_sink_v" => gradients.d_sink_v.as_deref().unwrap(),
        "d_intervals" => gradients.d_intervals.as_deref().unwrap(),
        _ => unreachable!("{name}"),
    }
}

/// Judges gradients that are small differences by the size of what was subtracted: Σ |d_out| |v| per row. That of a length
/// is so much per length of the sequence, where that is short.
fn check_absolute(problem: &Problem) {
    let (want, factor) = problem.reference();
    let largest = |x: &[f32]| x.iter().fold(1.0f64, |top, x| top.max(f64::from(x.abs())));
    let d_lse = problem.d_lse.as_deref().map_or(1.0, largest);
    let terms = largest(&problem.d_out) * largest(&problem.v) * problem.config.value_dim as f64 + d_lse;
    let size = terms * largest(&problem.k).max(largest(&problem.q));
    let total = |lengths: &[f32]| lengths.iter().map(|x| f64::from(*x)).sum::<f64>();
    let lengths = problem.intervals.iter().flat_map(|x| x.chunks(problem.shape.keys.max(1)).map(total));
    let shortest = lengths.filter(|length| *length > 0.0).fold(1.0, f64::min);
    for (name, got) in problem.run() {
        let size = if name == "d_intervals" { size / shortest } else { size };
        for (got, want) in got.iter().zip(named(&want, name)) {
            let error = (f64::from(*got) - want).abs();
            assert!(error <= 1e-6 * factor * size, "{name}: {got} {want} {:?} {:?}", problem.config, problem.shape);
        }
    }
}

/// More keys and more rows than llvmpipe's loops go through in one dispatch.
#[test]
fn long_sequences() {
    for (dim, value_dim, queries, keys) in
        [(6, 5, 33, 66_000), (6, 5, 66_000, 20), (128, 128, 20, 66_000), (128, 128, 13_000, 20)]
    {
        let config = AttentionConfig { head_dim: dim, value_dim, causal: keys > queries, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries, keys };
        Problem::random(&mut rng(14), config, shape, false).check();
        AttentionCase::random(config, shape, &mut rng(15)).check();
    }
}

#[test]
fn given_cases() {
    for entry in std::fs::read_dir("tests/cases").unwrap() {
        let path = entry.unwrap().path();
        let case = case::Case::load(&path, &Default::default()).unwrap();
        let case::Operation::Attention { config, shape, .. } = case.operation else { continue };
        let get = |name: &str| case.inputs.get(name).map(|tensor| tensor.values.clone());
        let problem = Problem {
            config,
            shape,
            q: get("q").unwrap(),
            k: get("k").unwrap(),
            v: get("v").unwrap(),
            sinks: get("sink_k").map(|k| {
                [(k, case.inputs["sink_k"].shape[0]), (get("sink_v").unwrap(), case.inputs["sink_v"].shape[0])]
            }),
            intervals: get("intervals"),
            d_out: get("d_out").unwrap(),
            d_lse: get("d_lse"),
        };
        println!("{}", path.display());
        problem.check();
        for (name, got) in problem.run() {
            let want = widen(&case.expected[name].values);
            let result = compare(&got, &want, limit(Quantity::Gradient, DType::F32), Scale::Tensor);
            assert!(result.passed(), "{}: {name}: {result:?}", path.display());
        }
    }
}

#[test]
fn random_configurations() {
    let mut worst = 0f64;
    for seed in 0..case_count(60) as u64 {
        let rng = &mut rng(seed);
        let method = if rng.u8(0..4) == 0 { Method::Softmax } else { Method::Continuous };
        let sink = match method {
            Method::Softmax => Sink::None,
            Method::Continuous => [Sink::Zero, Sink::First, Sink::Given, Sink::None][rng.usize(0..4)],
        };
        let config = AttentionConfig {
            head_dim: rng.usize(1..70),
            value_dim: rng.usize(1..70),
            method,
            sink,
            causal: rng.bool(),
            // A row of one segment has out = L v + R v whatever its length, and small gradients of q and k: differences
            // of nearly equal numbers, which no relative error can judge. `few_nodes` judges them by what is subtracted.
            window: rng.bool().then(|| rng.usize(5..80)),
            scale: None,
            block_q: None,
        };
        let kv_heads = rng.usize(1..3);
        let shape = AttentionShape {
            batch: rng.usize(1..3),
            heads: kv_heads * rng.usize(1..3),
            kv_heads,
            queries: rng.usize(0..100),
            keys: if rng.u8(0..20) == 0 { 0 } else { rng.usize(5..100) },
        };
        let intervals = rng.bool();
        let problem = Problem::random(rng, config, shape, intervals);
        println!("{seed}: {config:?} {shape:?}");
        worst = worst.max(problem.check());
    }
    println!("worst rms {worst:.2} of its limit");
}

#[test]
fn few_nodes() {
    for seed in 0..60 {
        let rng = &mut rng(1000 + seed);
        let config = AttentionConfig {
            head_dim: rng.usize(1..20),
            value_dim: rng.usize(1..20),
            sink: [Sink::Zero, Sink::First, Sink::Given, Sink::None][rng.usize(0..4)],
            causal: rng.bool(),
            window: rng.bool().then(|| rng.usize(1..4)),
            ..Default::default()
        };
        let shape = AttentionShape {
            batch: rng.usize(0..3),
            heads: 2,
            kv_heads: rng.usize(1..3),
            queries: rng.usize(0..8),
            keys: rng.usize(0..5),
        };
        let intervals = rng.bool();
        check_absolute(&Problem::random(rng, config, shape, intervals));
    }
}

#[test]
fn zero_d_out_gives_zeros_and_scaling_is_linear() {
    let rng = &mut rng(7);
    let config = AttentionConfig { head_dim: 16, value_dim: 8, sink: Sink::Given, ..Default::default() };
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 45, keys: 70 };
    let problem = Problem::random(rng, config, shape, true);
    let scaled = |factor: f32| {
        let scale = |x: &Vec<f32>| x.iter().map(|x| x * factor).collect::<Vec<_>>();
        Problem { d_out: scale(&problem.d_out), d_lse: problem.d_lse.as_ref().map(scale), ..problem.clone() }.run()
    };
    let one = scaled(1.0);
    // A power of two: every rounding is the same.
    for ((name, one), (_, four)) in one.iter().zip(scaled(4.0)) {
        assert!(one.iter().any(|x| *x != 0.0), "{name}");
        assert!(one.iter().zip(&four).all(|(one, four)| 4.0 * one == *four), "{name}");
    }
    for (name, zero) in scaled(0.0) {
        assert!(zero.iter().all(|x| *x == 0.0), "{name}");
    }
    // A repeated run is bit-equal.
    for ((name, one), (_, again)) in one.iter().zip(scaled(1.0)) {
        assert_eq!(bits(one), bits(&again), "{name}");
    }
}

#[test]
fn what_no_row_sees_gets_zero_and_its_nan_stays_there() {
    let rng = &mut rng(8);
    let config = AttentionConfig { head_dim: 8, value_dim: 40, window: Some(5), ..Default::default() };
    // 70 keys, the last 10 rows of them queried: rows see nodes 56 (= 61 − 5) to 70.
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 10, keys: 70 };
    let clean = Problem::random(rng, config, shape, false);
    let mut dirty = clean.clone();
    for token in 0..55 {
        dirty.k[token * 8..][..8].fill(f32::NAN);
        dirty.v[token * 40..][..40].fill(f32::INFINITY);
    }
    for ((name, clean), (_, dirty)) in clean.run().iter().zip(dirty.run()) {
        assert_eq!(bits(clean), bits(&dirty), "{name}");
        let width = match *name {
            "d_k" => 8,
            "d_v" => 40,
            _ => continue,
        };
        assert!(clean[..55 * width].iter().all(|x| *x == 0.0), "{name}");
        assert!(clean[55 * width..].iter().all(|x| *x != 0.0), "{name}");
    }
}

#[test]
fn a_nan_row_spoils_only_what_it_sees() {
    let rng = &mut rng(9);
    let config = AttentionConfig { head_dim: 8, value_dim: 8, window: Some(5), ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 70, keys: 70 };
    let clean = Problem::random(rng, config, shape, false);
    let mut dirty = clean.clone();
    // Row 40 has last node 41 and first node 36: tokens 35 to 40.
    dirty.d_out[40 * 8] = f32::NAN;
    for ((name, clean), (_, dirty)) in clean.run().iter().zip(dirty.run()) {
        for (at, (clean, dirty)) in clean.iter().zip(&dirty).enumerate() {
            let row = at / 8;
            let spoiled = match *name {
                "d_q" => row == 40,
                "d_k" => (35..=40).contains(&row),
                _ => (35..=40).contains(&row) && at % 8 == 0,
            };
            assert_eq!(dirty.is_nan(), spoiled, "{name} {at}");
            assert!(spoiled || clean.to_bits() == dirty.to_bits(), "{name} {at}");
        }
    }
}

/// Row 0 sees token 1 alone and returned its value: only d_v has to do with it, whatever its query and key hold.
#[test]
fn a_row_of_one_node_hands_on_its_gradient_only() {
    let rng = &mut rng(14);
    let config = AttentionConfig { head_dim: 8, value_dim: 8, sink: Sink::None, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 40, keys: 40 };
    let clean = Problem::random(rng, config, shape, false);
    let mut dirty = clean.clone();
    dirty.q[..8].fill(f32::NAN);
    for ((name, clean), (_, dirty)) in clean.run().iter().zip(dirty.run()) {
        assert_eq!(bits(clean), bits(&dirty), "{name}");
        assert!(*name != "d_q" || clean[..8].iter().all(|x| *x == 0.0));
    }
    // A key that is NaN spoils the rows that integrate over it, of which row 0 is none.
    let mut dirty = clean.clone();
    dirty.k[..8].fill(f32::NAN);
    let gradients = dirty.run();
    assert!(gradients[0].1[..8].iter().all(|x| *x == 0.0), "{:?}", &gradients[0].1[..8]);
    assert!(gradients[0].1[8..].iter().all(|x| x.is_nan()));
}

#[test]
fn numerics_at_every_step_size() {
    let rng = &mut rng(10);
    let config = AttentionConfig { head_dim: 4, value_dim: 5, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 50, keys: 50 };
    // Steps from nearly 0 through both branches' border to very large.
    for size in [1e-4, 1e-2, 1.0, 3.0, 10.0, 30.0] {
        let mut problem = Problem::random(rng, config, shape, false);
        problem.k.iter_mut().for_each(|x| *x *= size);
        problem.check();
    }
}

#[test]
fn a_long_sequence() {
    let rng = &mut rng(11);
    let config = AttentionConfig::default();
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1000, keys: 1000 };
    Problem::random(rng, config, shape, true).check();
}

#[test]
fn intervals_down_to_the_shortest() {
    let rng = &mut rng(12);
    let config = AttentionConfig { head_dim: 6, value_dim: 7, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 2, queries: 40, keys: 40 };
    let mut problem = Problem::random(rng, config, shape, true);
    problem.d_lse = None;
    // Only ratios of lengths matter to what is not the gradient of a length, which grows as they shrink.
    let lengths = problem.intervals.clone().unwrap();
    // Weights below the smallest normal number are 0 on drivers that flush them, which WGSL allows.
    let shortest = if arithmetic().flushes { 1e-33 } else { 2e-37 };
    for length in [1e-30f32, shortest] {
        problem.intervals = Some(lengths.iter().map(|x| length * (0.5 + x.min(1.0))).collect());
        problem.check();
    }
}

/// A sequence cut in two: the later shard starts from the last key and value of the earlier one, the results are merged
/// by their lse. Gradients of the merge go to either shard by the chain rule, and the shards' own gradients, added up,
/// are those of the whole.
#[test]
fn gradients_of_merged_shards_are_those_of_the_whole() {
    let rng = &mut rng(13);
    for (sink, causal, queries, cut) in [
        (Sink::Zero, true, 37, 60),
        (Sink::First, false, 20, 1),
        (Sink::Given, true, 33, 31),
        (Sink::None, true, 64, 36),
    ] {
        let config = AttentionConfig { head_dim: 6, value_dim: 7, sink, causal, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 4, kv_heads: 2, queries, keys: 100 };
        let mut whole = Problem::random(rng, config, shape, true);
        // A shard of length 0 has no lse through which the gradient of its length could come.
        whole.intervals.iter_mut().flatten().for_each(|length| *length += 0.01);
        let cut_heads = |x: &[f32], width: usize, from: usize, to: usize| -> Vec<f32> {
            x.chunks(100 * width).flat_map(|head| &head[from * width..to * width]).copied().collect()
        };
        let shard = |config: AttentionConfig, from: usize, to: usize| Problem {
            config,
            shape: AttentionShape { keys: to - from, ..shape },
            k: cut_heads(&whole.k, 6, from, to),
            v: cut_heads(&whole.v, 7, from, to),
            intervals: whole.intervals.as_deref().map(|x| cut_heads(x, 1, from, to)),
            ..whole.clone()
        };
        let mut shards = [
            shard(AttentionConfig { causal: false, ..config }, 0, cut),
            shard(AttentionConfig { sink: Sink::Given, ..config }, cut, 100),
        ];
        let last_node = |x: &[f32], width: usize| cut_heads(x, width, cut - 1, cut);
        shards[1].sinks = Some([(last_node(&whole.k, 6), 1), (last_node(&whole.v, 7), 1)]);

        // out = Σ_j e^{lse_j − lse} out_j: d_out_j = e^{lse_j − lse} d_out, d_lse_j = e^{lse_j − lse} (d_out·(out_j − out) + d_lse).
        let parts = shards.each_ref().map(Problem::reference_forward);
        let merged = reference::merge(&parts[0], &parts[1], 7).unwrap();
        for (shard, part) in shards.iter_mut().zip(&parts) {
            let mut d_lse = Vec::new();
            for (row, lse) in part.lse.iter().enumerate() {
                let weight = (lse - merged.lse[row]).exp();
                let row = row * 7..row * 7 + 7;
                let mut along = whole.d_lse.as_ref().map_or(0.0, |d_lse| f64::from(d_lse[row.start / 7]));
                for c in row {
                    along += f64::from(whole.d_out[c]) * (part.out[c] - merged.out[c]);
                    shard.d_out[c] = (weight * f64::from(whole.d_out[c])) as f32;
                }
                d_lse.push((weight * along) as f32);
            }
            shard.d_lse = Some(d_lse);
        }
        let [earlier, later] = shards.each_ref().map(Problem::run);
        let get = |gradients: &Gradients, name: &str| -> Vec<f32> {
            gradients.iter().find(|(n, _)| *n == name).map(|(_, values)| values.clone()).unwrap()
        };
        let join = |name: &str, sink: &str, width: usize| -> Vec<f32> {
            let (mut earlier, later, d_sink) = (get(&earlier, name), get(&later, name), get(&later, sink));
            let heads = earlier.chunks_mut(cut * width).zip(later.chunks((100 - cut) * width));
            heads
                .zip(d_sink.chunks(width))
                .flat_map(|((earlier, later), d_sink)| {
                    earlier[(cut - 1) * width..].iter_mut().zip(d_sink).for_each(|(sum, x)| *sum += x);
                    [&*earlier, later].concat()
                })
                .collect()
        };
        let d_q = get(&earlier, "d_q").iter().zip(get(&later, "d_q")).map(|(a, b)| a + b).collect();
        let d_intervals = [get(&earlier, "d_intervals"), get(&later, "d_intervals")].concat();
        let mut sums = vec![("d_q", d_q), ("d_k", join("d_k", "d_sink_k", 6)), ("d_v", join("d_v", "d_sink_v", 7))];
        sums.push(("d_intervals", d_intervals));
        if sink == Sink::Given {
            sums.extend(["d_sink_k", "d_sink_v"].map(|name| (name, get(&earlier, name))));
        }
        let (want, factor) = whole.reference();
        for (name, got) in sums {
            let result =
                compare(&got, named(&want, name), limit(Quantity::Gradient, DType::F32) * factor, Scale::Tensor);
            println!("{sink:?} {name}: rms {:.2e}", result.rms);
            assert!(result.passed(), "{sink:?} {name}: {result:?}");
        }
    }
}
