//! Durations of blocks at one quantile.

use super::blocks::BlockList;
use crate::cost::Quantile;
use crate::lowering::{Lowered, LoweredList, Work};
use foretell_units::Picoseconds;

/// What a block costs its device and its host.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockWork {
    /// Time on the device, alone.
    pub(super) duration: Picoseconds,
    /// When the host has launched it if it never waits, from the start of the step. The maximum if
    /// launches take no time.
    pub(super) launched: Picoseconds,
    /// Whether the host launches nothing more before the block has ended.
    pub(super) host_waits: bool,
}

impl BlockWork {
    fn new(work: &Work, list: &LoweredList, instructions: &[u32], quantile: Quantile) -> Self {
        let durations = instructions.iter().map(|&one| work.duration(list, one, quantile));
        let launched = instructions.first().and_then(|&first| work.launched.get(first as usize));
        let host_waits = instructions.last().and_then(|&last| work.host_waits.get(last as usize));
        Self {
            duration: durations.fold(Picoseconds::ZERO, |sum, one| sum + one),
            launched: launched.copied().unwrap_or(Picoseconds::MAX),
            host_waits: host_waits.copied().unwrap_or(false),
        }
    }
}

/// The work of each block: by list, by entry of the list's [`Lowered::work`], by block.
pub(super) fn block_work(lowered: &Lowered<'_>, block_lists: &[BlockList], quantile: Quantile) -> Vec<Vec<Vec<BlockWork>>> {
    let of_list = |(index, block_list): (usize, &BlockList)| {
        let list = &lowered.lists[index];
        let of_work = |work: &Work| {
            let of_block = |block| BlockWork::new(work, list, block_list.instructions(block), quantile);
            block_list.blocks.iter().map(of_block).collect()
        };
        lowered.work[index].iter().map(of_work).collect()
    };
    block_lists.iter().enumerate().map(of_list).collect()
}
