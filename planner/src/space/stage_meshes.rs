//! Pipelines whose stages have their own meshes, for clusters with runs of devices of different
//! kinds.
//!
//! Each run of devices is divided into equal stages, with a `tensor` that fits its nodes and all
//! remaining ranks along `data`. The runs' stages follow one another along the pipeline.

use super::divisors::divisors;
use foretell_program::StageLayout;

/// The most devices for which stages get their own meshes. On more devices, some common mesh fits
/// all kinds nearly as well, and there are too many combinations.
const MOST_DEVICES: usize = 256;

/// Largest ratio between the total speeds of two stages: cuts cannot balance more.
const MOST_UNEVEN: f64 = 4.0;

/// Consecutive devices of one kind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct DeviceRun {
    /// Number of devices.
    pub(crate) devices: usize,
    /// Devices of each of its nodes.
    pub(crate) node: usize,
    /// Matrix-product rate of each device, in operations per second.
    pub(crate) speed: f64,
}

/// Equal stages on one run of devices.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Section {
    stages: usize,
    /// Data-parallel ranks of each stage.
    data: usize,
    /// Tensor-parallel ranks of each stage.
    tensor: usize,
    /// Matrix-product rate of a whole stage.
    speed: f64,
}

/// Returns every pipeline, as one mesh a stage, that divides each run into equal stages, at least
/// two of which have different meshes, and all of which are about equally fast.
pub(super) fn unequal_meshes(runs: &[DeviceRun]) -> Vec<Vec<StageLayout>> {
    let devices: usize = runs.iter().map(|run| run.devices).sum();
    if runs.len() < 2 || devices > MOST_DEVICES {
        return Vec::new();
    }
    let mut pipelines: Vec<Vec<Section>> = vec![Vec::new()];
    for run in runs {
        let extended = |sections: &Vec<Section>| {
            let balanced =
                run.sections().into_iter().filter(|section| sections.iter().all(|other| section.is_about_as_fast_as(other)));
            balanced.map(|section| [sections.clone(), vec![section]].concat()).collect::<Vec<_>>()
        };
        pipelines = pipelines.iter().flat_map(extended).collect();
    }
    let is_unequal = |sections: &&Vec<Section>| {
        sections.iter().any(|section| (section.data, section.tensor) != (sections[0].data, sections[0].tensor))
    };
    let meshes = |sections: &Vec<Section>| sections.iter().flat_map(Section::meshes).collect::<Vec<StageLayout>>();
    pipelines.iter().filter(is_unequal).map(meshes).collect()
}

impl DeviceRun {
    /// Returns every division of all its devices into equal stages with `tensor` inside a node.
    fn sections(&self) -> Vec<Section> {
        let mut sections = Vec::new();
        for stages in divisors(self.devices) {
            let ranks = self.devices / stages;
            for tensor in divisors(ranks).into_iter().filter(|&tensor| tensor <= self.node && self.node.is_multiple_of(tensor)) {
                sections.push(Section { stages, data: ranks / tensor, tensor, speed: self.speed * ranks as f64 });
            }
        }
        sections
    }
}

impl Section {
    fn is_about_as_fast_as(&self, other: &Self) -> bool {
        (1.0 / MOST_UNEVEN..=MOST_UNEVEN).contains(&(self.speed / other.speed))
    }

    fn meshes(&self) -> Vec<StageLayout> {
        vec![StageLayout { data: self.data, tensor: self.tensor, ..StageLayout::default() }; self.stages]
    }
}
