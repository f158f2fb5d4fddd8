//! What the adapter can do at most, measured by two small shaders.

use super::measure::{Budget, Measured, Timed, Timer, alone};
use continuous_attention::{Gpu, wgpu};

/// The two roofs of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Roof {
    /// Multiplications and additions a second, two an FMA.
    pub flops: f64,
    /// Bytes read or written a second.
    pub bandwidth: f64,
}

/// What keeps a kernel from being faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    Arithmetic,
    Bandwidth,
}

impl Roof {
    /// The least time that so much work takes, and why no less.
    pub fn least(&self, flops: f64, bytes: f64) -> (f64, Limit) {
        let (arithmetic, bandwidth) = (flops / self.flops, bytes / self.bandwidth);
        if arithmetic >= bandwidth { (arithmetic, Limit::Arithmetic) } else { (bandwidth, Limit::Bandwidth) }
    }

    /// Measures both within the budget.
    pub fn measure(gpu: &Gpu, timer: &Timer, budget: &Budget) -> Measured<Roof> {
        // How many chains hide an FMA's latency without spilling registers differs: the best counts.
        let chains = [2, 3, 8];
        let budget = Budget { time: budget.time / (chains.len() as u32 + 2), ..*budget };
        let mut roof = Roof { flops: 0.0, bandwidth: 0.0 };
        for vectors in chains {
            roof.flops = roof.flops.max(fma(gpu, timer, &budget, vectors)?);
        }
        for copies in [false, true] {
            roof.bandwidth = roof.bandwidth.max(stream(gpu, timer, &budget, copies)?);
        }
        Ok(roof)
    }
}

/// FLOPs a second of `vectors` chains of four FMAs an invocation.
fn fma(gpu: &Gpu, timer: &Timer, budget: &Budget, vectors: usize) -> Measured<f64> {
    const UNROLLED: usize = 8;
    let software = gpu.info().device_type == wgpu::DeviceType::Cpu;
    let (workgroups, steps) = if software { (64, 256) } else { (8192, 256) };
    let lines = |line: &dyn Fn(usize) -> String| (0..vectors).map(line).collect::<String>();
    let declared = lines(&|i| format!("    var x{i} = seed * {}.0;\n", i + 2));
    let step = lines(&|i| format!("        x{i} = fma(x{i}, b, c);\n"));
    let sum = (0..vectors).map(|i| format!("x{i}")).collect::<Vec<_>>().join(" + ");
    let source = include_str!("fma.wgsl")
        .replace("//DECLARED", &declared)
        .replace("//UNROLLED", &step.repeat(UNROLLED))
        .replace("STEPS", &format!("{steps}u"))
        .replace("SUM", &sum);
    // Of ones, so that every chain keeps its order of magnitude.
    let invocations = workgroups as usize * 64;
    let result = gpu.upload(&vec![1.0f32; invocations * 4], &[invocations * 4])?;
    let seconds = shader(gpu, timer, budget, "fma", &source, &[result.buffer()], workgroups)?;
    Ok((invocations * steps * UNROLLED * vectors * 4 * 2) as f64 / seconds)
}

/// Bytes a second of reading or copying a buffer that no cache holds.
fn stream(gpu: &Gpu, timer: &Timer, budget: &Budget, copies: bool) -> Measured<f64> {
    let limits = gpu.limits();
    let most = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
    let steps = 64;
    let software = gpu.info().device_type == wgpu::DeviceType::Cpu;
    // Caches of servers and of the largest GPUs hold some hundred MiB.
    let wanted = if software { 512 << 20 } else { 1u64 << 30 }.min(most);
    let workgroups = (wanted / (steps * 64 * 16)).min(limits.max_compute_workgroups_per_dimension.into()) as u32;
    let bytes = u64::from(workgroups) * steps * 64 * 16;
    let source =
        include_str!("stream.wgsl").replace("STEPS", &format!("{steps}u")).replace("COPIES", &copies.to_string());
    let buffer = |size| {
        gpu.device().create_buffer(&wgpu::BufferDescriptor {
            label: Some("stream"),
            size,
            usage: wgpu::BufferUsages::STORAGE,
            mapped_at_creation: false,
        })
    };
    let (from, to) = (buffer(bytes), buffer(if copies { bytes } else { bytes / steps }));
    let seconds = shader(gpu, timer, budget, "stream", &source, &[&from, &to], workgroups)?;
    let moved = if copies { 2 * bytes } else { bytes + bytes / steps };
    Ok(moved as f64 / seconds)
}

/// The fastest run of a shader: noise only ever adds to it.
fn shader(
    gpu: &Gpu,
    timer: &Timer,
    budget: &Budget,
    label: &str,
    source: &str,
    buffers: &[&wgpu::Buffer],
    workgroups: u32,
) -> Measured<f64> {
    let device = gpu.device();
    let scope = device.push_error_scope(wgpu::ErrorFilter::Validation);
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: Some(label),
        source: wgpu::ShaderSource::Wgsl(source.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: Some(label),
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: None,
    });
    let entries: Vec<_> = buffers
        .iter()
        .enumerate()
        .map(|(binding, buffer)| wgpu::BindGroupEntry { binding: binding as u32, resource: buffer.as_entire_binding() })
        .collect();
    let group = device.create_bind_group(&wgpu::BindGroupDescriptor {
        label: Some(label),
        layout: &pipeline.get_bind_group_layout(0),
        entries: &entries,
    });
    if let Some(error) = pollster::block_on(scope.pop()) {
        return Err(format!("{label}: {error}").into());
    }
    let timed = Timed::new(timer, |pass| {
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(workgroups, 1, 1);
    })?;
    let mut fastest = f64::INFINITY;
    alone(budget, || {
        let seconds = timed.sample()?;
        fastest = fastest.min(seconds);
        Ok(seconds)
    })?;
    Ok(fastest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_higher_roof_of_time_limits() {
        let roof = Roof { flops: 100.0, bandwidth: 10.0 };
        assert_eq!(roof.least(200.0, 10.0), (2.0, Limit::Arithmetic));
        assert_eq!(roof.least(100.0, 30.0), (3.0, Limit::Bandwidth));
    }
}
