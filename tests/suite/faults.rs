//! What can go wrong around a call: lost devices, too little memory, errors of the host, threads, early drops. Each ends
//! in a typed error or in right results, without a panic or a hang, and the host's handlers and scopes hear only what is
//! the host's.

use std::sync::atomic::{AtomicBool, Ordering};

use continuous_attention::{
    Attention, AttentionConfig, AttentionShape, AttentionTensors, Call, Efla, EflaConfig, EflaShape, Error, Gpu,
    GpuOptions, Tensor, wgpu,
};

use crate::devices::host_device;
use crate::harness::{AttentionCase, EflaCase, Guarded, bits, gpu, normal, plain_gpu, rng, submit};

const CONFIG: AttentionConfig = AttentionConfig {
    head_dim: 8,
    value_dim: 8,
    method: continuous_attention::Method::Continuous,
    sink: continuous_attention::Sink::Zero,
    causal: true,
    window: None,
    scale: None,
    block_q: None,
};
const SHAPE: AttentionShape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 40, keys: 40 };

/// A device of a host and everything its error handler hears.
fn host() -> (Gpu, std::sync::Arc<std::sync::Mutex<Vec<String>>>) {
    let (device, queue, heard) = host_device(wgpu::Limits::default());
    (Gpu::from_wgpu(device, queue).unwrap(), heard)
}

/// A bound call on tensors of its own and its output.
fn bound(gpu: &Gpu) -> (Call, Tensor) {
    let mut rng = rng(1);
    let mut random = |shape: &[usize]| gpu.upload(&normal(&mut rng, shape.iter().product()), shape).unwrap().view();
    let (q, kv) = ([1, 2, 40, 8], [1, 1, 40, 8]);
    let out = gpu.zeros(&q).unwrap();
    let tensors = AttentionTensors::new(random(&q), random(&kv), random(&kv), out.view());
    let call = Attention::new(gpu, CONFIG).unwrap().plan(&SHAPE).unwrap().bind(&tensors).unwrap();
    (call, out)
}

/// What [`bound`] computes where nothing goes wrong.
fn expected(gpu: &Gpu) -> Vec<u32> {
    let (call, out) = bound(gpu);
    submit(gpu, &call);
    bits(&gpu.read(&out).unwrap())
}

/// Runs what may hang: fails after a minute, long before anyone would give up waiting.
fn ends<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || sender.send(work()));
    match receiver.recv_timeout(std::time::Duration::from_secs(60)) {
        Ok(result) => result,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("it hangs"),
        Err(_) => std::panic::resume_unwind(thread.join().expect_err("it sends or panics")),
    }
}

#[track_caller]
fn is_gpu_error<T>(result: Result<T, Error>, operation: &str) {
    match result {
        Err(Error::Gpu { operation: got, message }) => {
            assert!(got.contains(operation) && !message.is_empty(), "{got}: {message}")
        }
        Err(other) => panic!("{operation}: {other:?}"),
        Ok(_) => panic!("{operation}: no error on a lost device"),
    }
}

/// Everything that a caller can do with a device that is gone.
fn is_lost(gpu: &Gpu, before: &Tensor) {
    is_gpu_error(gpu.read(before), "reading back");
    is_gpu_error(gpu.zeros(&[4]), "allocating");
    is_gpu_error(gpu.upload(&[1.0f32], &[1]), "allocating");
    is_gpu_error(gpu.write(before, &vec![0f32; before.shape().iter().product()]), "writing");
    let head = |head| before.view().narrow(1, head, 1).unwrap();
    is_gpu_error(gpu.bind_copy(&head(0), &head(1)), "binding a copy");
    is_gpu_error(Efla::new(gpu, EflaConfig::default()), "compiling");
}

#[test]
fn destroyed_before_binding() {
    ends(|| {
        let (gpu, heard) = host();
        let attention = Attention::new(&gpu, CONFIG).unwrap();
        let plan = attention.plan(&SHAPE).unwrap();
        let [q, k, v, out] = [2, 1, 1, 2].map(|heads| gpu.zeros(&[1, heads, 40, 8]).unwrap());
        gpu.device().destroy();
        is_gpu_error(plan.bind(&AttentionTensors::new(q.view(), k.view(), v.view(), out.view())), "binding attention");
        is_lost(&gpu, &out);
        assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
    });
}

#[test]
fn destroyed_between_binding_and_submitting() {
    ends(|| {
        for after_recording in [false, true] {
            let (gpu, heard) = host();
            let (call, out) = bound(&gpu);
            if !after_recording {
                gpu.device().destroy();
            }
            let mut encoder = gpu.device().create_command_encoder(&Default::default());
            call.encode(&mut encoder);
            let commands = encoder.finish();
            gpu.device().destroy();
            gpu.queue().submit([commands]);
            is_lost(&gpu, &out);
            assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
        }
    });
}

#[test]
fn destroyed_with_work_in_flight() {
    ends(|| {
        let (gpu, heard) = host();
        let (call, out) = bound(&gpu);
        (0..20).for_each(|_| submit(&gpu, &call));
        gpu.device().destroy();
        is_lost(&gpu, &out);
        // A second time, and from another thread.
        std::thread::scope(|scope| scope.spawn(|| is_lost(&gpu, &out)).join().unwrap());
        drop((call, out));
        assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
    });
}

/// One device lost does not trouble another.
#[test]
fn destroyed_while_another_works() {
    ends(|| {
        let expected = expected(gpu());
        let lost = Gpu::new().unwrap();
        let (call, out) = bound(&lost);
        submit(&lost, &call);
        std::thread::scope(|scope| {
            let others = scope.spawn(|| {
                let (call, out) = bound(gpu());
                for _ in 0..5 {
                    submit(gpu(), &call);
                    assert_eq!(bits(&gpu().read(&out).unwrap()), expected);
                }
            });
            lost.device().destroy();
            is_lost(&lost, &out);
            others.join().unwrap();
        });
    });
}

/// A device that its host's budget lets allocate hardly anything.
#[test]
fn out_of_memory() {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    descriptor.memory_budget_thresholds.for_resource_creation = Some(60);
    let instance = wgpu::Instance::new(descriptor);
    let shared = gpu().info();
    let adapters = pollster::block_on(instance.enumerate_adapters(wgpu::Backends::all()));
    let same = |info: &wgpu::AdapterInfo| (&info.name, info.backend) == (&shared.name, shared.backend);
    let adapter = adapters.into_iter().find(|adapter| same(&adapter.get_info())).unwrap();
    let limits = wgpu::Limits {
        max_buffer_size: adapter.limits().max_buffer_size,
        max_storage_buffer_binding_size: adapter.limits().max_storage_buffer_binding_size,
        ..Default::default()
    };
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    let gpu = Gpu::from_wgpu(device, queue).unwrap();
    let expected = expected(plain_gpu());
    let largest = gpu.limits().max_storage_buffer_binding_size.min(gpu.limits().max_buffer_size) / 4;
    // Nothing is written there, but drivers without budgets may use it all the same.
    let most = if matches!(shared.backend, wgpu::Backend::Vulkan | wgpu::Backend::Dx12) { 64 } else { 1 };
    let mut held = Vec::new();
    let error = (0..most).find_map(|_| gpu.zeros(&[largest as usize]).map(|tensor| held.push(tensor)).err());
    println!("{} allocations of {largest} elements, then {error:?}", held.len());
    if let Some(error) = error {
        is_gpu_error(Err::<(), _>(error), "allocating memory");
    }
    // What was allocated still works, as does what fits.
    held.clear();
    gpu.device().poll(wgpu::PollType::wait_indefinitely()).unwrap();
    let (call, out) = bound(&gpu);
    submit(&gpu, &call);
    assert_eq!(bits(&gpu.read(&out).unwrap()), expected);
}

/// Scopes belong to the thread that opened them: the host's own errors reach the host, ours don't.
#[test]
fn scopes_of_the_host_stay_balanced() {
    let (gpu, heard) = host();
    let invalid = || {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::STORAGE;
        let descriptor = wgpu::BufferDescriptor { label: None, size: 4, usage, mapped_at_creation: false };
        drop(gpu.device().create_buffer(&descriptor));
    };
    let foreign = crate::harness::gpu().zeros(&[1, 2, 40, 8]).unwrap();
    let fails = || {
        let plan = Attention::new(&gpu, CONFIG).unwrap().plan(&SHAPE).unwrap();
        let [k, v, out] = [1, 1, 2].map(|heads| gpu.zeros(&[1, heads, 40, 8]).unwrap().view());
        is_gpu_error(plan.bind(&AttentionTensors::new(foreign.view(), k, v, out)), "binding attention");
        is_gpu_error(gpu.read(&foreign), "reading back");
        is_gpu_error(gpu.write(&foreign, &[0f32; 640]), "writing");
    };
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    fails();
    bound(&gpu);
    assert!(pollster::block_on(scope.pop()).is_none(), "the host's scope saw an error of ours");
    let outer = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    let inner = gpu.device().push_error_scope(wgpu::ErrorFilter::OutOfMemory);
    invalid();
    fails();
    assert!(pollster::block_on(inner.pop()).is_none());
    let error = pollster::block_on(outer.pop());
    assert!(matches!(error, Some(wgpu::Error::Validation { .. })), "{error:?}");
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
    invalid();
    assert_eq!(heard.lock().unwrap().len(), 1);
}

/// The host makes mistakes on one thread while calls are made on another.
#[test]
fn errors_of_the_host_meanwhile() {
    let (gpu, heard) = host();
    let expected = expected(&gpu);
    let done = AtomicBool::new(false);
    let mistakes = std::thread::scope(|scope| {
        let host = scope.spawn(|| {
            let mut mistakes = 0;
            while !done.load(Ordering::Relaxed) || mistakes == 0 {
                let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::STORAGE;
                let descriptor = wgpu::BufferDescriptor { label: None, size: 4, usage, mapped_at_creation: false };
                drop(gpu.device().create_buffer(&descriptor));
                mistakes += 1;
                std::thread::yield_now();
            }
            mistakes
        });
        for _ in 0..10 {
            let (call, out) = bound(&gpu);
            submit(&gpu, &call);
            assert_eq!(bits(&gpu.read(&out).unwrap()), expected);
        }
        done.store(true, Ordering::Relaxed);
        host.join().unwrap()
    });
    assert_eq!(heard.lock().unwrap().len(), mistakes);
}

/// Two threads compile, bind, submit and read on one device; one of them is refused half of the time.
#[test]
fn two_threads_of_one_device() {
    let (gpu, heard) = host();
    let expected = expected(&gpu);
    let foreign = crate::harness::gpu().zeros(&[4]).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..2u64 {
            let (gpu, expected, foreign) = (&gpu, &expected, &foreign);
            scope.spawn(move || {
                let mut rng = rng(50 + thread);
                for round in 0..6 {
                    let (call, out) = bound(gpu);
                    submit(gpu, &call);
                    if thread == 0 {
                        is_gpu_error(gpu.read(foreign), "reading back");
                    }
                    assert_eq!(&bits(&gpu.read(&out).unwrap()), expected);
                    let config = EflaConfig { key_dim: 4 + round, value_dim: 8, ..Default::default() };
                    let shape = EflaShape { batch: 1, heads: 1, value_heads: 2, tokens: 40 };
                    let case = EflaCase::random(config, shape, &mut rng);
                    case.judge(&case.run_on(gpu));
                }
            });
        }
    });
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
}

#[test]
fn twenty_devices() {
    let expected = expected(gpu());
    let gpus: Vec<_> = (0..20).map(|_| Gpu::new().unwrap()).collect();
    let calls: Vec<_> = gpus.iter().map(bound).collect();
    gpus.iter().zip(&calls).for_each(|(gpu, (call, _))| submit(gpu, call));
    for (gpu, (_, out)) in gpus.iter().zip(&calls) {
        assert_eq!(bits(&gpu.read(out).unwrap()), expected);
    }
}

/// A submission keeps what it needs.
#[test]
fn dropped_with_work_in_flight() {
    let expected = expected(gpu());
    let case = AttentionCase::random(CONFIG, AttentionShape { queries: 400, keys: 400, ..SHAPE }, &mut rng(3));
    for _ in 0..5 {
        let gpu = Gpu::new().unwrap();
        let (call, out) = bound(&gpu);
        submit(&gpu, &call);
        drop(call);
        assert_eq!(bits(&gpu.read(&out).unwrap()), expected);
        // Operator, call, tensors and in the end the device, while the longer call still runs.
        let long = Guarded::new(&gpu, Guarded::ODD, &case.out_shape());
        let call = Attention::new(&gpu, case.config).unwrap().plan(&case.shape).unwrap();
        let call = call.bind(&case.tensors(&gpu, &long)).unwrap();
        submit(&gpu, &call);
        drop((call, long, out));
        drop(gpu);
    }
    // Handed to the encoder and gone before it is submitted.
    let (call, out) = bound(gpu());
    let mut encoder = gpu().device().create_command_encoder(&Default::default());
    call.encode(&mut encoder);
    drop(call);
    gpu().queue().submit([encoder.finish()]);
    assert_eq!(bits(&gpu().read(&out).unwrap()), expected);
}

/// Recording can't fail: wgpu reports a misused encoder to its device when it is finished.
#[test]
fn misused_encoders() {
    let (gpu, heard) = host();
    let expected = expected(&gpu);
    let (call, out) = bound(&gpu);
    let finishes_with_error = |gpu: &Gpu, record: &dyn Fn(&mut wgpu::CommandEncoder)| {
        let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        record(&mut encoder);
        drop(encoder.finish());
        let error = pollster::block_on(scope.pop());
        assert!(matches!(error, Some(wgpu::Error::Validation { .. })), "{error:?}");
    };
    // Of another device.
    let other = Gpu::new().unwrap();
    finishes_with_error(&other, &|encoder| call.encode(encoder));
    finishes_with_error(&other, &|encoder| {
        gpu.copy(encoder, &out.view().narrow(1, 0, 1).unwrap(), &out.view().narrow(1, 1, 1).unwrap()).unwrap()
    });
    // While a pass is open, in a pass that outlived its encoder.
    finishes_with_error(&gpu, &|encoder| {
        let pass = encoder.begin_compute_pass(&Default::default()).forget_lifetime();
        call.encode(encoder);
        drop(pass);
    });
    let scope = gpu.device().push_error_scope(wgpu::ErrorFilter::Validation);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default()).forget_lifetime();
    drop(encoder.finish());
    call.record(&mut pass);
    drop(pass);
    assert!(pollster::block_on(scope.pop()).is_some());
    // Neither device minds.
    submit(&gpu, &call);
    assert_eq!(bits(&gpu.read(&out).unwrap()), expected);
    let (call, out) = bound(&other);
    submit(&other, &call);
    assert_eq!(other.read(&out).unwrap().len(), 640);
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
}

/// The number of dispatches follows from sizes and budget; results are the same to the bit.
#[test]
fn long_dispatches_are_split() {
    for (no_subgroups, whole) in [(true, plain_gpu()), (false, gpu())] {
        // Some dispatches of two workgroups, most of one; then of one tile or chunk.
        for budget in [1 << 18, 1] {
            let options = GpuOptions { no_subgroups, work_budget: Some(budget), ..Default::default() };
            let parts = crate::sizes::results(&Gpu::with_options(&options).unwrap());
            for ((name, whole), (_, parts)) in crate::sizes::results(whole).iter().zip(parts) {
                assert!(whole.iter().all(|x| !x.is_nan()), "{name}");
                assert_eq!(bits(whole), bits(&parts), "{name}, {budget}");
            }
        }
    }
    // A workgroup has 9 tiles of 32 rows and 32 nodes: 2·(16 + 16) + 32 operations a pair.
    let config = AttentionConfig { head_dim: 16, value_dim: 16, ..Default::default() };
    let tile = 32 * 32 * 96;
    let one = 9 * tile;
    for (queries, budget, dispatches) in [
        (256, None, 1),
        (256, Some(16 * one), 1),
        (256, Some(16 * one - 1), 2),
        (256, Some(2 * one), 8),
        (256, Some(one), 16),
        // Now the tiles of a workgroup.
        (256, Some(one - 1), 16 + 2),
        (256, Some(4 * tile), 16 + 16 + 4),
        (256, Some(1), 9 * 16),
        (250, Some(5 * one), 4),
    ] {
        let options = GpuOptions { work_budget: budget, no_subgroups: true, ..Default::default() };
        let gpu = Gpu::with_options(&options).unwrap();
        let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries, keys: 256 };
        let [q, k, v, out] = [(2, queries), (1, 256), (1, 256), (2, queries)]
            .map(|(heads, tokens)| gpu.zeros(&[1, heads, tokens, 16]).unwrap().view());
        let call = Attention::new(&gpu, config).unwrap().plan(&shape).unwrap();
        let call = call.bind(&AttentionTensors::new(q, k, v, out)).unwrap();
        assert_eq!(call.dispatches(), dispatches, "{queries} queries, {budget:?}");
    }
}
