//! Tensors on the device, views of them, and how their elements are stored.

use crate::error::{Error, Result};
use crate::gpu::Gpu;

/// Storage type of a tensor's elements. Arithmetic and accumulation are always f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum DType {
    /// IEEE single precision.
    #[default]
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16: the upper half of a single.
    BF16,
}

impl DType {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
        }
    }
}

/// A dense row-major tensor that owns its buffer.
///
/// Its buffer has the usages STORAGE, COPY_SRC and COPY_DST, and starts as zeros.
#[derive(Debug, Clone)]
pub struct Tensor {
    view: TensorView,
}

impl Tensor {
    /// The whole tensor, to hand to an operator.
    pub fn view(&self) -> TensorView {
        self.view.clone()
    }

    /// The sizes.
    pub fn shape(&self) -> &[usize] {
        &self.view.shape
    }

    /// The buffer, exactly as long as the tensor but never empty.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.view.buffer
    }
}

/// A strided f32 view of a range of a storage buffer, at any element offset. It shares the buffer; nothing is copied.
///
/// Operators demand the last of four dimensions contiguous, and outputs whose elements do not overlap; two outputs are
/// told apart by the ranges from their first to their last element, so they can't be interleaved. In a browser, tensors
/// of one buffer that are neither of them whole multiples of 256 bytes apart may be refused when they are submitted.
#[derive(Debug, Clone)]
pub struct TensorView {
    pub(crate) buffer: wgpu::Buffer,
    /// First element, in elements from the start of the buffer.
    pub(crate) offset: u64,
    pub(crate) shape: Vec<usize>,
    /// Distance between neighbours of each dimension, in elements.
    pub(crate) strides: Vec<usize>,
}

impl TensorView {
    /// A dense row-major tensor at element `offset` of `buffer`. Checked when it is bound, except that wgpu has no means
    /// to tell that a buffer belongs to a device of another `wgpu::Instance`: it must be of the operator's device.
    pub fn new(buffer: &wgpu::Buffer, offset: u64, shape: &[usize]) -> Self {
        Self::strided(buffer, offset, shape, &dense_strides(shape))
    }

    /// A tensor with the given strides, in elements. Checked when it is bound.
    pub fn strided(buffer: &wgpu::Buffer, offset: u64, shape: &[usize], strides: &[usize]) -> Self {
        TensorView { buffer: buffer.clone(), offset, shape: shape.to_vec(), strides: strides.to_vec() }
    }

    /// The sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Elements from the first to one behind the last, in u64; `None` when that overflows.
    fn reach(&self) -> Option<u64> {
        if self.is_empty() {
            return Some(0);
        }
        self.shape
            .iter()
            .zip(&self.strides)
            .try_fold(1u64, |reach, (&size, &stride)| (size as u64 - 1).checked_mul(stride as u64)?.checked_add(reach))
    }

    /// Range of the buffer that the view touches, in bytes. Only for views that passed [`TensorView::check`].
    pub(crate) fn bytes(&self) -> std::ops::Range<u64> {
        // The offset of an empty view was not checked.
        let start = self.offset.saturating_mul(4);
        start..start.saturating_add(self.reach().unwrap_or(0).saturating_mul(4))
    }

    /// Whether the two touch a common byte of one buffer.
    pub(crate) fn overlaps(&self, other: &TensorView) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        self.buffer == other.buffer && a.start.max(b.start) < a.end.min(b.end)
    }

    /// Whether both are the very same elements in the same order.
    pub(crate) fn is_same(&self, other: &TensorView) -> bool {
        self.buffer == other.buffer
            && self.offset == other.offset
            && self.shape == other.shape
            && self.strides == other.strides
    }

    /// Refuses a view that can't be bound as argument `name` of the given shape.
    pub(crate) fn check(&self, name: &str, shape: &[usize], limits: &wgpu::Limits) -> Result<()> {
        if self.shape != shape {
            return Err(Error::argument(name, format!("shape {:?}", self.shape), format!("shape {shape:?}")));
        }
        if self.strides.len() != shape.len() {
            let got = format!("{} strides", self.strides.len());
            return Err(Error::argument(name, got, format!("{} strides, one a dimension", shape.len())));
        }
        if !self.buffer.usage().contains(wgpu::BufferUsages::STORAGE) {
            let got = format!("a buffer with usage {:?}", self.buffer.usage());
            return Err(Error::argument(name, got, "usage STORAGE"));
        }
        if self.is_empty() {
            return Ok(());
        }
        // Kernels know three strides; the rows of a tensor of four dimensions are read as wholes.
        if let (&[_, _, _, size], &[_, _, _, stride]) = (shape, &self.strides[..])
            && size > 1
            && stride != 1
        {
            return Err(Error::argument(name, format!("stride {stride} of the last dimension"), "stride 1"));
        }
        // Shaders count elements in 32 bits; half of that leaves sums of a tile's edge room.
        let (reach, buffer) = (self.reach(), self.buffer.size() / 4);
        let end = reach.and_then(|reach| self.offset.checked_add(reach));
        match end {
            Some(end) if end <= buffer => {}
            _ => {
                let got = format!("a buffer of {buffer} elements");
                let needed = match end {
                    Some(end) => format!("{end} (offset {} + {})", self.offset, end - self.offset),
                    None => "more than 2⁶⁴".to_string(),
                };
                return Err(Error::argument(name, got, needed));
            }
        }
        let reach = reach.unwrap_or(u64::MAX);
        let align = u64::from(limits.min_storage_buffer_offset_alignment);
        let bound = self.offset * 4 % align + reach.saturating_mul(4);
        for (limit_name, limit) in [
            ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size),
            ("2³¹ elements of 4 bytes", 1 << 33),
        ] {
            if bound > limit {
                return Err(Error::Limit { argument: format!("{name}, in bytes"), got: bound, limit_name, limit });
            }
        }
        Ok(())
    }

    /// As [`TensorView::check`], for a tensor that is written: no element may stand for two.
    pub(crate) fn check_output(&self, name: &str, shape: &[usize], limits: &wgpu::Limits) -> Result<()> {
        self.check(name, shape, limits)?;
        if self.is_empty() {
            // Its strides say nothing.
            return Ok(());
        }
        let mut dimensions: Vec<_> =
            self.strides.iter().copied().zip(shape.iter().copied()).filter(|&(_, size)| size > 1).collect();
        dimensions.sort_unstable();
        let mut covered = 1u64;
        for (stride, size) in dimensions {
            if (stride as u64) < covered {
                let got = format!("strides {:?}, whose elements overlap", self.strides);
                return Err(Error::argument(name, got, "an element of its own for every index"));
            }
            covered += (size as u64 - 1) * stride as u64;
        }
        Ok(())
    }

    /// What a shader needs to index the view, given that its buffer is bound at an aligned offset at or before the
    /// first element: (offset from there, strides of the leading dimensions, missing ones 0).
    pub(crate) fn layout(&self, limits: &wgpu::Limits) -> [u32; 4] {
        let align = u64::from(limits.min_storage_buffer_offset_alignment / 4).max(1);
        let mut layout = [(self.offset % align) as u32, 0, 0, 0];
        for (slot, &stride) in layout[1..].iter_mut().zip(&self.strides) {
            *slot = stride as u32;
        }
        layout
    }
}

/// Refuses outputs that touch each other or an input. An input that is `in_place` of an output is not passed here.
pub(crate) fn check_overlaps(outputs: &[(&str, &TensorView)], inputs: &[(&str, &TensorView)]) -> Result<()> {
    for (index, (name, output)) in outputs.iter().enumerate() {
        for (other_name, other) in outputs[..index].iter().chain(inputs) {
            if output.overlaps(other) {
                let got = format!("bytes {:?}, which overlap {other_name} at {:?}", output.bytes(), other.bytes());
                return Err(Error::argument(*name, got, "a range of its own"));
            }
        }
    }
    Ok(())
}

/// Refuses a dimension over 2²⁹: with those below, what shaders count in 32 bits has room to spare.
pub(crate) fn check_longest(sizes: &[(&str, usize)]) -> Result<()> {
    const LONGEST: usize = 1 << 29;
    match sizes.iter().find(|(_, size)| *size > LONGEST) {
        Some(&(name, size)) => Err(Error::Limit {
            argument: name.to_string(),
            got: size as u64,
            limit_name: "2²⁹, the longest dimension",
            limit: LONGEST as u64,
        }),
        None => Ok(()),
    }
}

/// Strides of a dense row-major tensor.
fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for index in (0..shape.len().saturating_sub(1)).rev() {
        strides[index] = strides[index + 1].saturating_mul(shape[index + 1]);
    }
    strides
}

impl Gpu {
    /// A tensor of zeros.
    ///
    /// # Errors
    /// [`Error::Limit`] when it is larger than the device's buffers or storage bindings.
    pub fn zeros(&self, shape: &[usize]) -> Result<Tensor> {
        self.tensor(shape, None)
    }

    /// A tensor with the given elements, row-major.
    ///
    /// # Errors
    /// [`Error::Argument`] when the number of elements is not that of the shape, else as [`Gpu::zeros`].
    pub fn upload(&self, data: &[f32], shape: &[usize]) -> Result<Tensor> {
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if elements != Some(data.len()) {
            return Err(Error::argument("data", format!("{} elements", data.len()), format!("those of {shape:?}")));
        }
        self.tensor(shape, Some(data))
    }

    /// Overwrites a tensor, before whatever is submitted next.
    ///
    /// # Errors
    /// [`Error::Argument`] when the number of elements is not the tensor's, [`Error::Gpu`] when its buffer is destroyed
    /// or of another device.
    pub fn write(&self, tensor: &Tensor, data: &[f32]) -> Result<()> {
        let elements: usize = tensor.shape().iter().product();
        if elements != data.len() {
            let got = format!("{} elements", data.len());
            return Err(Error::argument("data", got, format!("the {elements} of {:?}", tensor.shape())));
        }
        self.catching("writing a tensor", || {
            self.queue().write_buffer(tensor.buffer(), 0, bytemuck::cast_slice(data));
        })
    }

    fn tensor(&self, shape: &[usize], data: Option<&[f32]>) -> Result<Tensor> {
        let bytes = shape.iter().try_fold(4u64, |product, &size| product.checked_mul(size as u64)).unwrap_or(u64::MAX);
        let limits = self.limits();
        for (limit_name, limit) in [
            ("max_buffer_size", limits.max_buffer_size),
            ("max_storage_buffer_binding_size", limits.max_storage_buffer_binding_size),
        ] {
            if bytes > limit {
                let argument = format!("a tensor of shape {shape:?}, in bytes");
                return Err(Error::Limit { argument, got: bytes, limit_name, limit });
            }
        }
        // An empty tensor still needs a buffer that can be bound.
        let buffer = self.allocate("tensor", bytes.max(4), data)?;
        Ok(Tensor { view: TensorView::new(&buffer, 0, shape) })
    }

    /// A storage buffer of its own.
    pub(crate) fn allocate(&self, label: &str, size: u64, data: Option<&[f32]>) -> Result<wgpu::Buffer> {
        self.catching("allocating memory", || {
            let buffer = self.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            if let Some(data) = data {
                self.queue().write_buffer(&buffer, 0, bytemuck::cast_slice(data));
            }
            buffer
        })
    }

    /// Reads a tensor back, waiting for everything submitted so far.
    ///
    /// # Errors
    /// [`Error::Gpu`] when the device is lost, or the buffer destroyed or of another device.
    #[cfg(not(target_arch = "wasm32"))]
    pub fn read(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        pollster::block_on(self.read_async(tensor))
    }

    /// As [`Gpu::read`] without blocking the browser; natively it waits inside.
    ///
    /// # Errors
    /// As [`Gpu::read`].
    pub async fn read_async(&self, tensor: &Tensor) -> Result<Vec<f32>> {
        let failed = |error: &dyn std::fmt::Display| Error::gpu("reading back", error);
        if tensor.view.is_empty() {
            return Ok(Vec::new());
        }
        let size = tensor.buffer().size();
        let (sender, receiver) = futures_intrusive::channel::shared::oneshot_channel();
        let staging = self.catching("reading back", || {
            let staging = self.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some("read back"),
                size,
                usage: wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            let mut encoder = self.device().create_command_encoder(&Default::default());
            encoder.copy_buffer_to_buffer(tensor.buffer(), 0, &staging, 0, size);
            self.queue().submit([encoder.finish()]);
            staging.slice(..).map_async(wgpu::MapMode::Read, move |result| {
                // The receiver is gone only if the caller dropped the future.
                let _ = sender.send(result);
            });
            staging
        })?;
        #[cfg(not(target_arch = "wasm32"))]
        self.device().poll(wgpu::PollType::wait_indefinitely()).map_err(|error| failed(&error))?;
        match receiver.receive().await {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(failed(&error)),
            None => return Err(failed(&"the device gave no answer")),
        }
        let view = staging.slice(..).get_mapped_range().map_err(|error| failed(&error))?;
        Ok(bytemuck::cast_slice(&view).to_vec())
    }
}
