//! Tensors of any storage type, anywhere in a buffer, with traps in every gap.

use continuous_attention::{DType, Gpu, Tensor, TensorView, half};

/// Where a tensor lies: its storage type, strides and offset, in elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Place {
    pub dtype: DType,
    pub shape: Vec<usize>,
    pub strides: Vec<usize>,
    pub offset: usize,
}

impl Place {
    /// Dense and row-major.
    pub fn dense(dtype: DType, shape: &[usize], offset: usize) -> Self {
        let order: Vec<usize> = (0..shape.len()).collect();
        Self::ordered(dtype, shape, &order, offset, 0)
    }

    /// Dimensions in memory in the given order, slowest first; rows of the last one are `gap` elements apart.
    pub fn ordered(dtype: DType, shape: &[usize], order: &[usize], offset: usize, gap: usize) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut stride = 1;
        for (place, &dimension) in order.iter().enumerate().rev() {
            strides[dimension] = stride;
            stride *= shape[dimension].max(1);
            if place + 1 == order.len() {
                stride += gap;
            }
        }
        Place { dtype, shape: shape.to_vec(), strides, offset }
    }

    /// A random one. Half of them, `usual` ones all, can be read in vectors where the last dimension allows it. What is
    /// written with 16 bits gets an even offset and even strides.
    pub fn random(rng: &mut fastrand::Rng, dtype: DType, shape: &[usize], written: bool, usual: bool) -> Self {
        let vectors = usual || rng.bool();
        let order = match shape.len() {
            4 => [vec![0, 1, 2, 3], vec![0, 2, 1, 3], vec![1, 0, 2, 3], vec![2, 1, 0, 3]][rng.usize(..4)].clone(),
            3 => [vec![0, 1, 2], vec![0, 2, 1], vec![1, 0, 2]][if dtype == DType::F32 { rng.usize(..3) } else { 0 }]
                .clone(),
            _ => (0..shape.len()).collect(),
        };
        let (offset, gap) =
            if vectors { (4 * rng.usize(..40), 4 * rng.usize(..2)) } else { (rng.usize(..160), rng.usize(..4)) };
        let even = |x: usize| if written && dtype != DType::F32 { x / 2 * 2 } else { x };
        Self::ordered(dtype, shape, &order, even(offset), even(gap))
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Where an element lies.
    fn at(&self, mut index: usize) -> usize {
        let mut at = self.offset;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            at += index % size * stride;
            index /= size;
        }
        at
    }

    /// What storing does to values.
    pub fn rounded(&self, values: &[f32]) -> Vec<f32> {
        values.iter().map(|&value| decode(self.dtype, encode(self.dtype, value))).collect()
    }

    /// Elements before, between and behind the tensor's own hold NaN.
    pub fn upload(&self, gpu: &Gpu, values: &[f32]) -> TensorView {
        assert_eq!(values.len(), self.elements());
        let nan = vec![encode(self.dtype, f32::NAN); self.length()];
        self.view(&self.fill(gpu, nan, values))
    }

    /// Full of NaN, between guards of a value of their own.
    pub fn output(&self, gpu: &Gpu) -> Placed {
        self.holding(gpu, &vec![f32::NAN; self.elements()])
    }

    /// As [`Place::output`], but holding `values`, which are both read and overwritten.
    pub fn holding(&self, gpu: &Gpu, values: &[f32]) -> Placed {
        let guards = (0..self.length()).map(|at| guard(self.dtype, at)).collect();
        Placed { tensor: self.fill(gpu, guards, values), place: self.clone() }
    }

    /// Elements of the buffer: what a kernel without a bound would touch too.
    fn length(&self) -> usize {
        let end = if self.elements() == 0 { self.offset } else { self.at(self.elements() - 1) + 1 };
        (end + 400).next_multiple_of(2)
    }

    fn fill(&self, gpu: &Gpu, mut content: Vec<u32>, values: &[f32]) -> Tensor {
        for (index, &value) in values.iter().enumerate() {
            content[self.at(index)] = encode(self.dtype, value);
        }
        let words: Vec<f32> = match self.dtype {
            DType::F32 => content.into_iter().map(f32::from_bits).collect(),
            _ => content.chunks(2).map(|pair| f32::from_bits(pair[0] | pair[1] << 16)).collect(),
        };
        gpu.upload(&words, &[words.len()]).unwrap()
    }

    fn view(&self, tensor: &Tensor) -> TensorView {
        TensorView::strided(tensor.buffer(), self.offset as u64, &self.shape, &self.strides).with_dtype(self.dtype)
    }
}

/// An output on the device.
pub struct Placed {
    tensor: Tensor,
    place: Place,
}

impl Placed {
    pub fn view(&self) -> TensorView {
        self.place.view(&self.tensor)
    }

    /// Its elements, once every guard was found intact.
    pub fn read(&self, gpu: &Gpu, label: &str) -> Vec<f32> {
        let words = gpu.read(&self.tensor).unwrap();
        let dtype = self.place.dtype;
        let content: Vec<u32> = match dtype {
            DType::F32 => words.iter().map(|word| word.to_bits()).collect(),
            _ => words.iter().flat_map(|word| [word.to_bits() & 0xffff, word.to_bits() >> 16]).collect(),
        };
        let mut own = vec![false; content.len()];
        (0..self.place.elements()).for_each(|index| own[self.place.at(index)] = true);
        for (at, &bits) in content.iter().enumerate() {
            assert!(
                own[at] || bits == guard(dtype, at),
                "element {at} outside of {:?} was overwritten in {label}",
                self.place
            );
        }
        (0..self.place.elements()).map(|index| decode(dtype, content[self.place.at(index)])).collect()
    }
}

/// A value of its own for every guard element.
fn guard(dtype: DType, at: usize) -> u32 {
    match dtype {
        DType::F32 => 0x4b00_0000 + at as u32,
        _ => 0x3000 + at as u32 % 0x1fff,
    }
}

fn encode(dtype: DType, value: f32) -> u32 {
    match dtype {
        DType::F32 => value.to_bits(),
        DType::F16 => half::f16::from_f32(value).to_bits().into(),
        DType::BF16 => half::bf16::from_f32(value).to_bits().into(),
    }
}

fn decode(dtype: DType, bits: u32) -> f32 {
    match dtype {
        DType::F32 => f32::from_bits(bits),
        DType::F16 => half::f16::from_bits(bits as u16).to_f32(),
        DType::BF16 => half::bf16::from_bits(bits as u16).to_f32(),
    }
}
