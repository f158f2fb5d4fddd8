//! Merge of partial results: plan, bind, record.

use super::MAX_DIM;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, check_bindings, params_buffer};
use crate::piece::Piece;
use crate::shader::{File, Kernel, input, output, params, wgsl};
use crate::tensor::{TensorView, check_longest, check_overlaps};

params! {
    /// Parameters of both kernels; the vectors are [`TensorView::layout`]s. Of the gradients, a is the side whose
    /// gradients go to `out` and `lse`.
    MergeParams {
        out_a: [u32; 4],
        lse_a: [u32; 4],
        out_b: [u32; 4],
        lse_b: [u32; 4],
        out: [u32; 4],
        lse: [u32; 4],
        d_out: [u32; 4],
        d_lse: [u32; 4],
        heads: u32,
        queries: u32,
        value_dim: u32,
        /// batch · heads · queries
        rows: u32,
        /// Bit 0: out is out_a, bit 1: out is out_b.
        out_in_place: u32,
        lse_in_place: u32,
        has_d_lse: u32,
        unused: u32,
    }
}

const GRID: File = wgsl!("shared/grid.wgsl");
const EXP: File = wgsl!("shared/exp.wgsl");
const MERGE: File = wgsl!("shared/attention_merge.wgsl");

pub(crate) static FORWARD: Kernel = Kernel {
    name: "attention_merge",
    files: &[GRID, EXP, MERGE, wgsl!("attention_merge.wgsl")],
    params: &MergeParams::LAYOUT,
    bindings: &[
        input("out_a").stored(),
        input("lse_a"),
        input("out_b").stored(),
        input("lse_b"),
        output("out").stored(),
        output("lse"),
    ],
};

pub(crate) static BACKWARD: Kernel = Kernel {
    name: "attention_merge_backward",
    files: &[GRID, EXP, MERGE, wgsl!("attention_merge_backward.wgsl")],
    params: &MergeParams::LAYOUT,
    bindings: &[
        input("out_a").stored(),
        input("lse_a"),
        input("out_b").stored(),
        input("lse_b"),
        input("d_out").stored(),
        input("d_lse"),
        output("d_side").stored(),
        output("d_side_lse"),
    ],
};

/// Rows of a workgroup.
const ROWS: u64 = 8;

/// Sizes of one merge: out is `[batch, heads, queries, value_dim]`, lse `[batch, heads, queries]`, of either side, of
/// the result and of all gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MergeShape {
    /// B.
    pub batch: usize,
    /// H_q.
    pub heads: usize,
    /// T_q.
    pub queries: usize,
    /// D_v, 1 to 256.
    pub value_dim: usize,
}

impl MergeShape {
    fn of(name: &str, out: &TensorView) -> Result<Self> {
        match *out.shape() {
            [batch, heads, queries, value_dim] => Ok(MergeShape { batch, heads, queries, value_dim }),
            ref shape => Err(Error::argument(name, format!("shape {shape:?}"), "[batch, heads, queries, value_dim]")),
        }
    }

    fn out(&self) -> [usize; 4] {
        [self.batch, self.heads, self.queries, self.value_dim]
    }

    fn lse(&self) -> [usize; 3] {
        [self.batch, self.heads, self.queries]
    }
}

/// The tensors of one merge, in the shapes of [`MergeShape`]: every out of any storage type with contiguous rows, every
/// lse f32. They may be ranges of one buffer. `out` may be the very range of `out_a` or `out_b`, `lse` that of `lse_a` or
/// `lse_b`; otherwise outputs may not overlap anything.
#[derive(Debug, Clone)]
pub struct MergeTensors {
    /// Result of one stretch.
    pub out_a: TensorView,
    /// Its log-normaliser.
    pub lse_a: TensorView,
    /// Result of the other stretch.
    pub out_b: TensorView,
    /// Its log-normaliser.
    pub lse_b: TensorView,
    /// Written: result of both together.
    pub out: TensorView,
    /// Written: its log-normaliser.
    pub lse: TensorView,
}

impl MergeTensors {
    /// The sizes that out states.
    ///
    /// # Errors
    /// [`Error::Argument`] when it has not four dimensions.
    pub fn shape(&self) -> Result<MergeShape> {
        MergeShape::of("out", &self.out)
    }
}

/// The tensors of a merge's backward call: what was merged, the gradients of the result, and where those of either side
/// go. Outputs may not overlap anything.
#[derive(Debug, Clone)]
pub struct MergeGradients {
    /// Result of one stretch, as in the forward call.
    pub out_a: TensorView,
    /// Its log-normaliser.
    pub lse_a: TensorView,
    /// Result of the other stretch, as in the forward call.
    pub out_b: TensorView,
    /// Its log-normaliser.
    pub lse_b: TensorView,
    /// Gradient of out.
    pub d_out: TensorView,
    /// Gradient of lse; zeros when absent. Ignored where lse is −∞.
    pub d_lse: Option<TensorView>,
    /// Written: gradient of out_a.
    pub d_out_a: TensorView,
    /// Written: gradient of lse_a.
    pub d_lse_a: TensorView,
    /// Written: gradient of out_b.
    pub d_out_b: TensorView,
    /// Written: gradient of lse_b.
    pub d_lse_b: TensorView,
}

impl MergeGradients {
    /// The sizes that d_out states.
    ///
    /// # Errors
    /// [`Error::Argument`] when it has not four dimensions.
    pub fn shape(&self) -> Result<MergeShape> {
        MergeShape::of("d_out", &self.d_out)
    }
}

/// Joins the results of attention over two disjoint stretches of keys into that over both.
///
/// lse = ln(e^{lse_a} + e^{lse_b}), w_j = e^{lse_j − lse}, out = w_a out_a + w_b out_b. A side whose lse is −∞ is empty:
/// the result is the other side, whatever the empty one holds; of two empty ones it is out_a + out_b and −∞. For
/// [`Method::Continuous`](crate::Method) the later stretch starts from the last node of the earlier one, its
/// [`Sink::Given`](crate::Sink).
///
/// Backward: ∂lse/∂lse_j = w_j and ∂out/∂lse_j = w_j (out_j − out), hence d_out_j = w_j d_out and
/// d_lse_j = w_j (d_out·(out_j − out) + d_lse); since out_a − out = w_b (out_a − out_b), neither out nor lse is needed.
/// Where both sides are empty d_out_a = d_out_b = d_out; d_lse_j is 0 on every empty side.
///
/// [`Merge::plan`] → [`MergePlan::bind`] → [`Call::record`](crate::Call::record), or [`Merge::forward`].
#[derive(Debug, Clone)]
pub struct Merge {
    gpu: Gpu,
}

impl Merge {
    /// Compiles the kernel.
    ///
    /// # Errors
    /// [`Error::Gpu`] when it doesn't compile.
    pub fn new(gpu: &Gpu) -> Result<Self> {
        gpu.precompile(&FORWARD, Vec::new(), |_| 4)?;
        Ok(Merge { gpu: gpu.clone() })
    }

    /// Validates sizes.
    ///
    /// # Errors
    /// [`Error::Argument`] for a value_dim that can't be, [`Error::Limit`] for sizes over the device's limits.
    pub fn plan(&self, shape: &MergeShape) -> Result<MergePlan> {
        let MergeShape { batch, heads, queries, value_dim } = *shape;
        if !(1..=MAX_DIM).contains(&value_dim) {
            return Err(Error::argument("value_dim", value_dim, format!("1 to {MAX_DIM}")));
        }
        check_longest(&[("batch", batch), ("heads", heads), ("queries", queries)])?;
        Ok(MergePlan { gpu: self.gpu.clone(), shape: *shape })
    }

    /// Plans, binds and records a merge in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Merge::plan`] and [`MergePlan::bind`]; nothing is recorded then.
    pub fn forward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &MergeTensors) -> Result<()> {
        self.plan(&tensors.shape()?)?.bind(tensors)?.encode(encoder);
        Ok(())
    }

    /// Plans, binds and records a backward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Merge::plan`] and [`MergePlan::bind_backward`]; nothing is recorded then.
    pub fn backward(&self, encoder: &mut wgpu::CommandEncoder, tensors: &MergeGradients) -> Result<()> {
        self.plan(&tensors.shape()?)?.bind_backward(tensors)?.encode(encoder);
        Ok(())
    }
}

/// A validated merge of given sizes, from [`Merge::plan`]. It needs no workspace.
#[derive(Debug, Clone)]
pub struct MergePlan {
    gpu: Gpu,
    shape: MergeShape,
}

impl MergePlan {
    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of the wrong shape or type, in a buffer that is too small or lacks usage STORAGE,
    /// or whose output overlaps another tensor without being in place; [`Error::Limit`] for one over the device's limits;
    /// [`Error::Gpu`] when the graphics stack refuses a buffer or a pipeline.
    pub fn bind(&self, tensors: &MergeTensors) -> Result<Call> {
        self.gpu.catching("binding a merge", || self.bind_uncaught(tensors))?
    }

    /// As [`MergePlan::bind`], for the gradients. The kernel is compiled when a first one is bound.
    ///
    /// # Errors
    /// As [`MergePlan::bind`].
    pub fn bind_backward(&self, tensors: &MergeGradients) -> Result<Call> {
        self.gpu.catching("binding a merge's backward pass", || self.bind_backward_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &MergeTensors) -> Result<Call> {
        let limits = self.gpu.limits();
        let MergeTensors { out_a, lse_a, out_b, lse_b, out, lse } = tensors;
        out_a.check_stored("out_a", &self.shape.out())?;
        lse_a.check("lse_a", &self.shape.lse())?;
        out_b.check_stored("out_b", &self.shape.out())?;
        lse_b.check("lse_b", &self.shape.lse())?;
        out.check_stored_output("out", &self.shape.out())?;
        lse.check_output("lse", &self.shape.lse())?;
        let inputs = [("out_a", out_a, out), ("lse_a", lse_a, lse), ("out_b", out_b, out), ("lse_b", lse_b, lse)];
        let own_ranges = inputs.iter().filter(|(_, from, to)| !from.is_same(to));
        let own_ranges: Vec<_> = own_ranges.map(|&(name, from, _)| (name, from)).collect();
        check_overlaps(&[("out", out), ("lse", lse)], &own_ranges)?;

        let mut call = Call::default();
        let part = |piece: &Piece| -> Result<MergeTensors> {
            let of = |view: &TensorView| piece.of(view, 1);
            let (out_a, lse_a, out_b, lse_b) = (of(out_a)?, of(lse_a)?, of(out_b)?, of(lse_b)?);
            Ok(MergeTensors { out_a, lse_a, out_b, lse_b, out: of(out)?, lse: of(lse)? })
        };
        let fits = |piece: &Piece| {
            let MergeTensors { out_a, lse_a, out_b, lse_b, out, lse } = part(piece)?;
            let sides = [("out_a", &out_a), ("lse_a", &lse_a), ("out_b", &out_b), ("lse_b", &lse_b)];
            check_bindings(sides.into_iter().chain([("out", &out), ("lse", &lse)]), limits)
        };
        for piece in Piece::whole(self.shape.batch, self.shape.heads).split(&fits)? {
            self.part(&piece).push(&mut call, &part(&piece)?)?;
        }
        Ok(call)
    }

    /// One dispatch, of some sequences or heads.
    fn push(&self, call: &mut Call, tensors: &MergeTensors) -> Result<()> {
        let (gpu, limits) = (&self.gpu, self.gpu.limits());
        let MergeTensors { out_a, lse_a, out_b, lse_b, out, lse } = tensors;
        let in_place = |a: &TensorView, b: &TensorView, to| u32::from(a.is_same(to)) | u32::from(b.is_same(to)) << 1;
        let params = MergeParams {
            out_a: out_a.layout(limits),
            lse_a: lse_a.layout(limits),
            out_b: out_b.layout(limits),
            lse_b: lse_b.layout(limits),
            out: out.layout(limits),
            lse: lse.layout(limits),
            out_in_place: in_place(out_a, out_b, out),
            lse_in_place: in_place(lse_a, lse_b, lse),
            ..self.params()
        };
        let buffer = params_buffer(gpu, FORWARD.name, &params);
        // Outputs that are inputs too are read through their own binding.
        let bound = |from: &TensorView, to: &TensorView| {
            if from.is_same(to) { None } else { BoundRange::of_view(from, limits) }
        };
        let arguments = [
            bound(out_a, out),
            bound(lse_a, lse),
            bound(out_b, out),
            bound(lse_b, lse),
            BoundRange::of_view(out, limits),
            BoundRange::of_view(lse, limits),
        ];
        call.push(gpu, &FORWARD, Vec::new(), &buffer, &arguments, u64::from(params.rows).div_ceil(ROWS))
    }

    fn bind_backward_uncaught(&self, tensors: &MergeGradients) -> Result<Call> {
        let limits = self.gpu.limits();
        let MergeGradients { out_a, lse_a, out_b, lse_b, d_out, d_lse, d_out_a, d_lse_a, d_out_b, d_lse_b } = tensors;
        let mut inputs = vec![("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)];
        inputs.push(("d_out", d_out));
        inputs.extend(d_lse.iter().map(|d_lse| ("d_lse", d_lse)));
        for &(name, view) in &inputs {
            match name.contains("lse") {
                true => view.check(name, &self.shape.lse())?,
                false => view.check_stored(name, &self.shape.out())?,
            }
        }
        d_out_a.check_stored_output("d_out_a", &self.shape.out())?;
        d_lse_a.check_output("d_lse_a", &self.shape.lse())?;
        d_out_b.check_stored_output("d_out_b", &self.shape.out())?;
        d_lse_b.check_output("d_lse_b", &self.shape.lse())?;
        let outputs = [("d_out_a", d_out_a), ("d_lse_a", d_lse_a), ("d_out_b", d_out_b), ("d_lse_b", d_lse_b)];
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let part = |piece: &Piece| -> Result<MergeGradients> {
            let of = |view: &TensorView| piece.of(view, 1);
            Ok(MergeGradients {
                out_a: of(out_a)?,
                lse_a: of(lse_a)?,
                out_b: of(out_b)?,
                lse_b: of(lse_b)?,
                d_out: of(d_out)?,
                d_lse: d_lse.as_ref().map(of).transpose()?,
                d_out_a: of(d_out_a)?,
                d_lse_a: of(d_lse_a)?,
                d_out_b: of(d_out_b)?,
                d_lse_b: of(d_lse_b)?,
            })
        };
        let fits = |piece: &Piece| {
            let MergeGradients { out_a, lse_a, out_b, lse_b, d_out, d_lse, d_out_a, d_lse_a, d_out_b, d_lse_b } =
                part(piece)?;
            let inputs = [("out_a", &out_a), ("lse_a", &lse_a), ("out_b", &out_b), ("lse_b", &lse_b)];
            let outputs = [("d_out_a", &d_out_a), ("d_lse_a", &d_lse_a), ("d_out_b", &d_out_b), ("d_lse_b", &d_lse_b)];
            let sides = inputs.into_iter().chain(outputs).chain([("d_out", &d_out)]);
            check_bindings(sides.chain(d_lse.iter().map(|d_lse| ("d_lse", d_lse))), limits)
        };
        for piece in Piece::whole(self.shape.batch, self.shape.heads).split(&fits)? {
            self.part(&piece).push_backward(&mut call, &part(&piece)?)?;
        }
        Ok(call)
    }

    /// Two dispatches, of some sequences or heads.
    fn push_backward(&self, call: &mut Call, tensors: &MergeGradients) -> Result<()> {
        let (gpu, limits) = (&self.gpu, self.gpu.limits());
        let MergeGradients { out_a, lse_a, out_b, lse_b, d_out, d_lse, d_out_a, d_lse_a, d_out_b, d_lse_b } = tensors;
        // One side at a time: both at once would be ten buffers.
        let (a, b) = ((out_a, lse_a), (out_b, lse_b));
        for (own, other, to) in [(a, b, (d_out_a, d_lse_a)), (b, a, (d_out_b, d_lse_b))] {
            let params = MergeParams {
                out_a: own.0.layout(limits),
                lse_a: own.1.layout(limits),
                out_b: other.0.layout(limits),
                lse_b: other.1.layout(limits),
                out: to.0.layout(limits),
                lse: to.1.layout(limits),
                d_out: d_out.layout(limits),
                d_lse: d_lse.as_ref().map_or([0; 4], |d_lse| d_lse.layout(limits)),
                has_d_lse: u32::from(d_lse.is_some()),
                ..self.params()
            };
            let buffer = params_buffer(gpu, BACKWARD.name, &params);
            let bound = |view: &TensorView| BoundRange::of_view(view, limits);
            let arguments = [
                bound(own.0),
                bound(own.1),
                bound(other.0),
                bound(other.1),
                bound(d_out),
                d_lse.as_ref().and_then(bound),
                bound(to.0),
                bound(to.1),
            ];
            call.push(gpu, &BACKWARD, Vec::new(), &buffer, &arguments, u64::from(params.rows).div_ceil(ROWS))?;
        }
        Ok(())
    }

    /// The plan of some sequences or heads.
    fn part(&self, piece: &Piece) -> MergePlan {
        let shape = MergeShape { batch: piece.batch.len(), heads: piece.heads.len(), ..self.shape };
        MergePlan { gpu: self.gpu.clone(), shape }
    }

    /// What does not depend on the tensors.
    fn params(&self) -> MergeParams {
        let MergeShape { batch, heads, queries, value_dim } = self.shape;
        MergeParams {
            heads: heads as u32,
            queries: queries as u32,
            value_dim: value_dim as u32,
            // Every row is an element of lse, of which there are fewer than 2³¹.
            rows: (batch as u64 * heads as u64).saturating_mul(queries as u64) as u32,
            ..Default::default()
        }
    }
}
