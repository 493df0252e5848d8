//! Process groups: the ranks that communicate with each other, in terms of axes.

use super::{Axis, Coordinates, Mesh, Rank};
use std::fmt;

/// A process group: the ranks whose coordinates differ from those of a member on these axes only.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group {
    /// The axes along which the members differ.
    pub axes: Vec<Axis>,
    /// The stages that take part, if the pipeline is among the axes.
    pub stages: Vec<usize>,
}

impl Group {
    /// The ranks along one axis within a stage.
    pub fn along(axis: Axis) -> Self {
        Self { axes: vec![axis], stages: Vec::new() }
    }

    /// The ranks along several axes within a stage.
    pub fn over(mut axes: Vec<Axis>) -> Self {
        axes.sort_unstable();
        Self { axes, stages: Vec::new() }
    }

    /// The ranks with the same coordinates in each of `stages`.
    pub fn across(stages: Vec<usize>) -> Self {
        Self { axes: vec![Axis::Pipeline], stages }
    }

    /// All ranks of all stages, whose meshes may differ.
    pub fn everyone(mesh: &Mesh) -> Self {
        Self { axes: Axis::ALL.to_vec(), stages: (0..mesh.stage_count()).collect() }
    }

    /// The members of the group that `rank` is in, ascending. Every member gets the same list.
    pub fn members(&self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        let mut ranks = self.members_by_strides(mesh, rank).unwrap_or_else(|| self.members_by_coordinates(mesh, rank));
        ranks.sort_unstable();
        ranks
    }

    /// The members in some order, if the mesh has one stride for each axis.
    fn members_by_strides(&self, mesh: &Mesh, rank: Rank) -> Option<Vec<Rank>> {
        let own = mesh.coordinates(rank);
        let first = self.axes.iter().fold(own, |position, &axis| position.with(axis, 0));
        let mut ranks = vec![mesh.rank(first)];
        for &axis in self.axes.iter().filter(|&&axis| axis != Axis::Pipeline) {
            let (stride, size) = (mesh.stride(axis)?, mesh.stage_at(own).size(axis));
            let mut all = Vec::with_capacity(size * ranks.len());
            for offset in (0..size).map(|position| position * stride) {
                ranks.iter().for_each(|rank| all.push(Rank(rank.0 + offset)));
            }
            ranks = all;
        }
        if self.axes.contains(&Axis::Pipeline) {
            // `ranks` are those of stage 0, whose ranks need not come first.
            let first_of = |stage: usize| mesh.rank(first.with(Axis::Pipeline, stage)).0;
            let stages = self.stages.iter().map(|&stage| first_of(stage));
            ranks = stages.flat_map(|own| ranks.iter().map(move |rank| Rank(rank.0 + own - first_of(0)))).collect();
        }
        Some(ranks)
    }

    /// The members in some order, for any mesh.
    fn members_by_coordinates(&self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        let mut members = vec![mesh.coordinates(rank)];
        // The pipeline comes first (it sorts last): the sizes of the other axes depend on the
        // stage.
        for &axis in self.axes.iter().rev() {
            let positions = |member: &Coordinates| match axis {
                Axis::Pipeline => self.stages.clone(),
                _ => (0..mesh.stage_at(*member).size(axis)).collect(),
            };
            members = members
                .iter()
                .flat_map(|member| positions(member).into_iter().map(|position| member.with(axis, position)))
                .collect();
        }
        members.into_iter().map(|member| mesh.rank(member)).collect()
    }
}

impl fmt::Display for Group {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names: Vec<&str> = self.axes.iter().map(|axis| axis.name()).collect();
        formatter.pad(&names.join("+"))
    }
}
