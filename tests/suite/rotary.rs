//! Rotary position embedding: every option, positions of every size, in place, decoding.

use continuous_attention::reference::compare::{Quantity, Scale, compare, limit};
use continuous_attention::reference::rotary::{backward, forward};
use continuous_attention::{
    DType, Error, Gpu, GpuOptions, Pairing, Rotary, RotaryConfig, RotaryGradients, RotaryShape, RotaryTensors,
    TensorView,
};

use crate::errors::{bad_views, refused};
use crate::harness::{EDGES, Guarded, Place, bits, case_count, gpu, normal, pick, rng, submit, widen};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];
const PAIRINGS: [Pairing; 2] = [Pairing::Interleaved, Pairing::HalfSplit];

/// A call with everything it reads; `x` is also what the backward pass gets as d_out.
#[derive(Clone)]
struct Case {
    config: RotaryConfig,
    shape: RotaryShape,
    x: Vec<f32>,
    /// `[B or 1, T]`.
    positions: Option<Vec<f32>>,
}

impl Case {
    fn random(config: RotaryConfig, shape: RotaryShape, rng: &mut fastrand::Rng) -> Self {
        let RotaryShape { batch, heads, tokens, .. } = shape;
        Case { config, shape, x: normal(rng, batch * heads * tokens * config.dim), positions: None }
    }

    fn with_positions(self, positions: Vec<f32>) -> Self {
        Case { positions: Some(positions), shape: RotaryShape { offset: 0, ..self.shape }, ..self }
    }

    fn dims(&self) -> [usize; 4] {
        [self.shape.batch, self.shape.heads, self.shape.tokens, self.config.dim]
    }

    fn label(&self) -> String {
        let positions = if self.positions.is_some() { "positions" } else { "no positions" };
        format!("rotary, {positions}, {:?}, {:?}", self.config, self.shape)
    }

    fn positions_view(&self, gpu: &Gpu) -> Option<TensorView> {
        let positions = self.positions.as_ref()?;
        let batches = if positions.len() == self.shape.tokens { 1 } else { self.shape.batch };
        Some(Place::dense(DType::F32, &[batches, self.shape.tokens], 7).upload(gpu, positions))
    }

    /// out and d_x, from places to places; `to` may be the same as `from`: then in place.
    fn run_between(&self, gpu: &Gpu, from: &Place, to: &Place, in_place: bool) -> [Vec<f32>; 2] {
        let plan = Rotary::new(gpu, self.config).unwrap().plan(&self.shape).unwrap();
        let label = self.label();
        [false, true].map(|is_backward| {
            let (output, x) = if in_place {
                let output = to.holding(gpu, &self.x);
                let x = output.view();
                (output, x)
            } else {
                (to.output(gpu), from.upload(gpu, &self.x))
            };
            let positions = self.positions_view(gpu);
            let call = if is_backward {
                plan.bind_backward(&RotaryGradients { d_out: x, d_x: output.view(), positions })
            } else {
                plan.bind(&RotaryTensors { x, out: output.view(), positions })
            };
            submit(gpu, &call.unwrap_or_else(|error| panic!("{error} in {label}")));
            output.read(gpu, &label)
        })
    }

    fn run(&self) -> [Vec<f32>; 2] {
        let place = Place::dense(DType::F32, &self.dims(), 5);
        self.run_between(gpu(), &place, &place, false)
    }

    /// Compares both passes with the reference, which is fed x as it is stored.
    fn judge(&self, from: &Place, dtype: DType, got: [Vec<f32>; 2]) {
        let x = widen(&from.rounded(&self.x));
        let positions = self.positions.as_deref().map(widen);
        let (config, shape) = (&self.config, &self.shape);
        let want =
            [forward(config, shape, &x, positions.as_deref()), backward(config, shape, &x, positions.as_deref())];
        for (((name, quantity), got), want) in
            [("out", Quantity::Forward), ("d_x", Quantity::Gradient)].into_iter().zip(got).zip(want)
        {
            let limit = limit(quantity, dtype);
            let outcome = compare(&got, &want.unwrap(), limit, Scale::Tensor);
            let (rms, label) = (outcome.rms, self.label());
            println!(
                "accuracy {name} {dtype:?} rms/limit {:.4} rms {rms:.2e} max {:.2e}: {label}",
                rms / limit,
                outcome.max
            );
            assert!(outcome.passed(), "{name} {dtype:?}: {}\n  in {label}", outcome.failure.unwrap_or_default());
        }
    }

    fn check(&self) {
        self.judge(&Place::dense(DType::F32, &self.dims(), 0), DType::F32, self.run());
    }
}

fn draw(rng: &mut fastrand::Rng) -> Case {
    let dim = if rng.u8(..3) == 0 { pick(rng, &EDGES).max(2) } else { rng.usize(2..=70) };
    let rotary_dim = if dim % 2 == 0 && rng.bool() { None } else { Some(2 * rng.usize(1..=dim / 2)) };
    let base = pick(rng, &[10_000.0, 10_000.0, 1.0, 2.0, 500_000.0, 1e300]);
    let config = RotaryConfig { dim, rotary_dim, base, pairing: pick(rng, &PAIRINGS) };
    let tokens = if rng.u8(..12) == 0 { 0 } else { rng.usize(1..40) };
    let shape = RotaryShape {
        batch: rng.usize(..4),
        heads: rng.usize(..4),
        tokens,
        offset: pick(rng, &[0, 0, 1, 777, 1 << 20]),
    };
    let case = Case::random(config, shape, rng);
    if rng.bool() {
        return case;
    }
    let batches = if rng.bool() { 1 } else { shape.batch };
    let size = pick(rng, &[1e-3, 1.0, 100.0, 1e6]);
    let positions = (0..batches * tokens).map(|_| size * (2.0 * rng.f32() - 1.0)).collect();
    case.with_positions(positions)
}

#[test]
fn random_cases() {
    for seed in 0..case_count(150) {
        let mut rng = rng(80_000 + seed as u64);
        let case = draw(&mut rng);
        let to_type = if case.config.dim.is_multiple_of(2) { pick(&mut rng, &TYPES) } else { DType::F32 };
        let in_place = rng.bool();
        let from_type = if in_place { to_type } else { pick(&mut rng, &TYPES) };
        let from = Place::random(&mut rng, from_type, &case.dims(), in_place, false);
        let to = if in_place { from.clone() } else { Place::random(&mut rng, to_type, &case.dims(), true, false) };
        case.judge(&from, to_type, case.run_between(gpu(), &from, &to, in_place));
    }
}

#[test]
fn dims_around_the_edges() {
    let mut rng = rng(1);
    for dim in EDGES.into_iter().filter(|&dim| dim > 1) {
        for pairing in PAIRINGS {
            for rotary_dim in [2, dim / 4 * 2, dim / 2 * 2].into_iter().filter(|&rotary_dim| rotary_dim >= 2) {
                let config = RotaryConfig { dim, rotary_dim: Some(rotary_dim), pairing, ..Default::default() };
                Case::random(config, RotaryShape { batch: 2, heads: 1, tokens: 9, offset: 3 }, &mut rng).check();
            }
        }
    }
}

/// The limit does not grow with the position.
#[test]
fn large_positions() {
    let mut rng = rng(2);
    for offset in [1 << 16, (1 << 20) - 30, (1 << 24) + 1, (1 << 31) + 12_345, u32::MAX - 63] {
        for base in [10_000.0, 1.5] {
            let config = RotaryConfig { dim: 32, base, ..Default::default() };
            Case::random(config, RotaryShape { batch: 1, heads: 3, tokens: 64, offset }, &mut rng).check();
        }
    }
}

/// Nor for real-valued ones, whatever their fraction.
#[test]
fn real_positions() {
    let mut rng = rng(3);
    for size in [1e-6, 0.3, 1.0, 9.7, 1234.5, 1.05e6, 8_388_607.5, 4.2e9] {
        for sign in [1.0, -1.0] {
            for base in [10_000.0, 1.0] {
                let config = RotaryConfig { dim: 32, base, ..Default::default() };
                let case = Case::random(config, RotaryShape { batch: 2, heads: 2, tokens: 40, offset: 0 }, &mut rng);
                let mut positions = vec![0.0, -0.0, sign * size, f32::MIN_POSITIVE];
                positions.extend((positions.len()..80).map(|_| sign * size * rng.f32()));
                case.with_positions(positions).check();
            }
        }
    }
}

/// An angle of every size, in each of the four quarters: at base 1 all pairs turn by the position itself.
#[test]
fn every_angle() {
    let config = RotaryConfig { dim: 2, base: 1.0, ..Default::default() };
    let tokens = 20_000;
    let shape = RotaryShape { batch: 1, heads: 1, tokens, offset: 0 };
    let x = [1.0, 0.0].repeat(tokens);
    let positions: Vec<f32> = (0..tokens).map(|token| 7.0 * token as f32 / tokens as f32).collect();
    let case = Case { config, shape, x, positions: Some(positions.clone()) };
    let [out, _] = case.run();
    let mut worst = 0.0f64;
    for (got, &position) in out.chunks(2).zip(&positions) {
        let (sin, cos) = f64::from(position).sin_cos();
        worst = worst.max((f64::from(got[0]) - cos).abs()).max((f64::from(got[1]) - sin).abs());
    }
    println!("largest error of a sine or cosine {worst:.2e}");
    assert!(worst < 2e-7, "{worst:e}");
}

/// Positions given as a tensor are those that tokens are counted by.
#[test]
fn positions_and_offsets_agree() {
    let mut rng = rng(4);
    for pairing in PAIRINGS {
        for offset in [0u32, 5, 1 << 23] {
            let config = RotaryConfig { dim: 12, pairing, ..Default::default() };
            let counted = Case::random(config, RotaryShape { batch: 2, heads: 3, tokens: 10, offset }, &mut rng);
            let positions: Vec<f32> = (0..10).map(|token| (offset + token) as f32).collect();
            let given = counted.clone().with_positions(positions.clone());
            let per_batch = counted.clone().with_positions(positions.repeat(2));
            let want = counted.run().map(|values| bits(&values));
            assert_eq!(given.run().map(|values| bits(&values)), want);
            assert_eq!(per_batch.run().map(|values| bits(&values)), want);
            // Repeated, and back again.
            assert_eq!(counted.run().map(|values| bits(&values)), want);
            let there = Case { x: counted.run()[0].clone(), ..counted.clone() };
            let outcome = compare(&there.run()[1], &widen(&counted.x), 5e-7, Scale::Tensor);
            assert!(outcome.passed(), "{outcome:?}");
        }
    }
}

/// Token by token with an offset is the whole at once.
#[test]
fn decoding_equals_the_whole() {
    let mut rng = rng(5);
    let config = RotaryConfig { dim: 10, rotary_dim: Some(6), ..Default::default() };
    let (tokens, offset) = (12, 100);
    let whole = Case::random(config, RotaryShape { batch: 2, heads: 3, tokens, offset }, &mut rng);
    let [want, _] = whole.run();
    let gpu = gpu();
    let rotary = Rotary::new(gpu, config).unwrap();
    let x = gpu.upload(&whole.x, &whole.dims()).unwrap().view();
    let out = Guarded::new(gpu, Guarded::ODD, &whole.dims());
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    for token in 0..tokens {
        let [x, out] = [&x, &out.view()].map(|view| view.narrow(2, token, 1).unwrap());
        rotary.forward(&mut encoder, offset + token as u32, &RotaryTensors::new(x, out)).unwrap();
    }
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(bits(&out.read(gpu, "decoding")), bits(&want));
    // The gradients likewise, by the short way.
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let tensors = RotaryGradients { d_out: x, d_x: out.view(), positions: None };
    rotary.backward(&mut encoder, offset, &tensors).unwrap();
    gpu.queue().submit([encoder.finish()]);
    assert_eq!(bits(&out.read(gpu, "gradients")), bits(&whole.run()[1]));
}

/// x, positions and out as ranges of one buffer.
#[test]
fn within_one_arena() {
    let mut rng = rng(6);
    let config = RotaryConfig { dim: 6, pairing: Pairing::HalfSplit, ..Default::default() };
    let shape = RotaryShape { batch: 1, heads: 2, tokens: 5, offset: 0 };
    let positions = normal(&mut rng, 5);
    let case = Case::random(config, shape, &mut rng).with_positions(positions.clone());
    let content = [&positions[..], &case.x, &[f32::NAN; 70]].concat();
    let arena = gpu().upload(&content, &[content.len()]).unwrap();
    let tensors = RotaryTensors {
        x: TensorView::new(arena.buffer(), 5, &case.dims()),
        out: TensorView::new(arena.buffer(), 68, &case.dims()),
        positions: Some(TensorView::new(arena.buffer(), 0, &[1, 5])),
    };
    let plan = Rotary::new(gpu(), config).unwrap().plan(&shape).unwrap();
    submit(gpu(), &plan.bind(&tensors).unwrap());
    let got = gpu().read(&arena).unwrap();
    assert_eq!(bits(&got[68..128]), bits(&case.run()[0]));
    assert_eq!(bits(&got[..65]), bits(&content[..65]));
    assert!(got[65..68].iter().chain(&got[128..]).all(|x| x.is_nan()));
}

#[test]
fn checked_shaders_agree() {
    let mut rng = rng(7);
    let gpu = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    for pairing in PAIRINGS {
        let config = RotaryConfig { dim: 22, rotary_dim: Some(18), pairing, ..Default::default() };
        let case = Case::random(config, RotaryShape { batch: 2, heads: 2, tokens: 7, offset: 9 }, &mut rng);
        let positions = normal(&mut rng, 14);
        for case in [case.clone(), case.with_positions(positions)] {
            let place = Place::dense(DType::BF16, &case.dims(), 2);
            case.judge(&place, DType::BF16, case.run_between(&gpu, &place, &place, false));
            case.judge(&place, DType::BF16, case.run_between(&gpu, &place, &place, true));
        }
    }
}

/// A bad element spoils its pair, a bad position its token.
#[test]
fn nan_stays_where_it_is() {
    let mut rng = rng(8);
    for pairing in PAIRINGS {
        let config = RotaryConfig { dim: 10, rotary_dim: Some(6), pairing, ..Default::default() };
        let shape = RotaryShape { batch: 2, heads: 2, tokens: 5, offset: 0 };
        let case = Case::random(config, shape, &mut rng);
        let clean = case.run();
        let mut spoiled = case.clone();
        spoiled.x[73] = f32::NAN;
        let partner = if pairing == Pairing::Interleaved { 72 } else { 70 };
        for (got, clean) in spoiled.run().iter().zip(&clean) {
            for (at, (got, clean)) in got.iter().zip(clean).enumerate() {
                let reached = at == 73 || at == partner;
                assert_eq!(got.is_nan(), reached, "element {at}, {pairing:?}");
                assert!(reached || got.to_bits() == clean.to_bits(), "element {at}, {pairing:?}");
            }
        }
        let positions = normal(&mut rng, 10);
        let case = case.with_positions(positions);
        let clean = case.run();
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 4_294_967_296.0, -f32::MAX] {
            let mut spoiled = case.clone();
            spoiled.positions.as_mut().unwrap()[7] = bad;
            for (got, clean) in spoiled.run().iter().zip(&clean) {
                for (at, (got, clean)) in got.iter().zip(clean).enumerate() {
                    // Token 2 of batch 1, either head.
                    let reached = at / 100 == 1 && at / 10 % 5 == 2 && at % 10 < 6;
                    assert_eq!(got.is_nan(), reached, "element {at}, position {bad}");
                    assert!(reached || got.to_bits() == clean.to_bits(), "element {at}, position {bad}");
                }
            }
        }
    }
}

#[test]
fn configurations_and_sizes_that_are_refused() {
    let refuse = |config: RotaryConfig, argument: &str, words: &[&str]| {
        refused(config.validate(), argument, words);
        refused(Rotary::new(gpu(), config), argument, words);
    };
    let base = RotaryConfig::default();
    for dim in [0, 257, usize::MAX] {
        refuse(RotaryConfig { dim, ..base }, "dim", &[&dim.to_string(), "1 to 256"]);
    }
    refuse(RotaryConfig { dim: 5, ..base }, "rotary_dim", &["got 5", "even"]);
    for rotary_dim in [0, 1, 63, 66, usize::MAX - 1] {
        refuse(RotaryConfig { rotary_dim: Some(rotary_dim), ..base }, "rotary_dim", &[&rotary_dim.to_string(), "64"]);
    }
    for number in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -3.0, 0.99] {
        refuse(RotaryConfig { base: number, ..base }, "base", &["finite", "at least 1"]);
    }
    let rotary = Rotary::new(gpu(), base).unwrap();
    let shape = RotaryShape { batch: 1, heads: 1, tokens: 1, offset: 0 };
    for size in [1 << 31, usize::MAX] {
        refused(rotary.plan(&RotaryShape { batch: size, ..shape }), "batch", &[&size.to_string()]);
        refused(rotary.plan(&RotaryShape { heads: size, ..shape }), "heads", &[&size.to_string()]);
        refused(rotary.plan(&RotaryShape { tokens: size, ..shape }), "tokens", &[&size.to_string()]);
    }
    rotary.plan(&RotaryShape { offset: u32::MAX, ..shape }).unwrap();
    refused(rotary.plan(&RotaryShape { offset: u32::MAX, tokens: 2, ..shape }), "offset", &["4294967295", "2³²"]);
}

#[test]
fn tensors_that_are_refused() {
    let gpu = gpu();
    let mut rng = rng(9);
    let config = RotaryConfig { dim: 6, ..Default::default() };
    let shape = RotaryShape { batch: 2, heads: 3, tokens: 4, offset: 0 };
    let case = Case::random(config, shape, &mut rng);
    let plan = Rotary::new(gpu, config).unwrap().plan(&shape).unwrap();
    let out = Guarded::new(gpu, Guarded::ODD, &case.dims());
    let good = RotaryTensors {
        x: gpu.upload(&case.x, &case.dims()).unwrap().view(),
        out: out.view(),
        positions: Some(gpu.upload(&normal(&mut rng, 8), &[2, 4]).unwrap().view()),
    };
    plan.bind(&good).unwrap();
    let refuse = |tensors: &RotaryTensors, argument: &str, words: &[&str]| {
        refused(plan.bind(tensors), argument, words);
        let RotaryTensors { x, out, positions } = tensors.clone();
        let argument = match argument {
            "x" => "d_out",
            "out" => "d_x",
            other => other,
        };
        let words: Vec<&str> = words.iter().map(|&word| if word == "x" { "d_out" } else { word }).collect();
        refused(plan.bind_backward(&RotaryGradients { d_out: x, d_x: out, positions }), argument, &words);
    };
    type Slot = (&'static str, fn(&mut RotaryTensors) -> &mut TensorView);
    let slots: [Slot; 3] = [
        ("x", |tensors| &mut tensors.x),
        ("out", |tensors| &mut tensors.out),
        ("positions", |tensors| tensors.positions.as_mut().unwrap()),
    ];
    for (name, slot) in slots {
        for (bad, words) in bad_views(slot(&mut good.clone())) {
            let mut tensors = good.clone();
            *slot(&mut tensors) = bad;
            refuse(&tensors, name, &words.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
    let three = gpu.zeros(&[3, 4]).unwrap().view();
    refuse(&RotaryTensors { positions: Some(three), ..good.clone() }, "positions", &["[3, 4]", "[2, 4]"]);
    let halves = good.positions.clone().unwrap().with_dtype(DType::F16);
    refuse(&RotaryTensors { positions: Some(halves), ..good.clone() }, "positions", &["F16", "F32"]);

    let shared = gpu.zeros(&[1000]).unwrap();
    let at = |offset| TensorView::new(shared.buffer(), offset, &case.dims());
    refuse(&RotaryTensors { x: at(0), out: at(143), ..good.clone() }, "out", &["overlap", "x"]);
    // The same range in another order is not in place.
    let swapped = TensorView::strided(shared.buffer(), 0, &case.dims(), &[72, 6, 18, 1]);
    refuse(&RotaryTensors { x: at(0), out: swapped, ..good.clone() }, "out", &["overlap", "x"]);
    let positions = Some(TensorView::new(shared.buffer(), 100, &[2, 4]));
    let in_place = RotaryTensors { x: at(0), out: at(0), positions };
    refuse(&in_place, "out", &["overlap", "positions"]);
    let folded = TensorView::strided(shared.buffer(), 0, &case.dims(), &[0, 24, 6, 1]);
    refuse(&RotaryTensors { out: folded, ..good.clone() }, "out", &["overlap"]);

    let plan = Rotary::new(gpu, config).unwrap().plan(&RotaryShape { offset: 3, ..shape }).unwrap();
    refused(plan.bind(&good), "positions", &["offset 3"]);
    let flat = RotaryTensors::new(gpu.zeros(&[5]).unwrap().view(), out.view());
    refused(flat.shape(0), "x", &["[5]"]);
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    let rotary = Rotary::new(gpu, config).unwrap();
    refused(rotary.forward(&mut encoder, 0, &flat), "x", &["[5]"]);
    let tensors = RotaryGradients { d_out: flat.x, d_x: out.view(), positions: None };
    refused(rotary.backward(&mut encoder, 0, &tensors), "d_out", &["[5]"]);
    assert!(matches!(rotary.forward(&mut encoder, 9, &good), Err(Error::Argument { .. })));
    gpu.queue().submit([encoder.finish()]);
    assert!(out.read(gpu, "refused calls").iter().all(|x| x.is_nan()));
}
