//! Case files: one call of an operator as a safetensors file, with or without the results it should give.
//!
//! The file holds the input tensors under their names (`q`, `k`, `v`, …), results to compare with under `expected.` +
//! name, and string metadata that says what to compute. A missing key means its default.
//!
//! * `op` = `continuous_attention`: inputs q, k, v, optionally sink_k, sink_v, intervals, d_out, d_lse; results out,
//!   lse, d_q, d_k, d_v, d_sink_k, d_sink_v, d_intervals; keys `causal`, `sink`, `scale`, `window`.
//! * `op` = `softmax_attention`: the same without sinks and intervals.
//! * `op` = `efla`: inputs q, k, v, beta, optionally log_decay (which makes it gated), initial_state, d_out,
//!   d_final_state; results out, final_state, d_q, d_k, d_v, d_beta, d_log_decay, d_initial_state; keys `integrator`,
//!   `normalize_q`, `normalize_k`, `scale`, `chunk`, `form`.
//!
//! The gradients, d_lse and d_final_state need d_out beside them.
//!
//! | key | values | default |
//! |---|---|---|
//! | `causal` | `true`, `false` | `true` |
//! | `sink` | `zero`, `first`, `given` (by sink_k and sink_v), `none` | `zero`; for `softmax_attention` only `none` |
//! | `scale` | a number | 1/√D |
//! | `window` | a whole number of at least 1 | no window |
//! | `integrator` | `exact`, `euler`, `rk2`, `rk4` | `exact` |
//! | `normalize_q`, `normalize_k` | `true`, `false` | `false` |
//! | `chunk` | `16`, `32`, `64` | chosen for the device |
//! | `form` | `chunked`, `recurrent` | `chunked` |
//!
//! `scale`, `window` and `chunk` may also be `none`, which is the default. Shapes are those of [`AttentionShape`] and
//! [`EflaShape`]; gradients have the shape of what they are the gradient of. Tensors are F32, or F64 and narrowed.

mod file;
#[cfg(test)]
mod tests;

pub use file::{load, save};

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use crate::attention::{AttentionConfig, AttentionShape, Method, Sink};
use crate::efla::{EflaConfig, EflaShape, Form, Integrator};
use crate::error::{Error, Result};
use crate::tensor::DType;

/// A tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseTensor {
    /// How the file stores the elements; F64 files are narrowed when read and say [`DType::F32`] here.
    pub dtype: DType,
    /// Sizes, the slowest varying first.
    pub shape: Vec<usize>,
    /// The elements in row-major order, as many as `shape` says.
    pub values: Vec<f32>,
}

/// What a case computes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Operation {
    /// Continuous or ordinary softmax attention.
    Attention {
        /// Options, with D and D_v from the tensors.
        config: AttentionConfig,
        /// Sizes, from the tensors.
        shape: AttentionShape,
    },
    /// Error-free linear attention.
    Efla {
        /// Options, with D_k and D_v from the tensors.
        config: EflaConfig,
        /// Sizes, from the tensors.
        shape: EflaShape,
    },
}

/// A case file's contents, complete and free of contradictions: every tensor has the shape that `operation` needs,
/// every input is finite, and no interval is negative.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The file's name, for messages.
    pub file: String,
    /// What to compute.
    pub operation: Operation,
    /// Input tensors by name.
    pub inputs: BTreeMap<String, CaseTensor>,
    /// Results that should come out, by name without `expected.`. Their values may be anything, −∞ and NaN included.
    pub expected: BTreeMap<String, CaseTensor>,
}

impl Case {
    /// Reads a case file. `overrides` are metadata that take the place of the file's own before it is interpreted.
    ///
    /// # Errors
    /// [`Error::Case`] with the file's name for a file that can't be read or is malformed, a key or tensor that is
    /// unknown or does not belong to the operation, one that is missing, a value that can't be parsed or is not finite,
    /// shapes that disagree, and a tensor of 2³¹ elements or more (a size of 0 counted as 1).
    pub fn load(path: impl AsRef<Path>, overrides: &BTreeMap<String, String>) -> Result<Case> {
        let name = path.as_ref().display().to_string();
        let bytes = std::fs::read(&path).map_err(|error| file::case_error(&name, error))?;
        Case::from_bytes(name, &bytes, overrides)
    }

    /// Like [`Case::load`], from the bytes of a file called `name`.
    pub fn from_bytes(name: impl Into<String>, bytes: &[u8], overrides: &BTreeMap<String, String>) -> Result<Case> {
        let file = name.into();
        match file::decode(bytes).and_then(|(tensors, metadata)| interpret(tensors, metadata, overrides)) {
            Ok((operation, inputs, expected)) => Ok(Case { file, operation, inputs, expected }),
            Err(error) => Err(file::case_error(&file, error)),
        }
    }

    /// Writes the case, so that [`Case::load`] gives it back, with every key explicit.
    ///
    /// # Errors
    /// Those of [`save`].
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let mut tensors = self.inputs.clone();
        tensors.extend(self.expected.iter().map(|(name, tensor)| (format!("{EXPECTED}{name}"), tensor.clone())));
        save(path, &tensors, &self.metadata())
    }

    /// The metadata that describes the operation, every key explicit.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.operation.metadata()
    }
}

impl Operation {
    /// The metadata that describes the operation, every key explicit: `scale` as a number, an absent `window` or
    /// `chunk` as `none`.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let optional = |size: Option<usize>| size.map_or(NONE.to_string(), |size| size.to_string());
        let pairs = match self {
            Operation::Attention { config, .. } => vec![
                ("op", word(METHODS, config.method)),
                ("causal", config.causal.to_string()),
                ("sink", word(SINKS, config.sink)),
                ("scale", format!("{:?}", config.scale())),
                ("window", optional(config.window)),
            ],
            Operation::Efla { config, .. } => vec![
                ("op", EFLA.to_string()),
                ("integrator", word(INTEGRATORS, config.integrator)),
                ("normalize_q", config.normalize_q.to_string()),
                ("normalize_k", config.normalize_k.to_string()),
                ("scale", format!("{:?}", config.scale())),
                ("chunk", optional(config.chunk)),
                ("form", word(FORMS, config.form)),
            ],
        };
        pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }
}

/// By name.
type Tensors = BTreeMap<String, CaseTensor>;

const EXPECTED: &str = "expected.";
const NONE: &str = "none";
const EFLA: &str = "efla";
const METHODS: &[(&str, Method)] =
    &[("continuous_attention", Method::Continuous), ("softmax_attention", Method::Softmax)];
const SINKS: &[(&str, Sink)] =
    &[("zero", Sink::Zero), ("first", Sink::First), ("given", Sink::Given), (NONE, Sink::None)];
const INTEGRATORS: &[(&str, Integrator)] = &[
    ("exact", Integrator::Exact),
    ("euler", Integrator::Euler),
    ("rk2", Integrator::RungeKutta2),
    ("rk4", Integrator::RungeKutta4),
];
const FORMS: &[(&str, Form)] = &[("chunked", Form::Chunked), ("recurrent", Form::Recurrent)];
const BOOLS: &[(&str, bool)] = &[("true", true), ("false", false)];

/// Offsets on the device are signed 32-bit.
const MAX_ELEMENTS: u64 = 1 << 31;

/// The word that stands for `value`.
fn word<T: PartialEq>(words: &[(&str, T)], value: T) -> String {
    words.iter().find(|(_, meaning)| *meaning == value).map_or(String::new(), |(word, _)| word.to_string())
}

/// Metadata that were not yet looked at.
struct Keys {
    left: BTreeMap<String, String>,
    known: Vec<&'static str>,
}

impl Keys {
    fn take<T>(&mut self, key: &'static str, needed: &str, parse: impl Fn(&str) -> Option<T>) -> Result<Option<T>> {
        self.known.push(key);
        let Some(text) = self.left.remove(key) else { return Ok(None) };
        match parse(&text) {
            Some(value) => Ok(Some(value)),
            None => Err(Error::argument(key, format!("{text:?}"), needed)),
        }
    }

    /// One of a few words.
    fn choice<T: Copy>(&mut self, key: &'static str, words: &[(&str, T)]) -> Result<Option<T>> {
        let needed = words.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
        self.take(key, &format!("one of {needed}"), |text| {
            words.iter().find(|(word, _)| *word == text).map(|(_, value)| *value)
        })
    }

    /// A number or `none`; its range is the configuration's business.
    fn number<T: FromStr>(&mut self, key: &'static str, kind: &str) -> Result<Option<T>> {
        let parse = |text: &str| if text == NONE { Some(None) } else { text.parse().ok().map(Some) };
        Ok(self.take(key, &format!("{kind}, or none"), parse)?.flatten())
    }

    /// Refuses keys that nobody asked for.
    fn finish(self, op: &str) -> Result<()> {
        let Some((key, value)) = self.left.first_key_value() else { return Ok(()) };
        let needed = format!("only the keys {} with op {op}", self.known.join(", "));
        Err(Error::argument(format!("metadata key {key}"), format!("{value:?}"), needed))
    }
}

/// A tensor that a case may hold.
struct Slot {
    name: &'static str,
    /// The shape in the terms of the specification.
    symbols: &'static str,
    shape: Vec<usize>,
    /// What it would take for the tensor to be allowed, where it isn't.
    refused: Option<&'static str>,
}

fn slot(name: &'static str, symbols: &'static str, shape: &[usize]) -> Slot {
    Slot { name, symbols, shape: shape.to_vec(), refused: None }
}

impl Slot {
    /// Allows the tensor only where `allowed` holds.
    fn only_if(mut self, allowed: bool, needed: &'static str) -> Self {
        if !allowed && self.refused.is_none() {
            self.refused = Some(needed);
        }
        self
    }
}

type Interpreted = (Operation, Tensors, Tensors);

fn interpret(
    tensors: Tensors,
    mut metadata: BTreeMap<String, String>,
    overrides: &BTreeMap<String, String>,
) -> Result<Interpreted> {
    metadata.extend(overrides.iter().map(|(key, value)| (key.clone(), value.clone())));
    let (mut inputs, mut expected) = (Tensors::new(), Tensors::new());
    for (name, tensor) in tensors {
        if tensor.dtype != DType::F32 {
            return Err(Error::argument(name, format!("{:?} elements", tensor.dtype), "F32 or F64"));
        }
        match name.strip_prefix(EXPECTED) {
            Some(result) => expected.insert(result.to_string(), tensor),
            None => inputs.insert(name, tensor),
        };
    }
    let mut keys = Keys { left: metadata, known: Vec::new() };
    let ops: Vec<(&str, Option<Method>)> =
        METHODS.iter().map(|&(word, method)| (word, Some(method))).chain([(EFLA, None)]).collect();
    let (operation, input_slots, result_slots) = match keys.choice("op", &ops)? {
        Some(Some(method)) => attention(method, keys, &inputs)?,
        Some(None) => efla(keys, &inputs)?,
        None => {
            let words = ops.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
            return Err(Error::argument("op", "no such metadata key", format!("one of {words}")));
        }
    };
    check_sizes(&input_slots)?;
    check_sizes(&result_slots)?;
    check_tensors("", &inputs, &input_slots)?;
    check_tensors(EXPECTED, &expected, &result_slots)?;
    check_values(&inputs)?;
    Ok((operation, inputs, expected))
}

fn attention(method: Method, mut keys: Keys, inputs: &Tensors) -> Result<(Operation, Vec<Slot>, Vec<Slot>)> {
    let default_sink = if method == Method::Softmax { Sink::None } else { Sink::default() };
    let causal = keys.choice("causal", BOOLS)?.unwrap_or(true);
    let sink = keys.choice("sink", SINKS)?.unwrap_or(default_sink);
    if method == Method::Softmax && sink != Sink::None {
        return Err(Error::argument("sink", word(SINKS, sink), "none with op softmax_attention"));
    }
    let scale = keys.number("scale", "a number")?;
    let window = keys.number("window", "a whole number of at least 1")?;
    keys.finish(&word(METHODS, method))?;

    const Q: &str = "[B, H_q, T_q, D]";
    const K: &str = "[B, H_kv, T_k, D]";
    const V: &str = "[B, H_kv, T_k, D_v]";
    let [batch, heads, queries, head_dim] = sizes(inputs, "q", Q)?;
    let [_, kv_heads, keys, _] = sizes(inputs, "k", K)?;
    let [_, _, _, value_dim] = sizes(inputs, "v", V)?;
    let config = AttentionConfig { head_dim, value_dim, method, sink, causal, window, scale };
    let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
    config.validate()?;
    shape.validate()?;

    let given = sink == Sink::Given;
    const SINK_K: &str = "[B or 1, H_kv, D]";
    const SINK_V: &str = "[B or 1, H_kv, D_v]";
    let (mut sink_k, mut sink_v) = ([batch, kv_heads, head_dim], [batch, kv_heads, value_dim]);
    if given {
        // One sink for the whole batch, or one per sequence.
        for (needed, got) in
            [(&mut sink_k, sizes::<3>(inputs, "sink_k", SINK_K)?), (&mut sink_v, sizes::<3>(inputs, "sink_v", SINK_V)?)]
        {
            if got[0] == 1 {
                needed[0] = 1;
            }
        }
    }
    let continuous = method == Method::Continuous;
    let has_grad = inputs.contains_key("d_out");
    let has_intervals = inputs.contains_key("intervals");
    const SINK_ONLY: &str = "sink = given in the metadata beside it";
    const GRAD_ONLY: &str = "d_out beside it";
    let (q, k, v) =
        ([batch, heads, queries, head_dim], [batch, kv_heads, keys, head_dim], [batch, kv_heads, keys, value_dim]);
    let (out, lse) = ([batch, heads, queries, value_dim], [batch, heads, queries]);
    let intervals = [batch, keys];
    const OUT: &str = "[B, H_q, T_q, D_v]";
    const LSE: &str = "[B, H_q, T_q]";
    let input_slots = vec![
        slot("q", Q, &q),
        slot("k", K, &k),
        slot("v", V, &v),
        slot("sink_k", SINK_K, &sink_k).only_if(given, SINK_ONLY),
        slot("sink_v", SINK_V, &sink_v).only_if(given, SINK_ONLY),
        slot("intervals", "[B, T_k]", &intervals).only_if(continuous, "none with op softmax_attention"),
        slot("d_out", OUT, &out),
        slot("d_lse", LSE, &lse).only_if(has_grad, GRAD_ONLY),
    ];
    let result_slots = vec![
        slot("out", OUT, &out),
        slot("lse", LSE, &lse),
        slot("d_q", Q, &q).only_if(has_grad, GRAD_ONLY),
        slot("d_k", K, &k).only_if(has_grad, GRAD_ONLY),
        slot("d_v", V, &v).only_if(has_grad, GRAD_ONLY),
        slot("d_sink_k", SINK_K, &sink_k).only_if(given, SINK_ONLY).only_if(has_grad, GRAD_ONLY),
        slot("d_sink_v", SINK_V, &sink_v).only_if(given, SINK_ONLY).only_if(has_grad, GRAD_ONLY),
        slot("d_intervals", "[B, T_k]", &intervals)
            .only_if(has_intervals, "intervals beside it")
            .only_if(has_grad, GRAD_ONLY),
    ];
    Ok((Operation::Attention { config, shape }, input_slots, result_slots))
}

fn efla(mut keys: Keys, inputs: &Tensors) -> Result<(Operation, Vec<Slot>, Vec<Slot>)> {
    let integrator = keys.choice("integrator", INTEGRATORS)?.unwrap_or_default();
    let normalize_q = keys.choice("normalize_q", BOOLS)?.unwrap_or(false);
    let normalize_k = keys.choice("normalize_k", BOOLS)?.unwrap_or(false);
    let scale = keys.number("scale", "a number")?;
    let chunk = keys.number("chunk", "16, 32 or 64")?;
    let form = keys.choice("form", FORMS)?.unwrap_or_default();
    keys.finish(EFLA)?;

    const K: &str = "[B, H, T, D_k]";
    const V: &str = "[B, H_v, T, D_v]";
    const BETA: &str = "[B, H_v, T]";
    const STATE: &str = "[B, H_v, D_k, D_v]";
    let [batch, heads, tokens, key_dim] = sizes(inputs, "q", K)?;
    let _: [usize; 4] = sizes(inputs, "k", K)?;
    let [_, value_heads, _, value_dim] = sizes(inputs, "v", V)?;
    let _: [usize; 3] = sizes(inputs, "beta", BETA)?;
    let gated = inputs.contains_key("log_decay");
    let config = EflaConfig { key_dim, value_dim, integrator, normalize_q, normalize_k, scale, chunk, form, gated };
    let shape = EflaShape { batch, heads, value_heads, tokens };
    config.validate()?;
    shape.validate()?;

    let has_grad = inputs.contains_key("d_out");
    const GRAD_ONLY: &str = "d_out beside it";
    let (k, v) = ([batch, heads, tokens, key_dim], [batch, value_heads, tokens, value_dim]);
    let (beta, state) = ([batch, value_heads, tokens], [batch, value_heads, key_dim, value_dim]);
    let input_slots = vec![
        slot("q", K, &k),
        slot("k", K, &k),
        slot("v", V, &v),
        slot("beta", BETA, &beta),
        slot("log_decay", BETA, &beta),
        slot("initial_state", STATE, &state),
        slot("d_out", V, &v),
        slot("d_final_state", STATE, &state).only_if(has_grad, GRAD_ONLY),
    ];
    let result_slots = vec![
        slot("out", V, &v),
        slot("final_state", STATE, &state),
        slot("d_q", K, &k).only_if(has_grad, GRAD_ONLY),
        slot("d_k", K, &k).only_if(has_grad, GRAD_ONLY),
        slot("d_v", V, &v).only_if(has_grad, GRAD_ONLY),
        slot("d_beta", BETA, &beta).only_if(has_grad, GRAD_ONLY),
        slot("d_log_decay", BETA, &beta).only_if(gated, "log_decay beside it").only_if(has_grad, GRAD_ONLY),
        slot("d_initial_state", STATE, &state).only_if(has_grad, GRAD_ONLY),
    ];
    Ok((Operation::Efla { config, shape }, input_slots, result_slots))
}

/// The sizes of an input that has to be there, with `N` dimensions.
fn sizes<const N: usize>(inputs: &Tensors, name: &str, symbols: &str) -> Result<[usize; N]> {
    match inputs.get(name) {
        None => Err(Error::argument(name, "no such tensor", symbols)),
        Some(tensor) => tensor.shape.as_slice().try_into().map_err(|_| {
            Error::argument(name, format!("shape {:?}", tensor.shape), format!("{N} dimensions, {symbols}"))
        }),
    }
}

/// Bounds what the tensors can make a caller allocate or loop over: a size of 0 elsewhere hides no huge one.
fn check_sizes(slots: &[Slot]) -> Result<()> {
    for slot in slots {
        let elements = slot.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size.max(1) as u64));
        if elements.is_none_or(|elements| elements >= MAX_ELEMENTS) {
            let needed = format!("less than 2^31 elements in {}, a size of 0 counted as 1", slot.symbols);
            return Err(Error::argument(slot.name, format!("shape {:?}", slot.shape), needed));
        }
    }
    Ok(())
}

/// Every tensor has a slot, is allowed there and has its shape.
fn check_tensors(prefix: &str, tensors: &Tensors, slots: &[Slot]) -> Result<()> {
    for (name, tensor) in tensors {
        let Some(slot) = slots.iter().find(|slot| slot.name == name) else {
            let names = slots.iter().map(|slot| format!("{prefix}{}", slot.name)).collect::<Vec<_>>().join(", ");
            return Err(Error::argument(format!("{prefix}{name}"), "a tensor of that name", format!("one of {names}")));
        };
        if let Some(needed) = slot.refused {
            return Err(Error::argument(format!("{prefix}{name}"), "a tensor", needed));
        }
        if tensor.shape != slot.shape {
            let needed = format!("{:?} = {}", slot.shape, slot.symbols);
            return Err(Error::argument(format!("{prefix}{name}"), format!("shape {:?}", tensor.shape), needed));
        }
    }
    Ok(())
}

/// Inputs are finite and time does not run backwards.
fn check_values(inputs: &Tensors) -> Result<()> {
    for (name, tensor) in inputs {
        let interval = name == "intervals";
        let bad = |value: &f32| !value.is_finite() || (interval && *value < 0.0);
        if let Some((index, value)) = tensor.values.iter().enumerate().find(|(_, value)| bad(value)) {
            let needed = if interval { "finite values of at least 0" } else { "finite values" };
            return Err(Error::argument(name, format!("{value} at element {index}"), needed));
        }
    }
    Ok(())
}
