//! Runs cases on the GPU, or on the float64 reference where that was asked for or is all there is.

use crate::exact;
use continuous_attention::case::{Case, CaseTensor, Operation};
use continuous_attention::half::{bf16, f16};
use continuous_attention::{
    AdapterChoice, Attention, AttentionConfig, AttentionGradients, AttentionShape, AttentionTensors, DType, Efla,
    EflaConfig, EflaGradients, EflaShape, EflaTensors, Error, Gpu, GpuOptions, Lengths, Result, Tensor, TensorView,
    wgpu,
};
use std::collections::BTreeMap;

/// What the user asked to compute on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Device {
    /// wgpu's adapter; the reference when there is none.
    #[default]
    Gpu,
    /// float64 on the CPU.
    Reference,
}

/// Tensors by their names in a case file.
pub type Tensors = BTreeMap<String, CaseTensor>;

/// The device that the jobs run on.
pub struct Engine {
    /// None: the reference.
    gpu: Option<Gpu>,
    name: String,
}

impl Engine {
    /// Opens `device`; `adapter` is a name or an index, as `info` lists them. A machine without any adapter gets the
    /// reference and is told so on stderr.
    ///
    /// # Errors
    /// Those of [`Gpu::with_options`], unless no adapter was asked for and there is none.
    pub fn open(device: Device, adapter: Option<&str>) -> Result<Engine> {
        const REFERENCE: &str = "the float64 reference on the CPU";
        if device == Device::Reference {
            return Ok(Engine { gpu: None, name: REFERENCE.into() });
        }
        let options = GpuOptions { adapter: adapter.map(AdapterChoice::from), ..GpuOptions::default() };
        let asked_for = adapter.is_some() || std::env::var_os("WGPU_ADAPTER_NAME").is_some_and(|name| !name.is_empty());
        match Gpu::with_options(&options) {
            Ok(gpu) => Ok(Engine { name: describe(&gpu.info()), gpu: Some(gpu) }),
            Err(error @ Error::NoAdapter { .. }) if !asked_for => {
                eprintln!("{error}\nGoing on with {REFERENCE}.");
                Ok(Engine { gpu: None, name: format!("{REFERENCE}, as there is no GPU adapter") })
            }
            Err(error) => Err(error),
        }
    }

    /// One line that says what the results were computed on.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether results come from the kernels, not from the reference.
    pub fn is_gpu(&self) -> bool {
        self.gpu.is_some()
    }

    /// Everything that the case asks for, by name: out and lse or final_state, and the gradients if it has d_out.
    pub fn compute(&self, case: &Case) -> Result<Tensors> {
        match (&self.gpu, &case.operation) {
            (None, _) => {
                let narrow = |(name, tensor): (String, exact::Exact)| {
                    let tensor = tensor.narrow(exact::stored(case, &name));
                    (name, tensor)
                };
                Ok(exact::compute(case)?.into_iter().map(narrow).collect())
            }
            (Some(gpu), Operation::Attention { config, shape, lengths, .. }) => {
                attention(gpu, case, config, shape, lengths)
            }
            (Some(gpu), Operation::Efla { config, shape, cu_seqlens, .. }) => {
                efla(gpu, case, config, shape, cu_seqlens.as_ref())
            }
        }
    }
}

/// Name, kind and driver of an adapter in one line.
fn describe(info: &wgpu::AdapterInfo) -> String {
    let wgpu::AdapterInfo { name, backend, driver, driver_info, .. } = info;
    format!("{name}, {}, {backend:?}, driver {driver} {driver_info}", kind(info.device_type)).trim_end().into()
}

/// The kind of an adapter in words.
pub fn kind(device_type: wgpu::DeviceType) -> &'static str {
    match device_type {
        wgpu::DeviceType::DiscreteGpu => "discrete GPU",
        wgpu::DeviceType::IntegratedGpu => "integrated GPU",
        wgpu::DeviceType::VirtualGpu => "virtual GPU",
        wgpu::DeviceType::Cpu => "software on the CPU",
        wgpu::DeviceType::Other => "of unknown kind",
    }
}

fn attention(
    gpu: &Gpu,
    case: &Case,
    config: &AttentionConfig,
    shape: &AttentionShape,
    lengths: &Lengths,
) -> Result<Tensors> {
    let AttentionShape { batch, heads, queries, .. } = *shape;
    let mut results = Results::new(gpu, case);
    let tensors = AttentionTensors {
        sink_k: input(gpu, case, "sink_k")?,
        sink_v: input(gpu, case, "sink_v")?,
        intervals: input(gpu, case, "intervals")?,
        lse: Some(results.add("lse", &[batch, heads, queries])?),
        lengths: lengths.clone(),
        ..AttentionTensors::new(
            needed_input(gpu, case, "q")?,
            needed_input(gpu, case, "k")?,
            needed_input(gpu, case, "v")?,
            results.add("out", &[batch, heads, queries, config.value_dim])?,
        )
    };
    // The library keeps compiled pipelines: another operator of the same kind costs a look-up.
    let operator = Attention::new(gpu, *config)?;
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    operator.forward(&mut encoder, &tensors)?;
    if let (Some(d_out), Some(lse)) = (input(gpu, case, "d_out")?, &tensors.lse) {
        let [d_q, d_k, d_v] = [("d_q", &tensors.q), ("d_k", &tensors.k), ("d_v", &tensors.v)]
            .map(|(name, of)| results.add(name, of.shape()));
        let mut optional =
            |name, of: &Option<TensorView>| of.as_ref().map(|of| results.add(name, of.shape())).transpose();
        let gradients = AttentionGradients {
            d_lse: input(gpu, case, "d_lse")?,
            d_sink_k: optional("d_sink_k", &tensors.sink_k)?,
            d_sink_v: optional("d_sink_v", &tensors.sink_v)?,
            d_intervals: optional("d_intervals", &tensors.intervals)?,
            ..AttentionGradients::new(&tensors, lse.clone(), d_out, [d_q?, d_k?, d_v?])
        };
        operator.backward(&mut encoder, &gradients)?;
    }
    gpu.queue().submit([encoder.finish()]);
    results.read()
}

fn efla(
    gpu: &Gpu,
    case: &Case,
    config: &EflaConfig,
    shape: &EflaShape,
    cu_seqlens: Option<&Vec<usize>>,
) -> Result<Tensors> {
    let EflaShape { batch, value_heads, tokens, .. } = *shape;
    let states = cu_seqlens.map_or(batch, |cu_seqlens| cu_seqlens.len() - 1);
    let state = [states, value_heads, config.key_dim, config.value_dim];
    let mut results = Results::new(gpu, case);
    let tensors = EflaTensors {
        cu_seqlens: cu_seqlens.cloned(),
        log_decay: input(gpu, case, "log_decay")?,
        initial_state: input(gpu, case, "initial_state")?,
        final_state: Some(results.add("final_state", &state)?),
        ..EflaTensors::new(
            needed_input(gpu, case, "q")?,
            needed_input(gpu, case, "k")?,
            needed_input(gpu, case, "v")?,
            needed_input(gpu, case, "beta")?,
            results.add("out", &[batch, value_heads, tokens, config.value_dim])?,
        )
    };
    let operator = Efla::new(gpu, *config)?;
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    operator.forward(&mut encoder, &tensors)?;
    if let Some(d_out) = input(gpu, case, "d_out")? {
        let [d_q, d_k, d_v, d_beta] =
            [("d_q", &tensors.q), ("d_k", &tensors.k), ("d_v", &tensors.v), ("d_beta", &tensors.beta)]
                .map(|(name, of)| results.add(name, of.shape()));
        let gradients = EflaGradients {
            d_final_state: input(gpu, case, "d_final_state")?,
            d_log_decay: tensors.log_decay.as_ref().map(|of| results.add("d_log_decay", of.shape())).transpose()?,
            d_initial_state: Some(results.add("d_initial_state", &state)?),
            ..EflaGradients::new(&tensors, d_out, [d_q?, d_k?, d_v?, d_beta?])
        };
        operator.backward(&mut encoder, &gradients)?;
    }
    gpu.queue().submit([encoder.finish()]);
    results.read()
}

/// Uploads an input if the case has it.
fn input(gpu: &Gpu, case: &Case, name: &str) -> Result<Option<TensorView>> {
    let Some(CaseTensor { dtype, shape, values }) = case.inputs.get(name) else { return Ok(None) };
    heads_first(case, name, &upload(gpu, *dtype, values, shape)?).map(Some)
}

/// Uploads an input that every case of its operation has.
fn needed_input(gpu: &Gpu, case: &Case, name: &str) -> Result<TensorView> {
    let missing =
        || Error::Argument { argument: name.into(), got: "no such tensor".into(), needed: "one in every case".into() };
    input(gpu, case, name)?.ok_or_else(missing)
}

fn upload(gpu: &Gpu, dtype: DType, values: &[f32], shape: &[usize]) -> Result<Tensor> {
    match dtype {
        DType::F32 => gpu.upload(values, shape),
        DType::F16 => gpu.upload(&values.iter().map(|&value| f16::from_f32(value)).collect::<Vec<_>>(), shape),
        DType::BF16 => gpu.upload(&values.iter().map(|&value| bf16::from_f32(value)).collect::<Vec<_>>(), shape),
    }
}

/// A tensor in the layout of its case, as the operators see it: nothing is moved.
fn heads_first(case: &Case, name: &str, tensor: &Tensor) -> Result<TensorView> {
    let tokens_first = case.operation.layout().is_tokens_first(name);
    if tokens_first { tensor.view().transposed(1, 2) } else { Ok(tensor.view()) }
}

/// Result tensors on the GPU, in the layout of the case.
struct Results<'a> {
    gpu: &'a Gpu,
    case: &'a Case,
    tensors: BTreeMap<&'static str, Tensor>,
}

impl<'a> Results<'a> {
    fn new(gpu: &'a Gpu, case: &'a Case) -> Results<'a> {
        Results { gpu, case, tensors: BTreeMap::new() }
    }

    /// A tensor for a kernel to write, of a shape with heads before tokens. It starts as NaN: an element that nothing is
    /// written to fails every comparison.
    fn add(&mut self, name: &'static str, shape: &[usize]) -> Result<TensorView> {
        let mut shape = shape.to_vec();
        if self.case.operation.layout().is_tokens_first(name) {
            shape.swap(1, 2);
        }
        // Kernels write 16 bits in pairs: rows of odd length are rounded once they are read.
        let pairs = shape.last().is_some_and(|size| size.is_multiple_of(2));
        let dtype = if pairs { exact::stored(self.case, name) } else { DType::F32 };
        let tensor = upload(self.gpu, dtype, &vec![f32::NAN; shape.iter().product()], &shape)?;
        let view = heads_first(self.case, name, &tensor)?;
        self.tensors.insert(name, tensor);
        Ok(view)
    }

    fn read(self) -> Result<Tensors> {
        let read = |(name, tensor): (&str, Tensor)| {
            let dtype = exact::stored(self.case, name);
            let values = self.gpu.read(&tensor)?.into_iter().map(|value| exact::rounded(dtype, value)).collect();
            Ok((name.to_string(), CaseTensor { dtype, shape: tensor.shape().to_vec(), values }))
        };
        self.tensors.into_iter().map(read).collect()
    }
}
