//! Copies on the device.

use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, check_bindings, params_buffer};
use crate::shader::{Kernel, input, output, params, wgsl};
use crate::tensor::{TensorView, check_overlaps};

params! {
    /// Parameters of `copy`.
    CopyParams {
        source: [u32; 4],
        destination: [u32; 4],
        /// Sizes n0, n1, n2, n3.
        shape: [u32; 4],
        /// Distance of neighbours along n3.
        source_step: u32,
        destination_step: u32,
        /// Groups of 4 columns of a row.
        quads: u32,
        /// n0 · n1 · n2
        rows: u32,
    }
}

pub(crate) static COPY: Kernel = Kernel {
    name: "copy",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("copy.wgsl")],
    params: &CopyParams::LAYOUT,
    bindings: &[input("source").stored(), output("destination").stored()],
};

impl Gpu {
    /// Records a copy of all elements of `from` into `to`, in a compute pass of its own: between any offsets and strides,
    /// converting between storage types. It appends to a cache of keys or values, say, which
    /// `gpu.copy(&mut encoder, &new_keys, &cache.narrow(2, length, new)?)?` does.
    ///
    /// Both have the same shape of at most four dimensions and any strides; neither buffer needs a COPY usage.
    ///
    /// # Errors
    /// As [`Gpu::bind_copy`]; nothing is recorded then.
    pub fn copy(&self, encoder: &mut wgpu::CommandEncoder, from: &TensorView, to: &TensorView) -> Result<()> {
        self.bind_copy(from, to)?.encode(encoder);
        Ok(())
    }

    /// Prepares a copy of `from` into `to`, to be recorded as often as you like. See [`Gpu::copy`].
    ///
    /// # Errors
    /// [`Error::Argument`] for tensors of different shapes or of more than four dimensions, in a buffer that is too small
    /// or lacks usage STORAGE, or if `to` overlaps itself or `from`; [`Error::Limit`] for one over the device's limits;
    /// [`Error::Gpu`] when the graphics stack refuses a buffer or the pipeline.
    pub fn bind_copy(&self, from: &TensorView, to: &TensorView) -> Result<Call> {
        self.catching("binding a copy", || self.bind_copy_uncaught(from, to))?
    }

    fn bind_copy_uncaught(&self, from: &TensorView, to: &TensorView) -> Result<Call> {
        if from.shape().len() > 4 {
            return Err(Error::argument("from", format!("shape {:?}", from.shape()), "at most four dimensions"));
        }
        from.check_strided("from", from.shape())?;
        to.check_strided_output("to", from.shape())?;
        check_overlaps(&[("to", to)], &[("from", from)])?;
        let mut call = Call::default();
        if !from.is_empty() {
            self.push_copy(&mut call, &from.four_dimensional(), &to.four_dimensional())?;
        }
        Ok(call)
    }

    /// One dispatch, or several where one binding is too small; rows stay whole.
    fn push_copy(&self, call: &mut Call, from: &TensorView, to: &TensorView) -> Result<()> {
        let limits = self.limits();
        if let Err(error) = check_bindings([("from", from), ("to", to)], limits) {
            // The dimension that reaches farthest: halves of another might be as large as the whole.
            let reach = |&dimension: &usize| {
                let stride = from.strides[dimension].max(to.strides[dimension]);
                (from.shape()[dimension] - 1).saturating_mul(stride)
            };
            let Some(dimension) = (0..3).filter(|dimension| reach(dimension) > 0).max_by_key(reach) else {
                return Err(error);
            };
            let size = from.shape()[dimension];
            for half in [0..size / 2, size / 2..size] {
                let part = |view: &TensorView| view.narrow(dimension, half.start, half.len());
                self.push_copy(call, &part(from)?, &part(to)?)?;
            }
            return Ok(());
        }
        let &[n0, n1, n2, n3] = from.shape() else { unreachable!("it was given four dimensions") };
        let step = |view: &TensorView| if n3 > 1 { view.strides[3] as u32 } else { 1 };
        // The elements of an output are distinct: they are fewer than 2³¹.
        let params = CopyParams {
            source: from.layout(limits),
            destination: to.layout(limits),
            shape: [n0, n1, n2, n3].map(|size| size as u32),
            source_step: step(from),
            destination_step: step(to),
            quads: n3.div_ceil(4) as u32,
            rows: (n0 * n1 * n2) as u32,
        };
        let workgroups = (u64::from(params.quads) * u64::from(params.rows)).div_ceil(64);
        let params = params_buffer(self, COPY.name, &params);
        let arguments = [BoundRange::of_view(from, limits), BoundRange::of_view(to, limits)];
        call.push(self, &COPY, Vec::new(), &params, &arguments, workgroups)
    }
}
