//! From a binding table to a recorded dispatch.
//!
//! # Binding tables
//!
//! Every kernel binds its parameters as a uniform at binding 0 and at most eight storage buffers, WebGPU's default
//! limit. An input may share its buffer with an output (hosts hand over ranges of one arena): it is then declared
//! `read_write` in a variant of its own. Small or optional inputs are first packed into the call's workspace by the
//! kernel `pack`. An absent input binds the parameters, an absent output a spare range of the workspace. Kernels that know
//! sequences also bind `table`, where those of a ragged batch stand.
//!
//! | kernel | inputs | outputs |
//! |---|---|---|
//! | pack | source | workspace |
//! | reduce | workspace | destination |
//! | attention_forward | q, k, v, table, workspace (packed sink_k, sink_v, intervals) | out, lse, or workspace (those of each split) |
//! | attention_combine | workspace | out, lse |
//! | attention_backward_rows | out, lse, d_out, d_lse | workspace (lse and D of every row) |
//! | attention_backward_outputs | q, k, v, d_out, table, workspace | workspace (D of every row, where out has 16 bits) |
//! | attention_backward_dq | q, k, v, d_out, table, workspace | d_q |
//! | attention_backward_dkv | q, k, v, d_out, table, workspace | d_k, d_v, workspace (partial sink and interval gradients) |
//! | attention_merge | out_a, lse_a, out_b, lse_b | out, lse |
//! | attention_merge_backward | out_a, lse_a, out_b, lse_b, d_out, d_lse | d_side, d_side_lse (of a; then the sides are exchanged) |
//! | efla_gates | q, k, beta, log_decay | workspace (gates, decays, rates) |
//! | efla_prepare | k, v, workspace (gates) | workspace (W, U) |
//! | efla_state | k, initial_state, workspace (gates, W) | workspace (V_new, states), final_state |
//! | efla_state_sums | as efla_state | workspace (what a group of chunks does to a state) |
//! | efla_groups | initial_state, workspace | workspace (the state before every group) |
//! | efla_state_starts | as efla_state | as efla_state |
//! | efla_output | q, k, workspace (gates, V_new, states) | out |
//! | efla_recurrent | q, k, v, initial_state, workspace (gates) | final_state, out |
//! | efla_backward_read | d_out or workspace (Y), q, k, workspace | workspace (value heads' parts of d_Q, or of d_k; parts of d_log_decay) |
//! | efla_backward_sum | q or k, workspace | d_q or d_k |
//! | efla_backward_output | q, k, d_out, workspace | workspace (dV_new and dS from within the chunk) |
//! | efla_backward_prepare | k, v (unused), workspace | workspace (TᵀK̂, Tᵀ dV_new) |
//! | efla_backward_state | k, d_final_state, workspace | workspace (Y, dS'), d_initial_state |
//! | efla_backward_sums, efla_backward_starts | as efla_backward_state | of groups of chunks |
//! | efla_backward_found | k, workspace | workspace (P) |
//! | efla_backward_values | v, workspace | workspace (X, part of d_log_decay), d_v, d_beta |
//! | efla_backward_replay | k, initial_state, workspace | workspace (states, what passes through chunks) |
//! | efla_backward_keys | q, k, d_out, workspace | workspace (value heads' parts of d_k, part of d_log_decay) |
//! | rotary | x, positions, frequencies | out |
//! | copy | source | destination |
//!
//! Kernels called `…_lanes` are the same for software adapters, one subgroup a workgroup (`shared/lanes.wgsl`). They bind the
//! same, but for the workspace, which they see as vectors: there attention's sum their rows, EFLA's keep the running state
//! and the matrix of a chunk.
//!
//! Kernels called `…_matrix` are for matrix units (`shared/matrix.wgsl`), `…_matrix_emulated` the same for tests.
//! They bind the same, but for q, k and v, which they see as vectors of f16.
//!
//! All kernels of EFLA bind `table`, too. Parts of d_log_decay stand among the gates, for `reduce` to add up.
//!
//! `workspace` counts as an output wherever a kernel writes any part of it. In place: when initial_state and final_state
//! (of rotary x and out, of a merge those of a side and of the result) are the same range, the kernel reads it through
//! the output's binding.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::shader::{self, Constants, Format, Kernel, Role, Variant};
use crate::tensor::{DType, TensorView};
use crate::trusted;

/// A compiled variant.
#[derive(Debug)]
pub(crate) struct Pipeline {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
}

impl Pipeline {
    /// Compiles; what the graphics stack says against it comes back as an error with the shader's file and line.
    pub fn compile(gpu: &Gpu, variant: &Variant, checked: bool) -> Result<Self> {
        let name = variant.kernel.name;
        let composed = shader::compose(variant);
        let device = gpu.device();
        let module = gpu
            .catching("compiling", || trusted::shader_module(device, name, &composed.text, checked))
            .map_err(|error| Error::gpu(format!("compiling {name}"), composed.locate(&error.to_string())))?;
        gpu.catching(&format!("creating the pipeline of {name}"), || Self::create(gpu, variant, &module, checked))
    }

    fn create(gpu: &Gpu, variant: &Variant, module: &wgpu::ShaderModule, checked: bool) -> Self {
        let device = gpu.device();
        let label = Some(variant.kernel.name);
        let entry = |binding: usize, ty: wgpu::BufferBindingType| wgpu::BindGroupLayoutEntry {
            binding: binding as u32,
            visibility: wgpu::ShaderStages::COMPUTE,
            ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
            count: None,
        };
        let mut entries = vec![entry(0, wgpu::BufferBindingType::Uniform)];
        entries.extend(
            (0..variant.kernel.bindings.len()).map(|index| {
                entry(index + 1, wgpu::BufferBindingType::Storage { read_only: variant.read_only(index) })
            }),
        );
        let layout = device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor { label, entries: &entries });
        let pipeline_layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(&layout)],
            immediate_size: 0,
        });
        let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&pipeline_layout),
            module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Kernels write workgroup memory before they read it.
                zero_initialize_workgroup_memory: checked,
                ..Default::default()
            },
            cache: gpu.disk_cache(),
        });
        Pipeline { pipeline, layout }
    }
}

/// A range of a buffer, ready to be bound: the offset is aligned.
#[derive(Debug, Clone)]
pub(crate) struct BoundRange {
    pub buffer: wgpu::Buffer,
    pub offset: u64,
    pub size: u64,
    pub format: Format,
}

impl BoundRange {
    /// A buffer as a whole.
    pub fn whole(buffer: &wgpu::Buffer) -> Self {
        BoundRange { buffer: buffer.clone(), offset: 0, size: buffer.size(), format: Format::default() }
    }

    /// The range of a checked view, from the aligned offset at or before its first element.
    pub fn of(view: &TensorView, limits: &wgpu::Limits) -> Self {
        let bytes = view.bytes();
        let offset = bytes.start - bytes.start % u64::from(limits.min_storage_buffer_offset_alignment);
        // Words of 16-bit elements are bound whole.
        let size = bytes.end.next_multiple_of(4) - offset;
        BoundRange { buffer: view.buffer.clone(), offset, size, format: view.format() }
    }

    /// Refuses what is too large for a binding.
    pub fn check(&self, name: &str, limits: &wgpu::Limits) -> Result<()> {
        for (limit_name, limit) in [
            ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size),
            // Shaders count elements in 32 bits; half of that leaves sums of a tile's edge room.
            ("2³¹ elements", (self.format.dtype.bytes() as u64) << 31),
        ] {
            if self.size > limit {
                return Err(Error::Limit { argument: format!("{name}, in bytes"), got: self.size, limit_name, limit });
            }
        }
        Ok(())
    }

    /// As [`BoundRange::of`]; `None` for a view without elements, which can't be bound.
    pub fn of_view(view: &TensorView, limits: &wgpu::Limits) -> Option<Self> {
        (!view.is_empty()).then(|| Self::of(view, limits))
    }
}

/// Whether kernels of one subgroup a workgroup take the tensors. They could take any, but compile slowly: the usual ones are
/// of one storage type, their rows whole vectors.
pub(crate) fn suits_lanes(tensors: &[&TensorView]) -> bool {
    tensors.iter().all(|view| view.format().vectors && view.dtype() == tensors[0].dtype())
}

/// Refuses checked views of which one is too large for a binding.
pub(crate) fn check_bindings<'a>(
    views: impl IntoIterator<Item = (&'static str, &'a TensorView)>,
    limits: &wgpu::Limits,
) -> Result<()> {
    let bound = |(name, view)| BoundRange::of_view(view, limits).map_or(Ok(()), |range| range.check(name, limits));
    views.into_iter().try_for_each(bound)
}

/// How much a kernel has to do.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub workgroups: u64,
    /// Floating-point operations of a workgroup at most; 0 where they are too few to count.
    pub operations: u64,
    /// Rounds of loops that an invocation goes through at most; 0 where no size makes them many.
    pub rounds: u64,
}

impl From<u64> for Load {
    fn from(workgroups: u64) -> Self {
        Load { workgroups, operations: 0, rounds: 0 }
    }
}

impl Load {
    /// That of so many in one dispatch.
    fn times(&self, count: u64) -> Self {
        let (operations, rounds) = (self.operations.saturating_mul(count), self.rounds.saturating_mul(count));
        Load { workgroups: self.workgroups, operations, rounds }
    }

    /// Workgroups of one dispatch that keeps to the budget: at least one, and whole rows of the grid, since those that are
    /// too many in the last one would be done twice.
    fn workgroups_at_once(&self, budget: u64, limit: u64) -> u64 {
        let fitting = budget.checked_div(self.operations).unwrap_or(u64::MAX).max(1);
        match fitting {
            _ if fitting >= self.workgroups => self.workgroups,
            _ if fitting > limit => fitting - fitting % limit,
            _ => fitting,
        }
    }
}

/// A kernel whose workgroups go from step to step (a tile, a chunk, a token) and can stop behind any: the next dispatch goes on
/// with what they left in the workspace. So no dispatch becomes longer than the budget, and no loop has more rounds than
/// llvmpipe goes through.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    /// Of one step.
    pub load: Load,
    /// Steps of the workgroup that has most.
    pub count: u64,
    /// Elements that a workgroup leaves.
    pub left: u64,
}

impl Steps {
    /// How many steps a dispatch does.
    fn at_once(&self, gpu: &Gpu) -> u64 {
        let within = |limit: u64, one: u64| limit.checked_div(one).unwrap_or(u64::MAX);
        let fitting = within(gpu.work_budget(), self.load.operations).min(within(gpu.loop_rounds(), self.load.rounds));
        fitting.min(self.count).max(1)
    }

    /// All of them as one.
    pub fn whole(&self) -> Steps {
        Steps { load: self.load.times(self.count), count: 1, left: 0 }
    }

    /// Elements of the workspace for what all workgroups leave; none if one dispatch does it all.
    pub fn elements(&self, gpu: &Gpu) -> u64 {
        if self.at_once(gpu) < self.count { self.load.workgroups.saturating_mul(self.left) } else { 0 }
    }
}

/// One dispatch of a call.
#[derive(Debug)]
struct Step {
    name: &'static str,
    pipeline: Arc<Pipeline>,
    bind_group: wgpu::BindGroup,
    workgroups: [u32; 3],
}

/// A bound call: every buffer, parameter and pipeline it needs. Recording it creates nothing and can't fail.
#[derive(Debug, Default)]
pub struct Call {
    steps: Vec<Step>,
}

impl Call {
    /// Records the call's dispatches into a compute pass, as often as you like. It runs when the pass is submitted.
    ///
    /// wgpu tells no one which device a pass belongs to: one of another device, or of an encoder that is finished, is a
    /// validation error that wgpu reports to that device, at the latest when the encoder is finished.
    pub fn record(&self, pass: &mut wgpu::ComputePass<'_>) {
        for step in &self.steps {
            pass.push_debug_group(step.name);
            pass.set_pipeline(&step.pipeline.pipeline);
            pass.set_bind_group(0, &step.bind_group, &[]);
            let [x, y, z] = step.workgroups;
            pass.dispatch_workgroups(x, y, z);
            pass.pop_debug_group();
        }
    }

    /// Records the call as a compute pass of its own.
    pub fn encode(&self, encoder: &mut wgpu::CommandEncoder) {
        let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
        self.record(&mut pass);
    }

    /// How many dispatches it records: more where sizes are over a limit or over [`GpuOptions::work_budget`].
    ///
    /// [`GpuOptions::work_budget`]: crate::GpuOptions::work_budget
    pub fn dispatches(&self) -> usize {
        self.steps.len()
    }

    /// Adds the dispatches of a kernel that goes by steps, at least one; `params` are those of a first step and a number of
    /// them.
    pub(crate) fn push_steps(
        &mut self,
        gpu: &Gpu,
        (kernel, constants): (&'static Kernel, Constants),
        params: impl Fn(u32, u32) -> Params,
        arguments: &[Option<BoundRange>],
        steps: &Steps,
    ) -> Result<()> {
        let at_once = steps.at_once(gpu);
        for dispatch in 0..steps.count.div_ceil(at_once).max(1) {
            let first = dispatch * at_once;
            let count = at_once.min(steps.count - first);
            self.push(
                gpu,
                kernel,
                constants.clone(),
                &params(first as u32, count as u32),
                arguments,
                steps.load.times(count),
            )?;
        }
        Ok(())
    }

    /// Adds a dispatch of so many workgroups, none if that is 0, or several that keep to the work budget. `arguments`
    /// follow the kernel's binding table; `None` stands for an absent input.
    pub(crate) fn push(
        &mut self,
        gpu: &Gpu,
        kernel: &'static Kernel,
        constants: Constants,
        params: &Params,
        arguments: &[Option<BoundRange>],
        load: impl Into<Load>,
    ) -> Result<()> {
        let load = load.into();
        if load.workgroups == 0 {
            return Ok(());
        }
        if load.rounds > gpu.loop_rounds() {
            let argument = format!("rounds of an invocation's loops in {}", kernel.name);
            let limit_name = "what software adapters go through in one dispatch";
            return Err(Error::Limit { argument, got: load.rounds, limit_name, limit: gpu.loop_rounds() });
        }
        debug_assert_eq!(arguments.len(), kernel.bindings.len());
        debug_assert_eq!(params.buffer.size(), kernel.params.size as u64);
        let absent = BoundRange::whole(&params.buffer);
        let ranges: Vec<_> = arguments.iter().map(|range| range.as_ref().unwrap_or(&absent)).collect();
        for (range, binding) in ranges.iter().zip(kernel.bindings) {
            range.check(binding.name, gpu.limits())?;
        }
        let written = |buffer: &wgpu::Buffer| {
            let bound = ranges.iter().zip(kernel.bindings);
            bound.into_iter().any(|(range, binding)| binding.role != Role::Input && range.buffer == *buffer)
        };
        let mut writable_inputs = 0;
        for (index, (range, binding)) in ranges.iter().zip(kernel.bindings).enumerate() {
            if binding.role == Role::Input && written(&range.buffer) {
                writable_inputs |= 1 << index;
            }
        }
        let formats = ranges.iter().zip(kernel.bindings);
        let formats =
            formats.map(|(range, binding)| if binding.is_stored() { range.format } else { Format::default() });
        let pipeline = gpu.pipeline(&Variant { kernel, constants, writable_inputs, formats: formats.collect() })?;
        let limit = u64::from(gpu.limits().max_compute_workgroups_per_dimension);
        let at_once = load.workgroups_at_once(gpu.work_budget(), limit);
        let mut first = 0;
        while first < load.workgroups {
            let workgroups = grid(at_once.min(load.workgroups - first), limit)?;
            let own = params.starting_at(gpu, kernel, first);
            let mut entries = vec![wgpu::BindGroupEntry { binding: 0, resource: own.as_entire_binding() }];
            entries.extend(ranges.iter().enumerate().map(|(index, range)| wgpu::BindGroupEntry {
                binding: index as u32 + 1,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &range.buffer,
                    offset: range.offset,
                    size: std::num::NonZeroU64::new(range.size),
                }),
            }));
            let bind_group = gpu.device().create_bind_group(&wgpu::BindGroupDescriptor {
                label: Some(kernel.name),
                layout: &pipeline.layout,
                entries: &entries,
            });
            self.steps.push(Step { name: kernel.name, pipeline: pipeline.clone(), bind_group, workgroups });
            first += at_once;
        }
        Ok(())
    }
}

/// Spreads a number of workgroups over two dimensions; kernels count them with `workgroup_index`.
fn grid(workgroups: u64, limit: u64) -> Result<[u32; 3]> {
    let y = workgroups.div_ceil(limit);
    if y > limit || workgroups > u64::from(u32::MAX >> 1) {
        return Err(Error::Limit {
            argument: "workgroups of one dispatch".to_string(),
            got: workgroups,
            limit_name: "max_compute_workgroups_per_dimension, squared",
            limit: (limit * limit).min(u64::from(u32::MAX >> 1)),
        });
    }
    Ok([workgroups.div_ceil(y) as u32, y as u32, 1])
}

/// An immutable uniform buffer and what it holds; also what absent inputs bind.
pub(crate) struct Params {
    buffer: wgpu::Buffer,
    bytes: Vec<u8>,
}

impl Params {
    /// Those of a dispatch that starts with workgroup `first`.
    fn starting_at(&self, gpu: &Gpu, kernel: &Kernel, first: u64) -> wgpu::Buffer {
        if first == 0 {
            return self.buffer.clone();
        }
        let field = kernel.params.fields.iter().find(|(name, ..)| *name == "first_workgroup");
        let offset = field.expect("a kernel whose load is counted knows where a dispatch starts").2;
        let mut bytes = self.bytes.clone();
        bytes[offset..offset + 4].copy_from_slice(&(first as u32).to_ne_bytes());
        uniform_buffer(gpu, kernel.name, &bytes)
    }
}

pub(crate) fn params_buffer(gpu: &Gpu, label: &str, params: &impl bytemuck::NoUninit) -> Params {
    let bytes = bytemuck::bytes_of(params).to_vec();
    Params { buffer: uniform_buffer(gpu, label, &bytes), bytes }
}

fn uniform_buffer(gpu: &Gpu, label: &str, bytes: &[u8]) -> wgpu::Buffer {
    let buffer = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: Some(label),
        size: bytes.len() as u64,
        usage: wgpu::BufferUsages::UNIFORM | wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST,
        mapped_at_creation: false,
    });
    // Written once, before any submission that could read it.
    gpu.queue().write_buffer(&buffer, 0, bytes);
    buffer
}

/// A range of the workspace, in f32 elements.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Part {
    start: u64,
    elements: u64,
}

impl Part {
    /// Part of the part; its start must be one that can be bound.
    pub fn narrow(self, start: u64, elements: u64) -> Part {
        Part { start: self.start + start, elements }
    }

    /// The range within a workspace that [`Gpu::workspace`] returned.
    pub fn of(self, workspace: &TensorView) -> BoundRange {
        BoundRange {
            buffer: workspace.buffer.clone(),
            offset: (workspace.offset + self.start) * 4,
            // An empty part is bound too, perhaps as vectors.
            size: self.elements.max(4) * 4,
            format: Format::default(),
        }
    }
}

/// Lays out the parts of a workspace, each aligned so that it can be bound by itself.
#[derive(Debug, Clone)]
pub(crate) struct WorkspaceLayout {
    elements: u64,
    align: u64,
    max_binding: u64,
    max_buffer: u64,
}

impl WorkspaceLayout {
    pub fn new(limits: &wgpu::Limits) -> Self {
        WorkspaceLayout {
            elements: 0,
            align: u64::from(limits.min_storage_buffer_offset_alignment / 4).max(1),
            // Shaders count elements in 32 bits.
            max_binding: limits.max_storage_buffer_binding_size.min(1 << 33),
            max_buffer: limits.max_buffer_size,
        }
    }

    /// Where a second array may start behind one of this many elements, so that it can be bound by itself.
    pub fn aligned(&self, elements: u64) -> u64 {
        elements.checked_next_multiple_of(self.align).unwrap_or(u64::MAX)
    }

    /// Reserves a part; `name` says in an error what it is for.
    pub fn reserve(&mut self, name: &str, elements: u64) -> Result<Part> {
        let (got, limit) = (elements.saturating_mul(4), self.max_binding);
        if got > limit {
            let (argument, limit_name) = (format!("{name}, in bytes"), "max_storage_buffer_binding_size");
            return Err(Error::Limit { argument, got, limit_name, limit });
        }
        let start = self.elements;
        self.elements = (start + elements.max(4)).next_multiple_of(self.align);
        Ok(Part { start, elements })
    }

    /// Refuses a workspace that no buffer could hold.
    pub fn check(&self) -> Result<()> {
        let (got, limit) = (self.bytes(), self.max_buffer);
        if got > limit {
            let (argument, limit_name) = ("workspace, in bytes".to_string(), "max_buffer_size");
            return Err(Error::Limit { argument, got, limit_name, limit });
        }
        Ok(())
    }

    pub fn bytes(&self) -> u64 {
        self.elements * 4
    }
}

impl Gpu {
    /// A buffer of its own for a table that kernels read.
    pub(crate) fn table(&self, words: &[u32]) -> Result<BoundRange> {
        let bytes = bytemuck::cast_slice(words);
        Ok(BoundRange::whole(&self.allocate("lengths of sequences", bytes.len() as u64, Some(bytes))?))
    }

    /// The caller's workspace if it is fit, else one of its own for this call.
    pub(crate) fn workspace(&self, given: Option<&TensorView>, bytes: u64) -> Result<TensorView> {
        let elements = (bytes / 4) as usize;
        let Some(given) = given else {
            return Ok(TensorView::new(&self.allocate("workspace", bytes, None)?, 0, &[elements]));
        };
        if given.dtype != DType::F32 || (given.shape().len() == 1 && given.strides != [1]) {
            let got = format!("{:?} elements, strides {:?}", given.dtype, given.strides);
            return Err(Error::argument("workspace", got, "F32, one dimension, contiguous"));
        }
        let align = u64::from(self.limits().min_storage_buffer_offset_alignment / 4).max(1);
        if !given.offset.is_multiple_of(align) {
            let got = format!("offset {} (in elements)", given.offset);
            return Err(Error::argument("workspace", got, format!("a multiple of {align}")));
        }
        if !given.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            let got = format!("a buffer with usage {:?}", given.buffer.usage());
            return Err(Error::argument("workspace", got, "usage STORAGE"));
        }
        // Its parts are bound one by one: the whole may be larger than a binding.
        let (end, buffer) = (given.offset.checked_add(bytes / 4), given.buffer.size() / 4);
        if end.is_none_or(|end| end > buffer) {
            let got = format!("a buffer of {buffer} elements");
            return Err(Error::argument("workspace", got, format!("{elements} from offset {}", given.offset)));
        }
        match given.shape() {
            &[size] if size >= elements => Ok(TensorView::new(&given.buffer, given.offset, &[elements])),
            shape => Err(Error::argument("workspace", format!("shape {shape:?}"), format!("[{elements}] or more"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every workgroup below the number asked for exists, and no dimension is over the limit.
    #[test]
    fn grids_hold_what_was_asked_for() {
        for workgroups in [1, 2, 65_535, 65_536, 65_537, 131_071, 1_000_000, 65_535 * 30_000] {
            let [x, y, z] = grid(workgroups, 65_535).unwrap();
            let total = u64::from(x) * u64::from(y);
            assert!(x <= 65_535 && y <= 65_535 && z == 1, "{x} {y} {z}");
            assert!(total >= workgroups && total - workgroups < u64::from(y), "{workgroups}: {x} x {y}");
        }
        assert!(matches!(grid(1 << 31, 65_535), Err(Error::Limit { got: 0x8000_0000, .. })));
    }

    /// Dispatches keep to the budget and do nothing twice: only the last may have a grid that is not full.
    #[test]
    fn loads_are_split() {
        for (workgroups, operations, budget, at_once) in [
            (1000, 0, 1, 1000),
            (1000, 10, u64::MAX, 1000),
            (1000, 10, 10_000, 1000),
            (1000, 10, 9_999, 999),
            (1000, 10, 1_000, 100),
            (1000, 10, 9, 1),
            (1 << 20, 10, 700_000, 65_535),
            (1 << 20, 1, 300_000, 262_140),
        ] {
            let load = Load { workgroups, operations, rounds: 0 };
            assert_eq!(load.workgroups_at_once(budget, 65_535), at_once, "{load:?} {budget}");
            let [x, y, _] = grid(at_once, 65_535).unwrap().map(u64::from);
            assert!(x * y == at_once || at_once == workgroups, "{load:?} {budget}");
        }
    }
}
