//! Adapter choice, device, pipeline cache.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::{Error, Result};
use crate::kernel::Pipeline;
#[cfg(not(target_arch = "wasm32"))]
use crate::measure::Choices;
use crate::shader::{Binding, Constants, Format, Kernel, Variant, VariantKey};
use crate::trusted;

/// A device to run on: cheap to clone, `Send` and `Sync`. Compiled pipelines are shared by its clones.
#[derive(Debug, Clone)]
pub struct Gpu {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    device: wgpu::Device,
    queue: wgpu::Queue,
    limits: wgpu::Limits,
    checked: bool,
    lanes: bool,
    matrices: Option<Matrices>,
    work_budget: u64,
    software: bool,
    cache: Option<DiskCache>,
    pipelines: Mutex<HashMap<VariantKey, Arc<Pipeline>>>,
    #[cfg(not(target_arch = "wasm32"))]
    chunk_choices: Choices<crate::efla::measure::Key>,
    #[cfg(not(target_arch = "wasm32"))]
    block_choices: Choices<crate::attention::measure::Key>,
    #[cfg(target_arch = "wasm32")]
    answers: crate::web::Answers,
}

/// Compiled pipelines on disk.
#[derive(Debug)]
struct DiskCache {
    cache: wgpu::PipelineCache,
    file: PathBuf,
}

/// How [`Gpu::with_options`] picks an adapter and compiles shaders.
#[derive(Debug, Clone, Default)]
pub struct GpuOptions {
    /// Which adapter; by default the environment variable `WGPU_ADAPTER_NAME`, else the best there is.
    pub adapter: Option<AdapterChoice>,
    /// Compile shaders with wgpu's bounds checks, loop bounds and guarded divisions: slower, for debugging.
    pub checked: bool,
    /// Run what adapters without subgroups run: on software adapters many times slower, for tests and comparisons.
    pub no_subgroups: bool,
    /// Let matrix units do products of tensors of f16, on adapters that have cooperative matrices: 16 x 16, f16
    /// summed in f32, subgroups of one size. Others run as ever. Off by default, since it is unproven: no adapter
    /// with cooperative matrices has run it yet.
    pub cooperative_matrices: bool,
    /// Run the kernels for matrix units with ordinary arithmetic in their place: very slow, for this crate's tests.
    #[doc(hidden)]
    pub emulated_matrices: bool,
    /// A folder for compiled pipelines, which a later process then need not compile: a file an adapter, read here and
    /// written by [`Gpu::save_pipelines`]. Drivers trust what they read: no one else may write there. Ignored where the
    /// backend has no pipeline cache (all but Vulkan; many drivers cache on their own).
    pub pipeline_cache: Option<PathBuf>,
    /// Floating-point operations that one dispatch may take, as estimated from its sizes: longer ones become several,
    /// since desktops reset a device that is busy with one for some seconds. By default 2⁴⁰ on a discrete GPU, 2³⁸
    /// (half a second at 500 GFLOP/s) on others, no bound on software adapters.
    pub work_budget: Option<u64>,
}

/// An adapter by its place in [`Gpu::adapters`] or by a part of its name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdapterChoice {
    /// Place in the list of [`Gpu::adapters`], from 0.
    Index(usize),
    /// Part of the adapter's name, in any case.
    Name(String),
}

impl From<&str> for AdapterChoice {
    /// A number is an index, anything else a name.
    fn from(text: &str) -> Self {
        text.parse().map(AdapterChoice::Index).unwrap_or_else(|_| AdapterChoice::Name(text.to_string()))
    }
}

impl std::fmt::Display for AdapterChoice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            AdapterChoice::Index(index) => write!(f, "with index {index}"),
            AdapterChoice::Name(name) => write!(f, "named like \"{name}\""),
        }
    }
}

/// Storage buffers a kernel of this crate binds at most.
pub(crate) const MAX_STORAGE_BUFFERS: u32 = 8;
/// Workgroup memory and invocations every kernel can do with.
pub(crate) const MIN_WORKGROUP_BYTES: u32 = 16384;
pub(crate) const MIN_INVOCATIONS: u32 = 128;
/// What kernels of one subgroup a workgroup need.
pub(crate) const SUBGROUPS: wgpu::Features = wgpu::Features::SUBGROUP.union(wgpu::Features::SUBGROUP_BARRIER);
/// Invocations of a subgroup of a software adapter on 256-bit vectors.
pub(crate) const LANES: u32 = 8;
/// What kernels for matrix units need but for these.
const HALVES: wgpu::Features = wgpu::Features::SHADER_F16.union(wgpu::Features::SUBGROUP);

/// Workgroup memory they take at most, rows of 256 elements, and invocations, subgroups of 64.
pub(crate) const MATRIX_WORKGROUP_BYTES: u32 = 32768;
pub(crate) const MATRIX_INVOCATIONS: u32 = 256;

/// What does the products of the kernels for matrix units.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Matrices {
    /// Invocations of a subgroup.
    pub subgroup: u32,
    /// Whether ordinary arithmetic stands in for matrix units.
    pub emulated: bool,
}

impl Matrices {
    /// What the options ask for, if the adapter has it.
    fn of(adapter: &wgpu::Adapter, options: &GpuOptions) -> Option<Self> {
        let info = adapter.get_info();
        let has = |features| adapter.features().contains(features);
        let limits = adapter.limits();
        let invocations = limits.max_compute_invocations_per_workgroup.min(limits.max_compute_workgroup_size_x);
        if limits.max_compute_workgroup_storage_size < MATRIX_WORKGROUP_BYTES || invocations < MATRIX_INVOCATIONS {
            return None;
        }
        if options.emulated_matrices && has(HALVES) {
            // As on most GPUs; no operation of a subgroup is used.
            return Some(Matrices { subgroup: 32, emulated: true });
        }
        let subgroup = info.subgroup_min_size;
        let known = subgroup == info.subgroup_max_size && matches!(subgroup, 16 | 32 | 64);
        let offered = options.cooperative_matrices
            && has(HALVES | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX)
            && adapter.cooperative_matrix_properties().iter().any(|matrix| {
                (matrix.m_size, matrix.n_size, matrix.k_size) == (16, 16, 16)
                    && matrix.ab_type == wgpu::CooperativeScalarType::F16
                    && matrix.cr_type == wgpu::CooperativeScalarType::F32
            });
        (known && offered).then_some(Matrices { subgroup, emulated: false })
    }

    /// Features to request for it.
    fn features(self) -> wgpu::Features {
        if self.emulated { HALVES } else { HALVES | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX }
    }
}

impl Gpu {
    /// The best adapter: a discrete GPU before an integrated one before a virtual one before software.
    ///
    /// `WGPU_ADAPTER_NAME` (part of a name) and `WGPU_BACKEND` are respected.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] when there is none or none matches, [`Error::Gpu`] when it gives no device,
    /// [`Error::Limit`] when it lacks compute shaders of WebGPU's default size.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn new() -> Result<Self> {
        Self::with_options(&GpuOptions::default())
    }

    /// As [`Gpu::new`], with a choice of adapter and of shader checks.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn with_options(options: &GpuOptions) -> Result<Self> {
        pollster::block_on(Self::with_options_async(options))
    }

    /// As [`Gpu::with_options`] without blocking.
    pub async fn with_options_async(options: &GpuOptions) -> Result<Self> {
        let adapters = Self::adapters().await;
        let choice = match &options.adapter {
            Some(choice) => Some(choice.clone()),
            None => std::env::var("WGPU_ADAPTER_NAME").ok().filter(|name| !name.is_empty()).map(AdapterChoice::Name),
        };
        let adapter = &adapters[pick(&adapters.iter().map(wgpu::Adapter::get_info).collect::<Vec<_>>(), choice)?];
        let matrices = Matrices::of(adapter, options);
        let features = wanted_features(options) | matrices.map_or(wgpu::Features::empty(), Matrices::features);
        let experimental_features = match matrices {
            Some(Matrices { emulated: false, .. }) => trusted::experimental_features(),
            _ => wgpu::ExperimentalFeatures::disabled(),
        };
        let (device, queue) = adapter
            .request_device(&wgpu::DeviceDescriptor {
                label: Some("continuous-attention"),
                required_features: adapter.features() & features,
                required_limits: wanted_limits(&adapter.limits()),
                experimental_features,
                ..Default::default()
            })
            .await
            .map_err(|error| Error::gpu(format!("opening {}", adapter.get_info().name), error))?;
        Self::build(device, queue, options, matrices)
    }

    /// Runs on the host's own device and queue. Neither its error handler nor its device-lost callback is touched.
    ///
    /// Default limits and no features suffice. What a device may be requested with besides: larger
    /// `max_storage_buffer_binding_size` and `max_buffer_size` for tensors over 128 MiB; 32 KiB of
    /// `max_compute_workgroup_storage_size` for EFLA's chunks of 64; on software adapters `Features::SUBGROUP` and
    /// `SUBGROUP_BARRIER`, without which the kernels made for them (see [options](crate::guide::options)) do not run.
    ///
    /// # Errors
    /// [`Error::Limit`] when the device was requested with less than WebGPU's default limits for compute shaders.
    pub fn from_wgpu(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::build(device, queue, &GpuOptions::default(), None)
    }

    /// As [`Gpu::from_wgpu`], with wgpu's shader checks (see [`GpuOptions::checked`]).
    pub fn from_wgpu_checked(device: wgpu::Device, queue: wgpu::Queue) -> Result<Self> {
        Self::build(device, queue, &GpuOptions { checked: true, ..Default::default() }, None)
    }

    fn build(
        device: wgpu::Device,
        queue: wgpu::Queue,
        options: &GpuOptions,
        matrices: Option<Matrices>,
    ) -> Result<Self> {
        let limits = device.limits();
        for (limit_name, limit, needed) in [
            ("max_storage_buffers_per_shader_stage", limits.max_storage_buffers_per_shader_stage, MAX_STORAGE_BUFFERS),
            ("max_compute_workgroup_storage_size", limits.max_compute_workgroup_storage_size, MIN_WORKGROUP_BYTES),
            ("max_compute_invocations_per_workgroup", limits.max_compute_invocations_per_workgroup, MIN_INVOCATIONS),
            ("max_compute_workgroup_size_x", limits.max_compute_workgroup_size_x, MIN_INVOCATIONS),
        ] {
            if limit < needed {
                let argument = "what the kernels need".to_string();
                return Err(Error::Limit { argument, got: needed.into(), limit_name, limit: limit.into() });
            }
        }
        let info = device.adapter_info();
        let lanes = device.features().contains(SUBGROUPS)
            && info.device_type == wgpu::DeviceType::Cpu
            && (info.subgroup_min_size, info.subgroup_max_size) == (LANES, LANES);
        let key = wgpu::util::pipeline_cache_key(&info)
            .filter(|_| device.features().contains(wgpu::Features::PIPELINE_CACHE));
        let cache = options.pipeline_cache.as_deref().zip(key).map(|(folder, key)| {
            let file = folder.join(key);
            // Whatever can't be read is compiled again.
            DiskCache { cache: trusted::pipeline_cache(&device, std::fs::read(&file).ok().as_deref()), file }
        });
        // In a browser devices belong to one thread; `Arc` stays so that the code is the same.
        #[cfg_attr(target_arch = "wasm32", allow(clippy::arc_with_non_send_sync))]
        let inner = Arc::new(Inner {
            device,
            queue,
            limits,
            checked: options.checked,
            lanes,
            matrices,
            work_budget: options.work_budget.unwrap_or_else(|| work_budget(info.device_type)),
            software: info.device_type == wgpu::DeviceType::Cpu,
            cache,
            pipelines: Mutex::default(),
            #[cfg(not(target_arch = "wasm32"))]
            chunk_choices: Choices::default(),
            #[cfg(not(target_arch = "wasm32"))]
            block_choices: Choices::default(),
            #[cfg(target_arch = "wasm32")]
            answers: Default::default(),
        });
        Ok(Gpu { inner })
    }

    /// Every adapter of this machine, in the order that [`AdapterChoice::Index`] counts.
    pub async fn adapters() -> Vec<wgpu::Adapter> {
        // One instance for all: wgpu tells devices of one instance apart, but panics on a buffer of another instance.
        #[cfg(not(target_arch = "wasm32"))]
        {
            static INSTANCE: std::sync::OnceLock<wgpu::Instance> = std::sync::OnceLock::new();
            // One thread at a time: wgpu's OpenGL backend panics when two ask at once. The answer is there at once.
            static ASKING: Mutex<()> = Mutex::new(());
            let _asking = ASKING.lock().unwrap_or_else(PoisonError::into_inner);
            pollster::block_on(INSTANCE.get_or_init(instance).enumerate_adapters(wgpu::Backends::all()))
        }
        #[cfg(target_arch = "wasm32")]
        instance().enumerate_adapters(wgpu::Backends::all()).await
    }

    /// Index in [`Gpu::adapters`] of the adapter that [`Gpu::with_options`] would take.
    ///
    /// # Errors
    /// [`Error::NoAdapter`] when none matches.
    pub fn preferred(adapters: &[wgpu::AdapterInfo]) -> Result<usize> {
        let name = std::env::var("WGPU_ADAPTER_NAME").ok().filter(|name| !name.is_empty());
        pick(adapters, name.map(AdapterChoice::Name))
    }

    /// The device.
    pub fn device(&self) -> &wgpu::Device {
        &self.inner.device
    }

    /// The queue.
    pub fn queue(&self) -> &wgpu::Queue {
        &self.inner.queue
    }

    /// Name, type, driver and backend of the adapter.
    pub fn info(&self) -> wgpu::AdapterInfo {
        self.inner.device.adapter_info()
    }

    /// The device's limits.
    pub fn limits(&self) -> &wgpu::Limits {
        &self.inner.limits
    }

    /// Writes what was compiled so far into the folder of [`GpuOptions::pipeline_cache`]; nothing without one.
    ///
    /// # Errors
    /// [`Error::Gpu`] with the system's message when the file can't be written. A file there already stays as it was.
    pub fn save_pipelines(&self) -> Result<()> {
        let Some(DiskCache { cache, file }) = &self.inner.cache else { return Ok(()) };
        let Some(data) = cache.get_data() else { return Ok(()) };
        // Another process may read meanwhile: the file appears whole or not at all.
        let written = file.with_extension(std::process::id().to_string());
        std::fs::write(&written, data)
            .and_then(|()| std::fs::rename(&written, file))
            .map_err(|error| Error::gpu(format!("writing {}", file.display()), error))
    }

    /// Chunk lengths that [`Efla::measured`](crate::Efla::measured) found fastest.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn chunk_choices(&self) -> &Choices<crate::efla::measure::Key> {
        &self.inner.chunk_choices
    }

    /// Rows of a tile that [`Attention::measured`](crate::Attention::measured) found fastest.
    #[cfg(not(target_arch = "wasm32"))]
    pub(crate) fn block_choices(&self) -> &Choices<crate::attention::measure::Key> {
        &self.inner.block_choices
    }

    /// Where compiled pipelines are kept, if anywhere.
    pub(crate) fn disk_cache(&self) -> Option<&wgpu::PipelineCache> {
        self.inner.cache.as_ref().map(|disk| &disk.cache)
    }

    /// Whether kernels whose workgroup is one subgroup of [`LANES`] suit this device: those of `shared/lanes.wgsl`.
    pub(crate) fn lanes(&self) -> bool {
        self.inner.lanes
    }

    /// What runs the kernels of `shared/matrix.wgsl`, if they are to run.
    pub(crate) fn matrices(&self) -> Option<Matrices> {
        self.inner.matrices
    }

    /// Floating-point operations that one dispatch may take.
    pub(crate) fn work_budget(&self) -> u64 {
        self.inner.work_budget
    }

    /// Rounds of loops that an invocation may go through in one dispatch. Mesa's llvmpipe leaves all loops, without a word,
    /// after 65,535 of them, nested ones and those that only other invocations of the vector go through included.
    pub(crate) fn loop_rounds(&self) -> u64 {
        // With room for the loops before and behind those that are counted.
        if self.inner.software { 60_000 } else { u64::MAX }
    }

    /// Whether a CPU does the work.
    pub(crate) fn is_software(&self) -> bool {
        self.inner.software
    }

    /// Compiles the variant whose inputs share no buffer with outputs and whose tensors are dense and f32: the usual
    /// one. `dim` is the length of a stored binding's rows.
    pub(crate) fn precompile(
        &self,
        kernel: &'static Kernel,
        constants: Constants,
        dim: impl Fn(&str) -> usize,
    ) -> Result<()> {
        let vectors = |binding: &Binding| binding.is_stored() && dim(binding.name).is_multiple_of(4);
        let formats = kernel.bindings.iter().map(|binding| Format { vectors: vectors(binding), ..Default::default() });
        self.pipeline(&Variant { kernel, constants, writable_inputs: 0, formats: formats.collect() }).map(drop)
    }

    /// Runs `work`, turning an error of the graphics stack into an [`Error`]: the device's own error handler, which
    /// is the host's, never hears of it. A lost device is an error, too. A browser answers later, see `settle`.
    pub(crate) fn catching<T>(&self, operation: &str, work: impl FnOnce() -> T) -> Result<T> {
        let scopes = [wgpu::ErrorFilter::Internal, wgpu::ErrorFilter::OutOfMemory, wgpu::ErrorFilter::Validation]
            .map(|filter| self.inner.device.push_error_scope(filter));
        let result = work();
        #[cfg(not(target_arch = "wasm32"))]
        let lost = self.is_lost();
        let answers = scopes.into_iter().rev().map(|scope| scope.pop());
        #[cfg(not(target_arch = "wasm32"))]
        {
            // Every scope is popped, whatever the first says.
            let errors: Vec<_> = answers.map(pollster::block_on).collect();
            if let Some(error) = errors.into_iter().flatten().next() {
                return Err(Error::gpu(operation, error));
            }
            if lost {
                return Err(Error::gpu(operation, "the device is lost"));
            }
        }
        #[cfg(target_arch = "wasm32")]
        answers.for_each(|answer| self.inner.answers.expect(operation, answer));
        Ok(result)
    }

    /// wgpu tells scopes nothing of a lost device, and its callback is the host's. But what is created on one can't be
    /// mapped.
    #[cfg(not(target_arch = "wasm32"))]
    fn is_lost(&self) -> bool {
        let probe = self.inner.device.create_buffer(&wgpu::BufferDescriptor {
            label: Some("is the device lost?"),
            size: 4,
            usage: wgpu::BufferUsages::COPY_SRC,
            mapped_at_creation: true,
        });
        probe.slice(..).get_mapped_range().is_err()
    }

    /// What a browser has to say against calls made before this one: there `new`, `bind`, `upload` and their like return
    /// before it does. The future waits for it. [`Gpu::read_async`] asks by itself.
    ///
    /// # Errors
    /// [`Error::Gpu`], the first since the last time anyone asked.
    #[cfg(target_arch = "wasm32")]
    pub fn settle(&self) -> impl Future<Output = Result<()>> + use<> {
        self.inner.answers.settle()
    }

    /// The compiled pipeline of a variant, from the cache if it was used before.
    pub(crate) fn pipeline(&self, variant: &Variant) -> Result<Arc<Pipeline>> {
        // A poisoned lock only means that another thread panicked while compiling; the map itself is whole.
        let mut pipelines = self.inner.pipelines.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pipeline) = pipelines.get(&variant.key()) {
            return Ok(pipeline.clone());
        }
        let pipeline = Arc::new(Pipeline::compile(self, variant, self.inner.checked)?);
        pipelines.insert(variant.key(), pipeline.clone());
        Ok(pipeline)
    }
}

/// A dispatch that a slow device of this kind ends within a second.
fn work_budget(device_type: wgpu::DeviceType) -> u64 {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => 1 << 40,
        // OpenGL and browsers don't say what they are: perhaps an integrated GPU.
        wgpu::DeviceType::IntegratedGpu | wgpu::DeviceType::VirtualGpu | wgpu::DeviceType::Other => 1 << 38,
        wgpu::DeviceType::Cpu => u64::MAX,
    }
}

fn instance() -> wgpu::Instance {
    let mut descriptor = wgpu::InstanceDescriptor::new_without_display_handle_from_env();
    // Validation layers, where a debug build finds them, check the driver's user, not this crate's shaders.
    descriptor.flags = wgpu::InstanceFlags::empty().with_env();
    wgpu::Instance::new(descriptor)
}

/// Features that some kernel or measurement can use. A named list: requesting all that an adapter lists fails on
/// experimental ones and makes others slow.
fn wanted_features(options: &GpuOptions) -> wgpu::Features {
    let subgroups = if options.no_subgroups { wgpu::Features::empty() } else { SUBGROUPS };
    let cache = match options.pipeline_cache {
        Some(_) => wgpu::Features::PIPELINE_CACHE,
        None => wgpu::Features::empty(),
    };
    wgpu::Features::TIMESTAMP_QUERY | subgroups | cache
}

/// WebGPU's defaults, raised to the adapter's own where larger helps.
fn wanted_limits(adapter: &wgpu::Limits) -> wgpu::Limits {
    let default = wgpu::Limits::default();
    wgpu::Limits {
        max_buffer_size: adapter.max_buffer_size,
        max_storage_buffer_binding_size: adapter.max_storage_buffer_binding_size,
        max_compute_workgroup_storage_size: adapter.max_compute_workgroup_storage_size,
        max_compute_invocations_per_workgroup: adapter.max_compute_invocations_per_workgroup,
        max_compute_workgroup_size_x: adapter.max_compute_workgroup_size_x,
        min_storage_buffer_offset_alignment: adapter.min_storage_buffer_offset_alignment,
        ..default
    }
    .or_worse_values_from(adapter)
}

/// Picks an adapter: the one asked for, else the fastest kind, the first among equals.
fn pick(adapters: &[wgpu::AdapterInfo], choice: Option<AdapterChoice>) -> Result<usize> {
    let rank = |info: &wgpu::AdapterInfo| {
        let kind = match info.device_type {
            wgpu::DeviceType::DiscreteGpu => 0,
            wgpu::DeviceType::IntegratedGpu => 1,
            wgpu::DeviceType::VirtualGpu => 2,
            wgpu::DeviceType::Other => 3,
            wgpu::DeviceType::Cpu => 4,
        };
        // The same GPU often shows up through OpenGL as well, with fewer features and an unknown type.
        (kind, info.backend == wgpu::Backend::Gl)
    };
    let matches = |index: usize| match &choice {
        None => true,
        Some(AdapterChoice::Index(wanted)) => index == *wanted,
        Some(AdapterChoice::Name(name)) => adapters[index].name.to_lowercase().contains(&name.to_lowercase()),
    };
    (0..adapters.len()).filter(|&index| matches(index)).min_by_key(|&index| rank(&adapters[index])).ok_or_else(|| {
        let available = if adapters.is_empty() {
            #[cfg(target_arch = "wasm32")]
            let none = "this browser has no WebGPU, or it is switched off or found no GPU";
            #[cfg(not(target_arch = "wasm32"))]
            let none = "this machine shows none: install a Vulkan driver (software: mesa-vulkan-drivers and libvulkan1 \
                        on Debian and Ubuntu)";
            none.to_string()
        } else {
            let names: Vec<_> =
                adapters.iter().enumerate().map(|(i, info)| format!("{i}: {} ({})", info.name, info.backend)).collect();
            format!("there are {}", names.join(", "))
        };
        let wanted = choice.map_or_else(|| "found".to_string(), |choice| choice.to_string());
        Error::NoAdapter { wanted, available }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adapter(name: &str, device_type: wgpu::DeviceType, backend: wgpu::Backend) -> wgpu::AdapterInfo {
        let mut info = wgpu::AdapterInfo::new(device_type, backend);
        info.name = name.to_string();
        info
    }

    #[test]
    fn a_real_gpu_comes_before_a_software_one() {
        use wgpu::{Backend, DeviceType};
        let adapters = [
            adapter("llvmpipe", DeviceType::Cpu, Backend::Vulkan),
            adapter("GeForce", DeviceType::Other, Backend::Gl),
            adapter("Iris", DeviceType::IntegratedGpu, Backend::Vulkan),
            adapter("GeForce", DeviceType::DiscreteGpu, Backend::Vulkan),
        ];
        assert_eq!(pick(&adapters, None), Ok(3));
        assert_eq!(pick(&adapters[..3], None), Ok(2));
        assert_eq!(pick(&adapters, Some("LLVM".into())), Ok(0));
        assert_eq!(pick(&adapters, Some("1".into())), Ok(1));
        let error = pick(&adapters, Some("radeon".into())).unwrap_err().to_string();
        assert!(error.contains("radeon") && error.contains("2: Iris"), "{error}");
        assert!(pick(&adapters, Some("4".into())).is_err());
        let error = pick(&[], None).unwrap_err().to_string();
        assert!(error.contains("install"), "{error}");
    }
}
