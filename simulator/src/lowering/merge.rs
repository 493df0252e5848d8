//! Merges the Programs of several jobs on one topology.

use super::Lowered;

impl Lowered<'_> {
    /// Merges two lowered Programs that have the same costs and disjoint devices. The ranks, groups
    /// and channels of `other` follow those of `self`. Call this before
    /// [`Self::with_resources_numbered`].
    pub(crate) fn merge(mut self, mut other: Self) -> Self {
        let (lists, ranks, processors) = (self.lists.len(), self.ranks.len() as u32, self.processors as u32);
        let (groups, channels) = (self.groups.len() as u32, self.channels.len() as u32);
        for rank in &mut other.ranks {
            rank.list += lists;
            rank.processor += processors;
            rank.groups.iter_mut().for_each(|group| *group += groups);
            rank.sends.iter_mut().chain(&mut rank.receives).for_each(|channel| *channel += channels);
        }
        let hops = self.hops.len() as u32;
        for hop in &mut other.hops {
            hop.group += groups;
            hop.sender += ranks;
            hop.receiver += ranks;
            hop.before += hops;
            hop.after += hops;
        }
        for group in &mut other.groups {
            group.hops = group.hops.start + hops..group.hops.end + hops;
        }
        other.representative_of.iter_mut().for_each(|index| *index += ranks);
        other.groups.iter_mut().flat_map(|group| &mut group.members).for_each(|(member, _)| *member += ranks);
        for channel in &mut other.channels {
            channel.sender += ranks;
            channel.receiver += ranks;
        }
        self.sources.append(&mut other.sources);
        self.lists.append(&mut other.lists);
        self.times.append(&mut other.times);
        self.hops.append(&mut other.hops);
        self.ranks.append(&mut other.ranks);
        self.representative_of.append(&mut other.representative_of);
        self.groups.append(&mut other.groups);
        self.channels.append(&mut other.channels);
        self.uncalibrated_kernels.append(&mut other.uncalibrated_kernels);
        self.processors += other.processors;
        self.number_communications();
        self
    }
}
