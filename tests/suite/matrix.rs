//! Kernels for matrix units, with ordinary arithmetic in their place where there are none: whether tiles, layouts,
//! scales and masks are right, not whether the units are.

use continuous_attention::reference::attention::{Inputs, forward_ragged, largest_logit_ragged, visible_nodes};
use continuous_attention::reference::compare::{Quantity, attention_factor, limit};
use continuous_attention::{
    Attention, AttentionConfig, AttentionShape, AttentionTensors, Call, DType, Efla, EflaConfig, EflaShape,
    EflaTensors, Gpu, GpuOptions, Integrator, Lengths, Method, Sink, TensorView,
};

use crate::harness::{
    AttentionCase, AttentionOutput, EflaCase, EflaOutput, Place, bits, forward_limit, gpu, judge, matrix_gpus, normal,
    pick, rng, submit, widen,
};

const SINKS: [Sink; 4] = [Sink::Zero, Sink::First, Sink::Given, Sink::None];

/// Whether a call runs a kernel whose name starts so.
fn runs(call: &Call, kernel: &str) -> bool {
    format!("{call:?}").contains(&format!("name: \"{kernel}"))
}

fn place(shape: &[usize]) -> Place {
    Place::dense(DType::F16, shape, 12)
}

/// Rounds what is stored as f16.
fn rounded(mut case: AttentionCase) -> AttentionCase {
    let stored = [&mut case.q, &mut case.k, &mut case.v].into_iter();
    for values in stored.chain(&mut case.sink_k).chain(&mut case.sink_v) {
        *values = place(&[values.len()]).rounded(values);
    }
    case
}

fn tensors(gpu: &Gpu, case: &AttentionCase, out: TensorView, lse: TensorView) -> AttentionTensors {
    let AttentionShape { batch, heads, kv_heads, queries, keys } = case.shape;
    let AttentionConfig { head_dim, value_dim, .. } = case.config;
    let input = |values: &[f32], shape: &[usize]| place(shape).upload(gpu, values);
    let sink =
        |values: &Option<Vec<f32>>, dim| values.as_ref().map(|values| input(values, &[case.sink_batch, kv_heads, dim]));
    let intervals = case.intervals.as_ref();
    AttentionTensors {
        sink_k: sink(&case.sink_k, head_dim),
        sink_v: sink(&case.sink_v, value_dim),
        intervals: intervals.map(|values| Place::dense(DType::F32, &[batch, keys], 3).upload(gpu, values)),
        lse: Some(lse),
        lengths: case.lengths.clone(),
        ..AttentionTensors::new(
            input(&case.q, &[batch, heads, queries, head_dim]),
            input(&case.k, &[batch, kv_heads, keys, head_dim]),
            input(&case.v, &[batch, kv_heads, keys, value_dim]),
            out,
        )
    }
}

/// Runs a case, all of it f16; the kernel for matrix units has to do it.
fn run(gpu: &Gpu, case: &AttentionCase) -> AttentionOutput {
    let out = place(&case.out_shape()).output(gpu);
    let lse = Place::dense(DType::F32, &case.lse_shape(), 5).output(gpu);
    let plan = Attention::new(gpu, case.config).unwrap().plan_ragged(&case.shape, &case.lengths).unwrap();
    let call = plan.bind(&tensors(gpu, case, out.view(), lse.view())).unwrap();
    assert!(runs(&call, "attention_forward_matrix"), "{}", case.label());
    submit(gpu, &call);
    AttentionOutput { out: out.read(gpu, &case.label()), lse: lse.read(gpu, &case.label()) }
}

/// Compares with the reference, the kernel for matrix units on every device that has one.
fn check(case: AttentionCase) {
    let case = rounded(case);
    let (q, k, v) = (widen(&case.q), widen(&case.k), widen(&case.v));
    let [sink_k, sink_v, intervals] =
        [&case.sink_k, &case.sink_v, &case.intervals].map(|values| values.as_deref().map(widen));
    let inputs = Inputs {
        q: &q,
        k: &k,
        v: &v,
        sink_k: sink_k.as_deref(),
        sink_v: sink_v.as_deref(),
        intervals: intervals.as_deref(),
    };
    let want = forward_ragged(&case.config, &case.shape, &case.lengths, &inputs).unwrap();
    let largest = largest_logit_ragged(&case.config, &case.shape, &case.lengths, &inputs).unwrap();
    let factor = attention_factor(largest);
    for gpu in matrix_gpus() {
        let (got, label) = (run(gpu, &case), format!("on matrix units, {}", case.label()));
        judge(&label, "out", &got.out, &want.out, limit(Quantity::Forward, DType::F16) * factor);
        judge(&label, "lse", &got.lse, &want.lse, forward_limit() * factor);
    }
}

#[test]
fn dimensions_and_options() {
    let mut rng = rng(1);
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 70, keys: 150 };
    for (head_dim, value_dim) in [(64, 64), (16, 128), (80, 16), (128, 80)] {
        for sink in SINKS {
            let config = AttentionConfig { head_dim, value_dim, sink, ..Default::default() };
            let causal = pick(&mut rng, &[true, false]);
            let window = pick(&mut rng, &[None, Some(40)]);
            check(AttentionCase::random(AttentionConfig { causal, ..config }, shape, &mut rng));
            check(
                AttentionCase::random(AttentionConfig { window, ..config }, shape, &mut rng).with_intervals(&mut rng),
            );
        }
        let softmax =
            AttentionConfig { head_dim, value_dim, method: Method::Softmax, sink: Sink::None, ..Default::default() };
        for (causal, window) in [(true, None), (false, None), (true, Some(33))] {
            check(AttentionCase::random(AttentionConfig { causal, window, ..softmax }, shape, &mut rng));
        }
    }
}

#[test]
fn sizes_and_grouped_heads() {
    let mut rng = rng(2);
    let config = AttentionConfig { head_dim: 16, value_dim: 16, ..Default::default() };
    for (queries, keys) in [(9, 0), (9, 1), (16, 16), (31, 33), (32, 32), (33, 31), (64, 40), (150, 150), (20, 1100)] {
        for sink in SINKS {
            let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries, keys };
            let config = AttentionConfig { sink, causal: rng.bool(), ..config };
            check(AttentionCase::random(config, shape, &mut rng).with_sink_per_sequence(&mut rng));
        }
    }
}

#[test]
fn ragged_batches() {
    let mut rng = rng(3);
    for sink in SINKS {
        let config = AttentionConfig { head_dim: 16, value_dim: 16, sink, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 120, keys: 150 };
        let mut case = AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng);
        case.lengths =
            Lengths::Packed { cu_seqlens_q: vec![0, 40, 40, 73, 120], cu_seqlens_k: vec![0, 33, 50, 50, 150] };
        case.sink_batch = 4;
        case.sink_k = case.sink_k.map(|_| normal(&mut rng, 4 * 16));
        case.sink_v = case.sink_v.map(|_| normal(&mut rng, 4 * 16));
        check(case);
        let shape = AttentionShape { batch: 3, queries: 40, keys: 90, ..shape };
        let mut case = AttentionCase::random(config, shape, &mut rng);
        case.lengths = Lengths::Cache { kv_lens: vec![90, 0, 35] };
        check(case);
    }
}

/// Weights go far beyond what f16 can say; so do logits of f16 vectors.
#[test]
fn magnitudes() {
    let mut rng = rng(4);
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 2, queries: 70, keys: 100 };
    let kinds: [fn(&mut fastrand::Rng) -> f32; 5] = [
        |_| 1e-30,
        |_| 1e30,
        |rng| 10f32.powf(rng.f32() * 10.0 - 6.0),
        |rng| 10f32.powf(rng.f32() * 40.0 - 20.0),
        |rng| if rng.u8(..3) == 0 { 0.0 } else { 1e5 },
    ];
    for kind in kinds {
        for (sink, window) in [(Sink::Zero, None), (Sink::Given, Some(33)), (Sink::None, None)] {
            let config = AttentionConfig { head_dim: 16, value_dim: 16, sink, window, ..Default::default() };
            let mut case = AttentionCase::random(config, shape, &mut rng);
            case.intervals = Some((0..100).map(|_| kind(&mut rng)).collect());
            check(case);
        }
    }
    for (size, sink, method) in [
        (30.0, Sink::First, Method::Continuous),
        (200.0, Sink::Zero, Method::Continuous),
        (60.0, Sink::None, Method::Softmax),
    ] {
        let config = AttentionConfig { head_dim: 16, value_dim: 16, sink, method, ..Default::default() };
        let mut case = AttentionCase::random(config, shape, &mut rng);
        case.q.iter_mut().for_each(|x| *x *= size);
        // Values at the ends of what f16 can say.
        case.v.iter_mut().for_each(|x| *x *= if rng.u8(..8) == 0 { 1e4 } else { 1e-5 });
        check(case);
    }
}

fn sees(config: &AttentionConfig, shape: &AttentionShape, row: usize, token: usize) -> bool {
    let Some((first, last)) = visible_nodes(config, shape, row) else { return false };
    let copied = config.sink == Sink::First && token == 0 && first == 0;
    copied || (first..=last).contains(&(token + 1))
}

#[test]
fn only_rows_that_see_what_is_not_finite_are_spoiled() {
    const DIM: usize = 16;
    let mut rng = rng(5);
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 70, keys: 75 };
    let base = AttentionConfig { head_dim: DIM, value_dim: DIM, ..Default::default() };
    let softmax = AttentionConfig { sink: Sink::None, method: Method::Softmax, ..base };
    let configs = SINKS.map(|sink| AttentionConfig { sink, ..base }).into_iter();
    for config in configs.chain([softmax, AttentionConfig { window: Some(9), ..base }]) {
        let case = rounded(AttentionCase::random(config, shape, &mut rng));
        for gpu in matrix_gpus() {
            let clean = run(gpu, &case);
            let row = |got: &AttentionOutput, at: usize| (bits(&got.out[at * DIM..][..DIM]), got.lse[at].to_bits());
            for (token, bad) in
                [(0, f32::NAN), (5, f32::INFINITY), (30, f32::NAN), (31, f32::NEG_INFINITY), (64, f32::NAN)]
            {
                let [mut in_values, mut in_keys, mut in_queries] = [(); 3].map(|()| case.clone());
                in_values.v[token * DIM + 2] = bad;
                in_keys.k[token * DIM + 1] = bad;
                in_queries.q[token * DIM + 3] = bad;
                let [values, keys, queries] = [&in_values, &in_keys, &in_queries].map(|case| run(gpu, case));
                for at in 0..shape.queries {
                    let label = format!("row {at}, {bad} in token {token}, {}", case.label());
                    assert_eq!(row(&queries, at) == row(&clean, at), at != token, "{label}");
                    if !sees(&config, &shape, at, token) {
                        assert_eq!(row(&values, at), row(&clean, at), "{label}");
                        assert_eq!(row(&keys, at), row(&clean, at), "{label}");
                        continue;
                    }
                    // One column of the values: the others and the weights are untouched.
                    let (mut got, mut wanted) = (row(&values, at), row(&clean, at));
                    assert!(!f32::from_bits(got.0.remove(2)).is_finite(), "{label}");
                    wanted.0.remove(2);
                    assert_eq!(got, wanted, "{label}");
                    let spoiled = &keys.out[at * DIM..][..DIM];
                    let one_node = clean.lse[at] == f32::NEG_INFINITY;
                    assert!(!bad.is_nan() || one_node || spoiled.iter().all(|x| x.is_nan()), "{label}: {spoiled:?}");
                }
            }
        }
    }
}

/// Binds a case, q, k and out of it f16, with sequences packed at `cu_seqlens` if there are any.
fn bind_efla(gpu: &Gpu, case: &EflaCase, cu_seqlens: &[usize], v: DType, [out, final_state]: [TensorView; 2]) -> Call {
    let EflaShape { batch, heads, value_heads, tokens } = case.shape;
    let EflaConfig { key_dim, value_dim, .. } = case.config;
    let input = |values: &[f32], dims: [usize; 4]| place(&dims).upload(gpu, values);
    let of_tokens = |values: &[f32]| Place::dense(DType::F32, &[batch, value_heads, tokens], 3).upload(gpu, values);
    let state = Place::dense(DType::F32, &case.state_shape(), 7);
    let efla = Efla::new(gpu, case.config).unwrap();
    let (plan, cu_seqlens) = match cu_seqlens {
        [] => (efla.plan(&case.shape), None),
        _ => (efla.plan_packed(&case.shape, cu_seqlens), Some(cu_seqlens.to_vec())),
    };
    let tensors = EflaTensors {
        log_decay: case.log_decay.as_deref().map(of_tokens),
        initial_state: case.initial_state.as_ref().map(|values| state.upload(gpu, values)),
        final_state: Some(final_state),
        cu_seqlens,
        ..EflaTensors::new(
            input(&case.q, [batch, heads, tokens, key_dim]),
            input(&case.k, [batch, heads, tokens, key_dim]),
            Place::dense(v, &[batch, value_heads, tokens, value_dim], 12).upload(gpu, &case.v),
            of_tokens(&case.beta),
            out,
        )
    };
    plan.unwrap().bind(&tensors).unwrap()
}

/// Runs a case, v of it f16, too; kernels for matrix units have to do all but the scan.
fn run_packed(gpu: &Gpu, case: &EflaCase, cu_seqlens: &[usize]) -> EflaOutput {
    let [_, heads, key_dim, value_dim] = case.state_shape()[..] else { unreachable!() };
    let sequences = if cu_seqlens.is_empty() { case.shape.batch } else { cu_seqlens.len() - 1 };
    let out = place(&case.out_shape()).output(gpu);
    let final_state = Place::dense(DType::F32, &[sequences, heads, key_dim, value_dim], 5).output(gpu);
    let call = bind_efla(gpu, case, cu_seqlens, DType::F16, [out.view(), final_state.view()]);
    for kernel in ["efla_prepare_matrix", "efla_output_matrix"] {
        assert!(runs(&call, kernel), "{kernel}, {}", case.label());
    }
    submit(gpu, &call);
    EflaOutput { out: out.read(gpu, &case.label()), final_state: final_state.read(gpu, &case.label()) }
}

fn run_efla(gpu: &Gpu, case: &EflaCase) -> EflaOutput {
    run_packed(gpu, case, &[])
}

fn rounded_efla(mut case: EflaCase) -> EflaCase {
    for values in [&mut case.q, &mut case.k, &mut case.v] {
        *values = place(&[values.len()]).rounded(values);
    }
    case
}

fn check_efla(case: EflaCase) {
    let case = rounded_efla(case);
    let want = case.reference();
    for gpu in matrix_gpus() {
        let (got, label) = (run_efla(gpu, &case), format!("on matrix units, {}", case.label()));
        judge(&label, "out", &got.out, &want.out, limit(Quantity::Forward, DType::F16));
        judge(&label, "final_state", &got.final_state, &want.final_state, forward_limit());
    }
}

#[test]
fn efla_chunks_and_options() {
    let mut rng = rng(7);
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: 150 };
    for (key_dim, value_dim) in [(64, 64), (16, 80), (128, 16)] {
        let config = EflaConfig { key_dim, value_dim, chunk: Some(32), ..Default::default() };
        check_efla(EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng));
        let normalized = EflaConfig { normalize_q: true, normalize_k: true, ..config };
        for tokens in [1, 31, 33] {
            check_efla(EflaCase::random(normalized, EflaShape { tokens, ..shape }, &mut rng).with_steps(|| 0.7));
        }
    }
    let config = EflaConfig { key_dim: 64, value_dim: 64, ..Default::default() };
    let mut strengths = fastrand::Rng::with_seed(8);
    let gated = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
    check_efla(gated.with_decay(|| [0.0, 0.1, 2.0, 1e30][strengths.usize(..4)]));
}

#[test]
fn efla_dimensions_and_integrators() {
    let mut rng = rng(12);
    let integrators = [Integrator::Exact, Integrator::Euler, Integrator::RungeKutta2, Integrator::RungeKutta4];
    for (at, (key_dim, value_dim)) in [(16, 128), (64, 64), (80, 16), (128, 80)].into_iter().enumerate() {
        for (n, integrator) in integrators.into_iter().enumerate() {
            let normalize_k = (at + n) % 2 == 1;
            let config =
                EflaConfig { key_dim, value_dim, integrator, normalize_k, chunk: Some(32), ..Default::default() };
            let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 70 };
            // Where |1 − γ| ≤ 0.9.
            let steps = || if integrator == Integrator::Euler { 1.8 } else { 0.8 };
            let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng).with_steps(steps);
            check_efla(case.clone());
            if integrator == Integrator::Exact || n == at {
                check_efla(case.with_decay(|| 0.05));
            }
        }
    }
}

/// Packed sequences are like those by themselves.
#[test]
fn efla_packed_sequences() {
    let mut rng = rng(13);
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 120 };
    let config = EflaConfig { key_dim: 16, value_dim: 80, chunk: Some(32), ..Default::default() };
    let case = rounded_efla(EflaCase::random(config, shape, &mut rng));
    for case in [case.clone(), case.with_decay(|| 0.3)] {
        for gpu in matrix_gpus() {
            let cu_seqlens = [0, 40, 40, 73, 120];
            let got = run_packed(gpu, &case, &cu_seqlens);
            for (at, ends) in cu_seqlens.windows(2).enumerate() {
                let [first, end] = *ends else { unreachable!() };
                let rows = |values: &[f32], dim: usize| values[first * dim..end * dim].to_vec();
                let alone = EflaCase {
                    shape: EflaShape { tokens: end - first, ..shape },
                    q: rows(&case.q, 16),
                    k: rows(&case.k, 16),
                    v: rows(&case.v, 80),
                    beta: rows(&case.beta, 1),
                    log_decay: case.log_decay.as_ref().map(|values| rows(values, 1)),
                    ..case.clone()
                };
                let (want, label) = (alone.reference(), format!("sequence {at}, {}", case.label()));
                judge(&label, "out", &rows(&got.out, 80), &want.out, limit(Quantity::Forward, DType::F16));
                let state = &got.final_state[at * 16 * 80..][..16 * 80];
                judge(&label, "final_state", state, &want.final_state, forward_limit());
            }
        }
    }
}

/// Every update takes back the one before.
#[test]
fn efla_like_keys() {
    let mut rng = rng(11);
    let config = EflaConfig { key_dim: 16, value_dim: 16, chunk: Some(32), ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 150 };
    for (noise, decay) in [(0.0, None), (1e-3, None), (1e-2, None), (1e-2, Some(1e-3))] {
        let mut case = EflaCase::random(config, shape, &mut rng);
        let key = normal(&mut rng, 16);
        case.k.iter_mut().enumerate().for_each(|(at, x)| *x = key[at % 16] + noise * *x);
        let case = case.with_steps(|| 20.0);
        check_efla(match decay {
            Some(decay) => case.with_decay(|| decay),
            None => case,
        });
    }
}

/// Keys, queries, values and states of every size, from token to token and from column to column.
#[test]
fn efla_magnitudes() {
    let mut rng = rng(9);
    let config = EflaConfig { key_dim: 16, value_dim: 16, chunk: Some(32), ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 100 };
    let scaled = |values: &mut [f32], sizes: &[f32], rng: &mut fastrand::Rng| {
        values.chunks_mut(16).for_each(|row| {
            let size = pick(rng, sizes);
            row.iter_mut().for_each(|x| *x *= size);
        });
    };
    for sizes in [[1e-4, 1e4], [1e-2, 1.0], [1e4, 1e4], [1e-3, 1e-3], [0.0, 1.0]] {
        for which in 0..5 {
            let mut case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
            match which {
                0 => scaled(&mut case.q, &sizes, &mut rng),
                1 => scaled(&mut case.k, &sizes, &mut rng),
                2 => scaled(&mut case.v, &sizes, &mut rng),
                // Steps of short keys are large, and so values as large as keys write alike.
                3 => {
                    let mut same = rng.clone();
                    scaled(&mut case.k, &sizes, &mut rng);
                    scaled(&mut case.v, &sizes, &mut same);
                }
                _ => case.initial_state.as_mut().unwrap().iter_mut().for_each(|x| *x *= sizes[0]),
            }
            if [1, 3].contains(&which) && sizes[0] > 0.0 {
                case = case.with_steps(|| 0.7);
            }
            check_efla(case);
        }
    }
}

/// Keys from the smallest that f16 can say to the largest.
#[test]
fn efla_key_lengths() {
    let mut rng = rng(14);
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: 100 };
    for (key_dim, normalize_k) in [(16, false), (16, true), (128, false)] {
        // Short keys write large states: queries keep out within f16.
        for (low, high, size) in [(-7.5, 4.6, 1e-4), (-7.0, -5.0, 1e-4), (4.0, 4.6, 1.0)] {
            let config = EflaConfig { key_dim, value_dim: 16, normalize_k, chunk: Some(32), ..Default::default() };
            let mut lengths = fastrand::Rng::with_seed(15);
            let mut case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
            case.q.iter_mut().for_each(|x| *x *= size);
            let case = case.with_key_lengths(|| 10f64.powf(low + (high - low) * lengths.f64()));
            let mut case = rounded_efla(case).with_steps(|| 0.7);
            // Of keys that rounded to 0.
            case.beta.iter_mut().filter(|beta| beta.is_infinite()).for_each(|beta| *beta = 1.0);
            check_efla(case.clone());
            check_efla(case.with_decay(|| 0.01));
        }
    }
}

/// Of a bad token no earlier one hears anything, and of a bad value no other column.
#[test]
fn efla_tokens_before_what_is_not_finite() {
    let mut rng = rng(10);
    const DIM: usize = 16;
    let config = EflaConfig { key_dim: DIM, value_dim: DIM, chunk: Some(32), ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 100 };
    let case = rounded_efla(EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng));
    for gpu in matrix_gpus() {
        let clean = run_efla(gpu, &case);
        for (token, bad) in [(0, f32::NAN), (20, f32::INFINITY), (31, f32::NAN), (40, f32::NAN), (99, f32::NAN)] {
            let [mut in_values, mut in_keys, mut in_queries] = [(); 3].map(|()| case.clone());
            in_values.v[token * DIM + 2] = bad;
            in_keys.k[token * DIM + 1] = bad;
            in_queries.q[token * DIM + 3] = bad;
            let [values, keys, queries] = [&in_values, &in_keys, &in_queries].map(|case| run_efla(gpu, case));
            for at in 0..shape.tokens {
                let label = format!("token {at}, {bad} in {token}, {}", case.label());
                let row = |got: &EflaOutput| bits(&got.out[at * DIM..][..DIM]);
                assert_eq!(row(&queries) == row(&clean), at != token, "{label}");
                assert_eq!(row(&keys) == row(&clean), at < token, "{label}");
                let (mut got, mut wanted) = (row(&values), row(&clean));
                assert_eq!(f32::from_bits(got.remove(2)).is_finite(), at < token, "{label}");
                wanted.remove(2);
                assert_eq!(got, wanted, "{label}");
            }
            for (at, (got, wanted)) in values.final_state.iter().zip(&clean.final_state).enumerate() {
                let label = format!("final_state {at}, {bad} in {token}, {}", case.label());
                assert_eq!(got.to_bits() == wanted.to_bits(), at % DIM != 2, "{label}");
                assert!(got.is_finite() == (at % DIM != 2) && !keys.final_state[at].is_finite(), "{label}");
            }
            assert_eq!(bits(&queries.final_state), bits(&clean.final_state));
        }
    }
}

/// Calls that the kernel does not take run as ever; so does everything where it is off.
#[test]
fn others_take_the_ordinary_kernels() {
    let mut rng = rng(6);
    let mut ran = |gpu: &Gpu, head_dim: usize, queries: usize, out: DType| {
        let config = AttentionConfig { head_dim, value_dim: 16, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries, keys: 40 };
        let case = AttentionCase::random(config, shape, &mut rng);
        let out = Place::dense(out, &case.out_shape(), 12).output(gpu);
        let lse = Place::dense(DType::F32, &case.lse_shape(), 5).output(gpu);
        let plan = Attention::new(gpu, config).unwrap().plan(&shape).unwrap();
        runs(&plan.bind(&tensors(gpu, &case, out.view(), lse.view())).unwrap(), "attention_forward_matrix")
    };
    let cooperative = Gpu::with_options(&GpuOptions { cooperative_matrices: true, ..Default::default() }).unwrap();
    let features = cooperative.device().features();
    let has_units = features.contains(continuous_attention::wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
    assert_eq!(ran(&cooperative, 16, 40, DType::F16), has_units);
    assert!(!ran(gpu(), 16, 40, DType::F16));
    for gpu in matrix_gpus() {
        assert!(ran(gpu, 16, 40, DType::F16));
        assert!(!ran(gpu, 18, 40, DType::F16), "rows that are no whole vectors");
        assert!(!ran(gpu, 16, 8, DType::F16), "few rows");
        assert!(!ran(gpu, 16, 40, DType::F32), "out of f32");
    }
    let config = EflaConfig { key_dim: 16, value_dim: 16, chunk: Some(32), ..Default::default() };
    let shape = EflaShape { batch: 1, heads: 1, value_heads: 1, tokens: 40 };
    let case = EflaCase::random(config, shape, &mut fastrand::Rng::with_seed(16));
    for gpu in matrix_gpus() {
        let out = place(&case.out_shape()).output(gpu);
        let final_state = Place::dense(DType::F32, &case.state_shape(), 5).output(gpu);
        let call = bind_efla(gpu, &case, &[], DType::F32, [out.view(), final_state.view()]);
        assert!(runs(&call, "efla_output_matrix") && !runs(&call, "efla_prepare_matrix"), "values of f32");
    }
}
