//! What the blocks of a list take.

use super::blocks::BlockList;
use crate::cost::Quantile;
use crate::lowering::{Lowered, LoweredList, Work};
use foretell_units::Picoseconds;

/// What a block of a list takes, and of the host: all that the interpreter asks of it beside its code, in one place.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BlockWork {
    /// Of the processor.
    pub(crate) duration: Picoseconds,
    /// When the host has launched it, if it never waits.
    pub(crate) launched: Picoseconds,
    /// Whether the host launches nothing more before it has ended.
    pub(crate) host_waits: bool,
}

impl BlockWork {
    /// What instructions that are run in one go take.
    fn new(work: &Work, list: &LoweredList, instructions: &[u32], quantile: Quantile) -> BlockWork {
        let durations = instructions.iter().map(|&one| work.duration(list, one, quantile));
        let launched = instructions.first().and_then(|&first| work.launched.get(first as usize));
        let host_waits = instructions.last().and_then(|&last| work.host_waits.get(last as usize));
        BlockWork {
            duration: durations.fold(Picoseconds::ZERO, |sum, one| sum + one),
            launched: launched.copied().unwrap_or(Picoseconds::MAX),
            host_waits: host_waits.copied().unwrap_or(false),
        }
    }
}

/// The work of each block of each list, for each entry of the list's [`Lowered::work`].
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
