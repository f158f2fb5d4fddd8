//! The repository's cases turned into every form that a case file can have. Where only the form changes, what they
//! expect stays true.

use crate::engine::{Device, Engine, Tensors};
use crate::exact::{self, rounded};
use crate::judge::{Check, Limits};
use continuous_attention::case::{Case, CaseTensor, Layout, Operation};
use continuous_attention::{AttentionConfig, DType, EflaConfig, Lengths};
use std::path::{Path, PathBuf};

fn given(name: &str) -> Case {
    let path = format!("{}/tests/cases/{name}.safetensors", env!("CARGO_MANIFEST_DIR"));
    Case::load(path, &Default::default()).unwrap()
}

/// Every tensor changed, inputs and expected results alike.
fn each(case: Case, change: impl Fn(&str, CaseTensor) -> CaseTensor) -> Case {
    let all = |tensors: Tensors| {
        let changed = |(name, tensor): (String, CaseTensor)| {
            let tensor = change(&name, tensor);
            (name, tensor)
        };
        tensors.into_iter().map(changed).collect()
    };
    Case { inputs: all(case.inputs), expected: all(case.expected), ..case }
}

/// Without what it expects.
fn unexpected(case: Case) -> Case {
    Case { expected: Tensors::new(), ..case }
}

/// What a tensor is, or is the gradient of.
fn kind(name: &str) -> &str {
    name.strip_prefix("d_").unwrap_or(name)
}

/// Dimensions `dim` and `dim + 1` exchanged.
fn exchanged(tensor: CaseTensor, dim: usize) -> CaseTensor {
    let CaseTensor { dtype, mut shape, values } = tensor;
    let (rows, columns, width) = (shape[dim], shape[dim + 1], shape[dim + 2..].iter().product::<usize>());
    let transposed = |matrix: &[f32]| -> Vec<f32> {
        let row = |row: usize, column: usize| &matrix[(row * columns + column) * width..][..width];
        (0..columns).flat_map(|column| (0..rows).flat_map(move |at| row(at, column))).copied().collect()
    };
    let values = values.chunks(rows * columns * width).flat_map(transposed).collect();
    shape.swap(dim, dim + 1);
    CaseTensor { dtype, shape, values }
}

/// Tokens before heads.
fn tokens_first(case: Case) -> Case {
    let mut case = each(case, |name, tensor| match kind(name) {
        "sink_k" | "sink_v" | "intervals" | "initial_state" | "final_state" => tensor,
        _ => exchanged(tensor, 1),
    });
    let (Operation::Attention { layout, .. } | Operation::Efla { layout, .. }) = &mut case.operation;
    *layout = Layout::TokensFirst;
    case
}

/// q, k, v, sinks and d_out stored as `dtype`.
fn stored(case: Case, dtype: DType) -> Case {
    unexpected(each(case, |name, tensor| match name {
        "q" | "k" | "v" | "sink_k" | "sink_v" | "d_out" => {
            let values = tensor.values.iter().map(|&value| rounded(dtype, value)).collect();
            CaseTensor { dtype, values, ..tensor }
        }
        _ => tensor,
    }))
}

/// v and d_out without their first column.
fn narrowed(mut case: Case) -> Case {
    case = unexpected(each(case, |name, mut tensor| {
        if let "v" | "d_out" = name {
            let columns = tensor.shape[3];
            tensor.values = tensor.values.chunks(columns).flat_map(|row| &row[1..]).copied().collect();
            tensor.shape[3] -= 1;
        }
        tensor
    }));
    let (Operation::Attention { config: AttentionConfig { value_dim, .. }, .. }
    | Operation::Efla { config: EflaConfig { value_dim, .. }, .. }) = &mut case.operation;
    *value_dim -= 1;
    case
}

/// The sequences of the batch one after another, in a batch of 1.
fn packed(case: Case) -> Case {
    let mut case = each(case, |name, tensor| {
        let mut tensor = match kind(name) {
            "sink_k" | "sink_v" | "initial_state" | "final_state" => return tensor,
            "intervals" => CaseTensor { shape: vec![1, tensor.shape[0], tensor.shape[1]], ..tensor },
            _ => exchanged(tensor, 0),
        };
        // [heads, batch, tokens, …], or [1, batch, tokens].
        let (batch, tokens) = (tensor.shape.remove(1), tensor.shape.remove(1));
        tensor.shape.insert(1, batch * tokens);
        if kind(name) != "intervals" {
            tensor.shape.insert(0, 1);
        }
        tensor
    });
    let ends = |batch: usize, tokens: usize| (0..=batch).map(|n| n * tokens).collect::<Vec<_>>();
    match &mut case.operation {
        Operation::Attention { shape, lengths, .. } => {
            *lengths = Lengths::Packed {
                cu_seqlens_q: ends(shape.batch, shape.queries),
                cu_seqlens_k: ends(shape.batch, shape.keys),
            };
            (shape.queries, shape.keys) = (shape.queries * shape.batch, shape.keys * shape.batch);
            shape.batch = 1;
        }
        Operation::Efla { shape, cu_seqlens, .. } => {
            *cu_seqlens = Some(ends(shape.batch, shape.tokens));
            (shape.batch, shape.tokens) = (1, shape.tokens * shape.batch);
        }
    }
    case
}

/// Three more tokens of NaN behind all keys, which are a cache then.
fn cached(case: Case) -> Case {
    let Operation::Attention { shape, .. } = case.operation else { panic!("no attention") };
    let mut case = each(case, |name, mut tensor| {
        let value = if name.starts_with("d_") { 0.0 } else { f32::NAN };
        let (dim, width) = match kind(name) {
            "k" | "v" => (2, tensor.shape[3]),
            "intervals" => (1, 1),
            _ => return tensor,
        };
        let longer = |tokens: &[f32]| [tokens, &vec![value; 3 * width]].concat();
        tensor.values = tensor.values.chunks(shape.keys * width).flat_map(longer).collect();
        tensor.shape[dim] += 3;
        tensor
    });
    let Operation::Attention { shape, lengths, .. } = &mut case.operation else { panic!("no attention") };
    *lengths = Lengths::Cache { kv_lens: vec![shape.keys; shape.batch] };
    shape.keys += 3;
    case
}

/// A state that decays.
fn gated(mut case: Case) -> Case {
    let Operation::Efla { config, .. } = &mut case.operation else { panic!("no EFLA") };
    config.gated = true;
    let mut log_decay = case.inputs["beta"].clone();
    log_decay.values.iter_mut().for_each(|value| *value *= -0.3);
    case.inputs.insert("log_decay".into(), log_decay);
    unexpected(case)
}

fn all() -> Vec<(&'static str, Case)> {
    let [grouped, intervals, sinks] =
        ["attention_grouped_cache_first_sink", "attention_bidirectional_intervals", "attention_given_sink_lse_grad"]
            .map(given);
    let [efla, raw_keys] = ["efla_grouped_values", "efla_exact_raw_keys"].map(given);
    let mut uneven = cached(stored(grouped.clone(), DType::F16));
    let Operation::Attention { lengths, .. } = &mut uneven.operation else { panic!("no attention") };
    *lengths = Lengths::Cache { kv_lens: vec![4, 12] };
    vec![
        ("attention_tokens_first", tokens_first(grouped.clone())),
        ("attention_half_tokens_first", tokens_first(stored(sinks.clone(), DType::F16))),
        ("attention_brain_odd", tokens_first(narrowed(stored(grouped.clone(), DType::BF16)))),
        ("attention_packed", packed(intervals.clone())),
        ("attention_packed_tokens_first", tokens_first(packed(sinks))),
        ("attention_cache", cached(grouped)),
        ("attention_cache_intervals", tokens_first(cached(intervals))),
        ("attention_half_cache_uneven", tokens_first(uneven)),
        ("efla_tokens_first", tokens_first(efla.clone())),
        ("efla_brain_gated", tokens_first(gated(stored(raw_keys, DType::BF16)))),
        ("efla_packed", packed(efla.clone())),
        ("efla_half_packed_gated", tokens_first(packed(gated(stored(efla, DType::F16))))),
    ]
}

/// Loaded again from a file in `folder`.
fn saved(folder: &Path, name: &str, case: &Case) -> Case {
    let path = folder.join(name).with_extension("safetensors");
    case.save(&path).unwrap();
    Case::load(&path, &Default::default()).unwrap_or_else(|error| panic!("{error}"))
}

/// The files stay where the environment variable VARIANTS names a folder: `scripts/test-demo` hands them to the demo.
#[test]
fn the_reference_gives_what_each_form_expects() {
    let kept = std::env::var_os("VARIANTS").map(PathBuf::from);
    let folder = kept
        .clone()
        .unwrap_or_else(|| std::env::temp_dir().join(format!("continuous-attention-variants-{}", std::process::id())));
    std::fs::create_dir_all(&folder).unwrap();
    for (name, case) in all() {
        let case = saved(&folder, name, &case);
        let limits = Limits::of(&case).unwrap();
        let results = Engine::open(Device::Reference, None).unwrap().compute(&case).unwrap();
        for (tensor, want) in &case.expected {
            let got = &results[tensor];
            assert_eq!(got.shape, want.shape, "{name}: {tensor}");
            let check = Check::expected(tensor.clone(), tensor, got, want, &limits);
            assert!(check.passed(), "{name}: {check:?}");
        }
        for (tensor, got) in &results {
            assert_eq!(got.dtype, exact::stored(&case, tensor), "{name}: {tensor}");
            if let Some(of) = case.inputs.get(kind(tensor)).filter(|_| tensor.starts_with("d_")) {
                assert_eq!((&got.shape, got.dtype), (&of.shape, of.dtype), "{name}: {tensor}");
            }
        }
        assert_eq!(results["out"].dtype, case.inputs["q"].dtype);
        assert_eq!(results.contains_key("d_log_decay"), name.contains("gated"));
    }
    if kept.is_none() {
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
