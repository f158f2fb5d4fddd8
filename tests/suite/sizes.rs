//! Calls that are larger than a binding: taken apart over batch and heads, with the results of the whole.

use continuous_attention::*;

use crate::harness::{gpu, normal, rng};

/// What the kernels of software adapters need.
const SUBGROUPS: wgpu::Features = wgpu::Features::SUBGROUP.union(wgpu::Features::SUBGROUP_BARRIER);

/// A device whose bindings hold `bytes` only.
fn narrow_gpu(bytes: u64) -> Gpu {
    let limits = wgpu::Limits { max_storage_buffer_binding_size: bytes, ..Default::default() };
    limited_gpu(limits, wgpu::Features::empty())
}

fn limited_gpu(limits: wgpu::Limits, features: wgpu::Features) -> Gpu {
    let adapters = pollster::block_on(Gpu::adapters());
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let adapter = &adapters[Gpu::preferred(&infos).unwrap()];
    let limits = wgpu::Limits {
        min_storage_buffer_offset_alignment: adapter.limits().min_storage_buffer_offset_alignment,
        ..limits
    };
    let descriptor = wgpu::DeviceDescriptor {
        required_limits: limits,
        required_features: features & adapter.features(),
        ..Default::default()
    };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    Gpu::from_wgpu(device, queue).unwrap()
}

/// One that is limited as little as the default, but has no subgroups: narrow ones give its results to the bit.
fn plain_gpu() -> Gpu {
    limited_gpu(wgpu::Limits::default(), wgpu::Features::empty())
}

/// A tensor in a buffer of its own, whatever a binding holds.
fn tensor(gpu: &Gpu, values: &[f32], shape: &[usize]) -> TensorView {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4 * values.len() as u64,
        usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC,
        mapped_at_creation: false,
    });
    gpu.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(values));
    TensorView::new(&buffer, 0, shape)
}

fn nan(gpu: &Gpu, shape: &[usize]) -> TensorView {
    tensor(gpu, &vec![f32::NAN; shape.iter().product()], shape)
}

/// Reads a tensor that fills its buffer.
fn read(gpu: &Gpu, buffer: &wgpu::Buffer) -> Vec<f32> {
    let staging = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: buffer.size(),
        usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    encoder.copy_buffer_to_buffer(buffer, 0, &staging, 0, buffer.size());
    gpu.queue().submit([encoder.finish()]);
    staging.slice(..).map_async(wgpu::MapMode::Read, |result| result.unwrap());
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).unwrap();
    bytemuck::cast_slice(&staging.slice(..).get_mapped_range().unwrap()).to_vec()
}

/// Forward and backward, in one submission; every result by name.
fn attention(gpu: &Gpu, sink: Sink, lengths: Lengths) -> Vec<(&'static str, Vec<f32>)> {
    let (batch, heads, kv_heads, queries, keys, dim) = (3, 4, 2, 33, 40, 8);
    let config = AttentionConfig { head_dim: dim, value_dim: dim, sink, ..Default::default() };
    let mut rng = rng(1);
    let mut random = |shape: &[usize]| tensor(gpu, &normal(&mut rng, shape.iter().product()), shape);
    let (q_shape, k_shape) = ([batch, heads, queries, dim], [batch, kv_heads, keys, dim]);
    let (q, k, v, d_out) = (random(&q_shape), random(&k_shape), random(&k_shape), random(&q_shape));
    let given = sink == Sink::Given;
    let [sink_k, sink_v] = [1, batch].map(|batch| given.then(|| random(&[batch, kv_heads, dim])));
    let intervals: Vec<f32> = (0..batch * keys).map(|at| 0.1 + (at % 7) as f32).collect();
    let mut outputs = vec![("out", nan(gpu, &q_shape)), ("lse", nan(gpu, &q_shape[..3]))];
    outputs.extend([("d_q", nan(gpu, &q_shape)), ("d_k", nan(gpu, &k_shape)), ("d_v", nan(gpu, &k_shape))]);
    outputs.push(("d_intervals", nan(gpu, &[batch, keys])));
    let d_sink = |sink: &Option<TensorView>| sink.as_ref().map(|sink| nan(gpu, sink.shape()));
    let (d_sink_k, d_sink_v) = (d_sink(&sink_k), d_sink(&sink_v));
    let forward = AttentionTensors {
        sink_k,
        sink_v,
        intervals: Some(tensor(gpu, &intervals, &[batch, keys])),
        lse: Some(outputs[1].1.clone()),
        lengths,
        ..AttentionTensors::new(q, k, v, outputs[0].1.clone())
    };
    let gradients = [2, 3, 4].map(|index: usize| outputs[index].1.clone());
    let backward = AttentionGradients {
        d_sink_k: d_sink_k.clone(),
        d_sink_v: d_sink_v.clone(),
        d_intervals: Some(outputs[5].1.clone()),
        ..AttentionGradients::new(&forward, outputs[1].1.clone(), d_out, gradients)
    };
    outputs.extend(d_sink_k.map(|view| ("d_sink_k", view)));
    outputs.extend(d_sink_v.map(|view| ("d_sink_v", view)));
    let operator = Attention::new(gpu, config).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    operator.forward(&mut encoder, &forward).unwrap();
    operator.backward(&mut encoder, &backward).unwrap();
    gpu.queue().submit([encoder.finish()]);
    outputs.iter().map(|(name, view)| (*name, read(gpu, view.buffer()))).collect()
}

/// The bytes of a head of q or out are 1056, of a head of k or v 1280.
#[test]
fn attention_over_one_binding() {
    let cache = Lengths::Cache { kv_lens: vec![40, 0, 17] };
    for (sink, lengths) in [(Sink::Zero, Lengths::Full), (Sink::Given, Lengths::Full), (Sink::Given, cache)] {
        let whole = attention(&plain_gpu(), sink, lengths.clone());
        // Two sequences at a time; one; one pair of heads at a time.
        for bytes in [9 << 10, 5 << 10, 5 << 9] {
            for ((name, whole), (_, parts)) in whole.iter().zip(attention(&narrow_gpu(bytes), sink, lengths.clone())) {
                let exact = !matches!(*name, "d_sink_k" | "d_intervals");
                for (at, (a, b)) in whole.iter().zip(&parts).enumerate() {
                    // What gathers over pieces is summed in another order.
                    let same = if exact { a.to_bits() == b.to_bits() } else { (a - b).abs() <= 1e-5 * (1.0 + a.abs()) };
                    assert!(same, "{name} {at}: {a} and {b}, {bytes} bytes, {sink:?} {lengths:?}");
                }
            }
        }
    }
}

/// Kernels that sum in the workspace need more of it: where that fits no binding, even of one head, others do.
#[test]
fn attention_over_one_binding_by_subgroups() {
    let whole = attention(gpu(), Sink::Given, Lengths::Full);
    for bytes in [9 << 10, 5 << 10, 5 << 9] {
        let limits = wgpu::Limits { max_storage_buffer_binding_size: bytes, ..Default::default() };
        let narrow = limited_gpu(limits, SUBGROUPS);
        for ((name, whole), (_, parts)) in whole.iter().zip(attention(&narrow, Sink::Given, Lengths::Full)) {
            for (at, (a, b)) in whole.iter().zip(&parts).enumerate() {
                assert!((a - b).abs() <= 1e-5 * (1.0 + a.abs()), "{name} {at}: {a} and {b}, {bytes} bytes");
            }
        }
    }
}

#[test]
fn a_head_over_one_binding_is_refused() {
    let gpu = narrow_gpu(1 << 10);
    let shape = [2, 2, 40, 8];
    let tensors = || nan(&gpu, &shape);
    let attention = Attention::new(&gpu, AttentionConfig { head_dim: 8, value_dim: 8, ..Default::default() }).unwrap();
    let tensors = AttentionTensors::new(tensors(), tensors(), tensors(), tensors());
    let error = attention.plan(&tensors.shape().unwrap()).unwrap().bind(&tensors).unwrap_err();
    assert_eq!(
        error,
        Error::Limit {
            argument: "q, in bytes".to_string(),
            got: 1280,
            limit_name: "max_storage_buffer_binding_size",
            limit: 1024
        }
    );
}

/// Rotary embedding, merge (both ways) and copy of `[3, 4, 33, 8]`; every result.
fn small_operators(gpu: &Gpu) -> Vec<Vec<f32>> {
    let shape = [3, 4, 33, 8];
    let mut rng = rng(2);
    let mut random = |shape: &[usize]| tensor(gpu, &normal(&mut rng, shape.iter().product()), shape);
    let [a, b, d_out] = [(); 3].map(|()| random(&shape));
    let [lse_a, lse_b, positions] = [&shape[..3], &shape[..3], &[3, 33]].map(&mut random);
    let outputs = [(); 5].map(|()| nan(gpu, &shape));
    let rows = [(); 3].map(|()| nan(gpu, &shape[..3]));
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let rotary = Rotary::new(gpu, RotaryConfig { dim: 8, ..Default::default() }).unwrap();
    let turned = RotaryTensors { positions: Some(positions), ..RotaryTensors::new(a.clone(), outputs[0].clone()) };
    rotary.forward(&mut encoder, 0, &turned).unwrap();
    let merge = Merge::new(gpu).unwrap();
    let [out, d_out_a, d_out_b] = [1, 2, 3].map(|index: usize| outputs[index].clone());
    let [lse, d_lse_a, d_lse_b] = rows.clone();
    let (out_a, out_b) = (a.clone(), b);
    let sides = MergeTensors { out_a, lse_a, out_b, lse_b, out, lse };
    merge.forward(&mut encoder, &sides).unwrap();
    let MergeTensors { out_a, lse_a, out_b, lse_b, .. } = sides;
    let gradients =
        MergeGradients { out_a, lse_a, out_b, lse_b, d_out, d_lse: None, d_out_a, d_lse_a, d_out_b, d_lse_b };
    merge.backward(&mut encoder, &gradients).unwrap();
    gpu.copy(&mut encoder, &a, &outputs[4]).unwrap();
    gpu.queue().submit([encoder.finish()]);
    outputs.iter().chain(&rows).map(|view| read(gpu, view.buffer())).collect()
}

#[test]
fn small_operators_over_one_binding() {
    let whole = small_operators(&plain_gpu());
    for bytes in [9 << 10, 5 << 10, 5 << 9] {
        for (index, (whole, parts)) in whole.iter().zip(small_operators(&narrow_gpu(bytes))).enumerate() {
            assert!(whole.iter().all(|x| !x.is_nan()), "output {index}");
            assert!(whole.iter().zip(&parts).all(|(a, b)| a.to_bits() == b.to_bits()), "output {index}, {bytes} bytes");
        }
    }
}

/// The grid then has several rows, the last of which is not full.
#[test]
fn more_workgroups_than_one_dimension_holds() {
    let limits = wgpu::Limits { max_compute_workgroups_per_dimension: 8, ..Default::default() };
    let small = limited_gpu(limits, SUBGROUPS);
    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    for ((name, whole), (_, rows)) in
        attention(gpu(), Sink::Given, Lengths::Full).iter().zip(attention(&small, Sink::Given, Lengths::Full))
    {
        assert_eq!(bits(whole), bits(&rows), "{name}");
    }
    for (whole, rows) in small_operators(gpu()).iter().zip(small_operators(&small)) {
        assert_eq!(bits(whole), bits(&rows));
    }
}

/// EFLA, gated or not, forward and backward; every result by name.
fn efla(gpu: &Gpu, gated: bool, form: Form) -> Vec<(&'static str, Vec<f32>)> {
    let (batch, heads, value_heads, tokens, dim) = (3, 2, 4, 40, 8);
    let config = EflaConfig { key_dim: dim, value_dim: dim, gated, form, chunk: Some(16), ..Default::default() };
    let mut rng = rng(4);
    let mut random = |shape: &[usize], scale: f32| {
        let values: Vec<f32> = normal(&mut rng, shape.iter().product()).iter().map(|x| scale * x.abs()).collect();
        tensor(gpu, &values, shape)
    };
    let (keys, values) = ([batch, heads, tokens, dim], [batch, value_heads, tokens, dim]);
    let state = [batch, value_heads, dim, dim];
    let forward = EflaTensors {
        log_decay: gated.then(|| random(&values[..3], -0.1)),
        initial_state: Some(random(&state, 1.0)),
        final_state: Some(nan(gpu, &state)),
        ..EflaTensors::new(
            random(&keys, 1.0),
            random(&keys, 1.0),
            random(&values, 1.0),
            random(&values[..3], 0.1),
            nan(gpu, &values),
        )
    };
    let gradients = [nan(gpu, &keys), nan(gpu, &keys), nan(gpu, &values), nan(gpu, &values[..3])];
    let backward = EflaGradients {
        d_final_state: Some(random(&state, 1.0)),
        d_initial_state: Some(nan(gpu, &state)),
        d_log_decay: gated.then(|| nan(gpu, &values[..3])),
        ..EflaGradients::new(&forward, random(&values, 1.0), gradients)
    };
    let operator = Efla::new(gpu, config).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    operator.forward(&mut encoder, &forward).unwrap();
    operator.backward(&mut encoder, &backward).unwrap();
    gpu.queue().submit([encoder.finish()]);
    let mut outputs = vec![("out", &forward.out), ("d_q", &backward.d_q), ("d_k", &backward.d_k)];
    outputs.extend([("d_v", &backward.d_v), ("d_beta", &backward.d_beta)]);
    outputs.extend(forward.final_state.iter().map(|view| ("final_state", view)));
    outputs.extend(backward.d_initial_state.iter().map(|view| ("d_initial_state", view)));
    outputs.extend(backward.d_log_decay.iter().map(|view| ("d_log_decay", view)));
    outputs.into_iter().map(|(name, view)| (name, read(gpu, view.buffer()))).collect()
}

/// Results of either operator, forward and backward, by name.
pub fn results(gpu: &Gpu) -> Vec<(&'static str, Vec<f32>)> {
    let cache = Lengths::Cache { kv_lens: vec![40, 0, 17] };
    let mut results = attention(gpu, Sink::Zero, Lengths::Full);
    results.extend(attention(gpu, Sink::Given, cache));
    for (gated, form) in [(false, Form::Chunked), (true, Form::Chunked), (false, Form::Recurrent)] {
        results.extend(efla(gpu, gated, form));
    }
    results
}

/// The bytes of a head of v are 1280; the workspace of a value head has parts of up to 3072 (Y and X).
#[test]
fn efla_over_one_binding() {
    for (gated, form) in [(false, Form::Chunked), (true, Form::Chunked), (false, Form::Recurrent)] {
        let whole = efla(&plain_gpu(), gated, form);
        // Two sequences at a time; one; a head with the two value heads that read it.
        for bytes in [28 << 10, 14 << 10, 8 << 10] {
            for ((name, whole), (_, parts)) in whole.iter().zip(efla(&narrow_gpu(bytes), gated, form)) {
                assert!(whole.iter().all(|x| !x.is_nan()), "{name}");
                let same = whole.iter().zip(&parts).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{name}, {bytes} bytes, gated {gated}, {form:?}");
            }
        }
    }
}
