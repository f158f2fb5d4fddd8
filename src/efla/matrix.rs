//! The forward pass on matrix units.

use super::EflaTensors;
use super::call::EflaParams;
use super::forward::{DECAY, GRID, OUTPUT, TILE, UPDATES};
use crate::gpu::Matrices;
use crate::kernel::suits_lanes;
use crate::shader::{Binding, Constants, Kernel, input, output, wgsl, workspace};
use crate::tensor::DType;

const BINDINGS: &[Binding] = &[
    input("q").halves(),
    input("k").halves(),
    workspace("gates"),
    workspace("u"),
    workspace("states"),
    output("out").stored(),
    input("table").words(),
];

/// The kernel with one of the two files that define products.
macro_rules! output {
    ($name:literal, $products:literal) => {
        Kernel {
            name: $name,
            files: &[wgsl!($products), GRID, TILE, DECAY, UPDATES, wgsl!("efla_output_matrix.wgsl")],
            params: &EflaParams::LAYOUT,
            bindings: BINDINGS,
        }
    };
}

pub(crate) static OUTPUT_MATRIX: Kernel = output!("efla_output_matrix", "shared/matrix.wgsl");
pub(crate) static OUTPUT_EMULATED: Kernel = output!("efla_output_matrix_emulated", "shared/matrix_emulated.wgsl");

/// Their chunk length: both halves of every operand have to fit into workgroup memory.
pub(super) const CHUNK: usize = 32;

/// What does a general kernel's work, and its constants.
pub(crate) fn kernel(
    matrices: Matrices,
    general: &'static Kernel,
    constants: Constants,
) -> (&'static Kernel, Constants) {
    if general.name != OUTPUT.name {
        return (general, constants);
    }
    let own = vec![("SUBGROUP", matrices.subgroup), ("TILES", CHUNK as u32 / 16)];
    (if matrices.emulated { &OUTPUT_EMULATED } else { &OUTPUT_MATRIX }, [own, constants].concat())
}

/// Whether a chunk and tensors are those it multiplies: f16, in whole vectors, as rounding an out of f32 would show.
pub(super) fn suits(chunk: usize, tensors: &EflaTensors) -> bool {
    chunk == CHUNK && tensors.out.dtype() == DType::F16 && suits_lanes(&[&tensors.q, &tensors.k, &tensors.out])
}
