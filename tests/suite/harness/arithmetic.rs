//! What WGSL leaves to the driver, measured: how far exp and log are off, and whether subnormal numbers are zero.

use std::sync::OnceLock;

use continuous_attention::{Gpu, wgpu};

use super::gpu;

/// The shared device's.
#[derive(Debug, Clone, Copy)]
pub struct Arithmetic {
    /// Largest relative error of exp(x), −20 ≤ x ≤ 0.
    pub exp: f64,
    /// Largest absolute error of log(x), 2⁻¹⁰ ≤ x ≤ 2¹⁰.
    pub log: f64,
    /// Whether a result that is subnormal becomes 0.
    pub flushes: bool,
}

pub fn arithmetic() -> Arithmetic {
    static MEASURED: OnceLock<Arithmetic> = OnceLock::new();
    *MEASURED.get_or_init(|| {
        const COUNT: usize = 1 << 14;
        let fraction = |at: usize| at as f32 / COUNT as f32;
        let exponents: Vec<f32> = (0..COUNT).map(|at| -20.0 * fraction(at)).collect();
        let numbers: Vec<f32> = (0..COUNT).map(|at| (20.0 * fraction(at) - 10.0).exp2()).collect();
        let exp = apply(gpu(), "exp(x)", &exponents);
        let log = apply(gpu(), "log(x)", &numbers);
        let errors = |got: Vec<f32>, xs: &[f32], error: &dyn Fn(f64, f64) -> f64| {
            got.iter().zip(xs).map(|(&got, &x)| error(got.into(), x.into())).fold(0.0, f64::max)
        };
        let measured = Arithmetic {
            exp: errors(exp, &exponents, &|got, x| (got / x.exp() - 1.0).abs()),
            log: errors(log, &numbers, &|got, x| (got - x.ln()).abs()),
            flushes: apply(gpu(), "x * 0x1p-20", &[1e-35; 64])[0] == 0.0,
        };
        println!("{}: {measured:?}", gpu().info().name);
        measured
    })
}

/// `expression` of every x.
fn apply(gpu: &Gpu, expression: &str, xs: &[f32]) -> Vec<f32> {
    let device = gpu.device();
    let text = format!(
        "@group(0) @binding(0) var<storage, read_write> data: array<f32>;
        @compute @workgroup_size(64) fn main(@builtin(global_invocation_id) id: vec3<u32>) {{
            let x = data[id.x];
            data[id.x] = {expression};
        }}"
    );
    let source = wgpu::ShaderSource::Wgsl(text.into());
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor { label: None, source });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: None,
    });
    let data = gpu.upload(xs, &[xs.len()]).unwrap();
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &[wgpu::BindGroupEntry { binding: 0, resource: data.buffer().as_entire_binding() }],
    });
    let mut encoder = device.create_command_encoder(&Default::default());
    let mut pass = encoder.begin_compute_pass(&Default::default());
    pass.set_pipeline(&pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.dispatch_workgroups(xs.len().div_ceil(64) as u32, 1, 1);
    drop(pass);
    gpu.queue().submit([encoder.finish()]);
    gpu.read(&data).unwrap()
}

/// WGSL allows exp 3 + 2|x| units in the last place, log 2⁻²¹ or 3 units: what is more is a broken driver.
#[test]
fn arithmetic_is_what_wgsl_allows() {
    let Arithmetic { exp, log, .. } = arithmetic();
    let unit = 2f64.powi(-23);
    assert!(exp <= 43.0 * unit, "exp is off by {:.1} units", exp / unit);
    assert!(log <= 3.0 * 8.0 * unit, "log is off by {log:e}");
}
