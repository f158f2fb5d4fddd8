//! The forward pass: plan, bind, record.

use super::operands::{AttentionParams, BLOCK_K, BLOCK_Q, check_sizes, packed_elements};
use super::{Attention, AttentionShape, AttentionTensors, Method};
use crate::error::Result;
use crate::kernel::{BoundRange, Call, Part, WorkspaceLayout, params_buffer};
use crate::shader::{Constants, Kernel, input, output, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

pub(crate) static FORWARD: Kernel = Kernel {
    name: "attention_forward",
    files: &[
        wgsl!("shared/grid.wgsl"),
        wgsl!("shared/phi.wgsl"),
        wgsl!("shared/attention.wgsl"),
        wgsl!("attention_forward.wgsl"),
    ],
    params: &AttentionParams::LAYOUT,
    bindings: &[
        input("q").stored(),
        input("k").stored(),
        input("v").stored(),
        workspace("workspace"),
        output("out").stored(),
        output("lse"),
    ],
};

/// What is compiled into `attention_forward`.
pub(crate) fn constants(method: Method, value_dim: usize) -> Constants {
    vec![
        ("CONTINUOUS", u32::from(method == Method::Continuous)),
        ("BLOCK_Q", BLOCK_Q as u32),
        ("BLOCK_K", BLOCK_K as u32),
        ("VALUE_STAGES", value_dim.div_ceil(BLOCK_K) as u32),
    ]
}

/// A validated forward call of given sizes, from [`Attention::plan`].
#[derive(Debug, Clone)]
pub struct AttentionPlan {
    attention: Attention,
    shape: AttentionShape,
    workspace: WorkspaceLayout,
    packed: Part,
    /// Where an lse nobody asked for is bound.
    spare: Part,
}

impl AttentionPlan {
    pub(super) fn new(attention: &Attention, shape: &AttentionShape) -> Result<Self> {
        check_sizes(shape)?;
        let mut workspace = WorkspaceLayout::new(attention.gpu().limits());
        let packed = workspace.reserve("workspace of packed inputs", packed_elements(attention.config(), shape))?;
        let spare = workspace.reserve("workspace", 1)?;
        workspace.check()?;
        Ok(AttentionPlan { attention: attention.clone(), shape: *shape, workspace, packed, spare })
    }

    /// Bytes of device memory a call needs besides its tensors, whichever optional tensors it has.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`](crate::Error::Argument) for a tensor that is missing, superfluous, of the wrong shape, in
    /// a buffer that is too small or lacks usage STORAGE, or whose output overlaps another tensor;
    /// [`Error::Limit`](crate::Error::Limit) for one over the device's limits; [`Error::Gpu`](crate::Error::Gpu) when
    /// the graphics stack refuses a buffer or a pipeline.
    pub fn bind(&self, tensors: &AttentionTensors) -> Result<Call> {
        self.attention.gpu().catching("binding attention", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &AttentionTensors) -> Result<Call> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let AttentionShape { batch, heads, queries, .. } = self.shape;
        let operands = tensors.operands();
        let inputs = operands.check(config, &self.shape, limits)?;
        tensors.out.check_stored_output("out", &[batch, heads, queries, config.value_dim], limits)?;
        let mut outputs = vec![("out", &tensors.out)];
        if let Some(lse) = &tensors.lse {
            lse.check_output("lse", &[batch, heads, queries], limits)?;
            outputs.push(("lse", lse));
        }
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes())?;
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let packed_range = self.packed.of(&workspace);
        let packed = operands.pack(gpu, &mut call, &packed_range)?;
        let params = AttentionParams {
            out: tensors.out.layout(limits),
            lse: tensors.lse.as_ref().map_or([0; 4], |lse| lse.layout(limits)),
            has_lse: u32::from(tensors.lse.is_some()),
            ..operands.params(config, &self.shape, limits, packed)
        };
        let workgroups = u64::from(params.row_blocks) * heads as u64 * batch as u64;
        let params = params_buffer(gpu, FORWARD.name, &params);
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let arguments = [
            bound(&tensors.q),
            bound(&tensors.k),
            bound(&tensors.v),
            Some(packed_range),
            bound(&tensors.out),
            tensors.lse.as_ref().map_or_else(|| Some(self.spare.of(&workspace)), bound),
        ];
        call.push(gpu, &FORWARD, constants(config.method, config.value_dim), &params, &arguments, workgroups)?;
        Ok(call)
    }
}
