//! The forward pass on matrix units.

use super::AttentionTensors;
use super::operands::AttentionParams;
use crate::gpu::Matrices;
use crate::kernel::suits_lanes;
use crate::shader::{Binding, Constants, Kernel, input, output, wgsl, workspace};
use crate::tensor::DType;

const BINDINGS: &[Binding] = &[
    input("q").halves(),
    input("k").halves(),
    input("v").halves(),
    workspace("workspace"),
    output("out").stored(),
    output("lse"),
    input("table").words(),
];

/// The kernel with one of the two files that define products.
macro_rules! forward {
    ($name:literal, $products:literal) => {
        Kernel {
            name: $name,
            files: &[
                wgsl!("shared/matrix_tiles.wgsl"),
                wgsl!($products),
                wgsl!("shared/grid.wgsl"),
                wgsl!("shared/exp.wgsl"),
                wgsl!("shared/phi.wgsl"),
                wgsl!("shared/segment_weights.wgsl"),
                wgsl!("shared/attention.wgsl"),
                wgsl!("shared/attention_rows.wgsl"),
                wgsl!("attention_forward_matrix.wgsl"),
            ],
            params: &AttentionParams::LAYOUT,
            bindings: BINDINGS,
        }
    };
}

pub(crate) static FORWARD_MATRIX: Kernel = forward!("attention_forward_matrix", "shared/matrix.wgsl");
pub(crate) static FORWARD_EMULATED: Kernel =
    forward!("attention_forward_matrix_emulated", "shared/matrix_emulated.wgsl");

/// The kernel and its constants, from those of `attention_forward`.
pub(crate) fn kernel(matrices: Matrices, head_dim: usize, general: Constants) -> (&'static Kernel, Constants) {
    let own = vec![("SUBGROUP", matrices.subgroup), ("HEAD_STAGES", head_dim.div_ceil(32) as u32)];
    (if matrices.emulated { &FORWARD_EMULATED } else { &FORWARD_MATRIX }, [own, general].concat())
}

/// Whether the tensors are those it multiplies: f16, in whole vectors. A sink of another type would be rounded; and who
/// wants an out of f32 wants its precision, which weights rounded to f16 have not.
pub(super) fn suits(tensors: &AttentionTensors) -> bool {
    let sinks = [&tensors.sink_k, &tensors.sink_v];
    tensors.out.dtype() == DType::F16
        && suits_lanes(&[&tensors.q, &tensors.k, &tensors.v, &tensors.out])
        && sinks.iter().all(|sink| sink.as_ref().is_none_or(|sink| sink.dtype() == DType::F16))
}
