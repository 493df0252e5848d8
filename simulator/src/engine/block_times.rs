//! Durations of blocks at one quantile.

use super::blocks::BlockList;
use crate::cost::Quantile;
use crate::lowering::{ListTimes, Lowered, LoweredList};
use foretell_units::Picoseconds;

/// The duration of a block, and its effect on the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockTimes {
    /// Time on the device, alone.
    pub(super) duration: Picoseconds,
    /// When the host has launched the block, from the start of the step, if the host never waits.
    /// The maximum if launches take no time.
    pub(super) launched: Picoseconds,
    /// Whether the host launches nothing more before the block has ended.
    pub(super) host_waits: bool,
}

impl BlockTimes {
    fn new(times: &ListTimes, list: &LoweredList, instructions: &[u32], quantile: Quantile) -> Self {
        let durations = instructions.iter().map(|&instruction| times.duration(list, instruction, quantile));
        let launched = instructions.first().and_then(|&first| times.launched.get(first as usize));
        let host_waits = instructions.last().and_then(|&last| times.host_waits.get(last as usize));
        Self {
            duration: durations.fold(Picoseconds::ZERO, |sum, duration| sum + duration),
            launched: launched.copied().unwrap_or(Picoseconds::MAX),
            host_waits: host_waits.copied().unwrap_or(false),
        }
    }
}

/// The durations of blocks: indexed by list, by entry of the list's [`Lowered::times`], and by
/// block.
pub(super) fn block_times(lowered: &Lowered<'_>, block_lists: &[BlockList], quantile: Quantile) -> Vec<Vec<Vec<BlockTimes>>> {
    let of_list = |(index, block_list): (usize, &BlockList)| {
        let list = &lowered.lists[index];
        let of_times = |times: &ListTimes| {
            let of_block = |block| BlockTimes::new(times, list, block_list.instructions(block), quantile);
            block_list.blocks.iter().map(of_block).collect()
        };
        lowered.times[index].iter().map(of_times).collect()
    };
    block_lists.iter().enumerate().map(of_list).collect()
}
