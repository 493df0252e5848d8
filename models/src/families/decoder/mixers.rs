//! Linear attention in the graph of a decoder.

use super::layers::{Layers, WEIGHTS};
use super::{LinearAttention, LinearNorm};
use crate::builder::dimension;
use crate::graph::{Dimension, TensorId};
use crate::kernel::ScanRule;

impl Layers<'_> {
    /// Adds linear attention. Transformers computes gate, keys, values and controls in one product
    /// or in four. Here they are four, so that `tensor` can shard each by heads.
    pub(super) fn linear_attention(&mut self, layer: usize, x: TensorId, sizes: &LinearAttention) -> TensorId {
        let part = match sizes.rule {
            ScanRule::StateSpace => "mamba",
            ScanRule::GatedDelta | ScanRule::KimiDelta | ScanRule::FixedDecay => "linear_attn",
        };
        let module = format!("model.layers.{layer}.{part}");
        let name = |part: &str| format!("{module}.{part}");
        let heads = [dimension("heads", sizes.key_heads), dimension("group", sizes.heads / sizes.key_heads)];
        let by_head = |last: Dimension| [&heads[..], &[last]].concat();
        let values = by_head(dimension("head_dimension", sizes.head_dimension));
        let keys = [heads[0], dimension("state", 2 * sizes.key_dimension)];
        let gate = self.by_rank(&name("in_proj_z"), x, sizes, &values);
        let values = self.linear(&name("in_proj_x"), x, 1, &values, sizes.bias);
        let keys = self.linear(&name("in_proj_keys"), x, 1, &keys, sizes.bias);
        let controls = match sizes.rule.controls(sizes.key_dimension) {
            0 => None,
            controls => {
                let by_head = by_head(dimension("controls", controls));
                Some(match sizes.rule.has_strengths() {
                    true => self.by_rank(&name("in_proj_controls"), x, sizes, &by_head),
                    false => self.linear(&name("in_proj_controls"), x, 1, &by_head, sizes.bias),
                })
            }
        };
        let has_strengths = sizes.rule.has_strengths();
        let strengths = has_strengths.then(|| self.linear(&name("in_proj_strengths"), x, 1, &heads, sizes.bias));
        let [keys, values] = [("conv1d.keys", keys), ("conv1d.values", values)].map(|(part, y)| match sizes.convolution {
            // Lightning attention has the activation without the convolution.
            0 if sizes.rule == ScanRule::FixedDecay => self.builder.silu(&name(part), y),
            0 => y,
            taps => self.builder.causal_convolution(&name(part), y, taps + usize::from(sizes.convolution_bias), WEIGHTS),
        });
        let chunk = sizes.chunk.min(self.sizes.sequence);
        let y = self.builder.scan(&name("scan"), [keys, values], [controls, strengths], sizes.rule, chunk, WEIGHTS);
        let epsilon = self.sizes.norm_epsilon.epsilon();
        // Mamba-2 normalises the gated output, the delta rule gates the normalised output. The work
        // is the same.
        let y = match sizes.norm {
            LinearNorm::Heads => self.builder.rms_norm(&name("norm"), y, epsilon),
            LinearNorm::None | LinearNorm::Whole | LinearNorm::Groups => y,
        };
        let y = match sizes.rule {
            ScanRule::StateSpace | ScanRule::GatedDelta => self.builder.silu_multiply(&name("gate"), gate, y),
            ScanRule::KimiDelta | ScanRule::FixedDecay => self.builder.gate(&name("gate"), y, gate),
        };
        let y = match sizes.norm {
            LinearNorm::Whole => self.builder.rms_norm_over(&name("norm"), y, epsilon, 3),
            LinearNorm::Groups => self.builder.group_norm(&name("norm"), y),
            LinearNorm::None | LinearNorm::Heads => y,
        };
        let hidden = [dimension("hidden", self.sizes.hidden)];
        self.linear(&name("out_proj"), y, 3, &hidden, sizes.bias)
    }

    /// Adds one product, or two with `rank` features between them.
    fn by_rank(&mut self, name: &str, x: TensorId, sizes: &LinearAttention, outputs: &[Dimension]) -> TensorId {
        let x = match sizes.rank {
            Some(rank) => self.linear(&format!("{name}.a"), x, 1, &[dimension("rank", rank)], sizes.bias),
            None => x,
        };
        self.linear(name, x, 1, outputs, sizes.bias)
    }
}
