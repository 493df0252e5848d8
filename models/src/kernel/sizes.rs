//! The sizes that several kernels share: of windows, recurrent layers and mixtures, how a weight lies, what a norm adds.
//! It must not know the kernels that have them.

use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::fmt;

/// How a weight matrix lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WeightLayout {
    /// `[columns, contracted]`, as PyTorch's `Linear` keeps it.
    OutIn,
    /// `[contracted, columns]`, as GPT-2's `Conv1D` keeps it.
    InOut,
}

/// A number format of eight bits (Micikevicius et al. 2022, as the Open Compute Project's OFP8 has it).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EightBits {
    /// Four bits of exponent, three of mantissa, no infinities: up to 448. Of activations and weights.
    E4M3,
    /// Five bits of exponent, two of mantissa, as the upper half of IEEE's half precision: up to 57,344. Of gradients, which reach over more.
    E5M2,
}

impl EightBits {
    /// The binary exponent of the largest number, which is 1.75 times that power of two in both.
    pub const fn largest_exponent(self) -> i32 {
        match self {
            EightBits::E4M3 => 8,
            EightBits::E5M2 => 15,
        }
    }
}

/// What is applied to a product in the same pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Nothing.
    #[default]
    None,
    /// `max(0, ·)`.
    Relu,
    /// GELU by its tanh approximation, as [`Kernel::Gelu`](super::Kernel::Gelu).
    Gelu,
    /// The same, and what it is applied to is a second result: its gradient wants that.
    GeluKept,
}

impl Activation {
    /// Whether it is a GELU.
    pub fn is_gelu(self) -> bool {
        matches!(self, Self::Gelu | Self::GeluKept)
    }

    /// Whether its argument is a second result.
    pub fn keeps_argument(self) -> bool {
        self == Self::GeluKept
    }
}

/// An activation, or as profiles had it that were written before there were any but ReLU: whether there is one.
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

/// What a norm adds to the variance: `10^-digits`.
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

    /// The number.
    pub fn value(self) -> f64 {
        10f64.powi(-i32::from(self.digits))
    }
}

/// The sizes of a two-dimensional convolution or pooling; `height` and `width` are the *input's*.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Window {
    /// Images.
    pub batch: usize,
    /// Rows of the input image.
    pub height: usize,
    /// Columns of the input image.
    pub width: usize,
    /// Channels of the input.
    pub in_channels: usize,
    /// Channels of the output; a pooling has as many as it takes.
    pub out_channels: usize,
    /// Side of the square window.
    pub size: usize,
    /// Step of the window in both directions.
    pub stride: usize,
    /// Zeros (for a pooling: nothing) added on each side.
    pub padding: usize,
}

impl Window {
    /// Rows of the output image. 0 for a window that is larger than the padded image or has no stride.
    pub fn out_height(&self) -> usize {
        self.out_extent(self.height)
    }

    /// Columns of the output image. 0 for a window that is larger than the padded image or has no stride.
    pub fn out_width(&self) -> usize {
        self.out_extent(self.width)
    }

    fn out_extent(&self, extent: usize) -> usize {
        let steps = (extent + 2 * self.padding).checked_sub(self.size).and_then(|free| free.checked_div(self.stride));
        steps.map_or(0, |steps| steps + 1)
    }

    /// Elements of the input.
    pub fn input_elements(&self) -> usize {
        self.batch * self.height * self.width * self.in_channels
    }

    /// Elements of the output.
    pub fn output_elements(&self) -> usize {
        self.batch * self.out_height() * self.out_width() * self.out_channels
    }

    /// Elements of a convolution's weight, `[out_channels, size, size, in_channels]`.
    pub fn weight_elements(&self) -> usize {
        self.out_channels * self.size * self.size * self.in_channels
    }
}

/// The sizes of a recurrent layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Recurrence {
    /// Sequences.
    pub batch: usize,
    /// Positions of a sequence.
    pub sequence: usize,
    /// Features of its state.
    pub hidden: usize,
    /// Whether it begins in a state that is given, instead of in zeros.
    pub initial: bool,
}

impl Recurrence {
    /// Elements of the outputs at all positions.
    pub fn output_elements(&self) -> usize {
        self.batch * self.sequence * self.hidden
    }

    /// Elements of a state: what goes out and the cell.
    pub fn state_elements(&self) -> usize {
        2 * self.batch * self.hidden
    }

    /// Elements of a state that is given.
    pub fn initial_elements(&self) -> usize {
        if self.initial { self.state_elements() } else { 0 }
    }

    /// Elements of the recurrent weight, `[4 hidden, hidden]`.
    pub fn weight_elements(&self) -> usize {
        4 * self.hidden * self.hidden
    }
}

/// The sizes of a mixture of experts' exchange between tokens and the experts' slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Mixture {
    /// Positions: samples times positions of a sample.
    pub tokens: usize,
    /// Experts, over all ranks.
    pub experts: usize,
    /// Slots of an expert for this rank's tokens.
    pub capacity: usize,
    /// Experts that a token is sent to.
    pub top: usize,
    /// Features of a token.
    pub hidden: usize,
}

impl Mixture {
    /// Elements of the tokens' rows.
    pub fn token_elements(&self) -> usize {
        self.tokens * self.hidden
    }

    /// Elements of the experts' slots.
    pub fn slot_elements(&self) -> usize {
        self.experts * self.capacity * self.hidden
    }

    /// Choices of all tokens.
    pub fn choices(&self) -> usize {
        self.tokens * self.top
    }
}

#[cfg(test)]
mod tests {
    use crate::{Activation, Kernel};

    #[test]
    fn profiles_of_before_are_read() {
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
