//! The kernels that are tested, of every kind and at sizes that no block, tile or vector divides.

use super::{dropout, eight_bits, lstm, mixture};
use foretell_models::{
    Activation, Attention, AttentionDropout, DropoutRate, DropoutSite, Epsilon, Kernel, RelativePositions, Rope, Smoothing,
    WeightLayout, Window, Zigzag,
};

pub(super) fn window(extents: [usize; 8]) -> Window {
    let [batch, height, width, in_channels, out_channels, size, stride, padding] = extents;
    Window { batch, height, width, in_channels, out_channels, size, stride, padding }
}

/// Attention of as many keys as queries, without grouping.
pub(super) fn attention([batch, sequence, heads, head_dimension]: [usize; 4], causal: bool, packed: bool) -> Attention {
    Attention {
        batch,
        queries: sequence,
        keys: sequence,
        key_heads: heads,
        group: 1,
        head_dimension,
        value_dimension: None,
        causal,
        scaled: true,
        window: None,
        relative: None,
        packed,
        query_parts: 1,
        query_offset: 0,
        zigzag: None,
        ring: None,
        dropout: None,
    }
}

/// The dropout of attention's probabilities on a rank that has all of it.
pub(super) fn dropped() -> AttentionDropout {
    let site = DropoutSite { rate: DropoutRate::try_from(0.3).unwrap(), site: 5 };
    AttentionDropout { site, first_sample: 2, position_parts: 1, head_parts: 1, group_parts: 1, sample_parts: 1 }
}

/// Attention of every kind: packed and not, grouped, crossed, of a part of the queries, with
/// relative positions, with dropout, in a zigzag order.
pub(super) fn attentions() -> Vec<Attention> {
    let mut all = Vec::new();
    for causal in [false, true] {
        for extents in [[1, 1, 1, 1], [2, 65, 3, 5], [1, 200, 2, 16], [1, 7, 1, 64]] {
            all.extend([true, false].map(|packed| attention(extents, causal, packed)));
        }
        let plain = attention([2, 66, 2, 8], causal, false);
        let relative = |bidirectional| Some(RelativePositions { buckets: 8, max_distance: 20, bidirectional });
        all.extend([
            Attention { group: 3, ..plain },
            Attention { keys: 91, query_offset: 25, scaled: false, ..plain },
            Attention { queries: 22, query_parts: 3, group: 2, ..plain },
            Attention { queries: 33, keys: 99, query_parts: 3, head_dimension: 17, ..plain },
            Attention { relative: relative(true), ..plain },
            Attention { relative: relative(false), scaled: false, packed: true, ..plain },
            Attention { relative: relative(!causal), queries: 22, query_parts: 3, group: 2, batch: 1, ..plain },
            Attention { dropout: Some(dropped()), ..plain },
            Attention { dropout: Some(dropped()), keys: 91, ..plain },
            Attention { dropout: Some(dropped()), packed: true, batch: 3, ..plain },
            Attention {
                dropout: Some(AttentionDropout { position_parts: 3, head_parts: 2, group_parts: 2, ..dropped() }),
                relative: relative(true),
                queries: 22,
                query_parts: 3,
                group: 2,
                ..plain
            },
        ]);
    }
    // Parts in a zigzag order, of chunks that are shorter and longer than a tile.
    let zigzag = |ranks, chunk: usize, head_dimension| Attention {
        queries: 2 * chunk,
        query_parts: ranks,
        zigzag: Zigzag::new(ranks, 2 * chunk * ranks),
        ..attention([2, 2 * chunk * ranks, 2, head_dimension], true, false)
    };
    all.extend([
        zigzag(2, 1, 4),
        Attention { group: 3, ..zigzag(3, 11, 8) },
        Attention { queries: 66, query_parts: 1, ..zigzag(3, 11, 8) },
        zigzag(2, 75, 17),
        Attention {
            dropout: Some(AttentionDropout { position_parts: 3, head_parts: 2, group_parts: 2, ..dropped() }),
            group: 2,
            ..zigzag(3, 13, 8)
        },
    ]);
    all
}

/// Rotary positions of a whole sequence, and of the last part of one.
pub(super) fn ropes() -> [Rope; 5] {
    let sizes = Rope {
        batch: 1,
        positions: 1,
        heads: 1,
        head_dimension: 2,
        rotated: None,
        theta: 10_000,
        position_parts: 1,
        position_offset: 0,
        zigzag: None,
    };
    let whole = Rope { batch: 3, positions: 37, heads: 2, head_dimension: 18, ..sizes };
    let partial = Rope { rotated: Some(8), theta: 100, ..whole };
    let zigzag = Rope { positions: 38, position_parts: 3, zigzag: Zigzag::new(3, 114), ..whole };
    [sizes, whole, partial, zigzag, Rope { theta: 500, position_parts: 3, position_offset: 1000, ..whole }]
}

/// Kernels of every kind at sizes that no block, tile or vector divides.
pub(super) fn cases() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for weight in [WeightLayout::OutIn, WeightLayout::InOut] {
        for [rows, columns, contracted] in
            [[1, 1, 1], [37, 29, 53], [300, 1100, 7], [5, 64, 128], [1030, 300, 260], [3, 40, 1030]]
        {
            for (bias, relu) in [(false, false), (true, false), (false, true), (true, true)] {
                let activation = if relu { Activation::Relu } else { Activation::None };
                cases.push(Kernel::Matmul { rows, columns, contracted, weight, bias, activation });
            }
            cases.push(Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: false });
            cases.push(Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: false });
        }
    }
    for [rows, columns] in [[1, 1], [131, 37], [67, 200], [3, 64]] {
        cases.extend([Kernel::BiasAdd { rows, columns }, Kernel::BiasGradient { rows, columns }]);
        cases.extend([
            Kernel::LayerNorm { rows, features: columns, epsilon: Epsilon::new(5) },
            Kernel::LayerNorm { rows, features: columns, epsilon: Epsilon::new(1) },
            Kernel::RmsNorm { rows, features: columns, epsilon: Epsilon::new(2) },
            Kernel::RmsNormInputGradient { rows, features: columns },
            Kernel::RmsNormWeightGradient { rows, features: columns },
            Kernel::LayerNormInputGradient { rows, features: columns },
            Kernel::LayerNormWeightGradient { rows, features: columns },
            Kernel::CrossEntropy { rows, classes: columns },
            Kernel::CrossEntropyGradient { rows, classes: columns, normalizer: 7, parts: 1, scaled: false },
        ]);
    }
    for elements in [1, 15, 64, 1037, 40_003] {
        cases.extend([
            Kernel::Relu { elements },
            Kernel::ReluGradient { elements },
            Kernel::Gelu { elements },
            Kernel::GeluGradient { elements },
            Kernel::GeluExact { elements },
            Kernel::GeluExactGradient { elements },
            Kernel::SiluMultiply { elements },
            Kernel::SiluMultiplyGradient { elements },
            Kernel::Add { elements },
            Kernel::Scale { elements, times: 1, square: 512 },
            Kernel::Scale { elements, times: 24, square: 64 },
            Kernel::Multiply { elements },
            Kernel::SumOfSquares { elements },
            Kernel::Sum { elements },
            Kernel::Accumulate { elements },
            Kernel::Zero { elements },
            Kernel::Average { elements, parts: 3 },
            Kernel::Difference { elements },
            Kernel::AdamW { elements, controlled: false, exempt: false },
        ]);
        for (momentum, nesterov) in [(false, false), (true, false), (true, true)] {
            cases.push(Kernel::Sgd { elements, momentum, nesterov, controlled: false, exempt: false });
            for mixed in [false, true] {
                cases.push(Kernel::OuterStep { elements, replicas: 3, momentum, nesterov, mixed });
            }
        }
    }
    for extents in [
        [1, 1, 1, 1, 1, 1, 1, 0],
        [2, 5, 6, 3, 4, 3, 1, 1],
        [2, 8, 8, 16, 32, 3, 1, 1],
        [3, 9, 7, 5, 33, 3, 2, 1],
        [2, 7, 7, 6, 70, 1, 1, 0],
        [2, 7, 8, 6, 9, 1, 2, 0],
        [1, 17, 19, 3, 40, 7, 2, 3],
        [2, 12, 11, 1, 8, 5, 1, 0],
        [1, 4, 4, 64, 48, 3, 1, 1],
        [2, 4, 4, 2, 3, 2, 3, 2],
        [1, 33, 35, 20, 16, 3, 1, 2],
        [1, 6, 5, 4, 5, 4, 1, 1],
        [3, 30, 30, 40, 36, 3, 1, 1],
        [1, 5, 5, 2, 3, 2, 1, 3],
        [2, 10, 10, 7, 5, 1, 1, 1],
        [2, 13, 15, 5, 64, 3, 1, 1],
        [1, 31, 40, 3, 32, 7, 2, 3],
        [2, 16, 16, 20, 64, 1, 1, 0],
        [130, 9, 8, 20, 6, 3, 2, 1],
        [2, 8, 7, 16, 40, 1, 2, 0],
        [2, 9, 9, 24, 7, 4, 3, 2],
        [2, 2, 4, 16, 5, 3, 3, 1],
        [5, 1, 1, 20, 33, 3, 1, 1],
        [30, 1, 1, 260, 300, 3, 2, 1],
    ] {
        let window = window(extents);
        cases.extend([
            Kernel::Convolution(window),
            Kernel::ConvolutionInputGradient(window),
            Kernel::ConvolutionWeightGradient(window),
        ]);
        let pooling = Window { out_channels: window.in_channels, ..window };
        if pooling.padding < pooling.size {
            cases.extend([Kernel::MaxPool(pooling), Kernel::MaxPoolGradient(pooling)]);
        }
    }
    for [groups, positions, channels] in [[1, 5, 1], [1, 700, 17], [3, 50, 64], [2, 9000, 3]] {
        cases.extend([
            Kernel::BatchNorm { groups, positions, channels },
            Kernel::BatchNormInputGradient { groups, positions, channels },
            Kernel::BatchNormWeightGradient { groups, channels },
            Kernel::BatchNormInference { positions, channels },
            Kernel::RunningStatistics { channels, contributions: groups },
            Kernel::GlobalAveragePool { batch: groups, positions, channels },
            Kernel::GlobalAveragePoolGradient { batch: groups, positions, channels },
        ]);
    }
    for [tokens, vocabulary, hidden] in [[1, 1, 1], [50, 7, 33]] {
        cases.extend([
            Kernel::Embedding { tokens, vocabulary, hidden, parts: 1 },
            Kernel::EmbeddingWeightGradient { tokens, vocabulary, hidden, parts: 1 },
        ]);
    }
    for sizes in attentions() {
        cases.extend([Kernel::Attention(sizes), Kernel::AttentionGradient(sizes)]);
    }
    cases.extend([1, 77, 3000].map(|elements| Kernel::Narrow { elements }));
    for sizes in ropes() {
        cases.extend([Kernel::Rope(sizes), Kernel::RopeGradient(sizes)]);
    }
    for [batch, positions, features] in [[1, 1, 1], [3, 7, 20], [2, 1, 5]] {
        cases.extend([
            Kernel::Prepend { batch, positions, features },
            Kernel::PrependInputGradient { batch, positions, features },
            Kernel::PrependWeightGradient { batch, positions, features },
            Kernel::First { batch, positions, features },
            Kernel::FirstGradient { batch, positions, features },
        ]);
    }
    for [rows, parts, columns] in [[1, 1, 1], [7, 3, 10], [2, 8, 3]] {
        cases.extend([Kernel::Split { rows, parts, columns }, Kernel::Join { rows, parts, columns }]);
    }
    cases.extend(dropout::cases());
    cases.extend(mixture::cases());
    cases.extend(lstm::cases());
    for [outer, parts, inner] in [[1, 1, 1], [3, 4, 5], [1, 2, 33]] {
        cases.extend([
            Kernel::Slice { outer, parts, inner },
            Kernel::Interleave { outer, parts, inner },
            Kernel::Deinterleave { outer, parts, inner },
        ]);
    }
    for [rows, columns, start, part] in [[1, 3, 1, 2], [4, 10, 0, 3], [3, 70, 30, 40]] {
        cases.extend([Kernel::TakeColumns { rows, columns, start, part }, Kernel::PutColumns { rows, columns, start, part }]);
    }
    // What GPUs read by packs of sixteen bytes: several packs a thread, other columns at each turn
    // and the same, several chunks of rows.
    for [groups, positions, channels] in [[2, 1500, 96], [1, 4100, 64]] {
        cases.extend([
            Kernel::BatchNorm { groups, positions, channels },
            Kernel::BatchNormInputGradient { groups, positions, channels },
            Kernel::BiasAdd { rows: positions, columns: channels },
            Kernel::BiasGradient { rows: positions, columns: channels },
        ]);
    }
    let (rows, features) = (3, 4096);
    cases.extend([
        Kernel::LayerNorm { rows, features, epsilon: Epsilon::new(5) },
        Kernel::LayerNormInputGradient { rows, features },
        Kernel::LayerNormWeightGradient { rows: 600, features: 104 },
        Kernel::RmsNorm { rows, features, epsilon: Epsilon::new(5) },
        Kernel::RmsNormInputGradient { rows, features },
        Kernel::RmsNormWeightGradient { rows: 600, features: 104 },
        Kernel::CrossEntropy { rows, classes: features + 3 },
        Kernel::CrossEntropyGradient { rows, classes: features + 3, normalizer: 7, parts: 1, scaled: false },
    ]);
    cases.extend(fused_products());
    cases.extend(eight_bits::cases());
    cases.extend(recipes());
    cases
}

/// Losses, measures and updates that a recipe asks for. They come last, so that the random operands
/// of the other cases stay the same.
fn recipes() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for [rows, classes] in [[1, 1], [131, 37], [67, 200], [3, 64], [3, 4099]] {
        cases.extend([
            Kernel::LabelRanks { rows, classes, parts: 1 },
            Kernel::TopLabels { rows, top: 5 },
            Kernel::ClassScores { rows, classes },
        ]);
        for smoothing in [0.0, 0.1].map(Smoothing::new) {
            let (normalizer, scaled) = (7, false);
            cases.extend([
                Kernel::WeightedCrossEntropy { rows, classes, smoothing },
                Kernel::WeightedCrossEntropyGradient { rows, classes, smoothing, normalizer, scaled },
            ]);
        }
    }
    for elements in [1, 15, 64, 1037, 40_003] {
        let controlled = false;
        cases.push(Kernel::LambStep { elements, controlled });
        cases.extend([false, true].map(|exempt| Kernel::LambDirection { elements, controlled, exempt }));
        cases.push(Kernel::MuonDirection { elements, controlled });
        cases.extend([false, true].map(|exempt| Kernel::MuonStep { elements, longest: 48, controlled, exempt }));
        cases.push(Kernel::AdamW { elements, controlled, exempt: true });
        for (momentum, nesterov) in [(false, false), (true, false), (true, true)] {
            cases.push(Kernel::Sgd { elements, momentum, nesterov, controlled, exempt: true });
        }
    }
    for [matrices, rows, columns] in [[1, 1, 1], [1, 24, 24], [3, 17, 40], [2, 65, 8], [1, 130, 300]] {
        cases.push(Kernel::Orthogonalise { matrices, rows, columns });
    }
    cases
}

/// Products with a GELU, its gradient or a bias's gradient, of which rows begin where epilogues of
/// a library take them, and where not.
fn fused_products() -> Vec<Kernel> {
    let mut cases = Vec::new();
    for weight in [WeightLayout::OutIn, WeightLayout::InOut] {
        for [rows, columns, contracted] in [[1, 1, 1], [37, 29, 53], [300, 1100, 7], [5, 64, 128], [130, 72, 264]] {
            for (bias, activation) in
                [(false, Activation::Gelu), (true, Activation::Gelu), (false, Activation::GeluKept), (true, Activation::GeluKept)]
            {
                cases.push(Kernel::Matmul { rows, columns, contracted, weight, bias, activation });
            }
            cases.push(Kernel::MatmulInputGradient { rows, columns, contracted, weight, gelu: true });
            cases.push(Kernel::MatmulWeightGradient { rows, columns, contracted, weight, bias: true });
        }
    }
    cases
}
