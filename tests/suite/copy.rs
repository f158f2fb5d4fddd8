//! Copies between any views, and a cache that grows by them.

use continuous_attention::{Attention, AttentionTensors, DType, Gpu, GpuOptions, TensorView, wgpu};

use crate::errors::{bad_views, refused};
use crate::harness::{AttentionCase, Guarded, Place, bits, case_count, gpu, normal, pick, rng, submit};

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Copies `values` from one place to another on `gpu` and demands what two roundings make of them, bit by bit.
fn check(gpu: &Gpu, from: &Place, to: &Place, values: &[f32]) {
    let label = format!("copy from {from:?} to {to:?}");
    let (source, destination) = (from.upload(gpu, values), to.output(gpu));
    submit(gpu, &gpu.bind_copy(&source, &destination.view()).unwrap_or_else(|error| panic!("{error}: {label}")));
    let got = destination.read(gpu, &label);
    assert_eq!(bits(&got), bits(&to.rounded(&from.rounded(values))), "{label}");
}

/// Numbers of every size, zeros of both signs, infinities, subnormals and ties of 16-bit storage.
fn values(rng: &mut fastrand::Rng, count: usize) -> Vec<f32> {
    let special =
        [0.0, -0.0, f32::INFINITY, f32::NEG_INFINITY, 65504.0, 65519.9, 65520.0, 1e-7, 5.9e-8, 3e-8, -6.1e-5, 3.4e38];
    let draw = |rng: &mut fastrand::Rng| match rng.u8(..8) {
        0 => pick(rng, &special),
        // Half way between two neighbours of f16 and of bf16.
        1 => 1.0 + (2 * rng.u32(..500) + 1) as f32 / 2048.0,
        2 => 1.0 + (2 * rng.u32(..60) + 1) as f32 / 256.0,
        _ => (rng.f32() - 0.5) * 10f32.powi(rng.i32(-8..6)),
    };
    (0..count).map(|_| draw(rng)).collect()
}

fn random_case(seed: u64) {
    let mut rng = rng(seed);
    let rank = rng.usize(..5);
    let shape: Vec<usize> = (0..rank).map(|_| if rng.u8(..12) == 0 { 0 } else { rng.usize(1..14) }).collect();
    let even = shape.last().is_some_and(|last| last % 2 == 0);
    let (from_type, to_type) = (pick(&mut rng, &TYPES), if even { pick(&mut rng, &TYPES) } else { DType::F32 });
    let mut from = Place::random(&mut rng, from_type, &shape, false, false);
    let mut to = Place::random(&mut rng, to_type, &shape, true, false);
    // Transposed, and columns that are not neighbours.
    let shuffled = |rng: &mut fastrand::Rng, dtype| {
        let mut order: Vec<usize> = (0..rank).collect();
        rng.shuffle(&mut order);
        Place::ordered(dtype, &shape, &order, rng.usize(..70), rng.usize(..3))
    };
    if rng.bool() {
        from = shuffled(&mut rng, from_type);
    }
    if to_type == DType::F32 && rng.bool() {
        to = shuffled(&mut rng, to_type);
    }
    let values = values(&mut rng, shape.iter().product());
    check(gpu(), &from, &to, &values);
}

#[test]
fn random_cases() {
    (0..case_count(300)).for_each(|seed| random_case(70_000 + seed as u64));
}

/// Rows read in whole vectors and not, from every type to every type, at the edges of a vector.
#[test]
fn every_type_to_every_type() {
    let mut rng = rng(1);
    for from_type in TYPES {
        for to_type in TYPES {
            for (columns, offset) in [(2, 6), (4, 8), (6, 2), (8, 0), (64, 4), (66, 130), (256, 64)] {
                let shape = [2, 3, 5, columns];
                let (from, to) = (Place::dense(from_type, &shape, offset), Place::dense(to_type, &shape, offset));
                check(gpu(), &from, &to, &values(&mut rng, 30 * columns));
                let odd = Place::dense(from_type, &shape, offset + 1);
                check(gpu(), &odd, &to, &values(&mut rng, 30 * columns));
            }
        }
    }
}

/// f32 is moved as it is, subnormals and the bits of a NaN included.
#[test]
fn bits_survive() {
    let mut rng = rng(2);
    let values: Vec<f32> = (0..2 * 60).map(|_| f32::from_bits(rng.u32(..) | 0x40_0000)).collect();
    let values = [&values[..], &[f32::from_bits(1), f32::from_bits(0x807f_ffff), f32::NAN, -f32::NAN]].concat();
    for offset in [0, 3] {
        check(gpu(), &Place::dense(DType::F32, &[31, 4], offset), &Place::dense(DType::F32, &[31, 4], 4), &values);
    }
}

/// Elements of the source may stand for many.
#[test]
fn expanded_sources() {
    let source = gpu().upload(&[1.0, 2.0, 3.0], &[3]).unwrap();
    for (strides, want) in [([0, 1], [1.0, 2.0, 3.0, 1.0, 2.0, 3.0]), ([1, 0], [1.0, 1.0, 1.0, 2.0, 2.0, 2.0])] {
        let destination = Place::dense(DType::F32, &[2, 3], 5).output(gpu());
        let expanded = TensorView::strided(source.buffer(), 0, &[2, 3], &strides);
        submit(gpu(), &gpu().bind_copy(&expanded, &destination.view()).unwrap());
        assert_eq!(destination.read(gpu(), "expanded"), want);
    }
}

#[test]
fn within_one_buffer() {
    let mut rng = rng(3);
    let content = normal(&mut rng, 300);
    let buffer = gpu().upload(&content, &[300]).unwrap();
    let at = |offset| TensorView::new(buffer.buffer(), offset, &[5, 20]);
    let mut encoder = gpu().device().create_command_encoder(&Default::default());
    gpu().copy(&mut encoder, &at(7), &at(107)).unwrap();
    gpu().copy(&mut encoder, &at(107), &at(200)).unwrap_err();
    gpu().queue().submit([encoder.finish()]);
    let want = [&content[..107], &content[7..107], &content[207..]].concat();
    assert_eq!(bits(&gpu().read(&buffer).unwrap()), bits(&want));
}

#[test]
fn checked_shaders_agree() {
    let gpu = Gpu::with_options(&GpuOptions { checked: true, ..Default::default() }).unwrap();
    let mut rng = rng(4);
    for (from_type, to_type) in [(DType::F32, DType::F16), (DType::BF16, DType::F32)] {
        let (from, to) = (Place::dense(from_type, &[3, 5, 6], 3), Place::dense(to_type, &[3, 5, 6], 2));
        check(&gpu, &from, &to, &values(&mut rng, 90));
    }
    let transposed = Place::ordered(DType::F32, &[3, 5, 7], &[2, 0, 1], 3, 1);
    check(&gpu, &transposed, &transposed, &values(&mut rng, 105));
}

#[test]
fn narrowed_views() {
    let tensor = gpu().upload(&(0..60).map(|x| x as f32).collect::<Vec<_>>(), &[3, 4, 5]).unwrap();
    let read = |view: &TensorView| {
        let out = gpu().zeros(view.shape()).unwrap();
        submit(gpu(), &gpu().bind_copy(view, &out.view()).unwrap());
        gpu().read(&out).unwrap()
    };
    let view = tensor.view().narrow(1, 1, 2).unwrap();
    assert_eq!(view.shape(), [3, 2, 5]);
    let want: Vec<f32> = [5..15, 25..35, 45..55].into_iter().flatten().map(|x| x as f32).collect();
    assert_eq!(read(&view), want);
    assert_eq!(read(&view.narrow(0, 2, 1).unwrap().narrow(2, 3, 2).unwrap()), [48.0, 49.0, 53.0, 54.0]);
    assert_eq!(tensor.view().narrow(0, 3, 0).unwrap().shape(), [0, 4, 5]);
    assert_eq!(read(&tensor.view().narrow(2, 0, 5).unwrap()), gpu().read(&tensor).unwrap());

    refused(tensor.view().narrow(3, 0, 1), "dim", &["3", "3 dimensions"]);
    refused(tensor.view().narrow(1, 3, 2), "length", &["2", "start 3", "4"]);
    refused(tensor.view().narrow(1, 5, 0), "length", &["start 5"]);
    refused(tensor.view().narrow(1, usize::MAX, 2), "length", &["start"]);
    let bare = TensorView::strided(tensor.buffer(), 0, &[3, 4], &[4]);
    refused(bare.narrow(1, 0, 1), "strides", &["1 strides", "2"]);
    let far = TensorView::strided(tensor.buffer(), 7, &[3, 4], &[usize::MAX, 1]);
    refused(far.narrow(0, 2, 1), "start", &["2"]);
}

#[test]
fn transposed_views() {
    let tensor = gpu().upload(&(0..24).map(|x| x as f32).collect::<Vec<_>>(), &[2, 3, 4]).unwrap();
    let view = tensor.view().narrow(0, 1, 1).unwrap().transposed(1, 2).unwrap();
    assert_eq!(view.shape(), [1, 4, 3]);
    let out = gpu().zeros(&[1, 4, 3]).unwrap();
    submit(gpu(), &gpu().bind_copy(&view, &out.view()).unwrap());
    let want = [12, 16, 20, 13, 17, 21, 14, 18, 22, 15, 19, 23].map(|x| x as f32);
    assert_eq!(gpu().read(&out).unwrap(), want);
    refused(tensor.view().transposed(3, 0), "dim", &["3", "3 dimensions"]);
    refused(tensor.view().transposed(1, 4), "dim", &["4", "3 dimensions"]);
    let bare = TensorView::strided(tensor.buffer(), 0, &[3, 4], &[4]);
    refused(bare.transposed(0, 1), "dim", &["1", "1 dimensions"]);
}

/// What it is for: keys and values go to the end of a cache, and attention reads as much of it as there is.
#[test]
fn decoding_with_a_cache() {
    let mut rng = rng(5);
    for dtype in TYPES {
        let (tokens, capacity) = (9, 16);
        let config = continuous_attention::AttentionConfig { head_dim: 6, value_dim: 4, ..Default::default() };
        let shape =
            continuous_attention::AttentionShape { batch: 2, heads: 4, kv_heads: 2, queries: tokens, keys: tokens };
        let case = AttentionCase::random(config, shape, &mut rng);
        let (k, v) = (Place::dense(dtype, &[2, 2, capacity, 6], 6), Place::dense(dtype, &[2, 2, capacity, 4], 2));
        let (k_cache, v_cache) = (k.output(gpu()), v.output(gpu()));
        let new_keys = gpu().upload(&case.k, &[2, 2, tokens, 6]).unwrap().view();
        let new_values = gpu().upload(&case.v, &[2, 2, tokens, 4]).unwrap().view();
        let queries = gpu().upload(&case.q, &[2, 4, tokens, 6]).unwrap().view();
        let out = Guarded::new(gpu(), Guarded::ODD, &case.out_shape());

        let attention = Attention::new(gpu(), config).unwrap();
        let mut encoder = gpu().device().create_command_encoder(&Default::default());
        let mut length = 0;
        for new in [3, 1, 1, 4] {
            for (cache, from) in [(&k_cache, &new_keys), (&v_cache, &new_values)] {
                let end = cache.view().narrow(2, length, new).unwrap();
                gpu().copy(&mut encoder, &from.narrow(2, length, new).unwrap(), &end).unwrap();
            }
            let tensors = AttentionTensors::new(
                queries.narrow(2, length, new).unwrap(),
                k_cache.view().narrow(2, 0, length + new).unwrap(),
                v_cache.view().narrow(2, 0, length + new).unwrap(),
                out.view().narrow(2, length, new).unwrap(),
            );
            attention.forward(&mut encoder, &tensors).unwrap();
            length += new;
        }
        gpu().queue().submit([encoder.finish()]);

        let mut rounded = case.clone();
        (rounded.k, rounded.v) = (k.rounded(&case.k), v.rounded(&case.v));
        let want = rounded.reference();
        let label = format!("{dtype:?} cache");
        crate::harness::judge(&label, "out", &out.read(gpu(), &label), &want.out, rounded.limit());
        k_cache.read(gpu(), &label);
        v_cache.read(gpu(), &label);
    }
}

#[test]
fn refusals() {
    let gpu = gpu();
    let good = gpu.zeros(&[2, 3, 4, 6]).unwrap().view();
    let out = Guarded::new(gpu, Guarded::ODD, good.shape());
    let refuse = |from: &TensorView, to: &TensorView, argument: &str, words: &[&str]| {
        refused(gpu.bind_copy(from, to), argument, words);
        let mut encoder = gpu.device().create_command_encoder(&Default::default());
        refused(gpu.copy(&mut encoder, from, to), argument, words);
        gpu.queue().submit([encoder.finish()]);
        assert!(out.read(gpu, argument).iter().all(|x| x.is_nan()), "{argument}: written to");
    };
    for (bad, words) in bad_views(&good) {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        // Copies take any strides, and the source says what the shape is.
        if words.contains(&"stride 1") {
            gpu.bind_copy(&bad, &gpu.zeros(good.shape()).unwrap().view()).unwrap();
            continue;
        }
        refuse(&good, &bad, "to", &words);
        if bad.shape() == good.shape() {
            refuse(&bad, &out.view(), "from", &words);
        }
    }
    let five = gpu.zeros(&[1, 2, 3, 4, 6]).unwrap().view();
    refuse(&five, &out.view(), "from", &["[1, 2, 3, 4, 6]", "four dimensions"]);

    let shared = gpu.zeros(&[1000]).unwrap();
    let at = |offset| TensorView::new(shared.buffer(), offset, good.shape());
    refuse(&at(0), &at(143), "to", &["overlap", "from"]);
    refuse(&at(5), &at(5), "to", &["overlap", "from"]);
    let folded = TensorView::strided(shared.buffer(), 0, good.shape(), &[0, 24, 6, 1]);
    refuse(&good, &folded, "to", &["overlap"]);
    // Two elements of 16 bits share a word.
    for (offset, shape, strides) in [(1, [2, 4], [4, 1]), (0, [2, 3], [4, 1]), (0, [2, 4], [5, 1]), (0, [4, 2], [1, 4])]
    {
        let to = TensorView::strided(shared.buffer(), offset, &shape, &strides).with_dtype(DType::F16);
        refuse(&gpu.zeros(&shape).unwrap().view(), &to, "to", &["even", "F16"]);
    }
    let scalar = TensorView::new(shared.buffer(), 0, &[]).with_dtype(DType::BF16);
    refuse(&gpu.zeros(&[]).unwrap().view(), &scalar, "to", &["even", "BF16"]);

    let destroyed = gpu.device().create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: 4096,
        usage: wgpu::BufferUsages::STORAGE,
        mapped_at_creation: false,
    });
    destroyed.destroy();
    refuse(&TensorView::new(&destroyed, 0, good.shape()), &out.view(), "binding a copy", &[]);
}
