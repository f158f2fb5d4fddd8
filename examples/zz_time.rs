use continuous_attention::*;
use std::time::Instant;
fn main() {
    let gpu =
        Gpu::with_options(&GpuOptions { checked: std::env::var("CHECKED").is_ok(), ..Default::default() }).unwrap();
    let (b, h, t, d) = (1usize, 8usize, 1024usize, 64usize);
    for chunk in [32, 64] {
        let config = EflaConfig { chunk: Some(chunk), ..Default::default() };
        let efla = Efla::new(&gpu, config).unwrap();
        let shape = EflaShape { batch: b, heads: h, value_heads: h, tokens: t };
        let mut r = fastrand::Rng::with_seed(1);
        let mut up = |s: &[usize]| {
            let n: usize = s.iter().product();
            let v: Vec<f32> = (0..n).map(|_| r.f32() - 0.5).collect();
            gpu.upload(&v, s).unwrap().view()
        };
        let row = [b, h, t, d];
        let (q, k, v, beta, d_out) = (up(&row), up(&row), up(&row), up(&[b, h, t]), up(&row));
        let fp = efla.plan(&shape).unwrap();
        let bp = efla.plan_backward(&shape).unwrap();
        println!("chunk {chunk} workspace forward {} backward {}", fp.workspace_bytes(), bp.workspace_bytes());
        let out = gpu.zeros(&row).unwrap();
        let f = fp.bind(&EflaTensors::new(q.clone(), k.clone(), v.clone(), beta.clone(), out.view())).unwrap();
        let z = |s: &[usize]| gpu.zeros(s).unwrap().view();
        let g = bp
            .bind(&EflaGradients {
                q,
                k,
                v,
                beta,
                initial_state: None,
                d_out,
                d_final_state: None,
                d_q: z(&row),
                d_k: z(&row),
                d_v: z(&row),
                d_beta: z(&[b, h, t]),
                d_initial_state: None,
                workspace: None,
            })
            .unwrap();
        for (name, call) in [("forward", &f), ("backward", &g)] {
            let mut best = f64::MAX;
            for _ in 0..12 {
                let start = Instant::now();
                let mut e = gpu.device().create_command_encoder(&Default::default());
                call.record(&mut e.begin_compute_pass(&Default::default()));
                gpu.queue().submit([e.finish()]);
                gpu.device().poll(wgpu::PollType::wait_indefinitely()).unwrap();
                best = best.min(start.elapsed().as_secs_f64());
            }
            println!("chunk {chunk} {name}: {:.1} ms", best * 1e3);
        }
    }
}
