//! Rotary position embedding.

use std::f64::consts::TAU;

use crate::attention::MAX_DIM;
use crate::error::{Error, Result};
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, check_bindings, params_buffer};
use crate::piece::Piece;
use crate::shader::{Kernel, input, output, params, wgsl};
use crate::tensor::{TensorView, check_longest, check_overlaps};

params! {
    /// Parameters of `rotary`; the vectors are [`TensorView::layout`]s.
    RotaryParams {
        x: [u32; 4],
        out: [u32; 4],
        /// The batch's stride is 0 if all batches share their positions.
        positions: [u32; 4],
        heads: u32,
        tokens: u32,
        dim: u32,
        rotary_dim: u32,
        /// batch · heads · tokens
        rows: u32,
        /// Groups of 4 columns of a row.
        quads: u32,
        /// Position of the first token.
        offset: u32,
        half_split: u32,
        /// Turn back.
        inverse: u32,
        has_positions: u32,
        /// x is out, and read there.
        in_place: u32,
        unused: u32,
    }
}

pub(crate) static ROTARY: Kernel = Kernel {
    name: "rotary",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("rotary.wgsl")],
    params: &RotaryParams::LAYOUT,
    bindings: &[input("x").stored(), input("positions"), input("frequencies"), output("out").stored()],
};

/// Invocations of a workgroup, each with 4 columns of a row.
const THREADS: u64 = 64;

/// Which two columns of a row turn together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Pairing {
    /// Neighbours: pair i is columns 2i and 2i + 1 (RoFormer, GPT-J).
    #[default]
    Interleaved,
    /// Halves: pair i is columns i and i + rotary_dim/2 (GPT-NeoX, Llama in most libraries).
    HalfSplit,
}

/// What a rotary operator computes; fixed when it is created.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RotaryConfig {
    /// D, the length of a row: 1 to 256.
    pub dim: usize,
    /// Leading columns that turn, an even number; the others are copied. D when absent.
    pub rotary_dim: Option<usize>,
    /// Pair i turns by base^(−2i/rotary_dim) per unit of position; at least 1, default 10 000.
    pub base: f64,
    /// Neighbours (default) or halves.
    pub pairing: Pairing,
}

impl Default for RotaryConfig {
    fn default() -> Self {
        RotaryConfig { dim: 64, rotary_dim: None, base: 10_000.0, pairing: Pairing::default() }
    }
}

/// Sizes and place of one rotary call.
///
/// | tensor | shape |
/// |---|---|
/// | x, out, d_out, d_x | `[batch, heads, tokens, dim]` |
/// | positions | `[batch or 1, tokens]` |
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RotaryShape {
    /// B.
    pub batch: usize,
    /// H.
    pub heads: usize,
    /// T.
    pub tokens: usize,
    /// Position of the first token (decoding with a cache: the tokens already there). 0 if the call has positions.
    pub offset: u32,
}

impl RotaryConfig {
    /// Columns that turn.
    pub fn rotary_dim(&self) -> usize {
        self.rotary_dim.unwrap_or(self.dim)
    }

    /// Refuses what no shape could make right.
    pub fn validate(&self) -> Result<()> {
        if !(1..=MAX_DIM).contains(&self.dim) {
            return Err(Error::argument("dim", self.dim, format!("1 to {MAX_DIM}")));
        }
        let rotary_dim = self.rotary_dim();
        if !rotary_dim.is_multiple_of(2) || !(2..=self.dim).contains(&rotary_dim) {
            return Err(Error::argument("rotary_dim", rotary_dim, format!("an even number, 2 to dim = {}", self.dim)));
        }
        if !self.base.is_finite() || self.base < 1.0 {
            return Err(Error::argument("base", self.base, "a finite number, at least 1"));
        }
        Ok(())
    }
}

impl RotaryShape {
    fn of(name: &str, x: &TensorView, offset: u32) -> Result<Self> {
        match *x.shape() {
            [batch, heads, tokens, _] => Ok(RotaryShape { batch, heads, tokens, offset }),
            ref shape => Err(Error::argument(name, format!("shape {shape:?}"), "[batch, heads, tokens, dim]")),
        }
    }

    /// Refuses positions beyond 32 bits.
    pub fn validate(&self) -> Result<()> {
        if (self.tokens as u64).saturating_add(self.offset.into()) > 1 << 32 {
            let needed = format!("2³² − tokens = 2³² − {} at most", self.tokens);
            return Err(Error::argument("offset", self.offset, needed));
        }
        Ok(())
    }
}

/// The tensors of one rotary call, in the shapes of [`RotaryShape`]; rows contiguous. `out` may be the very range of `x`,
/// but may not overlap anything otherwise.
#[derive(Debug, Clone)]
pub struct RotaryTensors {
    /// Queries or keys, of any storage type.
    pub x: TensorView,
    /// Written: x, turned. Its storage type may be another.
    pub out: TensorView,
    /// f32 positions, time stamps for instance; offset + 0, 1, … when absent. A token whose position is not finite or
    /// not below 2³² in size turns to NaN.
    pub positions: Option<TensorView>,
}

impl RotaryTensors {
    /// A call whose positions are the numbers of the tokens.
    pub fn new(x: TensorView, out: TensorView) -> Self {
        RotaryTensors { x, out, positions: None }
    }

    /// The sizes that x states.
    ///
    /// # Errors
    /// [`Error::Argument`] when it has not four dimensions.
    pub fn shape(&self, offset: u32) -> Result<RotaryShape> {
        RotaryShape::of("x", &self.x, offset)
    }
}

/// The tensors of a rotary call's backward call. `d_x` may be the very range of `d_out`, but may not overlap anything
/// otherwise.
#[derive(Debug, Clone)]
pub struct RotaryGradients {
    /// Gradient of out.
    pub d_out: TensorView,
    /// Written: gradient of x.
    pub d_x: TensorView,
    /// Positions, as in the forward call.
    pub positions: Option<TensorView>,
}

impl RotaryGradients {
    /// The sizes that d_out states.
    ///
    /// # Errors
    /// [`Error::Argument`] when it has not four dimensions.
    pub fn shape(&self, offset: u32) -> Result<RotaryShape> {
        RotaryShape::of("d_out", &self.d_out, offset)
    }
}

/// Rotary position embedding: pair i of a row at position p turns by the angle p · base^(−2i/rotary_dim), so that the
/// product of a query and a key depends on the distance of their positions.
///
/// (x_a, x_b) → (x_a cos θ − x_b sin θ, x_a sin θ + x_b cos θ). The gradient of x is the gradient of out, turned back;
/// nothing is kept from the forward call. Source: *RoFormer* (arXiv 2104.09864).
///
/// Angles are reduced in fixed point: against the exact angle of the position in float64 they are off by 2⁻²⁸ and
/// position · 2⁻⁵¹ at most, for integer and for real-valued positions: to f32 no position up to 2²⁴ differs from another.
/// What a real-valued position lost when it was rounded to f32 (2⁻²⁴ of its size) is the caller's: counting time from a
/// near origin keeps it small.
///
/// Cheap to clone. [`Rotary::plan`] → [`RotaryPlan::bind`] → [`Call::record`](crate::Call::record), or [`Rotary::forward`].
#[derive(Debug, Clone)]
pub struct Rotary {
    gpu: Gpu,
    config: RotaryConfig,
    /// [`frequency_digits`] of every pair.
    frequencies: TensorView,
}

/// base^(−2i/rotary_dim)/2π of every pair, in turns: 64-bit fractions as digits of 16 bits, the lowest first.
fn frequency_digits(config: &RotaryConfig) -> Vec<f32> {
    let rotary_dim = config.rotary_dim();
    let fraction = |pair: usize| {
        let turns = config.base.powf(-2.0 * pair as f64 / rotary_dim as f64) / TAU;
        // Below 2⁶²: no frequency is above 1/2π.
        (turns * 2f64.powi(64)).round() as u64
    };
    let digits = |fraction: u64| [0, 16, 32, 48].map(|shift| f32::from((fraction >> shift) as u16));
    (0..rotary_dim / 2).flat_map(|pair| digits(fraction(pair))).collect()
}

impl Rotary {
    /// Validates the configuration and compiles its kernel.
    ///
    /// # Errors
    /// [`Error::Argument`] for a configuration that can't be, [`Error::Gpu`] when the kernel doesn't compile.
    pub fn new(gpu: &Gpu, config: RotaryConfig) -> Result<Self> {
        config.validate()?;
        gpu.precompile(&ROTARY, Vec::new(), |_| config.dim)?;
        let digits = frequency_digits(&config);
        let frequencies = gpu.upload(&digits, &[digits.len()])?.view();
        Ok(Rotary { gpu: gpu.clone(), config, frequencies })
    }

    /// The configuration.
    pub fn config(&self) -> &RotaryConfig {
        &self.config
    }

    /// The device it runs on.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Validates sizes. One plan serves forward and backward calls.
    ///
    /// # Errors
    /// [`Error::Argument`] for positions beyond 32 bits, [`Error::Limit`] for sizes over the device's limits.
    pub fn plan(&self, shape: &RotaryShape) -> Result<RotaryPlan> {
        let RotaryShape { batch, heads, tokens, .. } = *shape;
        check_longest(&[("batch", batch), ("heads", heads), ("tokens", tokens)])?;
        shape.validate()?;
        Ok(RotaryPlan { rotary: self.clone(), shape: *shape })
    }

    /// Plans, binds and records a forward call in a compute pass of its own; the first token is at position `offset`.
    ///
    /// # Errors
    /// As [`Rotary::plan`] and [`RotaryPlan::bind`]; nothing is recorded then.
    pub fn forward(&self, encoder: &mut wgpu::CommandEncoder, offset: u32, tensors: &RotaryTensors) -> Result<()> {
        self.plan(&tensors.shape(offset)?)?.bind(tensors)?.encode(encoder);
        Ok(())
    }

    /// Plans, binds and records a backward call in a compute pass of its own.
    ///
    /// # Errors
    /// As [`Rotary::plan`] and [`RotaryPlan::bind_backward`]; nothing is recorded then.
    pub fn backward(&self, encoder: &mut wgpu::CommandEncoder, offset: u32, tensors: &RotaryGradients) -> Result<()> {
        self.plan(&tensors.shape(offset)?)?.bind_backward(tensors)?.encode(encoder);
        Ok(())
    }
}

/// A validated call of given sizes and place, from [`Rotary::plan`]. It needs no workspace.
#[derive(Debug, Clone)]
pub struct RotaryPlan {
    rotary: Rotary,
    shape: RotaryShape,
}

impl RotaryPlan {
    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor of the wrong shape or type, in a buffer that is too small or lacks usage STORAGE,
    /// for an output that overlaps another tensor without being in place, and for positions in a plan with an offset;
    /// [`Error::Limit`] for one over the device's limits; [`Error::Gpu`] when the graphics stack refuses a buffer or a
    /// pipeline.
    pub fn bind(&self, tensors: &RotaryTensors) -> Result<Call> {
        self.turn(("x", &tensors.x), ("out", &tensors.out), tensors.positions.as_ref(), false)
    }

    /// As [`RotaryPlan::bind`], for the gradients.
    ///
    /// # Errors
    /// As [`RotaryPlan::bind`].
    pub fn bind_backward(&self, tensors: &RotaryGradients) -> Result<Call> {
        self.turn(("d_out", &tensors.d_out), ("d_x", &tensors.d_x), tensors.positions.as_ref(), true)
    }

    fn turn(
        &self,
        x: (&'static str, &TensorView),
        out: (&'static str, &TensorView),
        positions: Option<&TensorView>,
        inverse: bool,
    ) -> Result<Call> {
        self.rotary.gpu.catching("binding rotary", || self.turn_uncaught(x, out, positions, inverse))?
    }

    fn turn_uncaught(
        &self,
        (x_name, x): (&'static str, &TensorView),
        (out_name, out): (&'static str, &TensorView),
        positions: Option<&TensorView>,
        inverse: bool,
    ) -> Result<Call> {
        let Rotary { gpu, config, .. } = &self.rotary;
        let limits = gpu.limits();
        let RotaryShape { batch, heads, tokens, offset } = self.shape;
        let shape = [batch, heads, tokens, config.dim];
        x.check_stored(x_name, &shape)?;
        out.check_stored_output(out_name, &shape)?;
        let in_place = x.is_same(out);
        let mut inputs = if in_place { vec![] } else { vec![(x_name, x)] };
        if let Some(positions) = positions {
            let is_shared = positions.shape().first() == Some(&1);
            positions.check("positions", &[if is_shared { 1 } else { batch }, tokens])?;
            if offset != 0 {
                let needed = format!("none, since the plan has offset {offset}");
                return Err(Error::argument("positions", "a tensor", needed));
            }
            inputs.push(("positions", positions));
        }
        check_overlaps(&[(out_name, out)], &inputs)?;

        let mut call = Call::default();
        let fits = |piece: &Piece| check_bindings([(x_name, &piece.of(x, 1)?), (out_name, &piece.of(out, 1)?)], limits);
        for piece in Piece::whole(batch, heads).split(&fits)? {
            let (x, out) = (piece.of(x, 1)?, piece.of(out, 1)?);
            let positions = match positions {
                Some(positions) if positions.shape()[0] > 1 => piece.of_batch(&Some(positions.clone()))?,
                positions => positions.cloned(),
            };
            self.push(&mut call, &x, &out, positions.as_ref(), inverse)?;
        }
        Ok(call)
    }

    /// One dispatch, of some sequences or heads.
    fn push(
        &self,
        call: &mut Call,
        x: &TensorView,
        out: &TensorView,
        positions: Option<&TensorView>,
        inverse: bool,
    ) -> Result<()> {
        let Rotary { gpu, config, frequencies } = &self.rotary;
        let limits = gpu.limits();
        let RotaryShape { tokens, offset, .. } = self.shape;
        let (batch, heads) = (x.shape()[0], x.shape()[1]);
        let in_place = x.is_same(out);
        let mut positions_layout = positions.map_or([0; 4], |positions| positions.layout(limits));
        if positions.is_some_and(|positions| positions.shape()[0] == 1) {
            // One row for all, or for a batch of one.
            positions_layout[1] = 0;
        }
        let quads = config.dim.div_ceil(4) as u32;
        // Every row has an element of out, of which there are at most 2³¹.
        let rows = (batch as u64 * heads as u64).saturating_mul(tokens as u64);
        let params = RotaryParams {
            x: x.layout(limits),
            out: out.layout(limits),
            positions: positions_layout,
            heads: heads as u32,
            tokens: tokens as u32,
            dim: config.dim as u32,
            rotary_dim: config.rotary_dim() as u32,
            rows: rows as u32,
            quads,
            offset,
            half_split: u32::from(config.pairing == Pairing::HalfSplit),
            inverse: inverse.into(),
            has_positions: u32::from(positions.is_some()),
            in_place: in_place.into(),
            unused: 0,
        };
        let params = params_buffer(gpu, ROTARY.name, &params);
        let bound = |view: &TensorView| BoundRange::of_view(view, limits);
        let x = if in_place { None } else { bound(x) };
        let arguments = [x, positions.and_then(bound), bound(frequencies), bound(out)];
        call.push(gpu, &ROTARY, Vec::new(), &params, &arguments, rows.div_ceil(THREADS / u64::from(quads)))
    }
}
