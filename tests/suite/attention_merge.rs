//! Merges of partial results and their gradients: lse near and far from each other, empty sides, in place.

use continuous_attention::reference::attention::{Output, merge, merge_backward};
use continuous_attention::reference::compare::{Quantity, Scale, compare, limit};
use continuous_attention::{
    AttentionConfig, AttentionShape, DType, Gpu, GpuOptions, Merge, MergeGradients, MergeShape, MergeTensors, Sink,
    TensorView,
};

use crate::errors::{bad_views, refused};
use crate::harness::{
    AttentionCase, AttentionOutput, EDGES, Guarded, Place, Placed, bits, case_count, gpu, normal, pick, rng, submit,
    widen,
};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const EMPTY: f32 = f32::NEG_INFINITY;

/// Two sides and the gradients of their merge.
#[derive(Clone)]
struct Case {
    shape: MergeShape,
    /// out_a, out_b
    out: [Vec<f32>; 2],
    lse: [Vec<f32>; 2],
    d_out: Vec<f32>,
    d_lse: Option<Vec<f32>>,
}

/// Where the tensors of a case lie.
struct Places {
    out_sides: [Place; 2],
    lse_sides: [Place; 2],
    out: Place,
    lse: Place,
    d_out: Place,
    d_lse: Place,
    /// Of the gradients of either side.
    d_out_sides: [Place; 2],
    d_lse_sides: [Place; 2],
}

/// What both passes wrote: out, lse, and the gradients of either side.
type Results = [Vec<f32>; 6];

impl Case {
    /// Rows whose lse lie `gap(row)` apart, the first side's above, and either side empty where that is infinite; both
    /// where it is NaN.
    fn new(shape: MergeShape, rng: &mut fastrand::Rng, mut gap: impl FnMut(&mut fastrand::Rng) -> f32) -> Self {
        let rows = shape.batch * shape.heads * shape.queries;
        let mut lse = [vec![], vec![]];
        for _ in 0..rows {
            let (gap, middle) = (gap(rng), 6.0 * (rng.f32() - 0.5));
            let pair = match gap {
                gap if gap.is_nan() => [EMPTY; 2],
                f32::INFINITY => [middle, EMPTY],
                f32::NEG_INFINITY => [EMPTY, middle],
                gap => [middle + 0.5 * gap, middle - 0.5 * gap],
            };
            lse[0].push(pair[0]);
            lse[1].push(pair[1]);
        }
        let d_lse = rng.bool().then(|| normal(rng, rows));
        let mut elements = || normal(rng, rows * shape.value_dim);
        Case { shape, out: [elements(), elements()], lse, d_out: elements(), d_lse }
    }

    fn out_shape(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.heads, self.shape.queries, self.shape.value_dim]
    }

    fn lse_shape(&self) -> [usize; 3] {
        [self.shape.batch, self.shape.heads, self.shape.queries]
    }

    fn dense(&self, dtype: DType) -> Places {
        let out = || Place::dense(dtype, &self.out_shape(), 6);
        let lse = || Place::dense(DType::F32, &self.lse_shape(), 3);
        Places {
            out_sides: [out(), out()],
            lse_sides: [lse(), lse()],
            out: out(),
            lse: lse(),
            d_out: out(),
            d_lse: lse(),
            d_out_sides: [out(), out()],
            d_lse_sides: [lse(), lse()],
        }
    }

    fn run_in(&self, gpu: &Gpu, places: &Places) -> Results {
        let label = format!("merge of {:?}", self.shape);
        let plan = Merge::new(gpu).unwrap().plan(&self.shape).unwrap();
        let upload = |place: &Place, values: &[f32]| place.upload(gpu, values);
        let [out_a, out_b] = [0, 1].map(|side| upload(&places.out_sides[side], &self.out[side]));
        let [lse_a, lse_b] = [0, 1].map(|side| upload(&places.lse_sides[side], &self.lse[side]));
        let (out, lse) = (places.out.output(gpu), places.lse.output(gpu));
        let forward = MergeTensors {
            out_a: out_a.clone(),
            lse_a: lse_a.clone(),
            out_b: out_b.clone(),
            lse_b: lse_b.clone(),
            out: out.view(),
            lse: lse.view(),
        };
        submit(gpu, &plan.bind(&forward).unwrap_or_else(|error| panic!("{error} in {label}")));
        let [d_out_a, d_out_b] = places.d_out_sides.each_ref().map(|place| place.output(gpu));
        let [d_lse_a, d_lse_b] = places.d_lse_sides.each_ref().map(|place| place.output(gpu));
        let backward = MergeGradients {
            out_a,
            lse_a,
            out_b,
            lse_b,
            d_out: upload(&places.d_out, &self.d_out),
            d_lse: self.d_lse.as_ref().map(|d_lse| upload(&places.d_lse, d_lse)),
            d_out_a: d_out_a.view(),
            d_lse_a: d_lse_a.view(),
            d_out_b: d_out_b.view(),
            d_lse_b: d_lse_b.view(),
        };
        submit(gpu, &plan.bind_backward(&backward).unwrap_or_else(|error| panic!("{error} in {label}")));
        [out, lse, d_out_a, d_lse_a, d_out_b, d_lse_b].map(|output: Placed| output.read(gpu, &label))
    }

    fn run(&self) -> Results {
        self.run_in(gpu(), &self.dense(DType::F32))
    }

    /// Compares with the reference, which is fed what the places hold.
    fn judge(&self, places: &Places, got: &Results) {
        let [a, b] = [0, 1].map(|side| Output {
            out: widen(&places.out_sides[side].rounded(&self.out[side])),
            lse: widen(&self.lse[side]),
        });
        let value_dim = self.shape.value_dim;
        let d_out = widen(&places.d_out.rounded(&self.d_out));
        let d_lse = self.d_lse.as_deref().map(widen);
        let merged = merge(&a, &b, value_dim).unwrap();
        let [d_a, d_b] = merge_backward(&a, &b, value_dim, &d_out, d_lse.as_deref()).unwrap();
        let f32 = DType::F32;
        for (name, got, want, quantity, dtype) in [
            ("out", &got[0], &merged.out, Quantity::Forward, places.out.dtype),
            ("lse", &got[1], &merged.lse, Quantity::Forward, f32),
            ("d_out_a", &got[2], &d_a.out, Quantity::Gradient, places.d_out_sides[0].dtype),
            ("d_lse_a", &got[3], &d_a.lse, Quantity::Gradient, f32),
            ("d_out_b", &got[4], &d_b.out, Quantity::Gradient, places.d_out_sides[1].dtype),
            ("d_lse_b", &got[5], &d_b.lse, Quantity::Gradient, f32),
        ] {
            let limit = limit(quantity, dtype);
            let outcome = compare(got, want, limit, if name == "lse" { Scale::Lse } else { Scale::Tensor });
            let (rms, shape) = (outcome.rms, self.shape);
            println!("accuracy {name} {dtype:?} rms/limit {:.4} rms {rms:.2e}: merge of {shape:?}", rms / limit);
            assert!(outcome.passed(), "{name} {dtype:?}: {}\n  in {shape:?}", outcome.failure.unwrap_or_default());
        }
    }

    fn check(&self) {
        self.judge(&self.dense(DType::F32), &self.run());
    }
}

/// Near, far, and empty on one side or both.
fn any_gap(rng: &mut fastrand::Rng) -> f32 {
    match rng.u8(..10) {
        0 => f32::INFINITY,
        1 => f32::NEG_INFINITY,
        2 => f32::NAN,
        3 => pick(rng, &[100.0, -100.0, 1e4, -1e4, 88.0, -104.0]),
        4 => 0.0,
        _ => 20.0 * (rng.f32() - 0.5),
    }
}

fn shape(batch: usize, heads: usize, queries: usize, value_dim: usize) -> MergeShape {
    MergeShape { batch, heads, queries, value_dim }
}

fn random_case(seed: u64) {
    let mut rng = rng(seed);
    let value_dim = if rng.u8(..3) == 0 { pick(&mut rng, &EDGES) } else { rng.usize(1..=70) };
    let queries = if rng.u8(..12) == 0 { 0 } else { 4 + rng.usize(..40) };
    let case = Case::new(shape(rng.usize(..4), rng.usize(..4), queries, value_dim), &mut rng, any_gap);
    let one = rng.bool().then(|| pick(&mut rng, &TYPES));
    let out = |rng: &mut fastrand::Rng, written: bool| {
        let dtype = one.unwrap_or_else(|| pick(rng, &TYPES));
        let dtype = if written && value_dim % 2 == 1 { DType::F32 } else { dtype };
        Place::random(rng, dtype, &case.out_shape(), written, false)
    };
    let lse =
        |rng: &mut fastrand::Rng, written: bool| Place::random(rng, DType::F32, &case.lse_shape(), written, false);
    let places = Places {
        out_sides: [out(&mut rng, false), out(&mut rng, false)],
        lse_sides: [lse(&mut rng, false), lse(&mut rng, false)],
        out: out(&mut rng, true),
        lse: lse(&mut rng, true),
        d_out: out(&mut rng, false),
        d_lse: lse(&mut rng, false),
        d_out_sides: [out(&mut rng, true), out(&mut rng, true)],
        d_lse_sides: [lse(&mut rng, true), lse(&mut rng, true)],
    };
    case.judge(&places, &case.run_in(gpu(), &places));
}

#[test]
fn random_cases() {
    (0..case_count(120)).for_each(|seed| random_case(90_000 + seed as u64));
}

#[test]
fn value_dims_around_the_edges() {
    let mut rng = rng(1);
    for value_dim in EDGES {
        Case::new(shape(2, 2, 9, value_dim), &mut rng, any_gap).check();
    }
}

/// So far apart that nothing of the lower side is left in f32.
#[test]
fn far_apart() {
    let mut rng = rng(2);
    for gap in [104.0, 1e4, 3e38, -104.0, -1e4, -3e38] {
        let mut case = Case::new(shape(1, 2, 10, 6), &mut rng, |_| gap);
        case.d_lse = Some(normal(&mut rng, 20));
        let got = case.run();
        let (upper, lower) = if gap > 0.0 { (0, 1) } else { (1, 0) };
        assert_eq!(bits(&got[0]), bits(&case.out[upper]), "out at {gap}");
        assert_eq!(bits(&got[1]), bits(&case.lse[upper]), "lse at {gap}");
        assert_eq!(bits(&got[2 + 2 * upper]), bits(&case.d_out), "gradient of out at {gap}");
        assert_eq!(&got[3 + 2 * upper], case.d_lse.as_ref().unwrap(), "gradient of lse at {gap}");
        for at in [2 + 2 * lower, 3 + 2 * lower] {
            assert!(got[at].iter().all(|x| x.abs() < 1e-43), "gradients of the lower side at {gap}");
        }
        // Among rows that are near each other the comparator judges them too.
        let mut near = false;
        let mixed = move |_: &mut fastrand::Rng| {
            near = !near;
            if near { 0.7 } else { gap }
        };
        Case::new(shape(1, 2, 10, 6), &mut rng, mixed).check();
    }
    // On the edge of what is left.
    Case::new(shape(1, 2, 300, 6), &mut rng, |rng| 240.0 * (rng.f32() - 0.5)).check();
    // Neither weight depends on where the two lie.
    for middle in [-2e4, -300.0, 300.0, 2e4] {
        let mut case = Case::new(shape(1, 2, 40, 6), &mut rng, |rng| 8.0 * (rng.f32() - 0.5));
        case.lse.iter_mut().flatten().for_each(|lse| *lse += middle);
        case.check();
    }
}

/// Whatever an empty side holds, and whatever the gradient of its lse is told.
#[test]
fn empty_sides_do_not_reach_the_other() {
    let mut rng = rng(3);
    let shape = shape(1, 2, 7, 10);
    for empty in [0, 1] {
        let mut case = Case::new(shape, &mut rng, |_| if empty == 0 { EMPTY } else { f32::INFINITY });
        case.d_lse = Some(normal(&mut rng, 14));
        case.out[empty].fill(f32::NAN);
        let (full, got) = (1 - empty, case.run());
        assert_eq!(bits(&got[0]), bits(&case.out[full]));
        assert_eq!(bits(&got[1]), bits(&case.lse[full]));
        assert_eq!(bits(&got[2 + 2 * full]), bits(&case.d_out));
        assert_eq!(bits(&got[3 + 2 * full]), bits(case.d_lse.as_ref().unwrap()));
        assert!(got[2 + 2 * empty].iter().chain(&got[3 + 2 * empty]).all(|x| *x == 0.0));
    }
    let mut case = Case::new(shape, &mut rng, |_| f32::NAN);
    case.d_lse = Some(vec![f32::NAN; 14]);
    let got = case.run();
    let sums: Vec<f32> = case.out[0].iter().zip(&case.out[1]).map(|(a, b)| a + b).collect();
    assert_eq!(bits(&got[0]), bits(&sums));
    assert_eq!(got[1], [EMPTY; 14]);
    for side in [0, 1] {
        assert_eq!(bits(&got[2 + 2 * side]), bits(&case.d_out));
        assert_eq!(got[3 + 2 * side], [0.0; 14]);
    }
}

#[test]
fn nan_stays_in_its_row() {
    let mut rng = rng(4);
    let mut case = Case::new(shape(1, 2, 20, 5), &mut rng, any_gap);
    case.d_lse = Some(normal(&mut rng, 40));
    // The rows that are spoiled have two sides.
    (case.lse[0][13], case.lse[1][13]) = (0.3, 0.6);
    let clean = case.run();
    type Spoil = fn(&mut Case, f32);
    let spoils: [(&str, Spoil); 6] = [
        ("out_a", |case, bad| case.out[0][13 * 5 + 2] = bad),
        ("out_b", |case, bad| case.out[1][13 * 5 + 2] = bad),
        ("lse_a", |case, bad| case.lse[0][13] = bad),
        ("lse_b", |case, bad| case.lse[1][13] = bad),
        ("d_out", |case, bad| case.d_out[13 * 5 + 2] = bad),
        ("d_lse", |case, bad| case.d_lse.as_mut().unwrap()[13] = bad),
    ];
    for (name, spoil) in spoils {
        for bad in [f32::NAN, f32::INFINITY] {
            let mut spoiled = case.clone();
            spoil(&mut spoiled, bad);
            let got = spoiled.run();
            for (tensor, (got, clean)) in got.iter().zip(&clean).enumerate() {
                let width = if tensor % 2 == 0 { 5 } else { 1 };
                for (at, (got, clean)) in got.iter().zip(clean).enumerate() {
                    let own = at / width == 13;
                    assert!(own || got.to_bits() == clean.to_bits(), "{bad} in {name}: {at} of tensor {tensor}");
                }
            }
            if bad.is_nan() {
                let row = |tensor: usize, width: usize| got[tensor][13 * width..14 * width].to_vec();
                let is_spoiled = |values: Vec<f32>| values.iter().any(|x| x.is_nan());
                let lse = name.starts_with("lse");
                assert_eq!(is_spoiled(row(0, 5)), lse || name.starts_with("out"), "{name}");
                assert_eq!(is_spoiled(row(1, 1)), lse, "{name}");
                assert_eq!(is_spoiled(row(2, 5)), lse || name == "d_out", "{name}");
                assert!(is_spoiled(row(3, 1)) && is_spoiled(row(5, 1)), "{name}");
            }
        }
    }
}

/// out and lse each where either side's are, or a range of their own.
#[test]
fn in_place() {
    let mut rng = rng(5);
    let gpu = gpu();
    for dtype in TYPES {
        let case = Case::new(shape(2, 2, 21, 38), &mut rng, any_gap);
        let places = case.dense(dtype);
        let want = case.run_in(gpu, &places);
        let plan = Merge::new(gpu).unwrap().plan(&case.shape).unwrap();
        for out_side in [None, Some(0), Some(1)] {
            for lse_side in [None, Some(0), Some(1)] {
                let outs = [0, 1].map(|side| places.out_sides[side].holding(gpu, &case.out[side]));
                let lses = [0, 1].map(|side| places.lse_sides[side].holding(gpu, &case.lse[side]));
                let (own_out, own_lse) = (places.out.output(gpu), places.lse.output(gpu));
                let out = out_side.map_or(&own_out, |side: usize| &outs[side]);
                let lse = lse_side.map_or(&own_lse, |side: usize| &lses[side]);
                let tensors = MergeTensors {
                    out_a: outs[0].view(),
                    lse_a: lses[0].view(),
                    out_b: outs[1].view(),
                    lse_b: lses[1].view(),
                    out: out.view(),
                    lse: lse.view(),
                };
                submit(gpu, &plan.bind(&tensors).unwrap());
                let label = format!("out in {out_side:?}, lse in {lse_side:?}");
                assert_eq!(bits(&out.read(gpu, &label)), bits(&want[0]), "{label}");
                assert_eq!(bits(&lse.read(gpu, &label)), bits(&want[1]), "{label}");
                // The other side is left as it was.
                for side in [0, 1] {
                    if out_side != Some(side) {
                        let rounded = places.out_sides[side].rounded(&case.out[side]);
                        assert_eq!(bits(&outs[side].read(gpu, &label)), bits(&rounded), "{label}");
                    }
                    if lse_side != Some(side) {
                        assert_eq!(bits(&lses[side].read(gpu, &label)), bits(&case.lse[side]), "{label}");
                    }
                }
            }
        }
    }
}

/// Everything as ranges of one buffer, by the short ways, twice.
#[test]
fn within_one_arena() {
    let mut rng = rng(6);
    let gpu = gpu();
    let mut case = Case::new(shape(1, 2, 5, 6), &mut rng, any_gap);
    case.d_lse = Some(normal(&mut rng, 10));
    let want = case.run();
    let d_lse = case.d_lse.as_ref().unwrap();
    let inputs = [&case.out[0], &case.lse[0], &case.out[1], &case.lse[1], &case.d_out, d_lse];
    let mut content = vec![f32::NAN; 600];
    let mut at = 3;
    let mut place = |values: Option<&Vec<f32>>, is_out: bool| {
        let start = at;
        at += if is_out { 60 } else { 10 };
        if let Some(values) = values {
            content[start..at].copy_from_slice(values);
        }
        start
    };
    let inputs: Vec<usize> = inputs.iter().enumerate().map(|(i, values)| place(Some(values), i % 2 == 0)).collect();
    let outputs: Vec<usize> = (0..6).map(|i| place(None, i % 2 == 0)).collect();
    let arena = gpu.upload(&content, &[content.len()]).unwrap();
    let view = |start: usize, is_out: bool| {
        let shape: &[usize] = if is_out { &[1, 2, 5, 6] } else { &[1, 2, 5] };
        TensorView::new(arena.buffer(), start as u64, shape)
    };
    let merge = Merge::new(gpu).unwrap();
    let forward = MergeTensors {
        out_a: view(inputs[0], true),
        lse_a: view(inputs[1], false),
        out_b: view(inputs[2], true),
        lse_b: view(inputs[3], false),
        out: view(outputs[0], true),
        lse: view(outputs[1], false),
    };
    let backward = MergeGradients {
        out_a: view(inputs[0], true),
        lse_a: view(inputs[1], false),
        out_b: view(inputs[2], true),
        lse_b: view(inputs[3], false),
        d_out: view(inputs[4], true),
        d_lse: Some(view(inputs[5], false)),
        d_out_a: view(outputs[2], true),
        d_lse_a: view(outputs[3], false),
        d_out_b: view(outputs[4], true),
        d_lse_b: view(outputs[5], false),
    };
    for _ in 0..2 {
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        merge.forward(&mut encoder, &forward).unwrap();
        merge.backward(&mut encoder, &backward).unwrap();
        gpu.queue().submit([encoder.finish()]);
        let got = gpu.read(&arena).unwrap();
        for (want, &start) in want.iter().zip(&outputs) {
            assert_eq!(bits(&got[start..start + want.len()]), bits(want));
        }
        assert_eq!(bits(&got[..outputs[0]]), bits(&content[..outputs[0]]));
    }
}

#[test]
fn checked_shaders_agree() {
    let mut rng = rng(7);
    let gpu = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    for dtype in [DType::F32, DType::F16] {
        let case = Case::new(shape(2, 3, 9, 42), &mut rng, any_gap);
        let places = case.dense(dtype);
        case.judge(&places, &case.run_in(&gpu, &places));
    }
}

/// What it is for: attention over a cache in two parts is attention over the whole.
#[test]
fn merged_shards_equal_the_whole() {
    let mut rng = rng(8);
    let config = AttentionConfig { head_dim: 5, value_dim: 4, ..Default::default() };
    for (queries, keys, cut) in [(20, 80, 31), (20, 80, 60), (1, 70, 65), (70, 100, 30)] {
        let attention = AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries, keys };
        let whole = AttentionCase::random(config, attention, &mut rng);
        // Rows from..to of every head.
        let cut_rows = |tensor: &[f32], width: usize, from: usize, to: usize| -> Vec<f32> {
            tensor.chunks(keys * width).flat_map(|head| head[from * width..to * width].to_vec()).collect()
        };
        let mut early = whole.clone();
        early.shape.keys = cut;
        early.config.causal = false;
        (early.k, early.v) = (cut_rows(&whole.k, 5, 0, cut), cut_rows(&whole.v, 4, 0, cut));
        let mut late = whole.clone();
        late.shape.keys = keys - cut;
        late.config.sink = Sink::Given;
        late.sink_batch = 2;
        late.sink_k = Some(cut_rows(&whole.k, 5, cut - 1, cut));
        late.sink_v = Some(cut_rows(&whole.v, 4, cut - 1, cut));
        (late.k, late.v) = (cut_rows(&whole.k, 5, cut, keys), cut_rows(&whole.v, 4, cut, keys));
        let (early, late) = (early.run(), late.run());
        let shape = shape(2, 4, queries, 4);
        let d_out = vec![0.0; early.out.len()];
        let case = Case { shape, out: [early.out, late.out], lse: [early.lse, late.lse], d_out, d_lse: None };
        let [out, lse, ..] = case.run();
        whole.judge(&AttentionOutput { out, lse }, whole.limit());
    }
}

#[test]
fn sizes_that_are_refused() {
    let merge = Merge::new(gpu()).unwrap();
    for value_dim in [0, 257, usize::MAX] {
        refused(merge.plan(&shape(1, 1, 1, value_dim)), "value_dim", &[&value_dim.to_string(), "1 to 256"]);
    }
    for size in [1 << 31, usize::MAX] {
        refused(merge.plan(&shape(size, 1, 1, 4)), "batch", &[&size.to_string()]);
        refused(merge.plan(&shape(1, size, 1, 4)), "heads", &[&size.to_string()]);
        refused(merge.plan(&shape(1, 1, size, 4)), "queries", &[&size.to_string()]);
    }
}

#[test]
fn tensors_that_are_refused() {
    let gpu = gpu();
    let sizes = shape(2, 3, 4, 6);
    let (out_shape, lse_shape) = ([2, 3, 4, 6], [2, 3, 4]);
    let plan = Merge::new(gpu).unwrap().plan(&sizes).unwrap();
    let out = || gpu.zeros(&out_shape).unwrap().view();
    let lse = || gpu.zeros(&lse_shape).unwrap().view();
    let guarded = [Guarded::new(gpu, Guarded::ODD, &out_shape), Guarded::new(gpu, Guarded::ODD, &lse_shape)];
    let forward = MergeTensors {
        out_a: out(),
        lse_a: lse(),
        out_b: out(),
        lse_b: lse(),
        out: guarded[0].view(),
        lse: guarded[1].view(),
    };
    let backward = MergeGradients {
        out_a: out(),
        lse_a: lse(),
        out_b: out(),
        lse_b: lse(),
        d_out: out(),
        d_lse: Some(lse()),
        d_out_a: guarded[0].view(),
        d_lse_a: guarded[1].view(),
        d_out_b: out(),
        d_lse_b: lse(),
    };
    plan.bind(&forward).unwrap();
    plan.bind_backward(&backward).unwrap();
    type Slot<T> = (&'static str, fn(&mut T) -> &mut TensorView);
    let forward_slots: [Slot<MergeTensors>; 6] = [
        ("out_a", |tensors| &mut tensors.out_a),
        ("lse_a", |tensors| &mut tensors.lse_a),
        ("out_b", |tensors| &mut tensors.out_b),
        ("lse_b", |tensors| &mut tensors.lse_b),
        ("out", |tensors| &mut tensors.out),
        ("lse", |tensors| &mut tensors.lse),
    ];
    let backward_slots: [Slot<MergeGradients>; 10] = [
        ("out_a", |tensors| &mut tensors.out_a),
        ("lse_a", |tensors| &mut tensors.lse_a),
        ("out_b", |tensors| &mut tensors.out_b),
        ("lse_b", |tensors| &mut tensors.lse_b),
        ("d_out", |tensors| &mut tensors.d_out),
        ("d_lse", |tensors| tensors.d_lse.as_mut().unwrap()),
        ("d_out_a", |tensors| &mut tensors.d_out_a),
        ("d_lse_a", |tensors| &mut tensors.d_lse_a),
        ("d_out_b", |tensors| &mut tensors.d_out_b),
        ("d_lse_b", |tensors| &mut tensors.d_lse_b),
    ];
    let shared = gpu.zeros(&[1000]).unwrap();
    let at = |offset: u64, like: &TensorView| TensorView::new(shared.buffer(), offset, like.shape());
    for (name, slot) in forward_slots {
        for (bad, words) in bad_views(slot(&mut forward.clone())) {
            let mut tensors = forward.clone();
            *slot(&mut tensors) = bad;
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            refused(plan.bind(&tensors), name, &words);
        }
    }
    for (name, slot) in backward_slots {
        for (bad, words) in bad_views(slot(&mut backward.clone())) {
            let mut tensors = backward.clone();
            *slot(&mut tensors) = bad;
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            refused(plan.bind_backward(&tensors), name, &words);
        }
    }
    // lse is always f32.
    let halves = lse().with_dtype(DType::F16);
    refused(plan.bind(&MergeTensors { lse_b: halves.clone(), ..forward.clone() }), "lse_b", &["F16", "F32"]);
    refused(plan.bind_backward(&MergeGradients { d_lse: Some(halves), ..backward.clone() }), "d_lse", &["F16"]);

    // Every input against every output: one element in common.
    for (input_name, input) in &forward_slots[..4] {
        for (output_name, output) in &forward_slots[4..] {
            let mut tensors = forward.clone();
            let elements = input(&mut tensors).shape().iter().product::<usize>() as u64;
            *input(&mut tensors) = at(100, input(&mut tensors.clone()));
            *output(&mut tensors) = at(99 + elements, output(&mut tensors.clone()));
            refused(plan.bind(&tensors), output_name, &["overlap", input_name]);
        }
    }
    for (input_name, input) in &backward_slots[..6] {
        for (output_name, output) in &backward_slots[6..] {
            let mut tensors = backward.clone();
            let elements = input(&mut tensors).shape().iter().product::<usize>() as u64;
            *input(&mut tensors) = at(100, input(&mut tensors.clone()));
            *output(&mut tensors) = at(99 + elements, output(&mut tensors.clone()));
            refused(plan.bind_backward(&tensors), output_name, &["overlap", input_name]);
        }
    }
    // In place on one side, in the way of the other; lse within out; another order.
    let (a, b) = (at(0, &forward.out), at(143, &forward.out));
    let tensors = MergeTensors { out_a: a.clone(), out_b: b, out: a.clone(), ..forward.clone() };
    refused(plan.bind(&tensors), "out", &["overlap", "out_b"]);
    let tensors = MergeTensors { out_a: a.clone(), out: a.clone(), lse: at(143, &forward.lse), ..forward.clone() };
    refused(plan.bind(&tensors), "lse", &["overlap", "out"]);
    let swapped = TensorView::strided(shared.buffer(), 0, &out_shape, &[24, 48, 6, 1]);
    refused(plan.bind(&MergeTensors { out_a: a, out: swapped, ..forward.clone() }), "out", &["overlap", "out_a"]);
    let tensors = MergeGradients { d_out_b: at(0, &forward.out), d_lse_b: at(143, &forward.lse), ..backward.clone() };
    refused(plan.bind_backward(&tensors), "d_lse_b", &["overlap", "d_out_b"]);

    let flat = gpu.zeros(&[5]).unwrap().view();
    let merge = Merge::new(gpu).unwrap();
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    refused(merge.forward(&mut encoder, &MergeTensors { out: flat.clone(), ..forward }), "out", &["[5]"]);
    refused(merge.backward(&mut encoder, &MergeGradients { d_out: flat, ..backward }), "d_out", &["[5]"]);
    gpu.queue().submit([encoder.finish()]);
    assert!(guarded.iter().all(|output| output.read(gpu, "refused calls").iter().all(|x| x.is_nan())));
}
