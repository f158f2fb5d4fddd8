//! Case files: one call of an operator as a safetensors file, with or without the results it should give.
//!
//! The file holds the input tensors under their names (`q`, `k`, `v`, …), results to compare with under `expected.` +
//! name, and string metadata that says what to compute. A missing key means its default.
//!
//! * `op` = `continuous_attention`: inputs q, k, v, optionally sink_k, sink_v, intervals, d_out, d_lse; results out,
//!   lse, d_q, d_k, d_v, d_sink_k, d_sink_v, d_intervals; keys `causal`, `sink`, `scale`, `window`, `layout`. Lengths of
//!   sequences are whole numbers: cu_seqlens_q and cu_seqlens_k for packed ones, or kv_lens for a padded cache, see
//!   [`Lengths`].
//! * `op` = `softmax_attention`: the same without sinks and intervals.
//! * `op` = `efla`: inputs q, k, v, beta, optionally log_decay (which makes it gated), initial_state, d_out,
//!   d_final_state, and cu_seqlens for packed sequences; results out, final_state, d_q, d_k, d_v, d_beta, d_log_decay,
//!   d_initial_state; keys `integrator`, `normalize_q`, `normalize_k`, `scale`, `chunk`, `form`, `layout`.
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
//! | `layout` | `bhtd`, `bthd` | `bhtd` |
//!
//! `scale`, `window` and `chunk` may also be `none`, which is the default. Shapes are those of [`AttentionShape`] and
//! [`EflaShape`] in the order of [`Layout`]; gradients have the shape of what they are the gradient of.
//!
//! q, k, v, sink_k, sink_v and d_out may each be F32, F16 or BF16, or F64 and narrowed; other inputs are widened to F32.
//! Lengths are I32, or I64 or U32.

mod file;
#[cfg(test)]
mod tests;

pub use file::{load, save};

use std::collections::BTreeMap;
use std::path::Path;
use std::str::FromStr;

use crate::attention::{AttentionConfig, AttentionShape, Lengths, Method, Sink};
use crate::efla::{EflaConfig, EflaShape, Form, Integrator};
use crate::error::{Error, Result};
use crate::tensor::{DType, check_cumulative};
use file::{Contents, FLOATING, WHOLE, Whole};

/// A tensor on the host.
#[derive(Debug, Clone, PartialEq)]
pub struct CaseTensor {
    /// How the file stores the elements; F64 is narrowed when read and says [`DType::F32`] here.
    pub dtype: DType,
    /// Sizes, the slowest varying first.
    pub shape: Vec<usize>,
    /// The elements in row-major order, as many as `shape` says.
    pub values: Vec<f32>,
}

/// In which order tensors have their dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Layout {
    /// `bhtd`: heads before tokens, `[B, H, T, D]` and `[B, H, T]`, as [`AttentionShape`] and [`EflaShape`] say.
    #[default]
    HeadsFirst,
    /// `bthd`: tokens before heads, `[B, T, H, D]` and `[B, T, H]`. Tensors without both (sinks, intervals, states) have
    /// the same shape in either layout.
    TokensFirst,
}

impl Layout {
    /// Whether dimensions 1 and 2 of the tensor called `name`, an input or a result, are tokens and heads, in this order.
    pub fn is_tokens_first(self, name: &str) -> bool {
        let of = name.strip_prefix("d_").unwrap_or(name);
        let without = ["sink_k", "sink_v", "intervals", "initial_state", "final_state"];
        self == Layout::TokensFirst && !without.contains(&of)
    }

    /// From `[B, H, T, …]` to the order of the tensor called `name`, or back.
    fn ordered<T: Copy, const N: usize>(self, name: &str, mut dimensions: [T; N]) -> [T; N] {
        if self.is_tokens_first(name) {
            dimensions.swap(1, 2);
        }
        dimensions
    }
}

/// What a case computes.
#[derive(Debug, Clone, PartialEq)]
pub enum Operation {
    /// Continuous or ordinary softmax attention.
    Attention {
        /// Options, with D and D_v from the tensors.
        config: AttentionConfig,
        /// Sizes, from the tensors.
        shape: AttentionShape,
        /// Of the sequences.
        lengths: Lengths,
        /// Of the tensors in inputs and expected.
        layout: Layout,
    },
    /// Error-free linear attention.
    Efla {
        /// Options, with D_k and D_v from the tensors.
        config: EflaConfig,
        /// Sizes, from the tensors.
        shape: EflaShape,
        /// Where each of N sequences starts in a batch of 1, and where the last one ends; states are then
        /// `[N, H_v, D_k, D_v]`.
        cu_seqlens: Option<Vec<usize>>,
        /// Of the tensors in inputs and expected.
        layout: Layout,
    },
}

/// A case file's contents, complete and free of contradictions: every tensor has the shape that `operation` needs,
/// every input is finite (a log decay may be −∞), and no interval is negative; what lies behind the lengths of a cache
/// may be anything.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The file's name, for messages.
    pub file: String,
    /// What to compute.
    pub operation: Operation,
    /// Input tensors by name; lengths are the operation's.
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
        match file::decode(bytes).and_then(|contents| interpret(contents, overrides)) {
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
        let lengths = |(name, lengths): (&str, &Vec<usize>)| {
            let values = lengths.iter().map(|&length| i64::try_from(length).unwrap_or(i64::MAX)).collect();
            (name.to_string(), Whole { shape: vec![lengths.len()], values })
        };
        let lengths = self.operation.lengths().into_iter().map(lengths).collect();
        file::write(path.as_ref(), &tensors, &lengths, &self.metadata())
    }

    /// The metadata that describes the operation, every key explicit.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        self.operation.metadata()
    }
}

impl Operation {
    /// In which order the case's tensors have their dimensions.
    pub fn layout(&self) -> Layout {
        match self {
            Operation::Attention { layout, .. } | Operation::Efla { layout, .. } => *layout,
        }
    }

    /// The lengths by name, as a file has them.
    fn lengths(&self) -> Vec<(&'static str, &Vec<usize>)> {
        match self {
            Operation::Attention { lengths: Lengths::Full, .. } => vec![],
            Operation::Attention { lengths: Lengths::Packed { cu_seqlens_q, cu_seqlens_k }, .. } => {
                vec![(CU_SEQLENS_Q, cu_seqlens_q), (CU_SEQLENS_K, cu_seqlens_k)]
            }
            Operation::Attention { lengths: Lengths::Cache { kv_lens }, .. } => vec![(KV_LENS, kv_lens)],
            Operation::Efla { cu_seqlens, .. } => cu_seqlens.iter().map(|lengths| (CU_SEQLENS, lengths)).collect(),
        }
    }

    /// The metadata that describes the operation, every key explicit: `scale` as a number, an absent `window` or
    /// `chunk` as `none`.
    pub fn metadata(&self) -> BTreeMap<String, String> {
        let optional = |size: Option<usize>| size.map_or(NONE.to_string(), |size| size.to_string());
        let pairs = match self {
            Operation::Attention { config, layout, .. } => vec![
                ("op", word(METHODS, config.method)),
                ("causal", config.causal.to_string()),
                ("sink", word(SINKS, config.sink)),
                ("scale", format!("{:?}", config.scale())),
                ("window", optional(config.window)),
                ("layout", word(LAYOUTS, *layout)),
            ],
            Operation::Efla { config, layout, .. } => vec![
                ("op", EFLA.to_string()),
                ("integrator", word(INTEGRATORS, config.integrator)),
                ("normalize_q", config.normalize_q.to_string()),
                ("normalize_k", config.normalize_k.to_string()),
                ("scale", format!("{:?}", config.scale())),
                ("chunk", optional(config.chunk)),
                ("form", word(FORMS, config.form)),
                ("layout", word(LAYOUTS, *layout)),
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
const CU_SEQLENS_Q: &str = "cu_seqlens_q";
const CU_SEQLENS_K: &str = "cu_seqlens_k";
const KV_LENS: &str = "kv_lens";
const CU_SEQLENS: &str = "cu_seqlens";
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
const LAYOUTS: &[(&str, Layout)] = &[("bhtd", Layout::HeadsFirst), ("bthd", Layout::TokensFirst)];
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
    symbols: String,
    shape: Vec<usize>,
    /// What it would take for the tensor to be allowed, where it isn't.
    refused: Option<&'static str>,
    /// Whether it is always F32.
    single: bool,
}

/// The dimensions of a tensor in the terms of the specification, in the order of a layout.
fn symbols<const N: usize>(layout: Layout, name: &str, dimensions: [&str; N]) -> String {
    format!("[{}]", layout.ordered(name, dimensions).join(", "))
}

impl Slot {
    /// Of a tensor with the given dimensions, tokens behind heads.
    fn new<const N: usize>(layout: Layout, name: &'static str, dimensions: [&str; N], sizes: [usize; N]) -> Slot {
        let (symbols, shape) = (symbols(layout, name, dimensions), layout.ordered(name, sizes).to_vec());
        Slot { name, symbols, shape, refused: None, single: false }
    }

    /// Allows the tensor only where `allowed` holds.
    fn only_if(mut self, allowed: bool, needed: &'static str) -> Self {
        if !allowed && self.refused.is_none() {
            self.refused = Some(needed);
        }
        self
    }

    /// Of a tensor that is always F32.
    fn single(self) -> Self {
        Slot { single: true, ..self }
    }
}

/// Tensors of whole numbers that were not yet looked at.
struct LengthTensors {
    left: BTreeMap<String, Vec<usize>>,
    known: Vec<&'static str>,
}

impl LengthTensors {
    fn new(whole: BTreeMap<String, Whole>) -> Result<Self> {
        let lengths = |(name, Whole { shape, values }): (String, Whole)| {
            if shape.len() != 1 {
                return Err(Error::argument(name, format!("shape {shape:?}"), "one dimension"));
            }
            let length = |(index, value): (usize, &i64)| {
                let negative = |_| Error::argument(&name, format!("{value} at element {index}"), "at least 0");
                usize::try_from(*value).map_err(negative)
            };
            let lengths = values.iter().enumerate().map(length).collect::<Result<_>>()?;
            Ok((name, lengths))
        };
        Ok(LengthTensors { left: whole.into_iter().map(lengths).collect::<Result<_>>()?, known: Vec::new() })
    }

    fn take(&mut self, name: &'static str) -> Option<Vec<usize>> {
        self.known.push(name);
        self.left.remove(name)
    }

    /// Refuses tensors that nobody asked for; the names of those that were.
    fn finish(self, op: &str) -> Result<Vec<&'static str>> {
        match self.left.into_keys().next() {
            Some(name) => {
                Err(Error::argument(name, "a tensor", format!("only {} with op {op}", self.known.join(", "))))
            }
            None => Ok(self.known),
        }
    }
}

/// What a case's metadata and shapes make of it.
struct Interpreted {
    operation: Operation,
    inputs: Vec<Slot>,
    results: Vec<Slot>,
    /// Names of lengths that it may have.
    lengths: Vec<&'static str>,
}

fn interpret(contents: Contents, overrides: &BTreeMap<String, String>) -> Result<(Operation, Tensors, Tensors)> {
    let Contents { tensors, whole, mut metadata } = contents;
    metadata.extend(overrides.iter().map(|(key, value)| (key.clone(), value.clone())));
    let is_length = |name: &str| [CU_SEQLENS_Q, CU_SEQLENS_K, KV_LENS, CU_SEQLENS].contains(&name);
    if let Some(name) = whole.keys().find(|name| !is_length(name)) {
        return Err(Error::argument(name, WHOLE, FLOATING));
    }
    let (mut inputs, mut expected) = (Tensors::new(), Tensors::new());
    for (name, tensor) in tensors {
        if is_length(&name) {
            return Err(Error::argument(name, format!("{:?} elements", tensor.dtype), "I32"));
        }
        match name.strip_prefix(EXPECTED) {
            Some(result) => expected.insert(result.to_string(), tensor),
            None => inputs.insert(name, tensor),
        };
    }
    let mut keys = Keys { left: metadata, known: Vec::new() };
    let lengths = LengthTensors::new(whole)?;
    let ops: Vec<(&str, Option<Method>)> =
        METHODS.iter().map(|&(word, method)| (word, Some(method))).chain([(EFLA, None)]).collect();
    let interpreted = match keys.choice("op", &ops)? {
        Some(Some(method)) => attention(method, keys, &inputs, lengths)?,
        Some(None) => efla(keys, &inputs, lengths)?,
        None => {
            let words = ops.iter().map(|(word, _)| *word).collect::<Vec<_>>().join(", ");
            return Err(Error::argument("op", "no such metadata key", format!("one of {words}")));
        }
    };
    let Interpreted { operation, inputs: input_slots, results: result_slots, lengths } = interpreted;
    check_sizes(&input_slots)?;
    check_sizes(&result_slots)?;
    check_tensors("", &inputs, &input_slots, &lengths)?;
    check_tensors(EXPECTED, &expected, &result_slots, &[])?;
    for slot in input_slots.iter().filter(|slot| slot.single) {
        inputs.entry(slot.name.to_string()).and_modify(|tensor| tensor.dtype = DType::F32);
    }
    check_values(&operation, &inputs)?;
    Ok((operation, inputs, expected))
}

fn attention(method: Method, mut keys: Keys, inputs: &Tensors, mut whole: LengthTensors) -> Result<Interpreted> {
    let op = word(METHODS, method);
    let default_sink = if method == Method::Softmax { Sink::None } else { Sink::default() };
    let causal = keys.choice("causal", BOOLS)?.unwrap_or(true);
    let sink = keys.choice("sink", SINKS)?.unwrap_or(default_sink);
    if method == Method::Softmax && sink != Sink::None {
        return Err(Error::argument("sink", word(SINKS, sink), "none with op softmax_attention"));
    }
    let scale = keys.number("scale", "a number")?;
    let window = keys.number("window", "a whole number of at least 1")?;
    let layout = keys.choice("layout", LAYOUTS)?.unwrap_or_default();
    keys.finish(&op)?;

    let lengths = match (whole.take(CU_SEQLENS_Q), whole.take(CU_SEQLENS_K), whole.take(KV_LENS)) {
        (None, None, None) => Lengths::Full,
        (None, None, Some(kv_lens)) => Lengths::Cache { kv_lens },
        (Some(cu_seqlens_q), Some(cu_seqlens_k), None) => Lengths::Packed { cu_seqlens_q, cu_seqlens_k },
        (Some(_), None, None) => {
            return Err(Error::argument(CU_SEQLENS_K, "no such tensor", "one beside cu_seqlens_q"));
        }
        (None, Some(_), None) => {
            return Err(Error::argument(CU_SEQLENS_Q, "no such tensor", "one beside cu_seqlens_k"));
        }
        (_, _, Some(_)) => return Err(Error::argument(KV_LENS, "a tensor", "none beside cu_seqlens_q, cu_seqlens_k")),
    };
    let length_names = whole.finish(&op)?;

    const Q: [&str; 4] = ["B", "H_q", "T_q", "D"];
    const K: [&str; 4] = ["B", "H_kv", "T_k", "D"];
    const V: [&str; 4] = ["B", "H_kv", "T_k", "D_v"];
    let [batch, heads, queries, head_dim] = sizes(inputs, layout, "q", Q)?;
    let [_, kv_heads, keys, _] = sizes(inputs, layout, "k", K)?;
    let [_, _, _, value_dim] = sizes(inputs, layout, "v", V)?;
    let config = AttentionConfig { head_dim, value_dim, method, sink, causal, window, scale, block_q: None };
    let shape = AttentionShape { batch, heads, kv_heads, queries, keys };
    config.validate()?;
    shape.validate()?;
    lengths.validate(&shape)?;

    let given = sink == Sink::Given;
    let sequences = lengths.sequences(&shape);
    let each = if matches!(lengths, Lengths::Packed { .. }) { "N or 1" } else { "B or 1" };
    let (sink_k, sink_v) = ([each, "H_kv", "D"], [each, "H_kv", "D_v"]);
    let (mut sinks_k, mut sinks_v) = (sequences, sequences);
    if given {
        // One sink for the whole batch, or one per sequence.
        for (sinks, [got, ..]) in [
            (&mut sinks_k, sizes(inputs, layout, "sink_k", sink_k)?),
            (&mut sinks_v, sizes(inputs, layout, "sink_v", sink_v)?),
        ] {
            if got == 1 {
                *sinks = 1;
            }
        }
    }
    let continuous = method == Method::Continuous;
    let has_grad = inputs.contains_key("d_out");
    let has_intervals = inputs.contains_key("intervals");
    const SINK_ONLY: &str = "sink = given in the metadata beside it";
    const GRAD_ONLY: &str = "d_out beside it";
    let q = |name| Slot::new(layout, name, Q, [batch, heads, queries, head_dim]);
    let k = |name| Slot::new(layout, name, K, [batch, kv_heads, keys, head_dim]);
    let v = |name| Slot::new(layout, name, V, [batch, kv_heads, keys, value_dim]);
    let sink_k = |name| Slot::new(layout, name, sink_k, [sinks_k, kv_heads, head_dim]).only_if(given, SINK_ONLY);
    let sink_v = |name| Slot::new(layout, name, sink_v, [sinks_v, kv_heads, value_dim]).only_if(given, SINK_ONLY);
    let intervals = |name| Slot::new(layout, name, ["B", "T_k"], [batch, keys]).single();
    let out = |name| Slot::new(layout, name, ["B", "H_q", "T_q", "D_v"], [batch, heads, queries, value_dim]);
    let lse = |name| Slot::new(layout, name, ["B", "H_q", "T_q"], [batch, heads, queries]).single();
    let input_slots = vec![
        q("q"),
        k("k"),
        v("v"),
        sink_k("sink_k"),
        sink_v("sink_v"),
        intervals("intervals").only_if(continuous, "none with op softmax_attention"),
        out("d_out"),
        lse("d_lse").only_if(has_grad, GRAD_ONLY),
    ];
    let result_slots = vec![
        out("out"),
        lse("lse"),
        q("d_q").only_if(has_grad, GRAD_ONLY),
        k("d_k").only_if(has_grad, GRAD_ONLY),
        v("d_v").only_if(has_grad, GRAD_ONLY),
        sink_k("d_sink_k").only_if(has_grad, GRAD_ONLY),
        sink_v("d_sink_v").only_if(has_grad, GRAD_ONLY),
        intervals("d_intervals").only_if(has_intervals, "intervals beside it").only_if(has_grad, GRAD_ONLY),
    ];
    if let Lengths::Packed { .. } = lengths {
        // No shape of q, k or v bounds the heads of all sequences if none has a token.
        check_sizes(&[Slot::new(Layout::HeadsFirst, CU_SEQLENS_Q, ["N", "H_q"], [sequences, heads])])?;
    }
    let operation = Operation::Attention { config, shape, lengths, layout };
    Ok(Interpreted { operation, inputs: input_slots, results: result_slots, lengths: length_names })
}

fn efla(mut keys: Keys, inputs: &Tensors, mut whole: LengthTensors) -> Result<Interpreted> {
    let integrator = keys.choice("integrator", INTEGRATORS)?.unwrap_or_default();
    let normalize_q = keys.choice("normalize_q", BOOLS)?.unwrap_or(false);
    let normalize_k = keys.choice("normalize_k", BOOLS)?.unwrap_or(false);
    let scale = keys.number("scale", "a number")?;
    let chunk = keys.number("chunk", "16, 32 or 64")?;
    let form = keys.choice("form", FORMS)?.unwrap_or_default();
    let layout = keys.choice("layout", LAYOUTS)?.unwrap_or_default();
    keys.finish(EFLA)?;
    let cu_seqlens = whole.take(CU_SEQLENS);
    let length_names = whole.finish(EFLA)?;

    const K: [&str; 4] = ["B", "H", "T", "D_k"];
    const V: [&str; 4] = ["B", "H_v", "T", "D_v"];
    const STEPS: [&str; 3] = ["B", "H_v", "T"];
    let [batch, heads, tokens, key_dim] = sizes(inputs, layout, "q", K)?;
    sizes(inputs, layout, "k", K)?;
    let [_, value_heads, _, value_dim] = sizes(inputs, layout, "v", V)?;
    sizes(inputs, layout, "beta", STEPS)?;
    let gated = inputs.contains_key("log_decay");
    let config = EflaConfig { key_dim, value_dim, integrator, normalize_q, normalize_k, scale, chunk, form, gated };
    let shape = EflaShape { batch, heads, value_heads, tokens };
    config.validate()?;
    shape.validate()?;
    let mut states = ("B", batch);
    if let Some(cu_seqlens) = &cu_seqlens {
        if batch != 1 {
            return Err(Error::argument("batch", batch, "1 with packed sequences"));
        }
        check_cumulative(CU_SEQLENS, cu_seqlens, tokens)?;
        states = ("N", cu_seqlens.len() - 1);
    }

    let has_grad = inputs.contains_key("d_out");
    const GRAD_ONLY: &str = "d_out beside it";
    let k = |name| Slot::new(layout, name, K, [batch, heads, tokens, key_dim]);
    let v = |name| Slot::new(layout, name, V, [batch, value_heads, tokens, value_dim]);
    let steps = |name| Slot::new(layout, name, STEPS, [batch, value_heads, tokens]).single();
    let state = |name| {
        let dimensions = [states.0, "H_v", "D_k", "D_v"];
        Slot::new(layout, name, dimensions, [states.1, value_heads, key_dim, value_dim]).single()
    };
    let input_slots = vec![
        k("q"),
        k("k"),
        v("v"),
        steps("beta"),
        steps("log_decay"),
        state("initial_state"),
        v("d_out"),
        state("d_final_state").only_if(has_grad, GRAD_ONLY),
    ];
    let result_slots = vec![
        v("out"),
        state("final_state"),
        k("d_q").only_if(has_grad, GRAD_ONLY),
        k("d_k").only_if(has_grad, GRAD_ONLY),
        v("d_v").only_if(has_grad, GRAD_ONLY),
        steps("d_beta").only_if(has_grad, GRAD_ONLY),
        steps("d_log_decay").only_if(gated, "log_decay beside it").only_if(has_grad, GRAD_ONLY),
        state("d_initial_state").only_if(has_grad, GRAD_ONLY),
    ];
    let operation = Operation::Efla { config, shape, cu_seqlens, layout };
    Ok(Interpreted { operation, inputs: input_slots, results: result_slots, lengths: length_names })
}

/// The sizes of an input that has to be there, tokens behind heads.
fn sizes<const N: usize>(inputs: &Tensors, layout: Layout, name: &str, dimensions: [&str; N]) -> Result<[usize; N]> {
    let symbols = symbols(layout, name, dimensions);
    match inputs.get(name) {
        None => Err(Error::argument(name, "no such tensor", symbols)),
        Some(tensor) => match tensor.shape.as_slice().try_into() {
            Ok(sizes) => Ok(layout.ordered(name, sizes)),
            Err(_) => {
                let needed = format!("{N} dimensions, {symbols}");
                Err(Error::argument(name, format!("shape {:?}", tensor.shape), needed))
            }
        },
    }
}

/// Bounds what the tensors can make a caller allocate or loop over: a size of 0 elsewhere hides no huge one.
fn check_sizes(slots: &[Slot]) -> Result<()> {
    for slot in slots.iter().filter(|slot| slot.refused.is_none()) {
        let elements = slot.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size.max(1) as u64));
        if elements.is_none_or(|elements| elements >= MAX_ELEMENTS) {
            let needed = format!("less than 2^31 elements in {}, a size of 0 counted as 1", slot.symbols);
            return Err(Error::argument(slot.name, format!("shape {:?}", slot.shape), needed));
        }
    }
    Ok(())
}

/// Every tensor has a slot, is allowed there and has its shape. Beside them there may be tensors called `more`.
fn check_tensors(prefix: &str, tensors: &Tensors, slots: &[Slot], more: &[&str]) -> Result<()> {
    for (name, tensor) in tensors {
        let Some(slot) = slots.iter().find(|slot| slot.name == name) else {
            let names = slots.iter().map(|slot| slot.name).chain(more.iter().copied());
            let names = names.map(|name| format!("{prefix}{name}")).collect::<Vec<_>>().join(", ");
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

/// Inputs are finite and time does not run backwards, as far as a cache is in use.
fn check_values(operation: &Operation, inputs: &Tensors) -> Result<()> {
    for (name, tensor) in inputs {
        let (valid, needed): (fn(f32) -> bool, _) = match name.as_str() {
            "intervals" => (|value| value.is_finite() && value >= 0.0, "finite values of at least 0"),
            "log_decay" => (|value| value.is_finite() || value == f32::NEG_INFINITY, "finite values or -inf"),
            _ => (f32::is_finite, "finite values"),
        };
        let bad = |&(index, value): &(usize, &f32)| !valid(*value) && in_use(operation, name, &tensor.shape, index);
        if let Some((index, value)) = tensor.values.iter().enumerate().find(bad) {
            return Err(Error::argument(name, format!("{value} at element {index}"), needed));
        }
    }
    Ok(())
}

/// Whether an element belongs to a token that exists.
fn in_use(operation: &Operation, name: &str, shape: &[usize], index: usize) -> bool {
    let Operation::Attention { lengths: Lengths::Cache { kv_lens }, layout, .. } = operation else { return true };
    let dimension = match name {
        "intervals" => 1,
        "k" | "v" if layout.is_tokens_first(name) => 1,
        "k" | "v" => 2,
        _ => return true,
    };
    let behind = |dimension: usize| shape[dimension + 1..].iter().product::<usize>();
    index / behind(dimension) % shape[dimension] < kv_lens[index / behind(0)]
}
