//! The scans of EFLA: of how many levels they are, and how much of one a dispatch does.

use super::call::Sizes;
use super::forward::{RECURRENT_COLUMNS, state_columns};
use crate::gpu::Gpu;
use crate::kernel::{Load, Steps};
use crate::shader::Kernel;

/// Below this many workgroups the chunks of a scan are scanned in groups, which get at least so many chunks.
const FEW_WORKGROUPS: u64 = 128;
const GROUP_CHUNKS: u64 = 8;

/// Groups of a scan and chunks of each; one group if there is work enough.
pub(super) fn groups(gpu: &Gpu, sizes: &Sizes, ragged: bool) -> (u64, u64) {
    let workgroups = sizes.scans * state_blocks(sizes);
    let groups = (FEW_WORKGROUPS / workgroups.max(1)).min(sizes.chunks / GROUP_CHUNKS);
    // All groups of a scan are one step of `efla_groups`.
    let groups = groups.min(gpu.loop_rounds() / groups_rounds(sizes));
    if ragged || groups < 2 {
        return (1, sizes.chunks);
    }
    let length = sizes.chunks.div_ceil(groups);
    (sizes.chunks.div_ceil(length), length)
}

/// Blocks of value columns that workgroups of `efla_state` have.
pub(super) fn state_blocks(sizes: &Sizes) -> u64 {
    sizes.value_dim.div_ceil(state_columns(sizes.key_dim as usize) as u64)
}

/// Rounds of loops that a group costs an invocation of `efla_groups`.
fn groups_rounds(sizes: &Sizes) -> u64 {
    sizes.key_dim.div_ceil(64) * (sizes.key_dim + 16) + 16
}

/// The steps of a kernel that scans, chunks or tokens; `None` of any other. Rounds of loops are counted from the kernels'
/// text, as if none were unrolled: per chunk those of either product, stage by stage.
pub(super) fn steps(name: &str, sizes: &Sizes, (groups, group_chunks): (u64, u64), chunk: usize) -> Option<Steps> {
    let Sizes { scans, key_dim, value_dim, longest, .. } = *sizes;
    let (stages, columns, chunk) = (key_dim.div_ceil(32), state_columns(key_dim as usize) as u64, chunk as u64);
    let chunks = longest.div_ceil(chunk);
    let (blocks, key_blocks) = (state_blocks(sizes), key_dim.div_ceil(columns));
    // A step multiplies all columns of the state with `vectors` vectors.
    let steps = |workgroups: u64, columns: u64, vectors: u64, rounds: u64, count: u64| {
        let load = Load { workgroups, operations: 2 * key_dim * columns * vectors, rounds };
        Some(Steps { load, count, left: key_dim * columns })
    };
    let tiled = |workgroups: u64, count: u64| {
        let (rows, passes) = (columns / 8, columns.div_ceil(chunk).max(1));
        let rounds = stages * (8 * (rows + 2) + 14 + passes * (chunk + 28)) + 6 * rows + 44;
        steps(workgroups, columns, 2 * chunk, rounds, count)
    };
    match name {
        "efla_state" | "efla_backward_state" | "efla_backward_replay" => tiled(scans * blocks, chunks),
        "efla_state_sums" | "efla_backward_sums" => tiled(scans * groups * (blocks + key_blocks), group_chunks),
        "efla_state_starts" | "efla_backward_starts" => tiled(scans * groups * blocks, group_chunks),
        "efla_state_lanes" | "efla_backward_state_lanes" | "efla_backward_replay_lanes" => {
            steps(scans * value_dim.div_ceil(32), 32, 2 * chunk, key_dim + 16, chunks)
        }
        "efla_groups" => steps(scans * value_dim.div_ceil(8), 8, key_dim * groups, groups_rounds(sizes) * groups, 1),
        "efla_recurrent" => {
            steps(scans * value_dim.div_ceil(RECURRENT_COLUMNS), RECURRENT_COLUMNS, 3, 32 * stages + 24, longest)
        }
        _ => None,
    }
}

/// Elements of the workspace for the states that the one of these kernels leaves that leaves most.
pub(super) fn left_elements<'a>(
    gpu: &Gpu,
    sizes: &Sizes,
    groups: (u64, u64),
    chunk: usize,
    kernels: impl Iterator<Item = &'a Kernel>,
) -> u64 {
    let steps = kernels.filter_map(|kernel| steps(kernel.name, sizes, groups, chunk));
    steps.map(|steps| steps.elements(gpu)).max().unwrap_or(0)
}
