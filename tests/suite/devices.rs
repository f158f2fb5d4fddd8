//! The host's own device, devices that offer little, checked shaders, the choice of an adapter.

use std::process::Command;
use std::sync::{Arc, Mutex};

use continuous_attention::{
    AdapterChoice, Attention, AttentionConfig, AttentionShape, Efla, EflaConfig, EflaShape, Error, Form, Gpu,
    GpuOptions, Integrator, Method, Sink, TensorView, wgpu,
};

use crate::harness::{AttentionCase, EflaCase, Guarded, bits, gpu, rng};

/// A device as a host would open it, and everything its error handler ever hears.
pub fn host_device(limits: wgpu::Limits) -> (wgpu::Device, wgpu::Queue, Arc<Mutex<Vec<String>>>) {
    let adapters = pollster::block_on(Gpu::adapters());
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let adapter = &adapters[Gpu::preferred(&infos).unwrap()];
    let descriptor = wgpu::DeviceDescriptor { required_limits: limits, ..Default::default() };
    let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).unwrap();
    let heard = Arc::new(Mutex::new(Vec::new()));
    let handler = heard.clone();
    device.on_uncaptured_error(Arc::new(move |error| handler.lock().unwrap().push(error.to_string())));
    (device, queue, heard)
}

fn attention_cases(rng: &mut fastrand::Rng) -> Vec<AttentionCase> {
    let base = AttentionConfig { head_dim: 20, value_dim: 70, ..Default::default() };
    let shape = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 70, keys: 100 };
    let mut cases: Vec<_> = [Sink::Zero, Sink::First, Sink::Given, Sink::None]
        .map(|sink| AttentionCase::random(AttentionConfig { sink, window: Some(50), ..base }, shape, rng))
        .into_iter()
        .map(|case| case.with_intervals(rng))
        .collect();
    let softmax = AttentionConfig { method: Method::Softmax, sink: Sink::None, value_dim: 5, ..base };
    cases.push(AttentionCase::random(softmax, shape, rng));
    let more_queries = AttentionShape { queries: 70, keys: 33, ..shape };
    cases.push(AttentionCase::random(AttentionConfig { causal: true, ..base }, more_queries, rng));
    cases
}

fn efla_cases(rng: &mut fastrand::Rng, chunks: &[usize]) -> Vec<EflaCase> {
    let base = EflaConfig { key_dim: 20, value_dim: 70, ..Default::default() };
    let shape = EflaShape { batch: 2, heads: 1, value_heads: 2, tokens: 70 };
    let mut cases: Vec<_> = chunks
        .iter()
        .map(|&chunk| EflaCase::random(EflaConfig { chunk: Some(chunk), ..base }, shape, rng).with_initial_state(rng))
        .collect();
    cases.push(EflaCase::random(base, shape, rng));
    cases.push(EflaCase::random(EflaConfig { form: Form::Recurrent, normalize_q: true, ..base }, shape, rng));
    let normalized = EflaConfig { integrator: Integrator::RungeKutta4, normalize_k: true, ..base };
    cases.push(EflaCase::random(normalized, shape, rng).with_steps(|| 0.7));
    cases
}

#[test]
fn the_default_limits_are_enough() {
    let mut rng = rng(1);
    let limits = wgpu::Limits::default();
    let (device, queue, heard) = host_device(limits.clone());
    assert_eq!(device.features(), wgpu::Features::empty());
    let gpu = Gpu::from_wgpu(device, queue).unwrap();
    for case in attention_cases(&mut rng) {
        case.judge(&case.run_on(&gpu), case.limit());
    }
    for case in efla_cases(&mut rng, &[16, 32]) {
        case.judge(&case.run_on(&gpu));
    }
    // 16 KiB of workgroup memory hold chunks of 32, not of 64.
    assert_eq!(limits.max_compute_workgroup_storage_size, 16384);
    assert_eq!(Efla::new(&gpu, EflaConfig::default()).unwrap().chunk(), 32);
    let refused = Efla::new(&gpu, EflaConfig { chunk: Some(64), ..Default::default() });
    assert!(matches!(&refused, Err(Error::Limit { .. })), "{refused:?}");
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
}

/// Errors of every kind come back as values; the host's handler never hears of them.
#[test]
fn the_error_handler_belongs_to_the_host() {
    let mut rng = rng(2);
    let (device, queue, heard) = host_device(wgpu::Limits::default());
    let gpu = Gpu::from_wgpu(device, queue).unwrap();
    let case = attention_cases(&mut rng).remove(0);
    let out = Guarded::new(&gpu, Guarded::ODD, &case.out_shape());
    let good = case.tensors(&gpu, &out);
    let plan = Attention::new(&gpu, case.config).unwrap().plan(&case.shape).unwrap();
    let bind = |spoil: &dyn Fn(&mut continuous_attention::AttentionTensors)| {
        let mut tensors = good.clone();
        spoil(&mut tensors);
        plan.bind(&tensors)
    };
    let buffer = |usage| {
        let size = 1 << 20;
        gpu.device().create_buffer(&wgpu::BufferDescriptor { label: None, size, usage, mapped_at_creation: false })
    };
    let copied = buffer(wgpu::BufferUsages::COPY_DST);
    assert!(bind(&|tensors| tensors.q = TensorView::new(&copied, 0, good.q.shape())).is_err());
    assert!(bind(&|tensors| tensors.k = TensorView::new(out.buffer(), 0, good.k.shape())).is_err());
    let destroyed = buffer(wgpu::BufferUsages::STORAGE);
    destroyed.destroy();
    let on_destroyed = bind(&|tensors| tensors.q = TensorView::new(&destroyed, 0, good.q.shape()));
    assert!(on_destroyed.is_err(), "a destroyed buffer was bound");
    let foreign = crate::harness::gpu().zeros(good.q.shape()).unwrap();
    assert!(bind(&|tensors| tensors.q = foreign.view()).is_err());
    assert!(gpu.zeros(&[1 << 40]).is_err());
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
    // And the handler is still the host's: an error of its own reaches it.
    let unusable = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::STORAGE;
    drop(buffer(unusable));
    assert_eq!(heard.lock().unwrap().len(), 1);
}

#[test]
fn a_device_with_less_than_the_default_limits_is_refused() {
    for (name, limits) in [
        ("storage_buffers", wgpu::Limits { max_storage_buffers_per_shader_stage: 7, ..Default::default() }),
        ("workgroup_storage_size", wgpu::Limits { max_compute_workgroup_storage_size: 16383, ..Default::default() }),
        ("invocations", wgpu::Limits { max_compute_invocations_per_workgroup: 64, ..Default::default() }),
    ] {
        let (device, queue, heard) = host_device(limits);
        let error = Gpu::from_wgpu(device, queue).expect_err(name);
        assert!(matches!(&error, Error::Limit { limit_name, .. } if limit_name.contains(name)), "{error}");
        assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
    }
}

/// With every check of wgpu turned on the kernels do the same.
#[test]
fn checked_shaders_agree() {
    let mut rng = rng(3);
    let gpu = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    for case in attention_cases(&mut rng) {
        case.judge(&case.run_on(&gpu), case.limit());
    }
    for case in efla_cases(&mut rng, &[16, 32]) {
        case.judge(&case.run_on(&gpu));
    }
    let (device, queue, heard) = host_device(wgpu::Limits::default());
    let gpu = Gpu::from_wgpu_checked(device, queue).unwrap();
    let case = attention_cases(&mut rng).remove(0);
    case.judge(&case.run_on(&gpu), case.limit());
    assert_eq!(*heard.lock().unwrap(), Vec::<String>::new());
}

#[test]
fn adapters_are_chosen_by_name_or_index() {
    let infos: Vec<_> = pollster::block_on(Gpu::adapters()).iter().map(wgpu::Adapter::get_info).collect();
    let open = |adapter: AdapterChoice| Gpu::with_options(&GpuOptions { adapter: Some(adapter), ..Default::default() });
    let preferred = Gpu::preferred(&infos).unwrap();
    let info = &infos[preferred];
    assert_eq!(open(AdapterChoice::Index(preferred)).unwrap().info().name, info.name);
    assert_eq!(open(AdapterChoice::from(info.name.to_uppercase().as_str())).unwrap().info().name, info.name);
    for (choice, words) in [
        (AdapterChoice::Index(infos.len()), infos.len().to_string()),
        ("no such thing".into(), "no such thing".to_string()),
    ] {
        let error = open(choice).expect_err("there is no such adapter");
        assert!(matches!(error, Error::NoAdapter { .. }), "{error}");
        let message = error.to_string();
        assert!(message.contains(&words) && message.contains(&info.name), "{message}");
    }
}

/// The environment names an adapter; an explicit choice comes before it. A process of its own, since changing the
/// environment of this one would be unsound.
#[test]
fn the_environment_chooses_an_adapter() {
    for (name, fails) in [("no such thing", true), ("", false), (gpu().info().name.as_str(), false)] {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "devices::opening_the_default_adapter", "--ignored"])
            .env("WGPU_ADAPTER_NAME", name)
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert_eq!(!output.status.success(), fails, "{name:?}: {text}");
        assert_eq!(text.contains("no GPU adapter named like \"no such thing\""), fails, "{name:?}: {text}");
        assert!(text.contains("1 test"), "{name:?}: {text}");
    }
}

#[test]
#[ignore = "run by the_environment_chooses_an_adapter"]
fn opening_the_default_adapter() {
    Gpu::with_options(&GpuOptions { adapter: Some(AdapterChoice::Index(0)), ..Default::default() }).unwrap();
    if let Err(error) = Gpu::new() {
        panic!("{error}");
    }
}

fn is_send_and_sync<T: Send + Sync>() {}

/// One device serves many threads.
#[test]
fn threads_share_a_device() {
    is_send_and_sync::<Gpu>();
    is_send_and_sync::<Attention>();
    is_send_and_sync::<Efla>();
    is_send_and_sync::<continuous_attention::Rotary>();
    is_send_and_sync::<continuous_attention::Merge>();
    is_send_and_sync::<continuous_attention::Call>();
    std::thread::scope(|scope| {
        for seed in 0..4 {
            scope.spawn(move || {
                let config = AttentionConfig { head_dim: 5, value_dim: 4, ..Default::default() };
                let shape = AttentionShape { batch: 1, heads: 2, kv_heads: 1, queries: 40, keys: 40 };
                let mut rng = rng(100 + seed);
                for _ in 0..5 {
                    AttentionCase::random(config, shape, &mut rng).check();
                }
            });
        }
    });
}

/// What one device compiled another one reads, if the backend can keep it; nonsense in its place does no harm.
#[test]
fn compiled_pipelines_on_disk() {
    let folder = std::env::temp_dir().join(format!("continuous-attention-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let options = GpuOptions { pipeline_cache: Some(folder.clone()), ..Default::default() };
    let case = AttentionCase::random(
        AttentionConfig::default(),
        AttentionShape { batch: 1, heads: 1, kv_heads: 1, queries: 40, keys: 40 },
        &mut rng(3),
    );
    let expected = bits(&case.run().out);
    let files = || std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect::<Vec<_>>();
    for round in 0..3 {
        let gpu = Gpu::with_options(&options).unwrap();
        assert_eq!(bits(&case.run_on(&gpu).out), expected, "round {round}");
        gpu.save_pipelines().unwrap();
        let kept = gpu.device().features().contains(wgpu::Features::PIPELINE_CACHE);
        assert_eq!(files().len(), usize::from(kept), "{:?}", files());
        if kept && round == 1 {
            std::fs::write(&files()[0], b"nonsense").unwrap();
        }
    }
    let gpu = Gpu::with_options(&options).unwrap();
    case.run_on(&gpu);
    std::fs::remove_dir_all(&folder).unwrap();
    if gpu.device().features().contains(wgpu::Features::PIPELINE_CACHE) {
        let message = gpu.save_pipelines().unwrap_err().to_string();
        assert!(message.contains("writing"), "{message}");
    }
}
