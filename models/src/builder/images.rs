//! Operators on images, channels last: convolutions, poolings, batch normalisation.

use super::{GraphBuilder, dimension, operand, shardable};
use crate::graph::{BATCH, Dimension, Extent, Initialisation, Loop, LoopId, Role, TensorId};
use crate::kernel::{Kernel, Window};
use crate::storage::Storage;

/// The statistics that batch normalisation uses.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Statistics of the batch.
    Training,
    /// Running averages.
    Inference,
}

impl GraphBuilder {
    /// Returns the sizes of a window over the images `x`.
    fn window(&self, x: TensorId, out_channels: usize, size: usize, stride: usize, padding: usize) -> Window {
        let extent = |index: usize| self.graph.tensor(x).dimensions[index].extent;
        let (batch, height, width, in_channels) = (extent(0), extent(1), extent(2), extent(3));
        Window { batch, height, width, in_channels, out_channels, size, stride, padding }
    }

    /// Returns the dimensions of a window's output.
    fn image(window: &Window) -> Vec<Dimension> {
        vec![
            dimension(BATCH, window.batch),
            dimension("height", window.out_height()),
            dimension("width", window.out_width()),
            dimension("channels", window.out_channels),
        ]
    }

    /// Adds a convolution. Its weight is `[out, size, size, in]`.
    pub(crate) fn convolution(&mut self, name: &str, x: TensorId, weight: TensorId, stride: usize, padding: usize) -> TensorId {
        let shape = self.dimensions(weight);
        let window = self.window(x, shape[0].extent, shape[1].extent, stride, padding);
        let loops = vec![
            Loop { name: BATCH, extent: window.batch, role: Extent::Rows, shardable: true },
            Loop { name: "out_channels", extent: window.out_channels, role: Extent::Columns, shardable: true },
            Loop { name: "in_channels", extent: window.in_channels, role: Extent::Contracted, shardable: true },
        ];
        let [batch, out, contracted] = [Some(LoopId(0)), Some(LoopId(1)), Some(LoopId(2))];
        let y = self.activation(name, Self::image(&window), Storage::Precision);
        self.operator(
            name,
            Kernel::Convolution(window),
            loops,
            vec![operand(x, vec![batch, None, None, contracted]), operand(weight, vec![out, None, None, contracted])],
            vec![operand(y, vec![batch, None, None, out])],
        );
        y
    }

    /// Adds batch normalisation. The loop over the batch counts groups of samples, so that a mesh
    /// axis can only cut between groups.
    pub(crate) fn batch_norm(&mut self, name: &str, x: TensorId, mode: Mode) -> TensorId {
        let channels = self.dimensions(x)[3].extent;
        let per_channel = |initialisation: Initialisation, part: &str, builder: &mut Self| {
            builder.parameter(format!("{name}.{part}"), vec![dimension("channels", channels)], vec![channels], initialisation)
        };
        let scale = per_channel(Initialisation::Ones, "weight", self);
        let shift = per_channel(Initialisation::Zeros, "bias", self);
        self.batch_norm_with(name, x, mode, [scale, shift])
    }

    /// As [`GraphBuilder::batch_norm`], with scale and shift that exist.
    pub(crate) fn batch_norm_with(&mut self, name: &str, x: TensorId, mode: Mode, [scale, shift]: [TensorId; 2]) -> TensorId {
        let dimensions = self.dimensions(x);
        let channels = dimensions[3].extent;
        let groups = self.normalization_groups;
        let group_positions = dimensions[..3].iter().map(|dimension| dimension.extent).product::<usize>() / groups;
        let loops = vec![
            Loop { name: BATCH, extent: groups, role: Extent::Rows, shardable: true },
            Loop { name: "positions", extent: group_positions, role: Extent::Positions, shardable: false },
            Loop { name: "channels", extent: channels, role: Extent::Features, shardable: true },
        ];
        let [batch, channel] = [Some(LoopId(0)), Some(LoopId(2))];
        let pair = vec![dimension("moments", 2), dimension("channels", channels)];
        let running = self.tensor(format!("{name}.running"), Role::Running, pair.clone(), Storage::Single);
        let y = self.activation(name, dimensions, Storage::Precision);
        let x_axes = vec![batch, None, None, channel];
        let mut inputs = vec![operand(x, x_axes.clone()), operand(scale, vec![channel]), operand(shift, vec![channel])];
        let mut outputs = vec![operand(y, x_axes)];
        let kind = match mode {
            Mode::Training => {
                let saved_dimensions = vec![dimension(BATCH, groups), pair[0], pair[1]];
                let saved = self.activation(&format!("{name}.saved"), saved_dimensions, Storage::Single);
                let statistics = self.tensor(format!("{name}.statistics"), Role::Sum, pair, Storage::Single);
                outputs.push(operand(saved, vec![batch, None, channel]));
                outputs.push(operand(statistics, vec![None, channel]));
                Kernel::BatchNorm { groups: 0, positions: 0, channels: 0 }
            }
            Mode::Inference => {
                inputs.push(operand(running, vec![None, channel]));
                Kernel::BatchNormInference { positions: 0, channels: 0 }
            }
        };
        self.operator(name, kind, loops, inputs, outputs);
        y
    }

    pub(crate) fn max_pool(&mut self, name: &str, x: TensorId, size: usize, stride: usize, padding: usize) -> TensorId {
        let channels = self.dimensions(x)[3].extent;
        let window = self.window(x, channels, size, stride, padding);
        let loops = vec![
            Loop { name: BATCH, extent: window.batch, role: Extent::Rows, shardable: true },
            Loop { name: "channels", extent: channels, role: Extent::Features, shardable: true },
        ];
        let axes = vec![Some(LoopId(0)), None, None, Some(LoopId(1))];
        let y = self.activation(name, Self::image(&window), Storage::Precision);
        // An index is an offset into the rank's own input, so it stays right when channels are
        // sharded.
        let indices = self.activation(&format!("{name}.indices"), Self::image(&window), Storage::Integer);
        self.operator(
            name,
            Kernel::MaxPool(window),
            loops,
            vec![operand(x, axes.clone())],
            vec![operand(y, axes.clone()), operand(indices, axes)],
        );
        y
    }

    pub(crate) fn global_average_pool(&mut self, name: &str, x: TensorId) -> TensorId {
        let dimensions = self.dimensions(x);
        let loops = vec![
            shardable(&dimensions[0], Extent::Rows),
            Loop {
                name: "positions",
                extent: dimensions[1].extent * dimensions[2].extent,
                role: Extent::Positions,
                shardable: false,
            },
            shardable(&dimensions[3], Extent::Features),
        ];
        let [batch, channel] = [Some(LoopId(0)), Some(LoopId(2))];
        let y = self.activation(name, vec![dimensions[0], dimensions[3]], Storage::Precision);
        self.operator(
            name,
            Kernel::GlobalAveragePool { batch: 0, positions: 0, channels: 0 },
            loops,
            vec![operand(x, vec![batch, None, None, channel])],
            vec![operand(y, vec![batch, channel])],
        );
        y
    }
}
