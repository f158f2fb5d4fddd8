//! Bad input is refused by name, before anything is recorded: no panic, no write.

use continuous_attention::{
    Attention, AttentionConfig, AttentionGradients, AttentionShape, AttentionTensors, Call, DType, Efla, EflaConfig,
    EflaGradients, EflaShape, EflaTensors, Error, Form, Gpu, Integrator, Lengths, Method, Result, Sink, TensorView,
    wgpu,
};

use crate::harness::{AttentionCase, EflaCase, Guarded, gpu, rng};

/// Fails unless `result` is an error about `argument` whose message holds every one of `words`.
#[track_caller]
pub fn refused<T>(result: Result<T>, argument: &str, words: &[&str]) {
    let error = match result {
        Ok(_) => panic!("{argument}: not refused ({words:?})"),
        Err(error) => error,
    };
    let named = match &error {
        Error::Argument { argument, .. } | Error::Limit { argument, .. } => argument.clone(),
        Error::Gpu { operation, .. } => operation.clone(),
        other => panic!("{argument}: unexpected kind of error {other:?}"),
    };
    let message = error.to_string();
    assert!(named.contains(argument), "\"{message}\" does not name {argument}");
    for word in words {
        assert!(message.contains(word), "\"{message}\" does not say \"{word}\"");
    }
}

#[test]
fn attention_configurations() {
    let refuse = |config: AttentionConfig, argument: &str, words: &[&str]| {
        refused(config.validate(), argument, words);
        refused(Attention::new(gpu(), config), argument, words);
    };
    let base = AttentionConfig::default();
    for dim in [0, 257, usize::MAX] {
        refuse(AttentionConfig { head_dim: dim, ..base }, "head_dim", &[&dim.to_string(), "1 to 256"]);
        refuse(AttentionConfig { value_dim: dim, ..base }, "value_dim", &[&dim.to_string(), "1 to 256"]);
    }
    refuse(AttentionConfig { window: Some(0), ..base }, "window", &["got 0", "at least 1"]);
    for scale in [f64::NAN, f64::INFINITY, -1e300] {
        refuse(AttentionConfig { scale: Some(scale), ..base }, "scale", &["finite"]);
    }
    for sink in [Sink::Zero, Sink::First, Sink::Given] {
        let config = AttentionConfig { method: Method::Softmax, sink, ..base };
        refuse(config, "sink", &[&format!("{sink:?}"), "Sink::None"]);
    }
}

#[test]
fn efla_configurations() {
    let refuse = |config: EflaConfig, argument: &str, words: &[&str]| {
        refused(config.validate(), argument, words);
        refused(Efla::new(gpu(), config), argument, words);
    };
    let base = EflaConfig::default();
    for dim in [0, 257, usize::MAX] {
        refuse(EflaConfig { key_dim: dim, ..base }, "key_dim", &[&dim.to_string(), "1 to 256"]);
        refuse(EflaConfig { value_dim: dim, ..base }, "value_dim", &[&dim.to_string(), "1 to 256"]);
    }
    for chunk in [0, 1, 8, 17, 63, 128, usize::MAX] {
        refuse(EflaConfig { chunk: Some(chunk), ..base }, "chunk", &[&chunk.to_string(), "16, 32 or 64"]);
    }
    for scale in [f64::NAN, f64::NEG_INFINITY, 1e300] {
        refuse(EflaConfig { scale: Some(scale), ..base }, "scale", &["finite"]);
    }
}

#[test]
fn attention_shapes() {
    let config = AttentionConfig { head_dim: 256, value_dim: 256, sink: Sink::Given, ..Default::default() };
    let attention = Attention::new(gpu(), config).unwrap();
    let base = AttentionShape { batch: 1, heads: 4, kv_heads: 2, queries: 3, keys: 3 };
    for (heads, kv_heads) in [(3, 2), (1, 2), (1, 0), (5, 3)] {
        let shape = AttentionShape { heads, kv_heads, ..base };
        refused(attention.plan(&shape), "heads", &[&format!("got {heads}"), &format!("{kv_heads}")]);
    }
    let huge = [1 << 31, 1 << 40, usize::MAX];
    for size in huge {
        refused(attention.plan(&AttentionShape { batch: size, ..base }), "batch", &[&size.to_string()]);
        refused(attention.plan(&AttentionShape { queries: size, ..base }), "queries", &[&size.to_string()]);
        refused(attention.plan(&AttentionShape { keys: size, ..base }), "keys", &[&size.to_string()]);
        refused(attention.plan(&AttentionShape { heads: size, kv_heads: 1, ..base }), "heads", &[&size.to_string()]);
    }
    // Products beyond 64 bits, each factor small enough.
    let most = 1 << 29;
    let shape = AttentionShape { batch: most, heads: most, kv_heads: most, queries: most, keys: most };
    refused(attention.plan(&shape), "workspace", &["exceeds"]);
    refused(attention.plan(&AttentionShape { batch: most, keys: most, ..base }), "workspace", &["exceeds"]);
}

#[test]
fn efla_shapes() {
    for form in [Form::Chunked, Form::Recurrent] {
        let config = EflaConfig { key_dim: 256, value_dim: 256, form, ..Default::default() };
        let efla = Efla::new(gpu(), config).unwrap();
        let base = EflaShape { batch: 1, heads: 2, value_heads: 4, tokens: 3 };
        for (heads, value_heads) in [(2, 3), (2, 1), (0, 1), (3, 5)] {
            let shape = EflaShape { heads, value_heads, ..base };
            refused(efla.plan(&shape), "value_heads", &[&format!("got {value_heads}"), &format!("{heads}")]);
        }
        for size in [1 << 31, 1 << 40, usize::MAX] {
            refused(efla.plan(&EflaShape { tokens: size, ..base }), "", &["exceeds"]);
            refused(efla.plan(&EflaShape { batch: size, ..base }), "", &["exceeds"]);
            refused(efla.plan(&EflaShape { heads: 1, value_heads: size, ..base }), "", &["exceeds"]);
            let all = EflaShape { batch: size, heads: size, value_heads: size, tokens: size };
            refused(efla.plan(&all), "", &["exceeds"]);
        }
    }
}

fn attention_case(sink: Sink) -> AttentionCase {
    let config = AttentionConfig { head_dim: 5, value_dim: 4, sink, ..Default::default() };
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 6, keys: 7 };
    let mut rng = rng(1);
    AttentionCase::random(config, shape, &mut rng).with_intervals(&mut rng).with_sink_per_sequence(&mut rng)
}

/// A valid call of attention that a test then spoils.
struct AttentionTrap {
    case: AttentionCase,
    out: Guarded,
    lse: Guarded,
    workspace: Guarded,
    tensors: AttentionTensors,
}

impl AttentionTrap {
    fn new(sink: Sink) -> Self {
        let (gpu, case) = (gpu(), attention_case(sink));
        let plan = Attention::new(gpu, case.config).unwrap().plan(&case.shape).unwrap();
        let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
        let lse = Guarded::new(gpu, Guarded::ODD, &case.lse_shape());
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(plan.workspace_bytes() / 4) as usize]);
        let mut tensors = case.tensors(gpu, &out);
        tensors.lse = Some(lse.view());
        tensors.workspace = Some(workspace.view());
        plan.bind(&tensors).expect("valid until it is spoiled");
        AttentionTrap { case, out, lse, workspace, tensors }
    }

    /// Spoils the call, demands the error and that nothing was written.
    #[track_caller]
    fn refuse(&self, argument: &str, words: &[&str], spoil: impl FnOnce(&mut AttentionTensors)) {
        let gpu = gpu();
        let mut tensors = self.tensors.clone();
        spoil(&mut tensors);
        let attention = Attention::new(gpu, self.case.config).unwrap();
        refused(attention.plan(&self.case.shape).unwrap().bind(&tensors), argument, words);
        // The encoder is submitted with whatever an erroneous call left in it.
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        assert!(attention.forward(&mut encoder, &tensors).is_err() || tensors.shape() != Ok(self.case.shape));
        if tensors.shape() == Ok(self.case.shape) {
            gpu.queue().submit([encoder.finish()]);
            for untouched in [&self.out, &self.lse, &self.workspace] {
                assert!(untouched.read(gpu, argument).iter().all(|x| x.is_nan()), "{argument}: written to");
            }
        }
    }
}

type AttentionSlot = (&'static str, fn(&mut AttentionTensors) -> &mut TensorView);

/// Every tensor of a call with all of them.
const ATTENTION_SLOTS: [AttentionSlot; 8] = [
    ("q", |tensors| &mut tensors.q),
    ("k", |tensors| &mut tensors.k),
    ("v", |tensors| &mut tensors.v),
    ("sink_k", |tensors| tensors.sink_k.as_mut().unwrap()),
    ("sink_v", |tensors| tensors.sink_v.as_mut().unwrap()),
    ("intervals", |tensors| tensors.intervals.as_mut().unwrap()),
    ("out", |tensors| &mut tensors.out),
    ("lse", |tensors| tensors.lse.as_mut().unwrap()),
];

type EflaSlot = (&'static str, fn(&mut EflaTensors) -> &mut TensorView);

const EFLA_SLOTS: [EflaSlot; 7] = [
    ("q", |tensors| &mut tensors.q),
    ("k", |tensors| &mut tensors.k),
    ("v", |tensors| &mut tensors.v),
    ("beta", |tensors| &mut tensors.beta),
    ("initial_state", |tensors| tensors.initial_state.as_mut().unwrap()),
    ("out", |tensors| &mut tensors.out),
    ("final_state", |tensors| tensors.final_state.as_mut().unwrap()),
];

/// Buffers that are too small, of the wrong shape or usage or device, with what the refusal has to say.
pub fn bad_views(good: &TensorView) -> Vec<(TensorView, Vec<String>)> {
    let gpu = gpu();
    let shape = good.shape().to_vec();
    let elements: usize = shape.iter().product();
    let buffer = |elements: usize, usage| {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: elements as u64 * 4,
            usage,
            mapped_at_creation: false,
        })
    };
    let storage = buffer(elements, wgpu::BufferUsages::STORAGE);
    let mut bad = Vec::new();
    for dimension in 0..shape.len() {
        for size in [0, shape[dimension] + 1] {
            let mut wrong = shape.clone();
            wrong[dimension] = size;
            let words = vec![format!("{wrong:?}"), format!("{shape:?}")];
            bad.push((TensorView::new(&buffer(elements * 8, wgpu::BufferUsages::STORAGE), 0, &wrong), words));
        }
    }
    let longer = [&[1][..], &shape].concat();
    bad.push((TensorView::new(&storage, 0, &longer), vec![format!("{longer:?}")]));
    bad.push((TensorView::new(&storage, 0, &[]), vec!["[]".into()]));
    let small = buffer(elements - 1, wgpu::BufferUsages::STORAGE);
    let words = vec![format!("buffer of {} elements", elements - 1), elements.to_string()];
    bad.push((TensorView::new(&small, 0, &shape), words));
    let words = vec![format!("buffer of {elements} elements"), (elements + 1).to_string()];
    bad.push((TensorView::new(&storage, 1, &shape), words));
    for offset in [u64::MAX, u64::MAX / 4, u64::MAX / 2] {
        bad.push((TensorView::new(&storage, offset, &shape), vec![format!("buffer of {elements} elements")]));
    }
    let strides = vec![usize::MAX / 2; shape.len() - 1];
    let far = TensorView::strided(&storage, 0, &shape, &[&strides[..], &[1]].concat());
    bad.push((far, vec![format!("buffer of {elements} elements")]));
    let few = TensorView::strided(&storage, 0, &shape, &vec![1; shape.len() - 1]);
    bad.push((few, vec![format!("{} strides", shape.len() - 1)]));
    // Rows of four-dimensional tensors are read as wholes; the others may have any strides.
    if shape.len() == 4 {
        let twice = TensorView::strided(
            &buffer(elements * 8, wgpu::BufferUsages::STORAGE),
            0,
            &shape,
            &shape.iter().map(|_| 2).collect::<Vec<_>>(),
        );
        bad.push((twice, vec!["stride 2".into(), "stride 1".into()]));
    }
    let copied = buffer(elements, wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC);
    bad.push((TensorView::new(&copied, 0, &shape), vec!["usage".into(), "STORAGE".into()]));
    bad
}

#[test]
fn attention_tensors() {
    let trap = AttentionTrap::new(Sink::Given);
    for (name, slot) in ATTENTION_SLOTS {
        let good = slot(&mut trap.tensors.clone()).clone();
        for (bad, words) in bad_views(&good) {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            trap.refuse(name, &words, |tensors| *slot(tensors) = bad);
        }
    }
}

#[test]
fn attention_tensors_that_are_missing_or_not_wanted() {
    let trap = AttentionTrap::new(Sink::Given);
    trap.refuse("sink_k", &["none", "Sink::Given"], |tensors| tensors.sink_k = None);
    trap.refuse("sink_v", &["none", "Sink::Given"], |tensors| tensors.sink_v = None);
    let three = gpu().zeros(&[3, 2, 4]).unwrap().view();
    trap.refuse("sink_v", &["[3, 2, 4]", "[2, 2, 4]"], |tensors| tensors.sink_v = Some(three));
    for sink in [Sink::Zero, Sink::First, Sink::None] {
        let other = AttentionTrap::new(sink);
        let words = ["a tensor", &format!("Sink::{sink:?}")];
        other.refuse("sink_k", &words, |tensors| tensors.sink_k = trap.tensors.sink_k.clone());
        other.refuse("sink_v", &words, |tensors| tensors.sink_v = trap.tensors.sink_v.clone());
    }
    let config = AttentionConfig { method: Method::Softmax, sink: Sink::None, ..trap.case.config };
    let softmax = Attention::new(gpu(), config).unwrap();
    let tensors = AttentionTensors { sink_k: None, sink_v: None, ..trap.tensors.clone() };
    refused(softmax.plan(&trap.case.shape).unwrap().bind(&tensors), "intervals", &["a tensor", "Softmax"]);
    let flat = gpu().zeros(&[5]).unwrap().view();
    for (name, tensors) in [
        ("q", AttentionTensors { q: flat.clone(), ..trap.tensors.clone() }),
        ("k", AttentionTensors { k: flat, ..trap.tensors.clone() }),
    ] {
        refused(tensors.shape(), name, &["[5]"]);
        let mut encoder = gpu().device().create_command_encoder(&Default::default());
        let attention = Attention::new(gpu(), trap.case.config).unwrap();
        refused(attention.forward(&mut encoder, &tensors), name, &["[5]"]);
    }
}

#[test]
fn attention_outputs_that_overlap() {
    let trap = AttentionTrap::new(Sink::Given);
    let shared = gpu().zeros(&[4000]).unwrap();
    let at = |offset: u64, like: &TensorView| TensorView::new(shared.buffer(), offset, like.shape());
    for (input_name, input) in &ATTENTION_SLOTS[..6] {
        for (output_name, output) in &ATTENTION_SLOTS[6..] {
            // The last element of the input is the first of the output.
            trap.refuse(output_name, &["overlap", input_name], |tensors| {
                let length = input(tensors).shape().iter().product::<usize>() as u64;
                *input(tensors) = at(100, input(tensors));
                *output(tensors) = at(100 + length - 1, output(tensors));
            });
        }
        trap.refuse("workspace", &["overlap", input_name], |tensors| {
            *input(tensors) = at(190, input(tensors));
            tensors.workspace = Some(at(192, tensors.workspace.as_ref().unwrap()));
        });
    }
    trap.refuse("lse", &["overlap", "out"], |tensors| {
        tensors.out = at(7, &tensors.out);
        tensors.lse = Some(at(7, tensors.lse.as_ref().unwrap()));
    });
    trap.refuse("workspace", &["overlap", "out"], |tensors| {
        tensors.out = at(0, &tensors.out);
        tensors.workspace = Some(at(64, tensors.workspace.as_ref().unwrap()));
    });
    for strides in [[0, 24, 4, 1], [96, 0, 4, 1], [96, 24, 3, 1], [96, 5, 4, 1]] {
        trap.refuse("out", &["overlap"], |tensors| {
            tensors.out = TensorView::strided(shared.buffer(), 0, &[2, 4, 6, 4], &strides);
        });
    }
}

#[test]
fn workspaces() {
    let trap = AttentionTrap::new(Sink::Given);
    let efla = EflaTrap::new(Form::Chunked);
    let bytes = |view: &TensorView| view.shape()[0];
    let storage = gpu().zeros(&[1 << 16]).unwrap();
    let copied = gpu().device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 1 << 18,
        usage: wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let attention_size = bytes(trap.tensors.workspace.as_ref().unwrap());
    let efla_size = bytes(efla.tensors.workspace.as_ref().unwrap());
    let bad = |size: usize| {
        vec![
            (TensorView::new(storage.buffer(), 0, &[size - 1]), format!("[{}]", size - 1)),
            (TensorView::new(storage.buffer(), 0, &[1, size]), format!("[1, {size}]")),
            (TensorView::new(storage.buffer(), 0, &[]), "[]".to_string()),
            (TensorView::new(storage.buffer(), 1, &[size]), "offset 1".to_string()),
            (TensorView::new(gpu().zeros(&[size + 63]).unwrap().buffer(), 64, &[size]), "buffer of".to_string()),
            (TensorView::new(storage.buffer(), u64::MAX, &[size]), "workspace".to_string()),
            (TensorView::new(storage.buffer(), 1 << 62, &[size]), "workspace".to_string()),
            (TensorView::new(&copied, 0, &[size]), "STORAGE".to_string()),
        ]
    };
    for (view, words) in bad(attention_size) {
        trap.refuse("workspace", &[&words], |tensors| tensors.workspace = Some(view));
    }
    for (view, words) in bad(efla_size) {
        efla.refuse("workspace", &[&words], |tensors| tensors.workspace = Some(view));
    }
}

/// A valid call of EFLA that a test then spoils.
struct EflaTrap {
    case: EflaCase,
    out: Guarded,
    final_state: Guarded,
    workspace: Guarded,
    tensors: EflaTensors,
}

impl EflaTrap {
    fn new(form: Form) -> Self {
        let gpu = gpu();
        let config = EflaConfig { key_dim: 5, value_dim: 4, integrator: Integrator::Exact, form, ..Default::default() };
        let shape = EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 7 };
        let mut rng = rng(2);
        let case = EflaCase::random(config, shape, &mut rng).with_initial_state(&mut rng);
        let plan = Efla::new(gpu, case.config).unwrap().plan(&case.shape).unwrap();
        let out = Guarded::new(gpu, Guarded::ODD, &case.out_shape());
        let final_state = Guarded::new(gpu, Guarded::ODD, &case.state_shape());
        let workspace = Guarded::new(gpu, Guarded::ALIGNED, &[(plan.workspace_bytes() / 4) as usize]);
        let mut tensors = case.tensors(gpu, &out);
        tensors.final_state = Some(final_state.view());
        tensors.workspace = Some(workspace.view());
        plan.bind(&tensors).expect("valid until it is spoiled");
        EflaTrap { case, out, final_state, workspace, tensors }
    }

    /// Spoils the call, demands the error and that nothing was written.
    #[track_caller]
    fn refuse(&self, argument: &str, words: &[&str], spoil: impl FnOnce(&mut EflaTensors)) {
        let gpu = gpu();
        let mut tensors = self.tensors.clone();
        spoil(&mut tensors);
        let efla = Efla::new(gpu, self.case.config).unwrap();
        refused(efla.plan(&self.case.shape).unwrap().bind(&tensors), argument, words);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        assert!(efla.forward(&mut encoder, &tensors).is_err() || tensors.shape() != Ok(self.case.shape));
        if tensors.shape() == Ok(self.case.shape) {
            gpu.queue().submit([encoder.finish()]);
            for untouched in [&self.out, &self.final_state, &self.workspace] {
                assert!(untouched.read(gpu, argument).iter().all(|x| x.is_nan()), "{argument}: written to");
            }
        }
    }
}

#[test]
fn efla_tensors() {
    for form in [Form::Chunked, Form::Recurrent] {
        let trap = EflaTrap::new(form);
        for (name, slot) in EFLA_SLOTS {
            let good = slot(&mut trap.tensors.clone()).clone();
            for (bad, words) in bad_views(&good) {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                trap.refuse(name, &words, |tensors| *slot(tensors) = bad);
            }
        }
        let flat = gpu().zeros(&[5]).unwrap().view();
        let tensors = EflaTensors { v: flat, ..trap.tensors.clone() };
        refused(tensors.shape(), "v", &["[5]"]);
    }
}

#[test]
fn efla_outputs_that_overlap() {
    for form in [Form::Chunked, Form::Recurrent] {
        let trap = EflaTrap::new(form);
        let shared = gpu().zeros(&[40000]).unwrap();
        let at = |offset: u64, like: &TensorView| TensorView::new(shared.buffer(), offset, like.shape());
        for (input_name, input) in &EFLA_SLOTS[..5] {
            for (output_name, output) in &EFLA_SLOTS[5..] {
                trap.refuse(output_name, &["overlap", input_name], |tensors| {
                    let length = input(tensors).shape().iter().product::<usize>() as u64;
                    *input(tensors) = at(100, input(tensors));
                    *output(tensors) = at(100 + length - 1, output(tensors));
                });
            }
        }
        trap.refuse("final_state", &["overlap", "out"], |tensors| {
            tensors.out = at(7, &tensors.out);
            tensors.final_state = Some(at(7, tensors.final_state.as_ref().unwrap()));
        });
        // The same range in another order is not an update in place.
        trap.refuse("final_state", &["overlap", "initial_state"], |tensors| {
            let shape = [2, 4, 5, 4];
            tensors.initial_state = Some(TensorView::strided(shared.buffer(), 0, &shape, &[80, 20, 4, 1]));
            tensors.final_state = Some(TensorView::strided(shared.buffer(), 0, &shape, &[20, 40, 4, 1]));
        });
        trap.refuse("final_state", &["overlap"], |tensors| {
            let shape = [2, 4, 5, 4];
            tensors.final_state = Some(TensorView::strided(shared.buffer(), 0, &shape, &[0, 20, 4, 1]));
        });
    }
}

/// Offsets of tensors without elements are never used, but must not overflow either.
#[test]
fn empty_tensors_at_absurd_offsets() {
    let gpu = gpu();
    let buffer = gpu.zeros(&[64]).unwrap();
    for offset in [u64::MAX, u64::MAX / 4 + 1, 1 << 62] {
        let empty = |shape: &[usize]| TensorView::new(buffer.buffer(), offset, shape);
        let attention =
            Attention::new(gpu, AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() }).unwrap();
        let out = gpu.zeros(&[1, 1, 0, 4]).unwrap();
        let tensors =
            AttentionTensors::new(empty(&[1, 1, 0, 4]), empty(&[1, 1, 0, 4]), empty(&[1, 1, 0, 4]), out.view());
        // Refused or done, but no panic.
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        let _ = attention.forward(&mut encoder, &tensors);
        let tensors = AttentionTensors { out: empty(&[1, 1, 0, 4]), ..tensors };
        let _ = attention.forward(&mut encoder, &tensors);
        gpu.queue().submit([encoder.finish()]);
    }
}

/// An empty range touches nothing, wherever it lies.
#[test]
fn empty_tensors_overlap_nothing() {
    let gpu = gpu();
    let shared = gpu.zeros(&[1000]).unwrap();
    let at = |offset, shape: &[usize]| TensorView::new(shared.buffer(), offset, shape);
    let config = AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() };
    let plan = Attention::new(gpu, config).unwrap();
    let plan = plan.plan(&AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 0, keys: 5 }).unwrap();
    let empty = || at(10, &[1, 1, 0, 4]);
    plan.bind(&AttentionTensors::new(empty(), at(0, &[1, 1, 5, 4]), at(5, &[1, 1, 5, 4]), empty())).unwrap();
}

#[test]
fn uploads() {
    let gpu = gpu();
    refused(gpu.upload(&[1.0; 5], &[2, 3]), "data", &["5 elements", "[2, 3]"]);
    refused(gpu.upload(&[1.0], &[usize::MAX, usize::MAX]), "data", &["1 elements"]);
    for shape in [vec![usize::MAX], vec![1 << 40, 1 << 40], vec![1 << 50]] {
        refused(gpu.zeros(&shape), "tensor of shape", &["exceeds"]);
    }
    assert!(gpu.read(&gpu.zeros(&[3, 0]).unwrap()).unwrap().is_empty());
    assert_eq!(gpu.read(&gpu.upload(&[2.5], &[]).unwrap()).unwrap(), [2.5]);
}

/// A second device, from an instance of its own and from the same adapter list.
#[test]
fn buffers_of_another_device() {
    let other = Gpu::new().unwrap();
    let trap = AttentionTrap::new(Sink::Given);
    for (name, slot) in ATTENTION_SLOTS {
        let mut tensors = trap.tensors.clone();
        let foreign = other.zeros(slot(&mut tensors).shape()).unwrap();
        trap.refuse("", &[], |tensors| *slot(tensors) = foreign.view());
        println!("{name} of another device is refused");
    }
    let trap = EflaTrap::new(Form::Chunked);
    for (name, slot) in EFLA_SLOTS {
        let mut tensors = trap.tensors.clone();
        let foreign = other.zeros(slot(&mut tensors).shape()).unwrap();
        trap.refuse("", &[], |tensors| *slot(tensors) = foreign.view());
        println!("{name} of another device is refused");
    }
}

/// Neither reading nor writing lets the graphics stack's error handler hear of a caller's mistake.
#[test]
fn tensors_that_are_gone_or_foreign() {
    let other = Gpu::new().unwrap();
    let foreign = other.zeros(&[4]).unwrap();
    let gone = gpu().zeros(&[4]).unwrap();
    gone.buffer().destroy();
    for (name, tensor) in [("foreign", &foreign), ("destroyed", &gone)] {
        assert!(matches!(gpu().read(tensor), Err(Error::Gpu { .. })), "{name}");
        assert!(matches!(gpu().write(tensor, &[0.0; 4]), Err(Error::Gpu { .. })), "{name}");
    }
    refused(gpu().write(&gone, &[0.0; 3]), "data", &["3 elements", "4"]);
    other.device().destroy();
    assert!(matches!(other.read(&foreign), Err(Error::Gpu { .. })));
}

#[test]
fn efla_sizes_that_no_integer_holds() {
    let efla = Efla::new(gpu(), EflaConfig::default()).unwrap();
    for size in [usize::MAX, 1 << 40] {
        let shape = EflaShape { batch: size, heads: 1, value_heads: 1, tokens: 0 };
        refused(efla.plan(&shape), "batch", &["exceeds"]);
        refused(efla.plan_backward(&shape), "batch", &["exceeds"]);
    }
}

#[test]
fn lengths_that_do_not_fit() {
    let attention = Attention::new(gpu(), AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() }).unwrap();
    let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 6, keys: 9 };
    let refuse = |shape: AttentionShape, lengths: Lengths, argument: &str, words: &[&str]| {
        refused(attention.plan_ragged(&shape, &lengths), argument, words);
        refused(attention.plan_backward_ragged(&shape, &lengths), argument, words);
    };
    let packed = |q: &[usize], k: &[usize]| Lengths::Packed { cu_seqlens_q: q.to_vec(), cu_seqlens_k: k.to_vec() };
    let cache = |lengths: &[usize]| Lengths::Cache { kv_lens: lengths.to_vec() };
    refuse(shape, packed(&[], &[0, 9]), "cu_seqlens_q", &["from 0 to the 6 tokens"]);
    refuse(shape, packed(&[0, 2, 5], &[0, 4, 9]), "cu_seqlens_q", &["0", "5", "the 6 tokens"]);
    refuse(shape, packed(&[1, 6], &[0, 9]), "cu_seqlens_q", &["from Some(1)"]);
    refuse(shape, packed(&[0, 4, 2, 6], &[0, 4, 4, 9]), "cu_seqlens_q", &["not sorted"]);
    refuse(shape, packed(&[0, 2, 6], &[0, 4, 10]), "cu_seqlens_k", &["the 9 tokens"]);
    refuse(shape, packed(&[0, 2, 6], &[0, 9]), "cu_seqlens_k", &["2 entries", "3, as cu_seqlens_q"]);
    refuse(AttentionShape { batch: 2, ..shape }, packed(&[0, 6], &[0, 9]), "batch", &["got 2", "packed"]);
    refuse(shape, cache(&[]), "kv_lens", &["0 entries", "1, one a sequence"]);
    refuse(shape, cache(&[10]), "kv_lens", &["got 10", "at most the 9 keys"]);
    refuse(AttentionShape { batch: 2, ..shape }, cache(&[9, usize::MAX]), "kv_lens", &["9 keys"]);

    let efla = Efla::new(gpu(), EflaConfig { key_dim: 4, value_dim: 4, ..Default::default() }).unwrap();
    let tokens = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: 6 };
    for (shape, cumulative, argument, words) in [
        (tokens, &[0, 2, 5][..], "cu_seqlens", "the 6 tokens"),
        (tokens, &[], "cu_seqlens", "0 entries"),
        (tokens, &[0, 4, 2, 6], "cu_seqlens", "not sorted"),
        (EflaShape { batch: 2, ..tokens }, &[0, 6], "batch", "packed"),
    ] {
        refused(efla.plan_packed(&shape, cumulative), argument, &[words]);
        refused(efla.plan_backward_packed(&shape, cumulative), argument, &[words]);
    }

    // Tables that no device should have to hold.
    let many = AttentionShape { batch: 4096, queries: 1 << 29, ..shape };
    refuse(many, cache(&vec![0; 4096]), "table", &["exceeds"]);

    // A plan's lengths are those of the call.
    let trap = AttentionTrap::new(Sink::Zero);
    let attention = Attention::new(gpu(), trap.case.config).unwrap();
    let tensors = AttentionTensors { lengths: cache(&[7, 7]), ..trap.tensors.clone() };
    refused(attention.plan(&trap.case.shape).unwrap().bind(&tensors), "lengths", &["those of the plan"]);
}

#[test]
fn storage_types_that_do_not_fit() {
    let types = [DType::F16, DType::BF16];
    for dtype in types {
        let trap = AttentionTrap::new(Sink::Given);
        let name = format!("{dtype:?}");
        trap.refuse("lse", &[&name, "F32"], |tensors| {
            tensors.lse = tensors.lse.clone().map(|lse| lse.with_dtype(dtype));
        });
        trap.refuse("intervals", &[&name, "F32"], |tensors| {
            tensors.intervals = tensors.intervals.clone().map(|intervals| intervals.with_dtype(dtype));
        });
        // Two elements share a word: neither may begin or end a row in the middle of one.
        let buffer = gpu().zeros(&[400]).unwrap();
        let shape = [2, 4, 6, 4];
        let at = |offset: u64, strides: [usize; 4]| {
            TensorView::strided(buffer.buffer(), offset, &shape, &strides).with_dtype(dtype)
        };
        trap.refuse("out", &[&name, "offset 3", "even"], |tensors| tensors.out = at(3, [96, 24, 4, 1]));
        trap.refuse("out", &[&name, "[99, 24, 4, 1]", "even"], |tensors| tensors.out = at(0, [99, 24, 4, 1]));
        trap.refuse("out", &[&name, "[125, 31, 5, 1]", "even"], |tensors| tensors.out = at(0, [125, 31, 5, 1]));
        let config = AttentionConfig { head_dim: 4, value_dim: 3, ..Default::default() };
        let attention = Attention::new(gpu(), config).unwrap();
        let (q, v) = (gpu().zeros(&[1, 1, 2, 4]).unwrap(), gpu().zeros(&[1, 1, 2, 3]).unwrap());
        let out = gpu().zeros_of(dtype, &[1, 1, 2, 3]).unwrap();
        let tensors = AttentionTensors::new(q.view(), q.view(), v.view(), out.view());
        refused(attention.plan(&tensors.shape().unwrap()).unwrap().bind(&tensors), "out", &["even last dimension"]);
        // Inputs may lie anywhere; but a word that only half belongs to the buffer can't be bound.
        let odd = gpu().device().create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size: 14,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        });
        let v = TensorView::new(&odd, 1, &[1, 1, 2, 3]).with_dtype(dtype);
        let tensors = AttentionTensors { v, out: gpu().zeros(&[1, 1, 2, 3]).unwrap().view(), ..tensors };
        refused(attention.plan(&tensors.shape().unwrap()).unwrap().bind(&tensors), "v", &["a buffer of 6 elements"]);
    }
    // A workspace of halves would be half as long as it says.
    let trap = AttentionTrap::new(Sink::Zero);
    trap.refuse("workspace", &["F16", "F32"], |tensors| {
        tensors.workspace = tensors.workspace.clone().map(|workspace| workspace.with_dtype(DType::F16));
    });
    refused(gpu().write(&gpu().zeros_of(DType::F16, &[2]).unwrap(), &[1f32, 2.0]), "data", &["F32", "F16"]);
}

/// Sizes of 0 hide no huge ones from the reference, which would loop over them or keep a list of them. Found by fuzzing.
#[test]
fn references_of_heads_and_keys_without_end() {
    use continuous_attention::reference::{attention, efla};
    let none = attention::Inputs { q: &[], k: &[], v: &[], sink_k: None, sink_v: None, intervals: None };
    let config = AttentionConfig { head_dim: 4, value_dim: 4, ..Default::default() };
    let empty = AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 0, keys: 0 };
    for shape in [
        AttentionShape { batch: 1 << 45, ..empty },
        AttentionShape { heads: usize::MAX, ..empty },
        AttentionShape { heads: 0, kv_heads: usize::MAX, ..empty },
    ] {
        refused(attention::forward(&config, &shape, &none), "heads", &["1048576"]);
        refused(attention::forward_ragged(&config, &shape, &Lengths::Full, &none), "heads", &["1048576"]);
        refused(attention::backward_ragged(&config, &shape, &Lengths::Full, &none, &[], None), "heads", &["1048576"]);
    }
    let headless = AttentionShape { heads: 0, kv_heads: 0, keys: 1 << 42, ..empty };
    attention::forward_ragged(&config, &headless, &Lengths::Full, &none).unwrap();

    let none = efla::Inputs { q: &[], k: &[], v: &[], beta: &[], log_decay: None, initial_state: None };
    let config = EflaConfig { key_dim: 4, value_dim: 4, ..Default::default() };
    let shape = EflaShape { batch: 1 << 45, heads: 1, value_heads: 1, tokens: 0 };
    refused(efla::forward(&config, &shape, &none), "heads", &["1048576"]);
}

/// Sums that no dispatch can stop within, longer than llvmpipe's loops: refused there, right elsewhere.
#[test]
fn sums_of_more_parts_than_loops_have_rounds() {
    let (gpu, parts) = (gpu(), 31_000);
    let check = |bound: Result<Call>, kernel: &str| match gpu.info().device_type {
        wgpu::DeviceType::Cpu => refused(bound, kernel, &["rounds", "60000"]),
        _ => drop(bound.unwrap()),
    };
    // A sink that every sequence shares.
    let config = AttentionConfig { head_dim: 2, value_dim: 2, sink: Sink::Given, ..Default::default() };
    let zeros = |shape: &[usize]| gpu.zeros(shape).unwrap().view();
    let [q, k, v, out, d_out, d_q, d_k, d_v] = [(); 8].map(|()| zeros(&[parts, 1, 1, 2]));
    let [sink_k, sink_v, d_sink_k] = [(); 3].map(|()| zeros(&[1, 1, 2]));
    let forward =
        AttentionTensors { sink_k: Some(sink_k), sink_v: Some(sink_v), ..AttentionTensors::new(q, k, v, out) };
    let lse = zeros(&[parts, 1, 1]);
    let gradients = AttentionGradients {
        d_sink_k: Some(d_sink_k),
        ..AttentionGradients::new(&forward, lse, d_out, [d_q, d_k, d_v])
    };
    let attention = Attention::new(gpu, config).unwrap();
    check(attention.plan_backward(&gradients.shape().unwrap()).unwrap().bind(&gradients), "reduce");

    // Value heads that read one key.
    let config = EflaConfig { key_dim: 2, value_dim: 2, ..Default::default() };
    let [q, k, d_q, d_k] = [(); 4].map(|()| zeros(&[1, 1, 1, 2]));
    let [v, out, d_out, d_v] = [(); 4].map(|()| zeros(&[1, parts, 1, 2]));
    let [beta, d_beta] = [(); 2].map(|()| zeros(&[1, parts, 1]));
    let gradients = EflaGradients::new(&EflaTensors::new(q, k, v, beta, out), d_out, [d_q, d_k, d_v, d_beta]);
    let efla = Efla::new(gpu, config).unwrap();
    check(efla.plan_backward(&gradients.shape().unwrap()).unwrap().bind(&gradients), "efla_backward_sum");
}
