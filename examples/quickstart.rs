//! Continuous attention from slices to a result: `cargo run --release --example quickstart`.

use continuous_attention::{Attention, AttentionConfig, AttentionTensors, Gpu};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let gpu = Gpu::new()?;
    let (heads, tokens, dim) = (4, 1000, 64);
    let noise = |seed: usize| (0..heads * tokens * dim).map(move |i| ((i * 7 + seed) as f32 * 0.37).sin());
    let shape = [1, heads, tokens, dim];
    let [q, k, v] = [0, 1, 2].map(|seed| gpu.upload(&noise(seed).collect::<Vec<f32>>(), &shape));
    let (q, k, v, out) = (q?, k?, v?, gpu.zeros(&shape)?);

    let attention = Attention::new(&gpu, AttentionConfig { head_dim: dim, value_dim: dim, ..Default::default() })?;
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    attention.forward(&mut encoder, &AttentionTensors::new(q.view(), k.view(), v.view(), out.view()))?;
    gpu.queue().submit([encoder.finish()]);

    println!("{}: {:?} …", gpu.info().name, &gpu.read(&out)?[..4]);
    Ok(())
}
