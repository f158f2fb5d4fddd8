//! Decoding: few rows against many keys, which are then split over workgroups; caches that grow on the device; steps of
//! EFLA from a resident state.

use continuous_attention::{
    Attention, AttentionConfig, AttentionShape, AttentionTensors, DType, Efla, EflaConfig, EflaShape, EflaTensors,
    Form, Lengths, Method, Sink, Tensor, TensorView,
};

use crate::errors::refused;
use crate::harness::{
    AttentionCase, AttentionOutput, EflaCase, EflaOutput, FORMS, Guarded, Place, bits, forward_limit, gpu, judge, rng,
    submit,
};

fn shape(batch: usize, queries: usize, keys: usize) -> AttentionShape {
    AttentionShape { batch, heads: 4, kv_heads: 2, queries, keys }
}

#[test]
fn split_keys() {
    let mut rng = rng(1);
    for (turn, sink) in [Sink::Zero, Sink::First, Sink::Given, Sink::None].into_iter().enumerate() {
        for (queries, keys, causal) in [(1, 1500, true), (3, 5000, false), (33, 2077, true)] {
            let config = AttentionConfig { head_dim: 6 + turn, value_dim: 9, sink, causal, ..Default::default() };
            AttentionCase::random(config, shape(1 + turn % 2, queries, keys), &mut rng)
                .with_intervals(&mut rng)
                .check();
        }
    }
    for (queries, keys) in [(1, 1500), (3, 5000)] {
        let base = AttentionConfig { head_dim: 8, value_dim: 8, sink: Sink::None, ..Default::default() };
        let config = AttentionConfig { method: Method::Softmax, ..base };
        AttentionCase::random(config, shape(2, queries, keys), &mut rng).check();
    }
}

/// The first rows see no node, one node, one segment, all within the first part.
#[test]
fn rows_that_see_little_of_split_keys() {
    let mut rng = rng(2);
    for sink in [Sink::Zero, Sink::First, Sink::Given, Sink::None] {
        let config = AttentionConfig { head_dim: 4, value_dim: 5, sink, ..Default::default() };
        let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 1103, keys: 1101 };
        AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng).check();
    }
}

/// Which rows a NaN among split keys reaches: those that see it, and no other.
#[test]
fn a_bad_key_among_split_keys() {
    let mut rng = rng(3);
    let config = AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() };
    let shape = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 40, keys: 1200 };
    let clean = AttentionCase::random(config, shape, &mut rng);
    let mut dirty = clean.clone();
    dirty.k[(1159 + 20) * 4] = f32::NAN;
    let (clean, dirty) = (clean.run(), dirty.run());
    for row in 0..40 {
        // Row r sees tokens up to 1160 + r.
        let spoiled = row >= 19;
        assert_eq!(dirty.lse[row].is_nan(), spoiled, "row {row}");
        for c in 4 * row..4 * row + 4 {
            assert_eq!(dirty.out[c].is_nan(), spoiled, "row {row}");
            assert!(spoiled || dirty.out[c] == clean.out[c], "row {row}");
        }
    }
}

/// Caches of different lengths in one call, some of them short.
#[test]
fn split_caches() {
    let mut rng = rng(4);
    let config = AttentionConfig { head_dim: 8, value_dim: 6, ..Default::default() };
    let kv_lens = vec![2000, 0, 3, 1024, 1];
    let case = AttentionCase::random(config, shape(5, 2, 2048), &mut rng);
    let ragged = AttentionCase { lengths: Lengths::Cache { kv_lens: kv_lens.clone() }, ..case.clone() }.run();
    for (batch, &keys) in kv_lens.iter().enumerate() {
        let cut = |x: &[f32], heads: usize, tokens: usize, width: usize, own: usize| -> Vec<f32> {
            let sequence = &x[batch * heads * tokens * width..][..heads * tokens * width];
            sequence.chunks(tokens * width).flat_map(|head| &head[..own * width]).copied().collect()
        };
        let alone = AttentionCase {
            shape: shape(1, 2, keys),
            q: cut(&case.q, 4, 2, 8, 2),
            k: cut(&case.k, 2, 2048, 8, keys),
            v: cut(&case.v, 2, 2048, 6, keys),
            ..case.clone()
        };
        let own = |x: &[f32], width: usize| cut(x, 4, 2, width, 2);
        alone.judge(&AttentionOutput { out: own(&ragged.out, 6), lse: own(&ragged.lse, 1) }, alone.limit());
    }
}

/// Caches of different lengths, one of them empty, in one buffer of f16 that holds NaN where no token is yet. Going back
/// to earlier lengths and appending the same tokens gives the same bits.
#[test]
fn caches_of_different_lengths_grow_on_the_device() {
    let mut rng = rng(5);
    let gpu = gpu();
    let (prompts, steps, capacity) = ([1100, 37, 0], [1, 2, 5, 1, 3], 1120);
    let new: usize = steps.iter().sum();
    let config = AttentionConfig { head_dim: 8, value_dim: 6, ..Default::default() };
    let places = [(8, 10), (6, 2)].map(|(dim, offset)| Place::dense(DType::F16, &[3, 2, capacity, dim], offset));
    let caches = places.each_ref().map(|place| place.output(gpu));
    let q = gpu.zeros(&[3, 4, new, 8]).unwrap().view();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    // Tokens `from..from + count` of sequence b go to the same places of its caches.
    let append = |encoder: &mut _, b: usize, tokens: &[Tensor; 2], from: usize, count: usize| {
        for (cache, tokens) in caches.iter().zip(tokens) {
            let end = cache.view().narrow(0, b, 1).unwrap().narrow(2, from, count).unwrap();
            gpu.copy(encoder, &tokens.view().narrow(2, from, count).unwrap(), &end).unwrap();
        }
    };
    let sequences = prompts.map(|prompt| {
        let case = AttentionCase::random(config, shape(1, new, prompt + new), &mut rng);
        let tokens =
            [(&case.k, 8), (&case.v, 6)].map(|(values, dim)| gpu.upload(values, &[1, 2, prompt + new, dim]).unwrap());
        (case, tokens)
    });
    for (b, (case, tokens)) in sequences.iter().enumerate() {
        let queries = gpu.upload(&case.q, &[1, 4, new, 8]).unwrap().view();
        gpu.copy(&mut encoder, &queries, &q.narrow(0, b, 1).unwrap()).unwrap();
        append(&mut encoder, b, tokens, 0, prompts[b]);
    }
    let attention = Attention::new(gpu, config).unwrap();
    let outs = [0, 1].map(|_| Guarded::new(gpu, Guarded::ODD, &[3, 4, new, 6]));
    for (out, first) in outs.iter().zip([0, 2]) {
        let mut done: usize = steps[..first].iter().sum();
        for &count in &steps[first..] {
            for (b, (_, tokens)) in sequences.iter().enumerate() {
                append(&mut encoder, b, tokens, prompts[b] + done, count);
            }
            let rows = |of: &TensorView| of.narrow(2, done, count).unwrap();
            let [k, v] = caches.each_ref().map(|cache| cache.view());
            let kv_lens = prompts.iter().map(|prompt| prompt + done + count).collect();
            let tensors = AttentionTensors {
                lengths: Lengths::Cache { kv_lens },
                ..AttentionTensors::new(rows(&q), k, v, rows(&out.view()))
            };
            attention.forward(&mut encoder, &tensors).unwrap();
            done += count;
        }
    }
    gpu.queue().submit([encoder.finish()]);

    let [streamed, replayed] = outs.map(|out| out.read(gpu, "streamed rows"));
    let replayed_from: usize = steps[..2].iter().sum();
    for (row, (streamed, replayed)) in streamed.chunks(6).zip(replayed.chunks(6)).enumerate() {
        if row % new >= replayed_from {
            assert_eq!(bits(streamed), bits(replayed), "row {row}");
        }
    }
    for ((case, _), got) in sequences.into_iter().zip(streamed.chunks(4 * new * 6)) {
        let rounded = AttentionCase { k: places[0].rounded(&case.k), v: places[1].rounded(&case.v), ..case };
        judge(&rounded.label(), "out", got, &rounded.reference().out, rounded.limit());
    }
    for cache in caches {
        cache.read(gpu, "a cache");
    }
}

/// The tokens `from..from + count` of a call.
fn part(tensors: &EflaTensors, from: usize, count: usize) -> EflaTensors {
    let rows = |of: &TensorView| of.narrow(2, from, count).unwrap();
    EflaTensors {
        q: rows(&tensors.q),
        k: rows(&tensors.k),
        v: rows(&tensors.v),
        beta: rows(&tensors.beta),
        out: rows(&tensors.out),
        ..tensors.clone()
    }
}

/// A prefill in the operator's own form, then steps on the state that it left.
#[test]
fn steps_equal_the_whole() {
    let mut rng = rng(6);
    let gpu = gpu();
    for (key_dim, value_dim) in [(9, 6), (70, 40)] {
        for (form, chunk) in FORMS {
            let config = EflaConfig { key_dim, value_dim, form, chunk, ..Default::default() };
            let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 150 };
            let case = EflaCase::random(config, shape, &mut rng);
            let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
            let state = Guarded::new(gpu, Guarded::ODD, &case.state_shape());
            let tensors = EflaTensors { final_state: Some(state.view()), ..case.tensors(gpu, &out) };
            let efla = Efla::new(gpu, config).unwrap();
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            efla.forward(&mut encoder, &part(&tensors, 0, 130)).unwrap();
            let mut at = 130;
            for count in [1, 2, 3, 0, 4, 5, 1, 1, 3] {
                let step = EflaTensors { initial_state: Some(state.view()), ..part(&tensors, at, count) };
                efla.step(&mut encoder, &step).unwrap();
                at += count;
            }
            gpu.queue().submit([encoder.finish()]);
            let label = case.label();
            case.judge(&EflaOutput { out: out.read(gpu, &label), final_state: state.read(gpu, &label) });
        }
    }
}

/// A step bound once and recorded for every token; a copy of the state in the middle, from which the rest is replayed:
/// copied back, and as the step's initial state.
#[test]
fn a_replay_from_a_snapshot_is_bit_equal() {
    let mut rng = rng(7);
    let gpu = gpu();
    let tokens = 8;
    let config = EflaConfig { key_dim: 9, value_dim: 6, ..Default::default() };
    let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens };
    let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
    let efla = Efla::new(gpu, config).unwrap();
    let state = Guarded::with(gpu, Guarded::ODD, &case.state_shape(), case.initial_state.as_ref().unwrap());
    let snapshot = Guarded::new(gpu, Guarded::ODD + 3, &case.state_shape());
    // Where a host writes one token after the other.
    let whole = case.tensors(gpu, &Guarded::new(gpu, Guarded::ODD, &case.out_shape()));
    let token = [[2, 2, 1, 9], [2, 2, 1, 9], [2, 4, 1, 6]].map(|shape| gpu.zeros(&shape).unwrap().view());
    let beta = gpu.zeros(&[2, 4, 1]).unwrap().view();
    let out = Guarded::new(gpu, Guarded::ODD, &[2, 4, 1, 6]);
    let [q, k, v] = token.clone();
    let plan = efla.plan_step(&EflaShape { tokens: 1, ..shape }).unwrap();
    let bind = |initial: &Guarded| {
        let tensors = EflaTensors {
            initial_state: Some(initial.view()),
            final_state: Some(state.view()),
            ..EflaTensors::new(q.clone(), k.clone(), v.clone(), beta.clone(), out.view())
        };
        plan.bind(&tensors).unwrap()
    };
    let (on, from_snapshot) = (bind(&state), bind(&snapshot));
    let step = |at: usize, call| {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let from = part(&whole, at, 1);
        for (from, to) in [(&from.q, &q), (&from.k, &k), (&from.v, &v), (&from.beta, &beta)] {
            gpu.copy(&mut encoder, from, to).unwrap();
        }
        gpu.queue().submit([encoder.finish()]);
        submit(gpu, call);
        out.read(gpu, "a step")
    };
    let copy = |from: &Guarded, to: &Guarded| submit(gpu, &gpu.bind_copy(&from.view(), &to.view()).unwrap());

    let mut streamed: Vec<_> = (0..3).map(|at| step(at, &on)).collect();
    copy(&state, &snapshot);
    streamed.extend((3..tokens).map(|at| step(at, &on)));
    let last = state.read(gpu, "the last state");

    let want = case.reference().out;
    let by_token =
        |at: usize| -> Vec<f64> { want.chunks(tokens * 6).flat_map(|head| head[at * 6..][..6].to_vec()).collect() };
    for (at, row) in streamed.iter().enumerate() {
        judge(&format!("token {at} of {}", case.label()), "out", row, &by_token(at), forward_limit());
    }
    for copied in [true, false] {
        if copied {
            copy(&snapshot, &state);
        }
        for (at, streamed) in streamed.iter().enumerate().skip(3) {
            let call = if !copied && at == 3 { &from_snapshot } else { &on };
            assert_eq!(bits(&step(at, call)), bits(streamed), "token {at}, copied back: {copied}");
        }
        assert_eq!(bits(&state.read(gpu, "the last state again")), bits(&last), "copied back: {copied}");
    }
}

/// A step without a state on either side is a mistake, not a sequence that starts at zeros.
#[test]
fn steps_that_are_refused() {
    let mut rng = rng(8);
    let gpu = gpu();
    for form in [Form::Chunked, Form::Recurrent] {
        let config = EflaConfig { key_dim: 5, value_dim: 4, form, ..Default::default() };
        let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 1 };
        let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
        let efla = Efla::new(gpu, config).unwrap();
        let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
        let state = Guarded::new(gpu, Guarded::ODD, &case.state_shape());
        let good = EflaTensors { final_state: Some(state.view()), ..case.tensors(gpu, &out) };
        let refuse = |argument: &str, words: &[&str], spoil: &dyn Fn(&mut EflaTensors)| {
            let mut tensors = good.clone();
            spoil(&mut tensors);
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            refused(efla.step(&mut encoder, &tensors), argument, words);
            gpu.queue().submit([encoder.finish()]);
            if let Ok(stated) = tensors.shape() {
                refused(efla.plan_step(&stated).and_then(|plan| plan.bind(&tensors)), argument, words);
            }
            for untouched in [&out, &state] {
                assert!(untouched.read(gpu, argument).iter().all(|x| x.is_nan()), "{argument}: written to");
            }
        };
        refuse("initial_state", &["none", "step"], &|tensors| tensors.initial_state = None);
        refuse("final_state", &["none", "step"], &|tensors| tensors.final_state = None);
        refuse("initial_state", &["[2, 4, 5, 3]", "[2, 4, 5, 4]"], &|tensors| {
            tensors.initial_state = Some(state.view().narrow(3, 0, 3).unwrap());
        });
        refuse("final_state", &["overlap", "initial_state"], &|tensors| {
            let shared = gpu.zeros(&[1000]).unwrap();
            let at = |offset| Some(TensorView::new(shared.buffer(), offset, &case.state_shape()));
            (tensors.initial_state, tensors.final_state) = (at(0), at(4));
        });
        refuse("beta", &["[2, 4, 1]"], &|tensors| tensors.beta = tensors.beta.narrow(1, 0, 2).unwrap());
        refuse("q", &["[2, 2, 5]"], &|tensors| tensors.q = TensorView::new(out.buffer(), 0, &[2, 2, 5]));
        refused(efla.plan_step(&EflaShape { heads: 3, ..shape }), "value_heads", &["4", "3"]);
        // The same is bound with both ends, and as a forward call with one.
        efla.plan_step(&shape).unwrap().bind(&good).unwrap();
        efla.plan(&shape).unwrap().bind(&EflaTensors { final_state: None, ..good.clone() }).unwrap();
    }
}
