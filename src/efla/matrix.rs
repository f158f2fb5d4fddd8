//! The forward pass on matrix units.

use super::EflaTensors;
use super::call::EflaParams;
use super::forward::{DECAY, GRID, INVERSE, OUTPUT, PREPARE, TILE, UPDATES};
use crate::gpu::Matrices;
use crate::kernel::suits_lanes;
use crate::shader::{Binding, Constants, File, Kernel, input, output, wgsl, workspace};
use crate::tensor::DType;

const MATRIX: File = wgsl!("shared/efla_matrix.wgsl");

const PREPARE_BINDINGS: &[Binding] = &[
    input("k").halves(),
    input("v").halves(),
    workspace("gates"),
    workspace("w"),
    workspace("u"),
    input("table").words(),
];

const OUTPUT_BINDINGS: &[Binding] = &[
    input("q").halves(),
    input("k").halves(),
    workspace("gates"),
    workspace("u"),
    workspace("states"),
    output("out").stored(),
    input("table").words(),
];

/// The kernel with one of the two files that define products.
macro_rules! prepare {
    ($name:literal, $products:literal) => {
        Kernel {
            name: $name,
            files: &[
                wgsl!("shared/matrix_tiles.wgsl"),
                wgsl!($products),
                GRID,
                TILE,
                DECAY,
                MATRIX,
                INVERSE,
                wgsl!("efla_prepare_matrix.wgsl"),
            ],
            params: &EflaParams::LAYOUT,
            bindings: PREPARE_BINDINGS,
        }
    };
}

macro_rules! output {
    ($name:literal, $products:literal) => {
        Kernel {
            name: $name,
            files: &[
                wgsl!("shared/matrix_tiles.wgsl"),
                wgsl!($products),
                GRID,
                TILE,
                DECAY,
                MATRIX,
                UPDATES,
                wgsl!("efla_output_matrix.wgsl"),
            ],
            params: &EflaParams::LAYOUT,
            bindings: OUTPUT_BINDINGS,
        }
    };
}

pub(crate) static PREPARE_MATRIX: Kernel = prepare!("efla_prepare_matrix", "shared/matrix.wgsl");
pub(crate) static PREPARE_EMULATED: Kernel = prepare!("efla_prepare_matrix_emulated", "shared/matrix_emulated.wgsl");
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
    let kernel = match (general.name == PREPARE.name, matrices.emulated) {
        (true, false) => &PREPARE_MATRIX,
        (true, true) => &PREPARE_EMULATED,
        (false, false) => &OUTPUT_MATRIX,
        (false, true) => &OUTPUT_EMULATED,
    };
    let own = vec![("SUBGROUP", matrices.subgroup), ("TILES", CHUNK as u32 / 16)];
    (kernel, [own, constants].concat())
}

/// Whether a chunk and tensors are those it multiplies: f16, in whole vectors, as rounding an out of f32 would show.
pub(super) fn suits(chunk: usize, tensors: &EflaTensors) -> bool {
    chunk == CHUNK && tensors.out.dtype() == DType::F16 && suits_lanes(&[&tensors.q, &tensors.k, &tensors.out])
}

/// Whether there is a kernel for a general one's work on tensors that suit.
pub(super) fn multiplies(general: &Kernel, tensors: &EflaTensors) -> bool {
    general.name == OUTPUT.name || general.name == PREPARE.name && suits_lanes(&[&tensors.v, &tensors.k])
}
