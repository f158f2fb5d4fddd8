//! The only unsafe code of the crate.
//!
//! wgpu guards every shader with bounds checks, bounded loops and guarded divisions. They cost a good part of a
//! kernel's time (bounded loops can't be unrolled), and this crate's kernels do not need them:
//!
//! * every index into a buffer is built from the parameters of the call, which `bind` checked against the bound
//!   ranges, and is clamped or guarded in the shader where a tile reaches over an edge; what is read from a buffer is a
//!   table of sequences that the plan owns, checked by the host and written once;
//! * every loop runs to a bound that is a constant, one of those parameters or from that table;
//! * every integer divisor is a constant or a parameter that is at least 1 wherever a kernel is dispatched.
//!
//! [`GpuOptions::checked`](crate::GpuOptions) turns the guards on again; the tests run a subset of the kernels so.
#![allow(unsafe_code)]

/// Compiles WGSL of this crate, without runtime checks unless `checked`.
pub(crate) fn shader_module(device: &wgpu::Device, label: &str, source: &str, checked: bool) -> wgpu::ShaderModule {
    let descriptor =
        wgpu::ShaderModuleDescriptor { label: Some(label), source: wgpu::ShaderSource::Wgsl(source.into()) };
    if checked {
        device.create_shader_module(descriptor)
    } else {
        // SAFETY: the module's text is composed by `shader::compose` from this crate's files only, and they keep
        // what the head of this file says.
        unsafe { device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked()) }
    }
}

/// Leave to request wgpu's experimental features.
pub(crate) fn experimental_features() -> wgpu::ExperimentalFeatures {
    // SAFETY: asked for only where the caller set `GpuOptions::cooperative_matrices`, for cooperative matrices alone. The
    // kernels that use them read and write workgroup memory inside of its arrays, with every invocation at every operation.
    unsafe { wgpu::ExperimentalFeatures::enabled() }
}

/// A pipeline cache that starts with what [`Gpu::save_pipelines`](crate::Gpu::save_pipelines) wrote, if the driver can use
/// that.
pub(crate) fn pipeline_cache(device: &wgpu::Device, data: Option<&[u8]>) -> wgpu::PipelineCache {
    let descriptor = wgpu::PipelineCacheDescriptor { label: Some("continuous-attention"), data, fallback: true };
    // SAFETY: the data is what `PipelineCache::get_data` gave for an adapter of the same key, in a file whose name only this
    // crate uses; the folder is the caller's, who is told to keep others from writing to it. wgpu and the driver refuse
    // what comes from another version or device.
    unsafe { device.create_pipeline_cache(&descriptor) }
}
