//! `info`: the adapters, and what of them matters to the kernels.

use crate::engine::kind;
use crate::{Outcome, print};
use continuous_attention::{Gpu, wgpu};

/// Lists every adapter and says which would be picked.
pub fn info() -> Outcome {
    let adapters = pollster::block_on(Gpu::adapters());
    let infos: Vec<_> = adapters.iter().map(wgpu::Adapter::get_info).collect();
    let picked = Gpu::preferred(&infos);
    for (index, (adapter, info)) in adapters.iter().zip(&infos).enumerate() {
        let mark = if picked == Ok(index) { "   (picked)" } else { "" };
        print(&format!("{index}: {}{mark}\n", info.name));
        for (name, value) in facts(adapter, info) {
            print(&format!("   {name:<28}{value}\n"));
        }
        print("\n");
    }
    match picked {
        Ok(index) => print(&format!("Picked: {index}, {}\n", infos[index].name)),
        // Nothing to list is an answer; a WGPU_ADAPTER_NAME that names nothing is a mistake.
        Err(error) if adapters.is_empty() && std::env::var_os("WGPU_ADAPTER_NAME").is_none_or(|n| n.is_empty()) => {
            print(&format!("{error}\n"));
        }
        Err(error) => return Err(error.into()),
    }
    Ok(true)
}

fn facts(adapter: &wgpu::Adapter, info: &wgpu::AdapterInfo) -> Vec<(&'static str, String)> {
    let (features, limits) = (adapter.features(), adapter.limits());
    let has = |feature| if features.contains(feature) { "yes" } else { "no" };
    let subgroups = match has(wgpu::Features::SUBGROUP) {
        "yes" if info.subgroup_min_size == info.subgroup_max_size => format!("yes, of {}", info.subgroup_min_size),
        "yes" => format!("yes, of {} to {}", info.subgroup_min_size, info.subgroup_max_size),
        no => no.to_string(),
    };
    let tiles = adapter.cooperative_matrix_properties().iter().map(tile).collect::<Vec<_>>().join(", ");
    let matrix = has(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX);
    vec![
        ("backend", format!("{:?}", info.backend)),
        ("type", kind(info.device_type).into()),
        ("driver", format!("{} {}", info.driver, info.driver_info).trim().into()),
        ("f16 in shaders", has(wgpu::Features::SHADER_F16).into()),
        ("subgroups", subgroups),
        ("timestamps", has(wgpu::Features::TIMESTAMP_QUERY).into()),
        ("cooperative matrix", if tiles.is_empty() { matrix.into() } else { format!("{matrix}, {tiles}") }),
        ("storage buffer binding", bytes(limits.max_storage_buffer_binding_size)),
        ("buffer", bytes(limits.max_buffer_size)),
        ("workgroup memory", bytes(limits.max_compute_workgroup_storage_size.into())),
        ("invocations per workgroup", limits.max_compute_invocations_per_workgroup.to_string()),
        ("workgroups per dimension", limits.max_compute_workgroups_per_dimension.to_string()),
        ("storage buffers per shader", limits.max_storage_buffers_per_shader_stage.to_string()),
        ("storage offset alignment", bytes(limits.min_storage_buffer_offset_alignment.into())),
    ]
}

/// m×n×k and types of a cooperative matrix product.
fn tile(tile: &wgpu::CooperativeMatrixProperties) -> String {
    let wgpu::CooperativeMatrixProperties { m_size, n_size, k_size, ab_type, cr_type, .. } = tile;
    format!("{m_size}×{n_size}×{k_size} {ab_type:?} to {cr_type:?}")
}

/// In the largest binary unit that leaves a whole number, or one of at least 1,024.
fn bytes(count: u64) -> String {
    let units = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let (mut value, mut unit) = (count, 0);
    while value >= 1024 && (value % 1024 == 0 || value >= 1 << 20) {
        (value, unit) = (value / 1024, unit + 1);
    }
    format!("{value} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::bytes;

    #[test]
    fn sizes_are_short() {
        assert_eq!(bytes(0), "0 bytes");
        assert_eq!(bytes(16), "16 bytes");
        assert_eq!(bytes(32768), "32 KiB");
        assert_eq!(bytes((1 << 31) - 1), "2047 MiB");
        assert_eq!(bytes((1 << 31) - 4), "2047 MiB");
        assert_eq!(bytes(u64::MAX), "16383 PiB");
    }
}
