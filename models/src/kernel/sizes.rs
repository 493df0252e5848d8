//! Sizes and properties that several kernels have: windows, recurrent layers, mixtures of experts,
//! orders of weights, activations.

use schemars::JsonSchema;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// Order of a weight matrix's dimensions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[columns, contracted]`, as in PyTorch's `Linear`.
    OutIn,
    /// `[contracted, columns]`, as in GPT-2's `Conv1D`.
    InOut,
}

/// A floating-point format of eight bits (Micikevicius et al. 2022; OFP8 of the Open Compute
/// Project).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EightBits {
    /// Four bits of exponent and three of mantissa, without infinities: up to 448. For activations
    /// and weights.
    E4M3,
    /// Five bits of exponent and two of mantissa, the upper half of IEEE's half precision: up to
    /// 57,344. For gradients, whose range is wider.
    E5M2,
}

impl EightBits {
    /// Returns the binary exponent of the largest number. It is 1.75 times that power of two in
    /// both formats.
    pub const fn largest_exponent(self) -> i32 {
        match self {
            EightBits::E4M3 => 8,
            EightBits::E5M2 => 15,
        }
    }
}

/// Activation that is fused with a product.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// No activation.
    #[default]
    None,
    /// `max(0, ·)`.
    Relu,
    /// GELU by its tanh approximation, as [`Kernel::Gelu`](super::Kernel::Gelu).
    Gelu,
    /// As `Gelu`. The argument is a second result, which the gradient needs.
    GeluKept,
}

impl Activation {
    /// Whether the activation is a GELU.
    pub fn is_gelu(self) -> bool {
        matches!(self, Self::Gelu | Self::GeluKept)
    }

    /// Whether the argument is a second result.
    pub fn keeps_argument(self) -> bool {
        self == Self::GeluKept
    }
}

/// Reads an activation. Older profiles have a boolean instead, which says whether there is a ReLU.
pub(super) fn activation<'a, D: Deserializer<'a>>(deserializer: D) -> Result<Activation, D::Error> {
    struct Either;
    impl Visitor<'_> for Either {
        type Value = Activation;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("`none`, `relu`, `gelu` or `gelu_kept`")
        }

        fn visit_bool<E: Error>(self, is_relu: bool) -> Result<Activation, E> {
            Ok(if is_relu { Activation::Relu } else { Activation::None })
        }

        fn visit_str<E: Error>(self, name: &str) -> Result<Activation, E> {
            Activation::deserialize(serde::de::value::StrDeserializer::new(name))
        }
    }
    deserializer.deserialize_any(Either)
}

/// Returns the factor `times / √square` of [`Kernel::Scale`](super::Kernel::Scale).
pub fn scale_factor(times: usize, square: usize) -> f64 {
    times as f64 / (square as f64).sqrt()
}

/// The number that a norm adds to the variance: a power of ten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epsilon {
    digits: u8,
}

impl Epsilon {
    /// `10^-digits`.
    pub const fn new(digits: u8) -> Self {
        Self { digits }
    }

    /// Returns the number.
    pub fn value(self) -> f64 {
        10f64.powi(-i32::from(self.digits))
    }
}

/// The part of a target's weight that label smoothing spreads over all classes (Szegedy et al.
/// 2016), in millionths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Smoothing {
    millionths: u32,
}

impl Smoothing {
    /// The nearest smoothing to a part from 0 to 1.
    pub fn new(part: f32) -> Self {
        Self { millionths: (f64::from(part) * 1e6).round().clamp(0.0, 1e6) as u32 }
    }

    /// Returns the parts of a target: `1 - s`, which only the label's class gets, and `s /
    /// classes`, which every class gets.
    pub fn parts(self, classes: usize) -> [f64; 2] {
        [1.0 - self.value(), self.value() / classes.max(1) as f64]
    }

    /// Returns the part.
    pub fn value(self) -> f64 {
        f64::from(self.millionths) * 1e-6
    }
}

/// Sizes of a two-dimensional convolution or pooling.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Window {
    /// Number of images.
    pub batch: usize,
    /// Rows of the input image.
    pub height: usize,
    /// Columns of the input image.
    pub width: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output. For a pooling as many as the input's.
    pub out_channels: usize,
    /// Rows, and columns, of the window.
    pub size: usize,
    /// Distance between windows in both directions.
    pub stride: usize,
    /// Rows and columns added on each side of the image: zeros, which a pooling leaves out.
    pub padding: usize,
}

impl Window {
    /// Returns the rows of the output. 0 for a window that is larger than the padded image, or
    /// whose stride is 0.
    pub fn out_height(&self) -> usize {
        self.out_extent(self.height)
    }

    /// Returns the columns of the output. 0 as for [`Window::out_height`].
    pub fn out_width(&self) -> usize {
        self.out_extent(self.width)
    }

    fn out_extent(&self, extent: usize) -> usize {
        let steps = (extent + 2 * self.padding).checked_sub(self.size).and_then(|free| free.checked_div(self.stride));
        steps.map_or(0, |steps| steps + 1)
    }

    /// Returns the elements of the input.
    pub fn input_elements(&self) -> usize {
        self.batch * self.height * self.width * self.in_channels
    }

    /// Returns the elements of the output.
    pub fn output_elements(&self) -> usize {
        self.batch * self.out_height() * self.out_width() * self.out_channels
    }

    /// Returns the elements of a convolution's weight, `[out_channels, size, size, in_channels]`.
    pub fn weight_elements(&self) -> usize {
        self.out_channels * self.size * self.size * self.in_channels
    }
}

/// Sizes of an LSTM layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recurrence {
    /// Number of sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub sequence: usize,
    /// Features of the state.
    pub hidden: usize,
    /// Whether an initial state is given. Otherwise it is zero.
    pub initial: bool,
}

impl Recurrence {
    /// Returns the elements of the outputs at all positions.
    pub fn output_elements(&self) -> usize {
        self.batch * self.sequence * self.hidden
    }

    /// Returns the elements of a state: output and cell.
    pub fn state_elements(&self) -> usize {
        2 * self.batch * self.hidden
    }

    /// Returns the elements of the recurrent weight, `[4 hidden, hidden]`.
    pub fn weight_elements(&self) -> usize {
        4 * self.hidden * self.hidden
    }
}

/// Rule by which a layer of linear attention updates its state at each position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScanRule {
    /// The state decays, and the product of key and value is added: Mamba-2 (Dao and Gu 2024).
    StateSpace,
    /// As `state_space`, after the value that the state holds for the key is subtracted: the gated
    /// delta rule (Yang et al. 2024).
    GatedDelta,
    /// As `gated_delta`, with a decay for each feature of a key (Kimi Team 2025).
    KimiDelta,
    /// The state decays at a rate of each head that is not trained, and the product of key and
    /// value is added: lightning attention (Qin et al. 2024).
    FixedDecay,
}

impl ScanRule {
    /// Numbers of a head at each position that control the update: the step, decay and strength, or
    /// a decay for each feature of a key.
    pub fn controls(self, key_dimension: usize) -> usize {
        match self {
            Self::StateSpace => 1,
            Self::GatedDelta => 2,
            Self::KimiDelta => key_dimension,
            Self::FixedDecay => 0,
        }
    }

    /// Whether the strength of an update is a tensor of its own.
    pub fn has_strengths(self) -> bool {
        self == Self::KimiDelta
    }

    /// Parameters of a head: decay, bias of the step, and the weight of the value itself in
    /// Mamba-2.
    pub fn scalars(self, key_dimension: usize) -> usize {
        match self {
            Self::StateSpace => 3,
            Self::GatedDelta => 2,
            Self::KimiDelta => key_dimension + 1,
            Self::FixedDecay => 0,
        }
    }
}

/// Sizes of linear attention over complete sequences, in chunks: products within a chunk, and for
/// each head a state `[key_dimension, value_dimension]` that is passed from chunk to chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Scan {
    /// The update.
    pub rule: ScanRule,
    /// Number of sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub positions: usize,
    /// Heads of keys and queries on this rank: the groups of Mamba-2.
    pub key_heads: usize,
    /// Heads of values for each head of keys.
    pub group: usize,
    /// Features of a key and of a query: the state size of Mamba-2.
    pub key_dimension: usize,
    /// Features of a value.
    pub value_dimension: usize,
    /// Positions of a chunk.
    pub chunk: usize,
}

impl Scan {
    /// Returns the heads of values.
    pub fn heads(&self) -> usize {
        self.key_heads * self.group
    }

    /// Returns the elements of keys and queries together.
    pub fn key_elements(&self) -> usize {
        2 * self.batch * self.positions * self.key_heads * self.key_dimension
    }

    /// Returns the elements of the values, and of the result.
    pub fn value_elements(&self) -> usize {
        self.batch * self.positions * self.heads() * self.value_dimension
    }

    /// Returns the elements of the controls.
    pub fn control_elements(&self) -> usize {
        self.batch * self.positions * self.heads() * self.rule.controls(self.key_dimension)
    }

    /// Returns the elements of the strengths, if they are a tensor of their own.
    pub fn strength_elements(&self) -> usize {
        if self.rule.has_strengths() { self.batch * self.positions * self.heads() } else { 0 }
    }

    /// Returns the parameters of all heads.
    pub fn scalar_elements(&self) -> usize {
        self.heads() * self.rule.scalars(self.key_dimension)
    }

    /// Returns the operations of the forward pass, all of them in products.
    ///
    /// Within a chunk of Q positions a query meets Q keys, and so does a row of values. A state is
    /// read and updated once for each position. The delta rule also takes products of keys with
    /// keys, inverts a triangle of Q x Q (Q²/3 multiply-adds for each position), and applies it to
    /// keys and values (Yang et al. 2024, section 3.3).
    pub fn flops(&self) -> f64 {
        let [chunk, keys, values] = [self.chunk, self.key_dimension, self.value_dimension].map(|extent| extent as f64);
        let state = keys * values;
        let by_head = match self.rule {
            ScanRule::StateSpace | ScanRule::FixedDecay => chunk * values + 2.0 * state,
            ScanRule::GatedDelta | ScanRule::KimiDelta => 2.0 * chunk * (keys + values) + chunk * chunk / 3.0 + 3.0 * state,
        };
        let by_key_head = chunk * keys;
        let positions = self.batch as f64 * self.positions as f64;
        2.0 * positions * (self.heads() as f64 * by_head + self.key_heads as f64 * by_key_head)
    }
}

/// Sizes of the routing between tokens and the slots of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mixture {
    /// Samples times positions of a sample.
    pub tokens: usize,
    /// Experts over all ranks.
    pub experts: usize,
    /// Slots of an expert for this rank's tokens.
    pub capacity: usize,
    /// Experts that a token is sent to.
    pub top: usize,
    /// Features of a token.
    pub hidden: usize,
}

impl Mixture {
    /// Returns the elements of all tokens.
    pub fn token_elements(&self) -> usize {
        self.tokens * self.hidden
    }

    /// Returns the elements of all slots.
    pub fn slot_elements(&self) -> usize {
        self.experts * self.capacity * self.hidden
    }

    /// Returns the number of choices of all tokens.
    pub fn choices(&self) -> usize {
        self.tokens * self.top
    }
}

/// Steps of Newton and Schulz that [`Kernel::Orthogonalise`](crate::Kernel::Orthogonalise) makes.
pub const NEWTON_SCHULZ_STEPS: usize = 5;

/// What [`Kernel::MuonStep`](crate::Kernel::MuonStep) multiplies the learning rate by, for a matrix
/// whose larger side is `longest`: elements of the update then have AdamW's usual root mean square
/// (Liu et al. 2025, equation 4).
pub fn muon_length(longest: usize) -> f32 {
    0.2 * (longest as f32).sqrt()
}

/// The coefficients a, b and c of a step `X := a X + (b A + c A A) X` with `A = X Xᵀ`, which bring
/// singular values from (0, 1] to about 1 the fastest (Jordan et al. 2024).
pub const NEWTON_SCHULZ: [f32; 3] = [3.4445, -4.7750, 2.0315];

#[cfg(test)]
mod tests {
    use crate::{Activation, Kernel};

    #[test]
    fn older_profiles_are_read() {
        let read = |text: &str| serde_json::from_str::<Kernel>(text).expect("a kernel");
        let sizes = r#""rows": 1, "columns": 2, "contracted": 3, "weight": "out_in""#;
        for (name, activation) in [("false", Activation::None), ("true", Activation::Relu)] {
            let kernel = read(&format!(r#"{{"matmul": {{{sizes}, "bias": true, "relu": {name}}}}}"#));
            assert!(matches!(kernel, Kernel::Matmul { activation: given, .. } if given == activation));
            let text = serde_json::to_string(&kernel).expect("it can be written");
            assert_eq!(read(&text), kernel);
        }
        let gradient = format!(r#"{{"matmul_input_gradient":{{{sizes}}}}}"#).replace(": ", ":").replace(", ", ",");
        assert_eq!(serde_json::to_string(&read(&gradient)).expect("it can be written"), gradient);
        assert!(
            serde_json::from_str::<Kernel>(&format!(r#"{{"matmul": {{{sizes}, "bias": true, "activation": "tanh"}}}}"#)).is_err()
        );
    }
}
