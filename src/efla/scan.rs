//! The scans of EFLA: of how many levels they are, and how much of one a dispatch does.

use super::call::{EflaParams, Sizes};
use super::forward::{RECURRENT_COLUMNS, state_columns};
use crate::error::Result;
use crate::gpu::Gpu;
use crate::kernel::{BoundRange, Call, Load, params_buffer};
use crate::shader::{Constants, Kernel};

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

/// A kernel that scans: its workgroups go from step to step, a chunk or a token each, and can stop behind any.
#[derive(Debug, Clone, Copy)]
pub(super) struct Steps {
    /// Of one step.
    load: Load,
    /// Columns of the state that a workgroup has.
    columns: u64,
    count: u64,
}

impl Steps {
    /// Those of a kernel that scans; `None` of any other. Loops are counted from the kernels' text, as if none were
    /// unrolled: per chunk those of either product, stage by stage.
    pub fn of(name: &str, sizes: &Sizes, (groups, group_chunks): (u64, u64), chunk: usize) -> Option<Self> {
        let Sizes { scans, key_dim, value_dim, longest, .. } = *sizes;
        let (stages, columns, chunk) = (key_dim.div_ceil(32), state_columns(key_dim as usize) as u64, chunk as u64);
        let chunks = longest.div_ceil(chunk);
        let (blocks, key_blocks) = (state_blocks(sizes), key_dim.div_ceil(columns));
        // A step multiplies all columns of the state with `vectors` vectors.
        let steps = |workgroups: u64, columns: u64, vectors: u64, rounds: u64, count: u64| {
            let load = Load { workgroups, operations: 2 * key_dim * columns * vectors, rounds };
            Some(Steps { load, columns, count })
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
            "efla_groups" => {
                steps(scans * value_dim.div_ceil(8), 8, key_dim * groups, groups_rounds(sizes) * groups, 1)
            }
            "efla_recurrent" => {
                steps(scans * value_dim.div_ceil(RECURRENT_COLUMNS), RECURRENT_COLUMNS, 3, 32 * stages + 24, longest)
            }
            _ => None,
        }
    }

    /// How many steps a dispatch does.
    fn at_once(&self, gpu: &Gpu) -> u64 {
        self.load.times_at_once(gpu).min(self.count).max(1)
    }

    /// How many dispatches there are, which hand the state on from one to the next.
    pub fn dispatches(&self, gpu: &Gpu) -> u64 {
        self.count.div_ceil(self.at_once(gpu)).max(1)
    }

    /// Records them all; without a step one, which passes the state on.
    pub fn push(
        &self,
        gpu: &Gpu,
        call: &mut Call,
        (kernel, constants): (&'static Kernel, Constants),
        params: &EflaParams,
        arguments: &[Option<BoundRange>],
    ) -> Result<()> {
        let at_once = self.at_once(gpu);
        for dispatch in 0..self.dispatches(gpu) {
            let first_step = dispatch * at_once;
            let steps = at_once.min(self.count - first_step);
            let mut own = EflaParams { first_step: first_step as u32, steps: steps as u32, ..*params };
            if kernel.name == "efla_recurrent" && first_step > 0 {
                // From where the dispatch before left the state.
                own.state_source = 2;
            }
            let params = params_buffer(gpu, "efla", &own);
            call.push(gpu, kernel, constants.clone(), &params, arguments, self.load.times(steps))?;
        }
        Ok(())
    }
}

/// Elements of the states of workgroups that stop behind a step, for the one of these kernels that has most.
pub(super) fn stopped_elements<'a>(
    gpu: &Gpu,
    sizes: &Sizes,
    groups: (u64, u64),
    chunk: usize,
    kernels: impl Iterator<Item = &'a Kernel>,
) -> u64 {
    let steps = kernels.filter_map(|kernel| Steps::of(kernel.name, sizes, groups, chunk));
    let stopping = steps.filter(|steps| steps.dispatches(gpu) > 1);
    stopping.map(|steps| steps.load.workgroups.saturating_mul(sizes.key_dim * steps.columns)).max().unwrap_or(0)
}
