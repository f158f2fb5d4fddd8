//! Runs operators on plain slices, with traps around everything they touch, and judges what comes out.

mod arithmetic;
mod attention;
mod efla;

pub use crate::random::{EDGES, Place, Placed, normal, pick, rng, submit, submit_all, widen};
pub use arithmetic::arithmetic;
pub use attention::{AttentionCase, AttentionOutput};
pub use efla::{EflaCase, EflaOutput, FORMS};

use std::sync::OnceLock;

use continuous_attention::reference::compare::{Quantity, Scale, compare, limit};
use continuous_attention::{DType, Gpu, GpuOptions, Tensor, TensorView, wgpu};

/// The limit for forward results of f32 kernels.
pub fn forward_limit() -> f64 {
    limit(Quantity::Forward, DType::F32)
}

/// The device that all tests share. With `CONTINUOUS_ATTENTION_NO_SUBGROUPS` set it has no subgroups, so that the kernels
/// of other adapters run; with a number in `CONTINUOUS_ATTENTION_WORK_BUDGET` dispatches are split that have more work.
pub fn gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| {
        let no_subgroups = std::env::var_os("CONTINUOUS_ATTENTION_NO_SUBGROUPS").is_some();
        let budget = std::env::var("CONTINUOUS_ATTENTION_WORK_BUDGET");
        let work_budget = budget.ok().map(|budget| budget.parse().expect("a number of operations"));
        let gpu = Gpu::with_options(&GpuOptions { no_subgroups, work_budget, ..Default::default() });
        gpu.expect("the tests need a GPU, a software one will do")
    })
}

/// One without subgroups.
pub fn plain_gpu() -> &'static Gpu {
    static GPU: OnceLock<Gpu> = OnceLock::new();
    GPU.get_or_init(|| Gpu::with_options(&GpuOptions { no_subgroups: true, ..Default::default() }).unwrap())
}

/// Those whose kernels for matrix units run: one that emulates them, and one that has them, where there are any. An
/// adapter without f16 has neither.
pub fn matrix_gpus() -> &'static [Gpu] {
    static GPUS: OnceLock<Vec<Gpu>> = OnceLock::new();
    GPUS.get_or_init(|| {
        let emulated = GpuOptions { emulated_matrices: true, ..Default::default() };
        let real = GpuOptions { cooperative_matrices: true, ..Default::default() };
        let needed =
            [wgpu::Features::SHADER_F16, wgpu::Features::SHADER_F16 | wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX];
        let gpus = [emulated, real].into_iter().zip(needed).map(|(options, needed)| {
            let gpu = Gpu::with_options(&options).unwrap();
            gpu.device().features().contains(needed).then_some(gpu)
        });
        gpus.flatten().collect()
    })
}

/// How many random cases an operator gets.
pub fn case_count(default: usize) -> usize {
    match std::env::var("CONTINUOUS_ATTENTION_CASES") {
        Ok(count) => count.parse().expect("CONTINUOUS_ATTENTION_CASES is a number"),
        Err(_) => default,
    }
}

/// Fails with `label` unless `got` is as good as `limit` demands.
pub fn judge(label: &str, tensor: &str, got: &[f32], want: &[f64], limit: f64) {
    let scale = if tensor == "lse" { Scale::Lse } else { Scale::Tensor };
    let outcome = compare(got, want, limit, scale);
    let (rms, max) = (outcome.rms, outcome.max);
    println!("accuracy {tensor} rms/limit {:.4} rms {rms:.2e} max {max:.2e}: {label}", rms / limit);
    assert!(outcome.passed(), "{tensor}: {}\n  in {label}", outcome.failure.unwrap_or_default());
}

/// The bits of values, in which NaN equals itself and 0 does not equal −0.
pub fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// An input at an odd offset, with NaN on both sides: whatever is read there in error shows.
/// Rows of 8 elements or a multiple of it start where vectors can be read whole, others anywhere: kernels differ in that.
fn placed(offset: usize, shape: &[usize]) -> usize {
    if shape.len() == 4 && shape[3].is_multiple_of(8) { offset.next_multiple_of(4) } else { offset }
}

pub fn input(gpu: &Gpu, values: &[f32], shape: &[usize], offset: usize) -> TensorView {
    const BEHIND: usize = 300;
    let offset = placed(offset, shape);
    let mut padded = vec![f32::NAN; offset + values.len() + BEHIND];
    padded[offset..offset + values.len()].copy_from_slice(values);
    let tensor = gpu.upload(&padded, &[padded.len()]).unwrap();
    TensorView::new(tensor.buffer(), offset as u64, shape)
}

/// A range of a buffer full of NaN, between guard elements that nothing may touch.
pub struct Guarded {
    tensor: Tensor,
    start: usize,
    shape: Vec<usize>,
}

impl Guarded {
    /// Guards behind the range: more than the tile that a kernel without a bound would write too much.
    const BEHIND: usize = 4099;
    /// Elements before an output: neither at an offset that can be bound nor at a multiple of a tile.
    pub const ODD: usize = 67;
    /// Elements before a workspace, whose offset has to be aligned.
    pub const ALIGNED: usize = 192;

    pub fn new(gpu: &Gpu, start: usize, shape: &[usize]) -> Self {
        let start = placed(start, shape);
        let count: usize = shape.iter().product();
        let mut content: Vec<f32> = (0..start + count + Self::BEHIND).map(guard).collect();
        content[start..start + count].fill(f32::NAN);
        let tensor = gpu.upload(&content, &[content.len()]).unwrap();
        Guarded { tensor, start, shape: shape.to_vec() }
    }

    /// As [`Guarded::new`], but holding `values`.
    pub fn with(gpu: &Gpu, start: usize, shape: &[usize], values: &[f32]) -> Self {
        let guarded = Self::new(gpu, start, shape);
        gpu.queue().write_buffer(guarded.tensor.buffer(), guarded.start as u64 * 4, bytemuck::cast_slice(values));
        guarded
    }

    pub fn view(&self) -> TensorView {
        TensorView::new(self.tensor.buffer(), self.start as u64, &self.shape)
    }

    pub fn buffer(&self) -> &wgpu::Buffer {
        self.tensor.buffer()
    }

    /// The range, once every guard was found intact.
    pub fn read(&self, gpu: &Gpu, label: &str) -> Vec<f32> {
        let content = gpu.read(&self.tensor).unwrap();
        let end = self.start + self.shape.iter().product::<usize>();
        for (at, value) in content.iter().enumerate() {
            let inside = (self.start..end).contains(&at);
            assert!(
                inside || value.to_bits() == guard(at).to_bits(),
                "element {at} outside of {}..{end} was overwritten with {value} in {label}",
                self.start
            );
        }
        content[self.start..end].to_vec()
    }
}

/// A value of its own for every guard element.
fn guard(at: usize) -> f32 {
    f32::from_bits(0x4b00_0000 + at as u32)
}

#[test]
#[should_panic(expected = "element 66 outside of 67..77 was overwritten")]
fn a_write_before_the_range_is_noticed() {
    let output = Guarded::new(gpu(), Guarded::ODD, &[2, 5]);
    gpu().queue().write_buffer(output.buffer(), 66 * 4, bytemuck::bytes_of(&1f32));
    output.read(gpu(), "a proof");
}

#[test]
#[should_panic(expected = "element 77 outside of 67..77 was overwritten")]
fn a_write_behind_the_range_is_noticed() {
    let output = Guarded::new(gpu(), Guarded::ODD, &[2, 5]);
    gpu().queue().write_buffer(output.buffer(), 77 * 4, bytemuck::bytes_of(&f32::NAN));
    output.read(gpu(), "a proof");
}

#[test]
#[should_panic(expected = "element 0 is NaN")]
fn an_element_that_was_not_written_is_noticed() {
    let output = Guarded::new(gpu(), Guarded::ODD, &[1]).read(gpu(), "a proof");
    judge("a proof", "out", &output, &[0.0], forward_limit());
}
