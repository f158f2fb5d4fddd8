//! The forward pass: plan, bind, record.

use super::{Attention, AttentionShape, AttentionTensors, Method, Sink};
use crate::error::{Error, Result};
use crate::kernel::{BoundRange, Call, WorkspaceLayout, params_buffer};
use crate::shader::{Kernel, input, output, params, wgsl, workspace};
use crate::tensor::{TensorView, check_overlaps};

params! {
    /// Parameters of `attention_forward`; `q` to `lse` are [`TensorView::layout`]s.
    AttentionParams {
        q: [u32; 4],
        k: [u32; 4],
        v: [u32; 4],
        out: [u32; 4],
        lse: [u32; 4],
        /// Workgroups that have work.
        workgroups: u32,
        row_blocks: u32,
        heads: u32,
        kv_heads: u32,
        /// Query heads per key/value head.
        group: u32,
        queries: u32,
        keys: u32,
        head_dim: u32,
        value_dim: u32,
        causal: u32,
        /// T_k − T_q.
        alignment: i32,
        /// Segments (tokens) that a row keeps, less the number a lone node has.
        window: i32,
        /// 0 with a sink, 1 without.
        first_node: i32,
        /// 0 zero, 1 first, 2 given, 3 none.
        sink: u32,
        sink_batch: u32,
        has_intervals: u32,
        has_lse: u32,
        packed_sink_k: u32,
        packed_sink_v: u32,
        packed_intervals: u32,
        scale: f32,
        unused0: u32,
        unused1: u32,
        unused2: u32,
    }
}

params! {
    /// Parameters of `pack`.
    PackParams {
        source: [u32; 4],
        /// Sizes n0, n1, n2 of the source; the fourth is unused.
        shape: [u32; 4],
        destination: u32,
        unused0: u32,
        unused1: u32,
        unused2: u32,
    }
}

pub(crate) static FORWARD: Kernel = Kernel {
    name: "attention_forward",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("shared/phi.wgsl"), wgsl!("attention_forward.wgsl")],
    params: &AttentionParams::LAYOUT,
    bindings: &[input("q"), input("k"), input("v"), workspace("packed"), output("out"), output("lse")],
};

pub(crate) static PACK: Kernel = Kernel {
    name: "pack",
    files: &[wgsl!("shared/grid.wgsl"), wgsl!("pack.wgsl")],
    params: &PackParams::LAYOUT,
    bindings: &[input("source"), workspace("packed")],
};

/// Query rows and nodes of a tile: 16 logits an invocation, 14 KiB of workgroup memory.
const BLOCK_Q: usize = 32;
const BLOCK_K: usize = 32;

/// What is compiled into `attention_forward`.
pub(crate) fn constants(method: Method, value_dim: usize) -> Vec<(&'static str, u32)> {
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
    packed_elements: u64,
    /// Where an lse nobody asked for may be bound.
    spare: u64,
}

impl AttentionPlan {
    pub(super) fn new(attention: &Attention, shape: &AttentionShape) -> Result<Self> {
        shape.validate()?;
        let config = attention.config();
        let AttentionShape { batch, heads, kv_heads, queries, keys } = *shape;
        for (name, size) in
            [("batch", batch), ("heads", heads), ("kv_heads", kv_heads), ("queries", queries), ("keys", keys)]
        {
            // Node and row numbers are 32-bit integers on the device.
            if size > (1 << 30) {
                let (argument, got) = (name.to_string(), size as u64);
                return Err(Error::Limit {
                    argument, got, limit_name: "2³⁰, the longest dimension", limit: 1 << 30
                });
            }
        }
        let (batch, kv_heads, keys) = (batch as u64, kv_heads as u64, keys as u64);
        let sinks = if config.sink == Sink::Given { batch.max(1) * kv_heads } else { 0 };
        let intervals = if config.method == Method::Continuous { batch.saturating_mul(keys) } else { 0 };
        let width = (config.head_dim + config.value_dim) as u64;
        let packed_elements = sinks.saturating_mul(width).saturating_add(intervals);
        let limits = attention.gpu().limits();
        let mut workspace = WorkspaceLayout::new(limits);
        workspace.reserve(packed_elements);
        let spare = workspace.reserve(1);
        let limit = limits.max_storage_buffer_binding_size;
        if workspace.bytes() > limit {
            let argument = "workspace, in bytes".to_string();
            let limit_name = "max_storage_buffer_binding_size";
            return Err(Error::Limit { argument, got: workspace.bytes(), limit_name, limit });
        }
        Ok(AttentionPlan { attention: attention.clone(), shape: *shape, workspace, packed_elements, spare })
    }

    /// Bytes of device memory a call needs besides its tensors, whichever optional tensors it has.
    pub fn workspace_bytes(&self) -> u64 {
        self.workspace.bytes()
    }

    /// Checks the tensors against the plan and prepares everything a recording needs.
    ///
    /// # Errors
    /// [`Error::Argument`] for a tensor that is missing, superfluous, of the wrong shape, in a buffer that is too
    /// small or lacks usage STORAGE, or whose output overlaps another tensor; [`Error::Limit`] for one over the
    /// device's limits; [`Error::Gpu`] when the graphics stack refuses a buffer or a pipeline.
    pub fn bind(&self, tensors: &AttentionTensors) -> Result<Call> {
        let gpu = self.attention.gpu();
        gpu.catching("binding attention", || self.bind_uncaught(tensors))?
    }

    fn bind_uncaught(&self, tensors: &AttentionTensors) -> Result<Call> {
        let gpu = self.attention.gpu();
        let (config, limits) = (self.attention.config(), gpu.limits());
        let AttentionShape { batch, heads, kv_heads, queries, keys } = self.shape;
        tensors.q.check("q", &[batch, heads, queries, config.head_dim], limits)?;
        tensors.k.check("k", &[batch, kv_heads, keys, config.head_dim], limits)?;
        tensors.v.check("v", &[batch, kv_heads, keys, config.value_dim], limits)?;
        tensors.out.check_output("out", &[batch, heads, queries, config.value_dim], limits)?;
        if let Some(lse) = &tensors.lse {
            lse.check_output("lse", &[batch, heads, queries], limits)?;
        }
        let mut inputs = vec![("q", &tensors.q), ("k", &tensors.k), ("v", &tensors.v)];
        let mut sink_batch = 1;
        for (name, sink, dim) in
            [("sink_k", &tensors.sink_k, config.head_dim), ("sink_v", &tensors.sink_v, config.value_dim)]
        {
            match (sink, config.sink == Sink::Given) {
                (Some(sink), true) => {
                    sink_batch = if sink.shape().first() == Some(&1) { 1 } else { batch };
                    sink.check(name, &[sink_batch, kv_heads, dim], limits)?;
                    inputs.push((name, sink));
                }
                (None, true) => return Err(Error::argument(name, "none", "a tensor, since the sink is Sink::Given")),
                (Some(_), false) => {
                    let needed = format!("none, since the sink is Sink::{:?}", config.sink);
                    return Err(Error::argument(name, "a tensor", needed));
                }
                (None, false) => {}
            }
        }
        if let (Some(sink_k), Some(sink_v)) = (&tensors.sink_k, &tensors.sink_v)
            && sink_k.shape()[0] != sink_v.shape()[0]
        {
            let got = format!("batch {}", sink_v.shape()[0]);
            return Err(Error::argument("sink_v", got, format!("batch {} like sink_k", sink_k.shape()[0])));
        }
        if let Some(intervals) = &tensors.intervals {
            if config.method == Method::Softmax {
                return Err(Error::argument("intervals", "a tensor", "none with Method::Softmax"));
            }
            intervals.check("intervals", &[batch, keys], limits)?;
            inputs.push(("intervals", intervals));
        }
        let mut outputs = vec![("out", &tensors.out)];
        outputs.extend(tensors.lse.as_ref().map(|lse| ("lse", lse)));
        let workspace = gpu.workspace(tensors.workspace.as_ref(), self.workspace_bytes())?;
        outputs.push(("workspace", &workspace));
        check_overlaps(&outputs, &inputs)?;

        let mut call = Call::default();
        let packed = gpu.part(&workspace, 0, self.packed_elements.max(1));
        let mut packed_end = 0;
        let mut pack = |view: &Option<TensorView>| -> Result<u32> {
            let destination = packed_end;
            if let Some(view) = view.as_ref().filter(|view| !view.is_empty()) {
                let layout = view.layout(limits);
                let (source, shape) = match *view.shape() {
                    [n1, n2] => ([layout[0], 0, layout[1], layout[2]], [1, n1, n2]),
                    [n0, n1, n2] => (layout, [n0, n1, n2]),
                    _ => return Err(Error::argument("pack", format!("{:?}", view.shape()), "2 or 3 dimensions")),
                };
                let elements = shape.iter().product::<usize>() as u64;
                let params = PackParams {
                    source,
                    shape: [shape[0] as u32, shape[1] as u32, shape[2] as u32, 0],
                    destination,
                    ..Default::default()
                };
                let params = params_buffer(gpu, PACK.name, &params);
                let arguments = [Some(BoundRange::of(view, limits)), Some(packed.clone())];
                call.push(gpu, &PACK, Vec::new(), &params, &arguments, elements.div_ceil(64))?;
                packed_end += elements as u32;
            }
            Ok(destination)
        };
        let packed_sink_k = pack(&tensors.sink_k)?;
        let packed_sink_v = pack(&tensors.sink_v)?;
        let packed_intervals = pack(&tensors.intervals)?;

        let row_blocks = queries.div_ceil(BLOCK_Q);
        let workgroups = row_blocks as u64 * heads as u64 * batch as u64;
        // An ordinary row's window counts tokens, of which a lone node is one; segments lie between nodes.
        let lone = usize::from(config.method == Method::Softmax);
        let params = AttentionParams {
            q: tensors.q.layout(limits),
            k: tensors.k.layout(limits),
            v: tensors.v.layout(limits),
            out: tensors.out.layout(limits),
            lse: tensors.lse.as_ref().map_or([0; 4], |lse| lse.layout(limits)),
            workgroups: workgroups as u32,
            row_blocks: row_blocks as u32,
            heads: heads as u32,
            kv_heads: kv_heads as u32,
            group: self.shape.group() as u32,
            queries: queries as u32,
            keys: keys as u32,
            head_dim: config.head_dim as u32,
            value_dim: config.value_dim as u32,
            causal: u32::from(config.causal),
            alignment: keys as i32 - queries as i32,
            window: config.window.map_or(keys + 1, |window| (window - lone).min(keys + 1)) as i32,
            first_node: i32::from(config.sink == Sink::None),
            sink: match config.sink {
                Sink::Zero => 0,
                Sink::First => 1,
                Sink::Given => 2,
                Sink::None => 3,
            },
            sink_batch: sink_batch as u32,
            has_intervals: u32::from(tensors.intervals.is_some()),
            has_lse: u32::from(tensors.lse.is_some()),
            packed_sink_k,
            packed_sink_v,
            packed_intervals,
            scale: config.scale() as f32,
            ..Default::default()
        };
        let params = params_buffer(gpu, FORWARD.name, &params);
        let bound = |view: &TensorView| (!view.is_empty()).then(|| BoundRange::of(view, limits));
        let lse = tensors.lse.as_ref().map(|lse| BoundRange::of(lse, limits));
        let arguments = [
            bound(&tensors.q),
            bound(&tensors.k),
            bound(&tensors.v),
            Some(packed),
            bound(&tensors.out),
            lse.or_else(|| Some(gpu.part(&workspace, self.spare, 1))),
        ];
        call.push(gpu, &FORWARD, constants(config.method, config.value_dim), &params, &arguments, workgroups)?;
        Ok(call)
    }
}
