//! Tensors on the device, views of them, and how their elements are stored.

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::shader::Format;

/// Storage type of a tensor's elements. Arithmetic and accumulation are always f32; stores round to nearest even, and
/// f16 beyond ±65504 becomes ±∞. No adapter feature is needed for any.
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

/// A host type that a tensor can be made of.
pub trait Element: bytemuck::Pod {
    /// Its storage type.
    const DTYPE: DType;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
}

impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}

impl Element for half::bf16 {
    const DTYPE: DType = DType::BF16;
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

    /// The storage type.
    pub fn dtype(&self) -> DType {
        self.view.dtype
    }

    /// The buffer, as long as the tensor in whole words of 4 bytes, but never empty.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.view.buffer
    }
}

/// A strided view of a range of a storage buffer, at any element offset. It shares the buffer; nothing is copied.
///
/// Operators demand the last of four dimensions contiguous, and outputs whose elements do not overlap; tensors may be
/// interleaved with a common period, as the parts of a fused `[B, T, 3, H, D]` are. Two 16-bit elements share a word:
/// 16-bit outputs need a contiguous last dimension of even length, an even offset and even strides. Kernels read and
/// write whole vectors where offset, strides and last dimension are multiples of 4. In a browser, tensors of one buffer
/// that are interleaved, or not whole multiples of 256 bytes apart, may be refused when they are submitted.
#[derive(Debug, Clone)]
pub struct TensorView {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) dtype: DType,
    /// First element, in elements from the start of the buffer.
    pub(crate) offset: u64,
    pub(crate) shape: Vec<usize>,
    /// Distance between neighbours of each dimension, in elements.
    pub(crate) strides: Vec<usize>,
}

impl TensorView {
    /// A dense row-major tensor of f32 at element `offset` of `buffer`. Checked when it is bound, except that wgpu has no means
    /// to tell that a buffer belongs to a device of another `wgpu::Instance`: it must be of the operator's device.
    pub fn new(buffer: &wgpu::Buffer, offset: u64, shape: &[usize]) -> Self {
        Self::strided(buffer, offset, shape, &dense_strides(shape))
    }

    /// A tensor of f32 with the given strides, in elements. Checked when it is bound.
    pub fn strided(buffer: &wgpu::Buffer, offset: u64, shape: &[usize], strides: &[usize]) -> Self {
        let (shape, strides) = (shape.to_vec(), strides.to_vec());
        TensorView { buffer: buffer.clone(), dtype: DType::F32, offset, shape, strides }
    }

    /// The same tensor, its elements taken as another storage type; offset and strides count elements of that type.
    pub fn with_dtype(self, dtype: DType) -> Self {
        TensorView { dtype, ..self }
    }

    /// The storage type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The buffer it is a range of.
    pub fn buffer(&self) -> &wgpu::Buffer {
        &self.buffer
    }

    /// The sizes.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The `length` elements from `start` on of dimension `dim`, all of the others: a part of a cache, say. Nothing is
    /// copied.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such dimension or range.
    pub fn narrow(&self, dim: usize, start: usize, length: usize) -> Result<TensorView> {
        let rank = self.shape.len();
        if self.strides.len() != rank {
            let got = format!("{} strides", self.strides.len());
            return Err(Error::argument("strides", got, format!("{rank} strides, one a dimension")));
        }
        let Some(&size) = self.shape.get(dim) else {
            return Err(Error::argument("dim", dim, format!("one of {rank} dimensions, from 0")));
        };
        if start.checked_add(length).is_none_or(|end| end > size) {
            let got = format!("{length} from start {start}");
            return Err(Error::argument("length", got, format!("a range within the {size} of dimension {dim}")));
        }
        let moved = (start as u64).checked_mul(self.strides[dim] as u64).and_then(|by| self.offset.checked_add(by));
        let Some(offset) = moved else {
            let got = format!("{start}, of stride {}", self.strides[dim]);
            return Err(Error::argument("start", got, "an offset below 2⁶⁴"));
        };
        let mut narrowed = TensorView { offset, ..self.clone() };
        narrowed.shape[dim] = length;
        Ok(narrowed)
    }

    /// The same elements with two dimensions exchanged: a tensor `[B, T, H, D]` seen as `[B, H, T, D]`, say. Nothing is
    /// copied.
    ///
    /// # Errors
    /// [`Error::Argument`] when there is no such dimension.
    pub fn transposed(&self, first: usize, second: usize) -> Result<TensorView> {
        let rank = self.shape.len().min(self.strides.len());
        if let Some(dim) = [first, second].into_iter().find(|dim| *dim >= rank) {
            return Err(Error::argument("dim", dim, format!("one of {rank} dimensions, from 0")));
        }
        let mut transposed = self.clone();
        transposed.shape.swap(first, second);
        transposed.strides.swap(first, second);
        Ok(transposed)
    }

    /// The same elements with four dimensions, leading ones of size 1 added. Only for views of four at most.
    pub(crate) fn four_dimensional(&self) -> TensorView {
        let missing = 4 - self.shape.len();
        let pad = |sizes: &[usize], with: usize| [&vec![with; missing], sizes].concat();
        TensorView { shape: pad(&self.shape, 1), strides: pad(&self.strides, 0), ..self.clone() }
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
        let size = self.dtype.bytes() as u64;
        let start = self.offset.saturating_mul(size);
        start..start.saturating_add(self.reach().unwrap_or(0).saturating_mul(size))
    }

    /// How a kernel may read or write it.
    pub(crate) fn format(&self) -> Format {
        let rows = self.shape.len() == 4
            && self.shape[3].is_multiple_of(4)
            && self.strides[3] == 1
            && self.offset.is_multiple_of(4)
            && self.strides[..3].iter().all(|stride| stride.is_multiple_of(4));
        Format { dtype: self.dtype, vectors: rows }
    }

    /// Whether the two might touch a common byte of one buffer: whether their ranges do, unless they are interleaved, as
    /// the parts of a fused `[B, T, 3, H, D]` or `[B, T, H, 3, D]` are.
    pub(crate) fn overlaps(&self, other: &TensorView) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        let apart = |period: u64| match (self.slot(period), other.slot(period)) {
            (Some(a), Some(b)) => a.end <= b.start || b.end <= a.start,
            _ => false,
        };
        let size = self.dtype.bytes() as u64;
        let dimensions = self.shape.iter().zip(&self.strides).filter(|(count, _)| **count > 1);
        let mut periods = dimensions.map(|(_, &stride)| stride as u64 * size);
        self.buffer == other.buffer && a.start.max(b.start) < a.end.min(b.end) && !periods.any(apart)
    }

    /// The bytes within every `period` bytes of the buffer that the view touches, if it is made of whole periods of them.
    fn slot(&self, period: u64) -> Option<std::ops::Range<u64>> {
        let size = self.dtype.bytes() as u64;
        let inner = self
            .shape
            .iter()
            .zip(&self.strides)
            .filter(|(count, stride)| **count > 1 && !(**stride as u64 * size).is_multiple_of(period));
        let extent: u64 = inner.map(|(&count, &stride)| (count as u64 - 1) * stride as u64 * size).sum();
        let start = self.bytes().start.checked_rem(period)?;
        (start + extent + size <= period).then(|| start..start + extent + size)
    }

    /// Whether both are the very same elements in the same order.
    pub(crate) fn is_same(&self, other: &TensorView) -> bool {
        self.buffer == other.buffer
            && self.dtype == other.dtype
            && self.offset == other.offset
            && self.shape == other.shape
            && self.strides == other.strides
    }

    /// Refuses a view that can't be bound as argument `name` of the given shape, which is always f32.
    pub(crate) fn check(&self, name: &str, shape: &[usize]) -> Result<()> {
        if self.dtype != DType::F32 {
            return Err(Error::argument(name, format!("{:?} elements", self.dtype), "F32"));
        }
        self.check_stored(name, shape)
    }

    /// As [`TensorView::check`], for a tensor of any storage type.
    pub(crate) fn check_stored(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.check_strided(name, shape)?;
        // Kernels know three strides; the rows of a tensor of four dimensions are read as wholes.
        if let (&[_, _, _, size], &[_, _, _, stride]) = (shape, &self.strides[..])
            && size > 1
            && stride != 1
            && !self.is_empty()
        {
            return Err(Error::argument(name, format!("stride {stride} of the last dimension"), "stride 1"));
        }
        Ok(())
    }

    /// As [`TensorView::check_stored`], for a kernel that knows the last stride of four too.
    pub(crate) fn check_strided(&self, name: &str, shape: &[usize]) -> Result<()> {
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
        let size = self.dtype.bytes() as u64;
        // Words are bound whole.
        let (reach, buffer) = (self.reach(), self.buffer.size() / 4 * (4 / size));
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
        Ok(())
    }

    /// As [`TensorView::check`], for a tensor that is written: no element may stand for two.
    pub(crate) fn check_output(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.check(name, shape)?;
        self.check_written(name)
    }

    /// As [`TensorView::check_output`], for a tensor of any storage type.
    pub(crate) fn check_stored_output(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.check_stored(name, shape)?;
        self.check_written(name)
    }

    /// As [`TensorView::check_stored_output`], for a kernel that knows the last stride of four too.
    pub(crate) fn check_strided_output(&self, name: &str, shape: &[usize]) -> Result<()> {
        self.check_strided(name, shape)?;
        self.check_written(name)
    }

    fn check_written(&self, name: &str) -> Result<()> {
        if self.is_empty() {
            // Its strides say nothing.
            return Ok(());
        }
        let shape = &self.shape;
        if self.dtype != DType::F32 {
            // Whole words only: of two invocations that write the halves of one, the first would be undone.
            let even = |count: usize| count.is_multiple_of(2);
            let pairs = match (shape.split_last(), self.strides.split_last()) {
                (Some((&size, sizes)), Some((&1, strides))) => {
                    even(size) && strides.iter().zip(sizes).all(|(&stride, &size)| size == 1 || even(stride))
                }
                _ => false,
            };
            if !pairs || !self.offset.is_multiple_of(2) {
                let got = format!("shape {shape:?}, strides {:?}, offset {}", self.strides, self.offset);
                let needed = format!(
                    "an even last dimension, contiguous, even strides and an even offset for {:?} that is written",
                    self.dtype
                );
                return Err(Error::argument(name, got, needed));
            }
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
        let align = u64::from(limits.min_storage_buffer_offset_alignment) / self.dtype.bytes() as u64;
        let mut layout = [(self.offset % align.max(1)) as u32, 0, 0, 0];
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

/// Checks cumulative lengths; how many sequences there are.
pub(crate) fn check_cumulative(name: &str, cumulative: &[usize], total: usize) -> Result<usize> {
    let ends = (cumulative.first(), cumulative.last());
    if ends != (Some(&0), Some(&total)) || !cumulative.is_sorted() {
        let order = if cumulative.is_sorted() { "" } else { ", not sorted" };
        let got = format!("{} entries from {:?} to {:?}{order}", cumulative.len(), ends.0, ends.1);
        return Err(Error::argument(name, got, format!("cumulative lengths that rise from 0 to the {total} tokens")));
    }
    Ok(cumulative.len() - 1)
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
    /// A tensor of f32 zeros.
    ///
    /// # Errors
    /// [`Error::Limit`] when it is larger than the device's buffers or storage bindings.
    pub fn zeros(&self, shape: &[usize]) -> Result<Tensor> {
        self.zeros_of(DType::F32, shape)
    }

    /// A tensor of zeros of a storage type.
    ///
    /// # Errors
    /// As [`Gpu::zeros`].
    pub fn zeros_of(&self, dtype: DType, shape: &[usize]) -> Result<Tensor> {
        self.tensor(dtype, shape, None)
    }

    /// A tensor with the given elements, row-major: f32, or `half::f16` and `half::bf16` for 16-bit storage.
    ///
    /// # Errors
    /// [`Error::Argument`] when the number of elements is not that of the shape, else as [`Gpu::zeros`].
    pub fn upload<E: Element>(&self, data: &[E], shape: &[usize]) -> Result<Tensor> {
        let elements = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if elements != Some(data.len()) {
            return Err(Error::argument("data", format!("{} elements", data.len()), format!("those of {shape:?}")));
        }
        self.tensor(E::DTYPE, shape, Some(bytemuck::cast_slice(data)))
    }

    /// Overwrites a tensor, before whatever is submitted next.
    ///
    /// # Errors
    /// [`Error::Argument`] when the elements are not as many or not of the type of the tensor's, [`Error::Gpu`] when its
    /// buffer is destroyed or of another device.
    pub fn write<E: Element>(&self, tensor: &Tensor, data: &[E]) -> Result<()> {
        let elements: usize = tensor.shape().iter().product();
        if elements != data.len() || E::DTYPE != tensor.dtype() {
            let got = format!("{} elements of {:?}", data.len(), E::DTYPE);
            let needed = format!("the {elements} of {:?} of shape {:?}", tensor.dtype(), tensor.shape());
            return Err(Error::argument("data", got, needed));
        }
        self.catching("writing a tensor", || write_words(self.queue(), tensor.buffer(), bytemuck::cast_slice(data)))
    }

    fn tensor(&self, dtype: DType, shape: &[usize], data: Option<&[u8]>) -> Result<Tensor> {
        let elements = shape.iter().try_fold(dtype.bytes() as u64, |product, &size| product.checked_mul(size as u64));
        let bytes = elements.and_then(|bytes| bytes.checked_next_multiple_of(4)).unwrap_or(u64::MAX);
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
        Ok(Tensor { view: TensorView::new(&buffer, 0, shape).with_dtype(dtype) })
    }

    /// A storage buffer of its own.
    pub(crate) fn allocate(&self, label: &str, size: u64, data: Option<&[u8]>) -> Result<wgpu::Buffer> {
        self.catching("allocating memory", || {
            let buffer = self.device().create_buffer(&wgpu::BufferDescriptor {
                label: Some(label),
                size,
                usage: wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_SRC | wgpu::BufferUsages::COPY_DST,
                mapped_at_creation: false,
            });
            if let Some(data) = data {
                write_words(self.queue(), &buffer, data);
            }
            buffer
        })
    }

    /// Reads a tensor back, widened to f32, waiting for everything submitted so far.
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
    /// As [`Gpu::read`]; in a browser also what it says against earlier calls.
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
        #[cfg(target_arch = "wasm32")]
        let settled = self.settle();
        let answer = receiver.receive().await;
        // Whatever made the answer a refusal says more than it does.
        #[cfg(target_arch = "wasm32")]
        settled.await?;
        match answer {
            Some(Ok(())) => {}
            Some(Err(error)) => return Err(failed(&error)),
            None => return Err(failed(&"the device gave no answer")),
        }
        let view = staging.slice(..).get_mapped_range().map_err(|error| failed(&error))?;
        let elements = tensor.shape().iter().product();
        let mut values: Vec<f32> = match tensor.dtype() {
            DType::F32 => bytemuck::cast_slice(&view).to_vec(),
            DType::F16 => bytemuck::cast_slice(&view).iter().map(|&value: &half::f16| value.to_f32()).collect(),
            DType::BF16 => bytemuck::cast_slice(&view).iter().map(|&value: &half::bf16| value.to_f32()).collect(),
        };
        values.truncate(elements);
        Ok(values)
    }
}

/// Writes bytes, an odd number of halves as whole words: copies are made of words.
fn write_words(queue: &wgpu::Queue, buffer: &wgpu::Buffer, bytes: &[u8]) {
    let (words, rest) = bytes.split_at(bytes.len() / 4 * 4);
    queue.write_buffer(buffer, 0, words);
    if let &[low, high] = rest {
        queue.write_buffer(buffer, words.len() as u64, &[low, high, 0, 0]);
    }
}
