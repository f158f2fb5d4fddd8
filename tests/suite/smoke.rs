use continuous_attention::*;

#[test]
fn smoke() {
    let gpu = Gpu::new().unwrap();
    println!("{:?}", gpu.info());
    for name in [
        "attention_causal_zero_sink",
        "attention_bidirectional_intervals",
        "attention_given_sink_lse_grad",
        "attention_grouped_cache_first_sink",
        "attention_ordinary_softmax",
        "attention_window",
        "efla_euler_normalized",
        "efla_exact_raw_keys",
        "efla_grouped_values",
        "efla_rk4",
    ] {
        let case = case::Case::load(format!("tests/cases/{name}.safetensors"), &Default::default()).unwrap();
        let up = |n: &str| case.inputs.get(n).map(|t| gpu.upload(&t.values, &t.shape).unwrap().view());
        let mut enc = gpu.device().create_command_encoder(&Default::default());
        let mut outs = vec![];
        match case.operation {
            case::Operation::Attention { config, shape } => {
                let a = Attention::new(&gpu, config).unwrap();
                let out = gpu.zeros(&[shape.batch, shape.heads, shape.queries, config.value_dim]).unwrap();
                let lse = gpu.zeros(&[shape.batch, shape.heads, shape.queries]).unwrap();
                let mut t = AttentionTensors::new(up("q").unwrap(), up("k").unwrap(), up("v").unwrap(), out.view());
                t.sink_k = up("sink_k");
                t.sink_v = up("sink_v");
                t.intervals = up("intervals");
                t.lse = Some(lse.view());
                a.forward(&mut enc, &t).unwrap();
                outs.push(("out", out));
                outs.push(("lse", lse));
            }
            case::Operation::Efla { config, shape } => {
                for form in [Form::Chunked, Form::Recurrent] {
                    let a = Efla::new(&gpu, EflaConfig { form, ..config }).unwrap();
                    let out = gpu.zeros(&[shape.batch, shape.value_heads, shape.tokens, config.value_dim]).unwrap();
                    let fs = gpu.zeros(&[shape.batch, shape.value_heads, config.key_dim, config.value_dim]).unwrap();
                    let mut t = EflaTensors::new(
                        up("q").unwrap(),
                        up("k").unwrap(),
                        up("v").unwrap(),
                        up("beta").unwrap(),
                        out.view(),
                    );
                    t.initial_state = up("initial_state");
                    t.final_state = Some(fs.view());
                    a.forward(&mut enc, &t).unwrap();
                    outs.push(("out", out));
                    outs.push(("final_state", fs));
                }
            }
        }
        gpu.queue().submit([enc.finish()]);
        for (n, t) in outs {
            let got = gpu.read(&t).unwrap();
            let want = &case.expected[n].values;
            let (mut e, mut r) = (0.0f64, 0.0f64);
            for (g, w) in got.iter().zip(want) {
                if *w == f32::NEG_INFINITY {
                    assert_eq!(g, w);
                    continue;
                }
                e += ((g - w) as f64).powi(2);
                r += (*w as f64).powi(2);
            }
            println!("{name} {n}: {:.3e}", (e / r).sqrt());
        }
    }
}
