//! Meshes: the sizes of every axis that a number of devices allows.

use super::Space;
use super::divisors::divisors;
use std::collections::BTreeMap;

/// The fewest positions of a sequence on each context-parallel rank. With fewer, a rank mostly
/// gathers keys and values.
pub(super) const FEWEST_POSITIONS: usize = 2048;

/// The most nodes that tensor parallelism spans: activations cross the network twice in every
/// layer.
pub(super) const MOST_NODES_OF_TENSOR: usize = 4;

/// Devices up to which `tensor` may have any size. With more devices, the size of `tensor` must
/// divide a node or be a multiple of it. With few, other sizes may be needed, for example on a node
/// of three devices.
const FEW_DEVICES: usize = 32;

/// A mesh's axis sizes other than `context` and `expert`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MeshSizes {
    pub(super) data: usize,
    pub(super) tensor: usize,
    pub(super) pipeline: usize,
}

impl Space<'_> {
    /// Returns the meshes for these sizes of `context` and `expert`.
    pub(super) fn meshes(&self, context: usize, expert: usize) -> Vec<MeshSizes> {
        let ranks = context.saturating_mul(expert).max(1);
        let devices = self.devices.count / ranks;
        let mut meshes = self.meshes_of_devices(devices);
        meshes.extend(self.meshes_of_first_nodes(ranks, devices, &meshes));
        meshes
    }

    /// Returns the meshes for `devices` devices, which `context` and `expert` leave for the other
    /// axes.
    fn meshes_of_devices(&self, devices: usize) -> Vec<MeshSizes> {
        let fixed = self.fixed;
        let worlds = match (fixed.data, fixed.tensor, fixed.pipeline) {
            (Some(data), Some(tensor), Some(pipeline)) => {
                let world = data.checked_mul(tensor).and_then(|ranks| ranks.checked_mul(pipeline));
                world.filter(|&ranks| ranks <= devices).into_iter().collect()
            }
            _ => divisors(devices),
        };
        let mut meshes = self.meshes_of_worlds(worlds);
        self.add_meshes_with_idle_devices(devices, &mut meshes);
        meshes
    }

    /// Returns the meshes for the devices of the first nodes alone, of which `context` and `expert`
    /// together take a factor `ranks`, without those in `others`. Links between unequal nodes may
    /// cost more than the remaining nodes gain..
    fn meshes_of_first_nodes(&self, ranks: usize, devices: usize, others: &[MeshSizes]) -> Vec<MeshSizes> {
        let counts = self.devices.of_first_nodes.iter().filter(|count| count.is_multiple_of(ranks));
        let mut worlds: Vec<usize> = counts.flat_map(|count| divisors(count / ranks)).collect();
        worlds.retain(|&world| !devices.is_multiple_of(world));
        worlds.sort_unstable();
        worlds.dedup();
        let mut meshes = self.meshes_of_worlds(worlds);
        meshes.retain(|mesh| !others.contains(mesh));
        meshes
    }

    /// Returns the meshes with these numbers of ranks.
    fn meshes_of_worlds(&self, worlds: Vec<usize>) -> Vec<MeshSizes> {
        let fixed = self.fixed;
        let mut meshes = Vec::new();
        for world in worlds {
            for tensor in self.tensor_sizes(world) {
                let stages = divisors(world / tensor).into_iter();
                for pipeline in stages.filter(|&size| fixed.pipeline.is_none_or(|fixed| fixed == size)) {
                    let data = world / tensor / pipeline;
                    if fixed.data.is_none_or(|fixed| fixed == data) {
                        meshes.push(MeshSizes { data, tensor, pipeline });
                    }
                }
            }
        }
        meshes
    }

    /// Adds meshes that leave devices idle, for a batch, a model or fixed sizes that cannot use all
    /// devices. For each `tensor` and `pipeline` the largest possible `data` is added, if it is
    /// larger than that of every mesh so far.
    fn add_meshes_with_idle_devices(&self, devices: usize, meshes: &mut Vec<MeshSizes>) {
        let fixed = self.fixed;
        if fixed.data.is_some() && fixed.tensor.is_some() && fixed.pipeline.is_some() {
            return;
        }
        let layers = self.model.blocks.saturating_sub(2).max(1);
        let mut stages: Vec<usize> =
            [devices, self.model.blocks, layers].into_iter().flat_map(divisors).chain(fixed.pipeline).collect();
        stages.sort_unstable();
        stages.dedup();
        stages.retain(|&size| size <= devices.min(self.model.blocks) && fixed.pipeline.is_none_or(|fixed| fixed == size));
        let divisors_of_batch = divisors(self.global_batch);
        // The largest `data` so far that divides the batch, keyed by `tensor` and `pipeline`.
        let mut largest: BTreeMap<(usize, usize), usize> = BTreeMap::new();
        for &MeshSizes { data, tensor, pipeline } in meshes.iter().filter(|sizes| self.global_batch.is_multiple_of(sizes.data)) {
            let largest = largest.entry((tensor, pipeline)).or_insert(data);
            *largest = data.max(*largest);
        }
        for tensor in self.tensor_sizes_with_idle_devices(devices) {
            for &pipeline in &stages {
                let most = devices / tensor / pipeline;
                let fits = |&&data: &&usize| data <= most && fixed.data.is_none_or(|fixed| fixed == data);
                let Some(&data) = divisors_of_batch.iter().rev().find(fits) else { continue };
                if largest.get(&(tensor, pipeline)).is_none_or(|&largest| data > largest) {
                    meshes.push(MeshSizes { data, tensor, pipeline });
                }
            }
        }
    }

    /// Returns the sizes of `tensor` that divide `devices` and pass
    /// [`allows_tensor_size`](Self::allows_tensor_size).
    fn tensor_sizes(&self, devices: usize) -> Vec<usize> {
        divisors(devices).into_iter().filter(|&size| self.allows_tensor_size(size)).collect()
    }

    /// Returns the sizes of `tensor` for meshes that leave devices idle: divisors of the devices
    /// and of a node, and powers of two, which divide most models.
    fn tensor_sizes_with_idle_devices(&self, devices: usize) -> Vec<usize> {
        let node = self.devices.per_node;
        let powers =
            (0..usize::BITS).map(|power| 1 << power).take_while(|&size| size <= devices.min(MOST_NODES_OF_TENSOR * node));
        let mut sizes: Vec<usize> =
            divisors(devices).into_iter().chain(divisors(node.max(1))).chain(powers).chain(self.fixed.tensor).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes.retain(|&size| size > 0 && size <= devices && self.allows_tensor_size(size));
        sizes
    }

    /// Returns `true` if `tensor` may have this size: the fixed one, or one that divides the number
    /// of heads (of queries or keys, as the stack requires), spans at most [`MOST_NODES_OF_TENSOR`]
    /// nodes and, with more than [`FEW_DEVICES`] devices, divides a node or is a multiple of it.
    pub(super) fn allows_tensor_size(&self, size: usize) -> bool {
        let node = self.devices.per_node.max(1);
        let fits_nodes = self.devices.count <= FEW_DEVICES || size.is_multiple_of(node) || node.is_multiple_of(size);
        let divides_heads = self.model.heads.is_none_or(|heads| heads.is_multiple_of(size));
        let is_free = divides_heads && size <= MOST_NODES_OF_TENSOR * node && fits_nodes;
        self.fixed.tensor.map_or(is_free, |fixed| fixed == size)
    }

    /// Returns the sizes of `context` that leave each rank at least [`FEWEST_POSITIONS`].
    pub(super) fn context_sizes(&self) -> Vec<usize> {
        match (self.fixed.context, self.model.sequence) {
            (Some(fixed), _) => vec![fixed],
            (None, Some(sequence)) => {
                let most = (sequence / FEWEST_POSITIONS).max(1);
                divisors(self.devices.count)
                    .into_iter()
                    .filter(|&size| size == 1 || size <= most && sequence.is_multiple_of(2 * size))
                    .collect()
            }
            (None, None) => vec![1],
        }
    }

    pub(super) fn expert_sizes(&self) -> Vec<usize> {
        match (self.fixed.expert, self.model.experts) {
            (Some(fixed), _) => vec![fixed],
            (None, Some(experts)) => {
                divisors(experts).into_iter().filter(|&size| self.devices.count.is_multiple_of(size)).collect()
            }
            (None, None) => vec![1],
        }
    }
}
