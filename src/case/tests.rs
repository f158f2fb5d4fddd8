use std::fs;
use std::path::PathBuf;

use super::*;

type Pairs<'a> = &'a [(&'a str, &'a str)];

fn strings(pairs: Pairs) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
}

/// A tensor of small distinct values.
fn tensor(shape: &[usize]) -> CaseTensor {
    let values = (0..shape.iter().product()).map(|index: usize| (index % 13) as f32 * 0.25).collect();
    CaseTensor { dtype: DType::F32, shape: shape.to_vec(), values }
}

fn tensors(shapes: &[(&str, &[usize])]) -> Tensors {
    shapes.iter().map(|(name, shape)| (name.to_string(), tensor(shape))).collect()
}

/// A file of any JSON header and any data.
fn raw(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

fn parse(tensors: &Tensors, metadata: Pairs) -> Result<Case> {
    parse_with(tensors, &[], metadata)
}

/// With tensors of whole numbers of one dimension.
fn parse_with(tensors: &Tensors, lengths: &[(&str, &[i64])], metadata: Pairs) -> Result<Case> {
    let bytes = file::encode(tensors, &whole(lengths), &strings(metadata)).unwrap();
    Case::from_bytes("some.safetensors", &bytes, &BTreeMap::new())
}

fn whole(lengths: &[(&str, &[i64])]) -> BTreeMap<String, Whole> {
    let whole = |values: &[i64]| Whole { shape: vec![values.len()], values: values.to_vec() };
    lengths.iter().map(|(name, values)| (name.to_string(), whole(values))).collect()
}

/// The message of a refused case, which has to carry the file's name.
#[track_caller]
fn refusal(result: Result<Case>) -> String {
    match result {
        Err(Error::Case { file, message }) if file == "some.safetensors" => message,
        other => panic!("expected Error::Case, got {other:?}"),
    }
}

#[track_caller]
fn refused(tensors: &Tensors, metadata: Pairs, message: &str) {
    assert_eq!(refusal(parse(tensors, metadata)), message);
}

const ATTENTION: Pairs = &[("op", "continuous_attention")];
const GIVEN: Pairs = &[("op", "continuous_attention"), ("sink", "given")];
const SOFTMAX: Pairs = &[("op", "softmax_attention")];
const EFLA_OP: Pairs = &[("op", "efla")];
const QKV: &[(&str, &[usize])] = &[("q", &[2, 4, 3, 5]), ("k", &[2, 2, 6, 5]), ("v", &[2, 2, 6, 7])];
const EFLA_QKV: &[(&str, &[usize])] =
    &[("q", &[2, 2, 3, 5]), ("k", &[2, 2, 3, 5]), ("v", &[2, 4, 3, 7]), ("beta", &[2, 4, 3])];

fn with(base: &[(&str, &[usize])], more: &[(&str, &[usize])]) -> Tensors {
    let mut all = tensors(base);
    all.extend(tensors(more));
    all
}

fn given_cases() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/cases")
}

fn given(name: &str, overrides: Pairs) -> Result<Case> {
    Case::load(given_cases().join(name).with_extension("safetensors"), &strings(overrides))
}

/// A folder of its own, removed at the end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("continuous-attention-{}-{name}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        Folder(folder)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn given_cases_round_trip() {
    let folder = Folder::new("round-trip");
    let mut count = 0;
    for entry in fs::read_dir(given_cases()).unwrap() {
        let path = entry.unwrap().path();
        let case = Case::load(&path, &BTreeMap::new()).unwrap();
        assert!(case.expected.contains_key("out"), "{}", case.file);
        let copy = folder.0.join("copy.safetensors");
        case.save(&copy).unwrap();
        let again = Case::load(&copy, &BTreeMap::new()).unwrap();
        assert_eq!((&again.inputs, &again.expected), (&case.inputs, &case.expected), "{}", case.file);
        assert_eq!(again.metadata(), case.metadata(), "{}", case.file);
        let first = fs::read(&copy).unwrap();
        again.save(&copy).unwrap();
        assert!(first == fs::read(&copy).unwrap(), "equal contents give equal bytes: {}", case.file);
        count += 1;
    }
    assert_eq!(count, 10);
}

#[test]
fn given_cases_by_hand() {
    let case = given("attention_grouped_cache_first_sink", &[]).unwrap();
    let Operation::Attention { config, shape, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!(config, AttentionConfig { head_dim: 24, value_dim: 40, sink: Sink::First, ..Default::default() });
    assert_eq!(shape, AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 5, keys: 12 });
    assert_eq!(case.expected.keys().collect::<Vec<_>>(), ["d_k", "d_q", "d_v", "lse", "out"]);
    assert_eq!(case.inputs.keys().collect::<Vec<_>>(), ["d_out", "k", "q", "v"]);
    assert!(case.file.ends_with("attention_grouped_cache_first_sink.safetensors"));

    let case = given("attention_bidirectional_intervals", &[]).unwrap();
    let Operation::Attention { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    let needed = AttentionConfig { head_dim: 8, value_dim: 8, sink: Sink::None, causal: false, ..Default::default() };
    assert_eq!(config, needed);
    assert_eq!(case.inputs["intervals"].shape, [2, 19]);

    let case = given("attention_ordinary_softmax", &[]).unwrap();
    let Operation::Attention { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.method, config.sink, config.head_dim), (Method::Softmax, Sink::None, 20));

    let case = given("attention_window", &[]).unwrap();
    let Operation::Attention { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.window, config.sink, config.scale), (Some(7), Sink::Zero, None));

    let case = given("attention_given_sink_lse_grad", &[]).unwrap();
    let Operation::Attention { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.sink, case.inputs["sink_k"].shape.as_slice()), (Sink::Given, [1, 2, 32].as_slice()));

    let case = given("efla_euler_normalized", &[]).unwrap();
    let Operation::Efla { config, shape, .. } = case.operation else { panic!("{:?}", case.operation) };
    let needed = EflaConfig {
        key_dim: 16,
        value_dim: 16,
        integrator: Integrator::Euler,
        normalize_q: true,
        normalize_k: true,
        ..Default::default()
    };
    assert_eq!(config, needed);
    assert_eq!(shape, EflaShape { batch: 1, heads: 2, value_heads: 2, tokens: 70 });

    let case = given("efla_grouped_values", &[]).unwrap();
    let Operation::Efla { config, shape, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.integrator, config.normalize_q, config.normalize_k), (Integrator::Exact, true, false));
    assert_eq!(shape, EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 45 });
}

#[test]
fn overrides_replace_metadata() {
    let overrides = &[("causal", "false"), ("sink", "none"), ("scale", "0.5"), ("window", "none")];
    let case = given("attention_window", overrides).unwrap();
    let Operation::Attention { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.causal, config.sink, config.scale, config.window), (false, Sink::None, Some(0.5), None));
    let described = [("causal", "false"), ("op", "continuous_attention"), ("scale", "0.5"), ("sink", "none")];
    assert_eq!(case.metadata(), strings(&[described.as_slice(), &[("window", "none"), ("layout", "bhtd")]].concat()));

    let overrides = &[
        ("integrator", "rk2"),
        ("normalize_q", "false"),
        ("normalize_k", "true"),
        ("chunk", "32"),
        ("form", "recurrent"),
    ];
    let case = given("efla_euler_normalized", overrides).unwrap();
    let Operation::Efla { config, .. } = case.operation else { panic!("{:?}", case.operation) };
    assert_eq!((config.integrator, config.form), (Integrator::RungeKutta2, Form::Recurrent));
    assert_eq!((config.normalize_q, config.normalize_k, config.chunk), (false, true, Some(32)));
    assert_eq!(
        case.metadata(),
        strings(&[overrides.as_slice(), EFLA_OP, &[("scale", "0.25"), ("layout", "bhtd")]].concat())
    );

    // An operation may change as long as nothing contradicts it.
    let case = given("attention_window", &[("op", "softmax_attention"), ("sink", "none")]).unwrap();
    assert!(matches!(case.operation, Operation::Attention { config, .. } if config.method == Method::Softmax));

    let error = given("attention_window", &[("window", "0")]).unwrap_err().to_string();
    assert!(error.ends_with("attention_window.safetensors: window: got 0, needed at least 1, or none"), "{error}");
    let error = given("attention_window", &[("normalize_k", "true")]).unwrap_err().to_string();
    assert!(error.contains("attention_window.safetensors: metadata key normalize_k: got \"true\""), "{error}");
}

#[test]
fn defaults() {
    let Operation::Attention { config, .. } = parse(&tensors(QKV), ATTENTION).unwrap().operation else { panic!() };
    assert_eq!(config, AttentionConfig { head_dim: 5, value_dim: 7, ..Default::default() });
    let Operation::Attention { config, .. } = parse(&tensors(QKV), SOFTMAX).unwrap().operation else { panic!() };
    assert_eq!((config.method, config.sink), (Method::Softmax, Sink::None));
    let Operation::Efla { config, .. } = parse(&tensors(EFLA_QKV), EFLA_OP).unwrap().operation else { panic!() };
    assert_eq!(config, EflaConfig { key_dim: 5, value_dim: 7, ..Default::default() });
}

#[test]
fn sizes_of_zero_are_valid() {
    let shapes = [
        [[0, 4, 3, 5], [0, 2, 6, 5], [0, 2, 6, 7]],
        [[2, 0, 3, 5], [2, 0, 6, 5], [2, 0, 6, 7]],
        [[2, 4, 0, 5], [2, 2, 6, 5], [2, 2, 6, 7]],
        [[2, 4, 3, 5], [2, 2, 0, 5], [2, 2, 0, 7]],
    ];
    for [q, k, v] in shapes {
        parse(&tensors(&[("q", &q), ("k", &k), ("v", &v)]), ATTENTION).unwrap();
    }
    let empty = tensors(&[("q", &[2, 2, 0, 5]), ("k", &[2, 2, 0, 5]), ("v", &[2, 4, 0, 7]), ("beta", &[2, 4, 0])]);
    let Operation::Efla { shape, .. } = parse(&empty, EFLA_OP).unwrap().operation else { panic!() };
    assert_eq!(shape, EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 0 });
}

#[test]
fn sinks_of_one_or_per_sequence() {
    for batch in [1, 2] {
        let more: &[(&str, &[usize])] = &[
            ("sink_k", &[batch, 2, 5]),
            ("sink_v", &[batch, 2, 7]),
            ("d_out", &[2, 4, 3, 7]),
            ("expected.d_sink_k", &[batch, 2, 5]),
        ];
        parse(&with(QKV, more), GIVEN).unwrap();
    }
}

#[test]
fn wrong_metadata() {
    let attention = |key, value, message: &str| refused(&tensors(QKV), &[ATTENTION[0], (key, value)], message);
    refused(
        &tensors(QKV),
        &[],
        "op: got no such metadata key, needed one of continuous_attention, softmax_attention, efla",
    );
    refused(
        &tensors(QKV),
        &[("op", "linear")],
        "op: got \"linear\", needed one of continuous_attention, softmax_attention, efla",
    );
    attention("causal", "True", "causal: got \"True\", needed one of true, false");
    attention("sink", "last", "sink: got \"last\", needed one of zero, first, given, none");
    attention("scale", "big", "scale: got \"big\", needed a number, or none");
    attention("scale", "NaN", "scale: got NaN, needed a finite float32");
    attention("scale", "1e39", "scale: got 1000000000000000000000000000000000000000, needed a finite float32");
    attention("window", "-1", "window: got \"-1\", needed a whole number of at least 1, or none");
    attention("window", "1.5", "window: got \"1.5\", needed a whole number of at least 1, or none");
    attention("window", "0", "window: got 0, needed at least 1, or none");
    let needed = "needed only the keys op, causal, sink, scale, window, layout with op continuous_attention";
    attention("colour", "red", &format!("metadata key colour: got \"red\", {needed}"));
    attention("chunk", "16", &format!("metadata key chunk: got \"16\", {needed}"));
    refused(&tensors(QKV), &[SOFTMAX[0], ("sink", "zero")], "sink: got zero, needed none with op softmax_attention");
    let efla = |key, value, message| refused(&tensors(EFLA_QKV), &[EFLA_OP[0], (key, value)], message);
    efla("integrator", "rk3", "integrator: got \"rk3\", needed one of exact, euler, rk2, rk4");
    efla("chunk", "8", "chunk: got 8, needed 16, 32 or 64");
    efla("chunk", "x", "chunk: got \"x\", needed 16, 32 or 64, or none");
    efla("form", "", "form: got \"\", needed one of chunked, recurrent");
    let message = "metadata key causal: got \"true\", needed only the keys op, integrator, normalize_q, normalize_k, \
                   scale, chunk, form, layout with op efla";
    efla("causal", "true", message);
}

#[test]
fn wrong_tensors() {
    let attention = |more: &[(&str, &[usize])], message| refused(&with(QKV, more), ATTENTION, message);
    for name in ["q", "k", "v"] {
        let mut missing = tensors(QKV);
        missing.remove(name);
        let message = refusal(parse(&missing, ATTENTION));
        assert!(message.starts_with(&format!("{name}: got no such tensor, needed [B, ")), "{message}");
    }
    attention(&[("q", &[4, 3, 5])], "q: got shape [4, 3, 5], needed 4 dimensions, [B, H_q, T_q, D]");
    attention(&[("q", &[])], "q: got shape [], needed 4 dimensions, [B, H_q, T_q, D]");
    attention(&[("k", &[2, 2, 6, 4])], "k: got shape [2, 2, 6, 4], needed [2, 2, 6, 5] = [B, H_kv, T_k, D]");
    attention(&[("k", &[1, 2, 6, 5])], "k: got shape [1, 2, 6, 5], needed [2, 2, 6, 5] = [B, H_kv, T_k, D]");
    attention(&[("v", &[2, 2, 5, 7])], "v: got shape [2, 2, 5, 7], needed [2, 2, 6, 7] = [B, H_kv, T_k, D_v]");
    attention(&[("k", &[2, 3, 6, 5]), ("v", &[2, 3, 6, 7])], "heads: got 4, needed a multiple of kv_heads = 3");
    attention(&[("k", &[2, 0, 6, 5]), ("v", &[2, 0, 6, 7])], "heads: got 4, needed a multiple of kv_heads = 0");
    attention(&[("q", &[2, 4, 3, 0])], "head_dim: got 0, needed 1 to 256");
    attention(&[("v", &[2, 2, 6, 257])], "value_dim: got 257, needed 1 to 256");
    attention(&[("intervals", &[6])], "intervals: got shape [6], needed [2, 6] = [B, T_k]");
    attention(&[("d_out", &[2, 4, 3, 5])], "d_out: got shape [2, 4, 3, 5], needed [2, 4, 3, 7] = [B, H_q, T_q, D_v]");
    attention(&[("d_lse", &[2, 4, 3])], "d_lse: got a tensor, needed d_out beside it");
    attention(
        &[("out", &[2, 4, 3, 7])],
        "out: got a tensor of that name, needed one of q, k, v, sink_k, sink_v, intervals, d_out, d_lse, cu_seqlens_q, \
         cu_seqlens_k, kv_lens",
    );
    let names = "expected.out, expected.lse, expected.d_q, expected.d_k, expected.d_v, expected.d_sink_k, \
                 expected.d_sink_v, expected.d_intervals";
    let message = format!("expected.state: got a tensor of that name, needed one of {names}");
    attention(&[("expected.state", &[2])], &message);
    attention(
        &[("expected.lse", &[2, 4, 3, 1])],
        "expected.lse: got shape [2, 4, 3, 1], needed [2, 4, 3] = [B, H_q, T_q]",
    );
    attention(&[("expected.d_q", &[2, 4, 3, 5])], "expected.d_q: got a tensor, needed d_out beside it");
    attention(
        &[("d_out", &[2, 4, 3, 7]), ("expected.d_intervals", &[2, 6])],
        "expected.d_intervals: got a tensor, needed intervals beside it",
    );
    attention(&[("sink_k", &[2, 2, 5])], "sink_k: got a tensor, needed sink = given in the metadata beside it");
    refused(&tensors(QKV), GIVEN, "sink_k: got no such tensor, needed [B or 1, H_kv, D]");
    refused(&with(QKV, &[("sink_k", &[1, 2, 5])]), GIVEN, "sink_v: got no such tensor, needed [B or 1, H_kv, D_v]");
    refused(
        &with(QKV, &[("sink_k", &[3, 2, 5]), ("sink_v", &[1, 2, 7])]),
        GIVEN,
        "sink_k: got shape [3, 2, 5], needed [2, 2, 5] = [B or 1, H_kv, D]",
    );
    refused(
        &with(QKV, &[("intervals", &[2, 6])]),
        SOFTMAX,
        "intervals: got a tensor, needed none with op softmax_attention",
    );
    let efla = |more: &[(&str, &[usize])], message| refused(&with(EFLA_QKV, more), EFLA_OP, message);
    refused(&tensors(&EFLA_QKV[..3]), EFLA_OP, "beta: got no such tensor, needed [B, H_v, T]");
    efla(&[("k", &[2, 2, 4, 5])], "k: got shape [2, 2, 4, 5], needed [2, 2, 3, 5] = [B, H, T, D_k]");
    efla(&[("v", &[2, 3, 3, 7])], "value_heads: got 3, needed a multiple of heads = 2");
    efla(&[("beta", &[2, 2, 3])], "beta: got shape [2, 2, 3], needed [2, 4, 3] = [B, H_v, T]");
    efla(
        &[("initial_state", &[2, 4, 7, 5])],
        "initial_state: got shape [2, 4, 7, 5], needed [2, 4, 5, 7] = [B, H_v, D_k, D_v]",
    );
    efla(&[("d_final_state", &[2, 4, 5, 7])], "d_final_state: got a tensor, needed d_out beside it");
    efla(
        &[("d_out", &[2, 4, 3, 7]), ("expected.d_log_decay", &[2, 4, 3])],
        "expected.d_log_decay: got a tensor, needed log_decay beside it",
    );
    let names = "q, k, v, beta, log_decay, initial_state, d_out, d_final_state, cu_seqlens";
    efla(&[("d_lse", &[2, 4, 3])], &format!("d_lse: got a tensor of that name, needed one of {names}"));
}

const PACKED: &[(&str, &[usize])] = &[("q", &[1, 4, 5, 3]), ("k", &[1, 2, 9, 3]), ("v", &[1, 2, 9, 7])];
const CU_SEQLENS: &[(&str, &[i64])] = &[("cu_seqlens_q", &[0, 2, 2, 5]), ("cu_seqlens_k", &[0, 4, 9, 9])];

#[test]
fn lengths_of_sequences() {
    let attention = |tensors: &Tensors, lengths, metadata| {
        let Operation::Attention { lengths, .. } = parse_with(tensors, lengths, metadata).unwrap().operation else {
            panic!()
        };
        lengths
    };
    let packed = Lengths::Packed { cu_seqlens_q: vec![0, 2, 2, 5], cu_seqlens_k: vec![0, 4, 9, 9] };
    assert_eq!(attention(&tensors(PACKED), CU_SEQLENS, ATTENTION), packed);
    assert_eq!(attention(&tensors(PACKED), CU_SEQLENS, SOFTMAX), packed);
    for sequences in [1, 3] {
        let more: &[(&str, &[usize])] = &[
            ("sink_k", &[sequences, 2, 3]),
            ("sink_v", &[1, 2, 7]),
            ("d_out", &[1, 4, 5, 7]),
            ("expected.d_sink_k", &[sequences, 2, 3]),
        ];
        attention(&with(PACKED, more), CU_SEQLENS, GIVEN);
    }
    let sinks = with(PACKED, &[("sink_k", &[2, 2, 3]), ("sink_v", &[1, 2, 7])]);
    let message = refusal(parse_with(&sinks, CU_SEQLENS, GIVEN));
    assert_eq!(message, "sink_k: got shape [2, 2, 3], needed [3, 2, 3] = [N or 1, H_kv, D]");
    assert_eq!(attention(&tensors(QKV), &[("kv_lens", &[6, 0])], ATTENTION), Lengths::Cache { kv_lens: vec![6, 0] });
    assert_eq!(attention(&tensors(QKV), &[], ATTENTION), Lengths::Full);

    let efla: &[(&str, &[usize])] = &[
        ("q", &[1, 2, 3, 5]),
        ("k", &[1, 2, 3, 5]),
        ("v", &[1, 4, 3, 7]),
        ("beta", &[1, 4, 3]),
        ("log_decay", &[1, 4, 3]),
        ("initial_state", &[4, 4, 5, 7]),
        ("expected.final_state", &[4, 4, 5, 7]),
    ];
    let case = parse_with(&tensors(efla), &[("cu_seqlens", &[0, 1, 1, 3, 3])], EFLA_OP).unwrap();
    let Operation::Efla { cu_seqlens, .. } = case.operation else { panic!() };
    assert_eq!(cu_seqlens, Some(vec![0, 1, 1, 3, 3]));
    let message = refusal(parse_with(&tensors(efla), &[("cu_seqlens", &[0, 1, 3])], EFLA_OP));
    assert_eq!(message, "initial_state: got shape [4, 4, 5, 7], needed [2, 4, 5, 7] = [N, H_v, D_k, D_v]");
}

#[test]
fn wrong_lengths() {
    let packed = |q: &[i64], k: &[i64], message: &str| {
        let lengths: &[(&str, &[i64])] = &[("cu_seqlens_q", q), ("cu_seqlens_k", k)];
        assert_eq!(refusal(parse_with(&tensors(PACKED), lengths, ATTENTION)), message);
    };
    let rise = |total| format!("needed cumulative lengths that rise from 0 to the {total} tokens");
    packed(&[0, 4], &[0, 9], &format!("cu_seqlens_q: got 2 entries from Some(0) to Some(4), {}", rise(5)));
    packed(&[0, 6], &[0, 9], &format!("cu_seqlens_q: got 2 entries from Some(0) to Some(6), {}", rise(5)));
    packed(&[], &[0, 9], &format!("cu_seqlens_q: got 0 entries from None to None, {}", rise(5)));
    let unsorted = format!("cu_seqlens_k: got 4 entries from Some(0) to Some(9), not sorted, {}", rise(9));
    packed(&[0, 2, 2, 5], &[0, 5, 4, 9], &unsorted);
    packed(&[0, 5], &[0, 4, 9], "cu_seqlens_k: got 3 entries, needed 2, as cu_seqlens_q");
    packed(&[0, -1, 5], &[0, 4, 9], "cu_seqlens_q: got -1 at element 1, needed at least 0");
    let refused = |tensors: &[(&str, &[usize])], lengths: &[(&str, &[i64])], metadata: Pairs, message: &str| {
        assert_eq!(refusal(parse_with(&self::tensors(tensors), lengths, metadata)), message);
    };
    let message = "cu_seqlens_k: got no such tensor, needed one beside cu_seqlens_q";
    refused(PACKED, &CU_SEQLENS[..1], ATTENTION, message);
    let message = "cu_seqlens_q: got no such tensor, needed one beside cu_seqlens_k";
    refused(PACKED, &CU_SEQLENS[1..], ATTENTION, message);
    let all: &[(&str, &[i64])] = &[CU_SEQLENS[0], CU_SEQLENS[1], ("kv_lens", &[9])];
    refused(PACKED, all, ATTENTION, "kv_lens: got a tensor, needed none beside cu_seqlens_q, cu_seqlens_k");
    let two: &[(&str, &[i64])] = &[("cu_seqlens_q", &[0, 3]), ("cu_seqlens_k", &[0, 6])];
    refused(QKV, two, ATTENTION, "batch: got 2, needed 1 with packed sequences");
    let cache = |kv_lens: &[i64], message| refused(QKV, &[("kv_lens", kv_lens)], ATTENTION, message);
    cache(&[6], "kv_lens: got 1 entries, needed 2, one a sequence");
    cache(&[6, 7], "kv_lens: got 7, needed at most the 6 keys of the cache");
    cache(&[6, -7], "kv_lens: got -7 at element 1, needed at least 0");
    cache(&[6, 1 << 30], "kv_lens: got 1073741824, needed at most the 6 keys of the cache");
    let names = "cu_seqlens_q, cu_seqlens_k, kv_lens";
    let message = format!("cu_seqlens: got a tensor, needed only {names} with op continuous_attention");
    refused(PACKED, &[("cu_seqlens", &[0, 5])], ATTENTION, &message);
    let efla = |cu_seqlens: &[i64], message| refused(EFLA_QKV, &[("cu_seqlens", cu_seqlens)], EFLA_OP, message);
    efla(&[0, 3], "batch: got 2, needed 1 with packed sequences");
    let one: &[(&str, &[usize])] =
        &[("q", &[1, 2, 3, 5]), ("k", &[1, 2, 3, 5]), ("v", &[1, 4, 3, 7]), ("beta", &[1, 4, 3])];
    let message = format!("cu_seqlens: got 2 entries from Some(0) to Some(2), {}", rise(3));
    refused(one, &[("cu_seqlens", &[0, 2])], EFLA_OP, &message);
    refused(one, &[("kv_lens", &[3])], EFLA_OP, "kv_lens: got a tensor, needed only cu_seqlens with op efla");

    // Types and shapes.
    let message = "kv_lens: got F32 elements, needed I32";
    refused(&[QKV[0], QKV[1], QKV[2], ("kv_lens", &[2])], &[], ATTENTION, message);
    let floating = "needed a floating point type: F32, F16, BF16 or F64";
    refused(QKV, &[("q_lens", &[3])], ATTENTION, &format!("q_lens: got whole numbers, {floating}"));
    let expected = format!("expected.kv_lens: got whole numbers, {floating}");
    refused(QKV, &[("expected.kv_lens", &[3])], ATTENTION, &expected);
    let column = BTreeMap::from([("kv_lens".to_string(), Whole { shape: vec![2, 1], values: vec![6, 3] })]);
    let bytes = file::encode(&tensors(QKV), &column, &strings(ATTENTION)).unwrap();
    let message = refusal(Case::from_bytes("some.safetensors", &bytes, &BTreeMap::new()));
    assert_eq!(message, "kv_lens: got shape [2, 1], needed one dimension");

    // As many empty sequences as a file can name, of as many heads as a shape can: not a loop over all of them.
    let many = vec![0; 1 << 12];
    let empty: &[(&str, &[usize])] = &[("q", &[1, 1 << 20, 0, 1]), ("k", &[1, 1, 0, 1]), ("v", &[1, 1, 0, 1])];
    let message = refusal(parse_with(&tensors(empty), &[("cu_seqlens_q", &many), ("cu_seqlens_k", &many)], ATTENTION));
    assert!(message.starts_with("cu_seqlens_q: got shape [4095, 1048576], needed less than 2^31"), "{message}");
}

#[test]
fn types_of_lengths() {
    let from = |dtype: &str, bytes: &[u8]| {
        let header = format!(
            r#"{{"__metadata__":{{"op":"softmax_attention"}},
            "q":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[0,4]}},
            "k":{{"dtype":"F32","shape":[1,1,2,1],"data_offsets":[4,12]}},
            "v":{{"dtype":"F32","shape":[1,1,2,1],"data_offsets":[12,20]}},
            "kv_lens":{{"dtype":"{dtype}","shape":[1],"data_offsets":[20,{}]}}}}"#,
            20 + bytes.len()
        );
        let bytes = raw(&header, &[[0; 20].as_slice(), bytes].concat());
        Case::from_bytes("some.safetensors", &bytes, &BTreeMap::new())
    };
    for (dtype, bytes) in [("I32", &1i32.to_le_bytes()[..]), ("U32", &1u32.to_le_bytes()), ("I64", &1i64.to_le_bytes())]
    {
        let Operation::Attention { lengths, .. } = from(dtype, bytes).unwrap().operation else { panic!() };
        assert_eq!(lengths, Lengths::Cache { kv_lens: vec![1] });
    }
    let message = refusal(from("U32", &u32::MAX.to_le_bytes()));
    assert_eq!(message, "kv_lens: got 4294967295, needed at most the 2 keys of the cache");
    assert_eq!(
        refusal(from("I64", &i64::MIN.to_le_bytes())),
        format!("kv_lens: got {} at element 0, needed at least 0", i64::MIN)
    );
    refusal(from("I64", &i64::MAX.to_le_bytes()));
    refusal(from("I16", &[0; 2]));
}

/// Behind the length of a cache there may be anything.
#[test]
fn a_cache_counts_as_far_as_it_is_used() {
    for (layout, token) in [("bhtd", 1), ("bthd", 2)] {
        // Two sequences, two heads, three tokens, one column.
        let shape = if layout == "bhtd" { [2, 2, 3, 1] } else { [2, 3, 2, 1] };
        let mut base = tensors(&[("q", &shape), ("k", &shape), ("v", &shape), ("intervals", &[2, 3])]);
        let metadata: Pairs = &[ATTENTION[0], ("layout", layout)];
        let lengths: &[(&str, &[i64])] = &[("kv_lens", &[1, 2])];
        for name in ["k", "v"] {
            for (index, value) in base.get_mut(name).unwrap().values.iter_mut().enumerate() {
                let (sequence, token) = (index / 6, index / token % 3);
                if token > sequence {
                    *value = f32::NAN;
                }
            }
        }
        base.get_mut("intervals").unwrap().values.copy_from_slice(&[1.0, -1.0, f32::NAN, 1.0, 0.0, f32::INFINITY]);
        parse_with(&base, lengths, metadata).unwrap();
        let message = refusal(parse_with(&base, &[("kv_lens", &[2, 2])], metadata));
        assert_eq!(message, "intervals: got -1 at element 1, needed finite values of at least 0");
        let mut spoilt = base.clone();
        spoilt.get_mut("k").unwrap().values[0] = f32::NAN;
        let message = refusal(parse_with(&spoilt, lengths, metadata));
        assert_eq!(message, "k: got NaN at element 0, needed finite values");
        base.get_mut("q").unwrap().values[5] = f32::NAN;
        refusal(parse_with(&base, lengths, metadata));
    }
}

#[test]
fn layouts() {
    let shapes: &[(&str, &[usize])] = &[
        ("q", &[2, 3, 4, 5]),
        ("k", &[2, 6, 2, 5]),
        ("v", &[2, 6, 2, 7]),
        ("sink_k", &[1, 2, 5]),
        ("sink_v", &[2, 2, 7]),
        ("intervals", &[2, 6]),
        ("d_out", &[2, 3, 4, 7]),
        ("d_lse", &[2, 3, 4]),
        ("expected.out", &[2, 3, 4, 7]),
        ("expected.lse", &[2, 3, 4]),
        ("expected.d_k", &[2, 6, 2, 5]),
        ("expected.d_sink_v", &[2, 2, 7]),
        ("expected.d_intervals", &[2, 6]),
    ];
    let metadata: Pairs = &[GIVEN[0], GIVEN[1], ("layout", "bthd")];
    let case = parse(&tensors(shapes), metadata).unwrap();
    assert_eq!(case.operation.layout(), Layout::TokensFirst);
    let Operation::Attention { config, shape, .. } = case.operation else { panic!() };
    assert_eq!((config.head_dim, config.value_dim), (5, 7));
    assert_eq!(shape, AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: 3, keys: 6 });
    assert_eq!(case.inputs["k"].shape, [2, 6, 2, 5]);
    let change = |name: &str, shape: &[usize]| {
        let mut changed = tensors(shapes);
        changed.insert(name.to_string(), tensor(shape));
        refusal(parse(&changed, metadata))
    };
    assert_eq!(change("k", &[6, 2, 5]), "k: got shape [6, 2, 5], needed 4 dimensions, [B, T_k, H_kv, D]");
    assert_eq!(change("v", &[2, 5, 2, 7]), "v: got shape [2, 5, 2, 7], needed [2, 6, 2, 7] = [B, T_k, H_kv, D_v]");
    assert_eq!(change("d_lse", &[2, 4, 3]), "d_lse: got shape [2, 4, 3], needed [2, 3, 4] = [B, T_q, H_q]");
    let message = "expected.d_k: got shape [2, 2, 6, 5], needed [2, 6, 2, 5] = [B, T_k, H_kv, D]";
    assert_eq!(change("expected.d_k", &[2, 2, 6, 5]), message);
    assert_eq!(change("q", &[2, 3, 3, 5]), "heads: got 3, needed a multiple of kv_heads = 2");

    let shapes: &[(&str, &[usize])] = &[
        ("q", &[2, 3, 2, 5]),
        ("k", &[2, 3, 2, 5]),
        ("v", &[2, 3, 4, 7]),
        ("beta", &[2, 3, 4]),
        ("log_decay", &[2, 3, 4]),
        ("initial_state", &[2, 4, 5, 7]),
        ("d_out", &[2, 3, 4, 7]),
        ("d_final_state", &[2, 4, 5, 7]),
        ("expected.final_state", &[2, 4, 5, 7]),
        ("expected.d_beta", &[2, 3, 4]),
        ("expected.d_log_decay", &[2, 3, 4]),
        ("expected.d_initial_state", &[2, 4, 5, 7]),
    ];
    let case = parse(&tensors(shapes), &[EFLA_OP[0], ("layout", "bthd")]).unwrap();
    let Operation::Efla { shape, .. } = case.operation else { panic!() };
    assert_eq!(shape, EflaShape { batch: 2, heads: 2, value_heads: 4, tokens: 3 });
    let mut wrong = tensors(shapes);
    wrong.insert("beta".into(), tensor(&[2, 4, 3]));
    let message = refusal(parse(&wrong, &[EFLA_OP[0], ("layout", "bthd")]));
    assert_eq!(message, "beta: got shape [2, 4, 3], needed [2, 3, 4] = [B, T, H_v]");
    let message = refusal(parse(&wrong, &[EFLA_OP[0], ("layout", "bshd")]));
    assert_eq!(message, "layout: got \"bshd\", needed one of bhtd, bthd");
}

/// Everything that a case can hold comes back: types, lengths, layout.
#[test]
fn every_kind_of_case_round_trips() {
    let folder = Folder::new("kinds");
    let path = folder.0.join("case.safetensors");
    let stored = |mut tensors: Tensors, names: &[&str], dtype: DType| {
        names.iter().for_each(|name| tensors.get_mut(*name).unwrap().dtype = dtype);
        tensors
    };
    let halves = stored(with(PACKED, &[("expected.out", &[1, 4, 5, 7])]), &["q", "k", "expected.out"], DType::F16);
    let brain = stored(tensors(QKV), &["v"], DType::BF16);
    let efla = with(&[("q", &[1, 3, 2, 5]), ("k", &[1, 3, 2, 5])], &[("v", &[1, 3, 4, 7]), ("beta", &[1, 3, 4])]);
    let cases = [
        parse_with(&halves, CU_SEQLENS, ATTENTION),
        parse_with(&brain, &[("kv_lens", &[6, 1])], SOFTMAX),
        parse_with(&efla, &[("cu_seqlens", &[0, 0, 3])], &[EFLA_OP[0], ("layout", "bthd")]),
    ];
    for case in cases.map(Result::unwrap) {
        case.save(&path).unwrap();
        let again = Case::load(&path, &BTreeMap::new()).unwrap();
        assert_eq!(again.operation.metadata(), case.operation.metadata());
        assert_eq!(again.operation.lengths(), case.operation.lengths());
        assert_eq!((&again.inputs, &again.expected), (&case.inputs, &case.expected));
        // The crate that defined the format reads it too, aligned.
        let bytes = fs::read(&path).unwrap();
        let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        for (name, lengths) in again.operation.lengths() {
            let tensor = file.tensor(name).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (safetensors::Dtype::I32, &[lengths.len()][..]));
        }
        // Not a file of results.
        let message = load(&path).unwrap_err().to_string();
        assert!(message.contains("got whole numbers, needed a floating point type"), "{message}");
    }
    let mut case = parse_with(&brain, &[("kv_lens", &[6, 1])], SOFTMAX).unwrap();
    let Operation::Attention { lengths, .. } = &mut case.operation else { panic!() };
    *lengths = Lengths::Cache { kv_lens: vec![1 << 31] };
    let message = case.save(folder.0.join("new")).unwrap_err().to_string();
    assert!(message.ends_with("kv_lens: got 2147483648, needed at most 2147483647"), "{message}");
    assert!(!folder.0.join("new").exists());
}

/// What the operators only take as F32 may be stored in fewer bits: it says F32 once it is read.
#[test]
fn single_precision_is_widened() {
    let mut base = with(QKV, &[("intervals", &[2, 6]), ("d_out", &[2, 4, 3, 7]), ("d_lse", &[2, 4, 3])]);
    base.values_mut().for_each(|tensor| tensor.dtype = DType::BF16);
    let case = parse(&base, ATTENTION).unwrap();
    for (name, tensor) in &case.inputs {
        let single = ["intervals", "d_lse"].contains(&name.as_str());
        assert_eq!(tensor.dtype, if single { DType::F32 } else { DType::BF16 }, "{name}");
        assert_eq!(tensor.values, base[name].values);
    }
    let mut base = with(EFLA_QKV, &[("log_decay", &[2, 4, 3]), ("initial_state", &[2, 4, 5, 7])]);
    base.values_mut().for_each(|tensor| tensor.dtype = DType::F16);
    let case = parse(&base, EFLA_OP).unwrap();
    for (name, tensor) in &case.inputs {
        let stored = ["q", "k", "v"].contains(&name.as_str());
        assert_eq!(tensor.dtype, if stored { DType::F16 } else { DType::F32 }, "{name}");
    }
}

#[test]
fn wrong_values() {
    let base = with(QKV, &[("intervals", &[2, 6]), ("expected.lse", &[2, 4, 3])]);
    let change = |name: &str, index: usize, value: f32| {
        let mut tensors = base.clone();
        tensors.get_mut(name).unwrap().values[index] = value;
        tensors
    };
    refused(&change("k", 7, f32::NAN), ATTENTION, "k: got NaN at element 7, needed finite values");
    refused(&change("q", 0, f32::NEG_INFINITY), ATTENTION, "q: got -inf at element 0, needed finite values");
    let needed = "needed finite values of at least 0";
    refused(&change("intervals", 3, -1.0), ATTENTION, &format!("intervals: got -1 at element 3, {needed}"));
    refused(&change("intervals", 3, f32::INFINITY), ATTENTION, &format!("intervals: got inf at element 3, {needed}"));
    parse(&change("intervals", 3, -0.0), ATTENTION).unwrap();
    let mut decay = with(EFLA_QKV, &[("log_decay", &[2, 4, 3])]);
    decay.get_mut("log_decay").unwrap().values[5] = f32::NEG_INFINITY;
    parse(&decay, EFLA_OP).unwrap();
    decay.get_mut("log_decay").unwrap().values[5] = f32::INFINITY;
    refused(&decay, EFLA_OP, "log_decay: got inf at element 5, needed finite values or -inf");
    let case = parse(&change("expected.lse", 2, f32::NEG_INFINITY), ATTENTION).unwrap();
    assert_eq!(case.expected["lse"].values[2], f32::NEG_INFINITY);
}

/// A softmax case of one row with one key, q of the given type, k and v F32.
fn one_row(dtype: &str, q: &[u8]) -> Vec<u8> {
    let end = q.len();
    let header = format!(
        r#"{{"__metadata__":{{"op":"softmax_attention"}},
        "q":{{"dtype":"{dtype}","shape":[1,1,1,1],"data_offsets":[0,{end}]}},
        "k":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[{end},{}]}},
        "v":{{"dtype":"F32","shape":[1,1,1,1],"data_offsets":[{},{}]}}}}"#,
        end + 4,
        end + 4,
        end + 8
    );
    raw(&header, &[q, [0; 8].as_slice()].concat())
}

#[test]
fn element_types() {
    let from = |bytes: &[u8]| Case::from_bytes("some.safetensors", bytes, &BTreeMap::new());
    let case = from(&one_row("F64", &0.1f64.to_le_bytes())).unwrap();
    assert_eq!(case.inputs["q"], CaseTensor { dtype: DType::F32, shape: vec![1; 4], values: vec![0.1] });
    assert_eq!(
        refusal(from(&one_row("F64", &1e300f64.to_le_bytes()))),
        "q: got 1e300, needed values within the range of float32"
    );
    let message = refusal(from(&one_row("F64", &f64::INFINITY.to_le_bytes())));
    assert_eq!(message, "q: got inf at element 0, needed finite values");
    let bits = half::f16::from_f32(0.1).to_le_bytes();
    let case = from(&one_row("F16", &bits)).unwrap();
    assert_eq!(case.inputs["q"], CaseTensor { dtype: DType::F16, shape: vec![1; 4], values: vec![0.099_975_586] });
    assert_eq!(case.inputs["k"].dtype, DType::F32);
    let case = from(&one_row("BF16", &half::bf16::from_f32(0.1).to_le_bytes())).unwrap();
    assert_eq!(case.inputs["q"], CaseTensor { dtype: DType::BF16, shape: vec![1; 4], values: vec![0.100_097_656] });
    let floating = "needed a floating point type: F32, F16, BF16 or F64";
    assert_eq!(refusal(from(&one_row("I32", &[0; 4]))), format!("q: got whole numbers, {floating}"));
    assert_eq!(refusal(from(&one_row("U8", &[0]))), format!("q: got U8 elements, {floating}"));
    let message = refusal(from(&one_row("F33", &[0; 4])));
    assert!(message.contains("F33"), "{message}");
}

#[test]
fn malformed_files() {
    let mut mixed = tensors(QKV);
    mixed.get_mut("q").unwrap().dtype = DType::F16;
    mixed.get_mut("v").unwrap().dtype = DType::BF16;
    let lengths = whole(&[("kv_lens", &[6, 3])]);
    let bytes = file::encode(&mixed, &lengths, &strings(&[ATTENTION[0], ("layout", "bhtd")])).unwrap();
    let from = |bytes: &[u8]| Case::from_bytes("some.safetensors", bytes, &BTreeMap::new());
    from(&bytes).unwrap();
    for length in 0..bytes.len() {
        refusal(from(&bytes[..length]));
    }
    refusal(from(&[bytes.as_slice(), &[0]].concat()));
    // Flipped bits may leave a case that is valid, but never a panic, and never an error without the file's name.
    for position in 0..bytes.len() {
        for bit in 0..8 {
            let mut flipped = bytes.clone();
            flipped[position] ^= 1 << bit;
            if let Err(error) = from(&flipped) {
                refusal(Err(error));
            }
        }
    }
    let mut random = fastrand::Rng::with_seed(1);
    for _ in 0..20_000 {
        let mut damaged = bytes.clone();
        for _ in 0..random.usize(1..6) {
            let position = random.usize(..bytes.len().min(500));
            damaged[position] = random.u8(..);
        }
        if let Err(error) = from(&damaged) {
            refusal(Err(error));
        }
    }
    for length in [u64::MAX, u64::MAX - 7, 1 << 63, 1 << 32, bytes.len() as u64 - 7, 0] {
        let mut lying = bytes.clone();
        lying[..8].copy_from_slice(&length.to_le_bytes());
        refusal(from(&lying));
    }
    for header in ["", "null", "[]", "{", "{}", "{\"q\":1}", "{\"__metadata__\":{\"op\":1}}", "\u{7f}"] {
        refusal(from(&raw(header, &[])));
    }
    refusal(from(&raw(&"[".repeat(100_000), &[])));
    refusal(from(&[&4u64.to_le_bytes(), [0xff; 4].as_slice()].concat()));
}

#[test]
fn absurd_sizes() {
    let from = |header: &str, data: &[u8]| {
        refusal(Case::from_bytes("some.safetensors", &raw(header, data), &BTreeMap::new()));
    };
    let entry = |name: &str, shape: &str, start: u64, end: u64| {
        format!(r#""{name}":{{"dtype":"F32","shape":{shape},"data_offsets":[{start},{end}]}}"#)
    };
    // Products and byte counts that overflow, offsets that overlap, run backwards or leave the file.
    for (shape, start, end) in [
        ("[4294967296,4294967296,1,1]", 0, 0),
        ("[18446744073709551615,2,1,1]", 0, 8),
        ("[4611686018427387904,1,1,1]", 0, 0),
        ("[18446744073709551616,1,1,1]", 0, 0),
        ("[-1,1,1,1]", 0, 4),
        ("[1,1,1,1]", 4, 0),
        ("[1,1,1,1]", 4, 8),
        ("[1,1,1,1]", u64::MAX - 4, u64::MAX),
        ("[1,1,1,2]", 0, 4),
    ] {
        from(&format!("{{{}}}", entry("q", shape, start, end)), &[0; 8]);
    }
    from(&format!("{{{},{}}}", entry("q", "[1,1,1,2]", 0, 8), entry("k", "[1,1,1,1]", 4, 8)), &[0; 8]);
    // Consecutive tensors whose end is just below 2⁶⁴, or would wrap to the length of the file.
    let size = (1u64 << 61) - 4;
    let mut entries: Vec<_> =
        (0..8).map(|i| entry(&format!("t{i}"), &format!("[{}]", size / 4), i * size, (i + 1) * size)).collect();
    entries.push(entry("t8", "[7]", 8 * size, 8 * size + 28));
    from(&format!("{{{}}}", entries.join(",")), &[0; 8]);

    // Nothing is stored, yet the state would be huge, or a loop over heads endless.
    let empty = |q: &[usize; 4], v: &[usize; 4]| {
        let beta = &v[..3];
        tensors(&[("q", q), ("k", q), ("v", v), ("beta", beta)])
    };
    let message = refusal(parse(&empty(&[1 << 20, 1 << 10, 0, 8], &[1 << 20, 1 << 10, 0, 8]), EFLA_OP));
    assert!(message.starts_with("q: got shape [1048576, 1024, 0, 8], needed less than 2^31 elements"), "{message}");
    let message = refusal(parse(&empty(&[1 << 10, 1 << 10, 0, 8], &[1 << 10, 1 << 10, 0, 256]), EFLA_OP));
    assert!(message.starts_with("initial_state: got shape [1024, 1024, 8, 256], needed less than"), "{message}");
    let huge = tensors(&[("q", &[0, 1 << 60, 3, 5]), ("k", &[0, 1 << 60, 6, 5]), ("v", &[0, 1 << 60, 6, 7])]);
    let message = refusal(parse(&huge, ATTENTION));
    assert!(message.starts_with("q: got shape [0, 1152921504606846976, 3, 5]"), "{message}");
}

#[test]
fn save_and_load_any_value() {
    let folder = Folder::new("values");
    let path = folder.0.join("result.safetensors");
    let values = vec![f32::NEG_INFINITY, f32::NAN, -0.0, 1.0 / 3.0, 65504.0, 1e30];
    let of = |dtype, shape: &[usize]| CaseTensor { dtype, shape: shape.to_vec(), values: values.clone() };
    let tensors = BTreeMap::from([
        ("b".to_string(), of(DType::F16, &[6])),
        ("c".to_string(), of(DType::BF16, &[2, 3])),
        ("z \"quoted\"".to_string(), of(DType::F32, &[1, 6, 1])),
        ("empty".to_string(), CaseTensor { dtype: DType::F32, shape: vec![2, 0], values: vec![] }),
        ("scalar".to_string(), CaseTensor { dtype: DType::F32, shape: vec![], values: vec![2.0] }),
    ]);
    let metadata = strings(&[("op", "efla"), ("note", "quote \" and ü")]);
    save(&path, &tensors, &metadata).unwrap();
    let (loaded, same) = load(&path).unwrap();
    assert_eq!(same, metadata);
    assert_eq!(loaded.len(), tensors.len());
    let bits = |tensor: &CaseTensor| tensor.values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&loaded["z \"quoted\""]), bits(&tensors["z \"quoted\""]));
    for name in ["empty", "scalar"] {
        assert_eq!(loaded[name], tensors[name]);
    }
    let half = &loaded["b"].values;
    assert!(half[0] == f32::NEG_INFINITY && half[1].is_nan() && half[3] == 0.333_251_95 && half[5] == f32::INFINITY);
    let brain = &loaded["c"];
    assert_eq!((brain.dtype, brain.shape.as_slice()), (DType::BF16, [2, 3].as_slice()));
    assert!(brain.values[1].is_nan() && brain.values[3] == 0.333_984_38);
    // The crate that defined the format reads it too, and nothing lies beside it.
    safetensors::SafeTensors::deserialize(&fs::read(&path).unwrap()).unwrap();
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 1);
}

#[test]
fn failed_save_leaves_nothing() {
    let folder = Folder::new("failure");
    let good = tensors(QKV);
    let message = |path: PathBuf, tensors: &Tensors| match save(&path, tensors, &BTreeMap::new()) {
        Err(Error::Case { file, message }) if file == path.display().to_string() => message,
        other => panic!("{other:?}"),
    };
    let mut wrong = good.clone();
    wrong.get_mut("k").unwrap().values.pop();
    let text = message(folder.0.join("new"), &wrong);
    assert_eq!(text, "k: got 119 values, needed as many as shape [2, 2, 6, 5] holds");
    wrong.get_mut("k").unwrap().shape = vec![usize::MAX, 2];
    message(folder.0.join("new"), &wrong);
    let reserved = BTreeMap::from([("__metadata__".to_string(), tensor(&[1]))]);
    message(folder.0.join("new"), &reserved);
    message(folder.0.join("missing/new"), &good);
    message(folder.0.join(".."), &good);
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 0);
    fs::create_dir(folder.0.join("taken")).unwrap();
    assert_eq!(message(folder.0.join("taken"), &good), "this is not a regular file");
    fs::write(folder.0.join("old"), "before").unwrap();
    message(folder.0.join("old"), &wrong);
    assert_eq!(fs::read(folder.0.join("old")).unwrap(), b"before");
    assert_eq!(fs::read_dir(&folder.0).unwrap().count(), 2);
    save(folder.0.join("old"), &good, &strings(ATTENTION)).unwrap();
    Case::load(folder.0.join("old"), &BTreeMap::new()).unwrap();
}

#[test]
fn unreadable_files() {
    let folder = Folder::new("unreadable");
    for path in [folder.0.clone(), folder.0.join("missing")] {
        for error in [Case::load(&path, &BTreeMap::new()).unwrap_err(), load(&path).unwrap_err()] {
            let Error::Case { file, .. } = error else { panic!("{error:?}") };
            assert_eq!(file, path.display().to_string());
        }
    }
}
