//! The library inside an application that already has a wgpu device: EFLA on ranges of one arena buffer, the state
//! updated in place, the call bound once and recorded for every batch of tokens. `cargo run --example own_device`.

use continuous_attention::{Efla, EflaConfig, EflaShape, EflaTensors, Gpu, TensorView, wgpu};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // What an application has: a device with default limits, and a buffer of its own.
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor::new_without_display_handle_from_env());
    let adapter = pollster::block_on(instance.request_adapter(&Default::default()))?;
    let (device, queue) = pollster::block_on(adapter.request_device(&Default::default()))?;
    let gpu = Gpu::from_wgpu(device.clone(), queue.clone())?;

    let (heads, tokens, dim) = (2, 48, 16);
    let config = EflaConfig { key_dim: dim, value_dim: dim, ..Default::default() };
    let plan = Efla::new(&gpu, config)?.plan(&EflaShape { batch: 1, heads, value_heads: heads, tokens })?;

    // q, k, v, beta, out and the state one after another in the arena, the workspace in a buffer beside it.
    let sequence = [1, heads, tokens, dim];
    let shapes = [&sequence[..], &sequence, &sequence, &[1, heads, tokens], &sequence, &[1, heads, dim, dim]];
    let sizes = shapes.map(|shape| shape.iter().product::<usize>() as u64);
    let storage = wgpu::BufferUsages::STORAGE | wgpu::BufferUsages::COPY_DST | wgpu::BufferUsages::COPY_SRC;
    let buffer = |size| wgpu::BufferDescriptor { label: None, size, usage: storage, mapped_at_creation: false };
    let arena = device.create_buffer(&buffer(4 * sizes.iter().sum::<u64>()));
    let mut offset = 0;
    let [q, k, v, beta, out, state] = std::array::from_fn(|i| {
        offset += sizes[i];
        TensorView::new(&arena, offset - sizes[i], shapes[i])
    });
    let workspace = device.create_buffer(&buffer(plan.workspace_bytes()));
    let call = plan.bind(&EflaTensors {
        initial_state: Some(state.clone()),
        final_state: Some(state),
        workspace: Some(TensorView::new(&workspace, 0, &[plan.workspace_bytes() as usize / 4])),
        ..EflaTensors::new(q, k, v, beta, out)
    })?;

    for step in 0..3 {
        // The application writes q, k, v and beta its own way; the state stays where it is.
        let inputs: Vec<f32> = (0..sizes[..4].iter().sum::<u64>()).map(|i| ((i + step) as f32 * 0.3).sin()).collect();
        queue.write_buffer(&arena, 0, bytemuck::cast_slice(&inputs));
        let mut encoder = device.create_command_encoder(&Default::default());
        call.record(&mut encoder.begin_compute_pass(&Default::default()));
        queue.submit([encoder.finish()]);
    }
    device.poll(wgpu::PollType::wait_indefinitely())?;
    println!("{} tokens in three batches through one state of {heads} x {dim} x {dim}", 3 * tokens);
    Ok(())
}
