//! The form of a table: parameters, and parts of ordered lines.

use super::error::TableError;
use super::formula::Formula;
use std::collections::BTreeMap;

/// The step of one replica of a model under a framework: what the framework's code allocates,
/// releases and launches.
///
/// It has the forward pass, the loss and the backward pass. Sharding and updates of parameters are
/// not part of it.
#[derive(Clone, Debug, PartialEq)]
pub struct OperatorTable {
    /// What was traced: `architecture`, `attention`, `checkpoint`, `precision`, `adapter`, and so
    /// on.
    pub key: BTreeMap<String, String>,
    /// Versions of the framework's packages.
    pub versions: BTreeMap<String, String>,
    /// The symbols of its formulas. The format's documentation says what each means.
    pub symbols: Vec<String>,
    /// Its parameters and buffers.
    pub parameters: Vec<TableParameter>,
    /// Its parts, in the order of execution.
    pub parts: Vec<Part>,
}

/// A parameter or buffer of a table's model.
#[derive(Clone, Debug, PartialEq)]
pub struct TableParameter {
    /// Its name, within its layer if it belongs to one. A `*` stands for the number of any expert.
    pub name: String,
    /// The stack of layers that each have one; `None` if the model has a single one.
    pub stack: Option<String>,
    /// Its number format.
    pub element: Element,
    /// Its shape.
    pub dimensions: Vec<Formula>,
    /// How training treats it.
    pub role: ParameterRole,
}

impl TableParameter {
    /// Whether each expert of a mixture has such a parameter, in modules of its own: `*` stands for
    /// the expert's number in [`Self::name`]. Then the first of [`Self::dimensions`] is the number
    /// of experts, and each expert's gradient is computed separately.
    pub fn is_of_each_expert(&self) -> bool {
        self.name.contains(".*.")
    }

    /// How many parameters of a layer this entry stands for at the symbols' `values`: one for each
    /// expert, or one.
    pub fn copies(&self, values: &[f64]) -> usize {
        let experts = self.dimensions.first().filter(|_| self.is_of_each_expert());
        experts.map_or(1, |experts| experts.value(values).round() as usize)
    }

    /// The shape of one of them.
    pub fn own_dimensions(&self) -> &[Formula] {
        let first = usize::from(self.is_of_each_expert());
        self.dimensions.get(first..).unwrap_or_default()
    }

    /// Elements of one of them at the symbols' `values`.
    pub fn own_elements(&self, values: &[f64]) -> u64 {
        self.own_dimensions().iter().map(|dimension| dimension.value(values)).product::<f64>().round() as u64
    }
}

/// How training treats a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParameterRole {
    /// Trained.
    Trained,
    /// A trained adapter.
    Adapter,
    /// Not trained.
    Frozen,
    /// Not a parameter: a buffer that lives as long as the model.
    Buffer,
    /// Another parameter under a second name, without memory of its own.
    Tied,
}

/// A number format of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// `float32`.
    F32,
    /// `bfloat16`.
    Bf16,
    /// `float16`.
    F16,
    /// `float64`.
    F64,
    /// `complex64`, two numbers of single precision.
    C64,
    /// An eight-bit floating-point format.
    F8,
    /// An integer of eight bytes.
    I64,
    /// An integer of four bytes.
    I32,
    /// An integer of one byte.
    I8,
    /// A truth value, one byte.
    Bool,
}

impl Element {
    fn parse(name: &str) -> Option<Self> {
        Some(match name {
            "f32" => Element::F32,
            "bf16" => Element::Bf16,
            "f16" => Element::F16,
            "f64" => Element::F64,
            "c64" => Element::C64,
            "f8" => Element::F8,
            "i64" => Element::I64,
            "i32" => Element::I32,
            "i8" | "u8" => Element::I8,
            "bool" => Element::Bool,
            _ => return None,
        })
    }

    /// Its name in tables and in measurements of operators.
    pub const fn name(self) -> &'static str {
        match self {
            Element::F32 => "f32",
            Element::Bf16 => "bf16",
            Element::F16 => "f16",
            Element::F64 => "f64",
            Element::C64 => "c64",
            Element::F8 => "f8",
            Element::I64 => "i64",
            Element::I32 => "i32",
            Element::I8 => "i8",
            Element::Bool => "bool",
        }
    }

    /// Bytes of one number.
    pub const fn bytes(self) -> u64 {
        match self {
            Element::F64 | Element::I64 | Element::C64 => 8,
            Element::F32 | Element::I32 => 4,
            Element::Bf16 | Element::F16 => 2,
            Element::F8 | Element::I8 | Element::Bool => 1,
        }
    }
}

/// A part of the step: all of a layer's forward pass, the loss, and so on.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// Its name without its variant, such as `forward.layer`.
    pub name: String,
    /// The stack of layers that run it; `None` if the step runs it once.
    pub stack: Option<String>,
    /// The layers that run it.
    pub variant: Variant,
    /// Its lines, in order.
    pub lines: Vec<Line>,
}

/// The layers of a stack that run a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// All layers that have no other variant.
    Usual,
    /// The first layer.
    First,
    /// The last layer.
    Last,
}

/// A line of a part.
#[derive(Clone, Debug, PartialEq)]
pub enum Line {
    /// A kernel that is launched.
    Operator(TracedOperator),
    /// Memory that is allocated, by a number that is unique within the part.
    Allocate {
        /// The number.
        number: u32,
        /// Bytes, before the allocator rounds them.
        bytes: Formula,
    },
    /// Memory that is released.
    Release(AllocationReference),
    /// An allocation that is now a parameter's gradient.
    Gradient {
        /// The allocation.
        allocation: AllocationReference,
        /// Index of the parameter.
        parameter: usize,
    },
    /// Bytes that the kernel before it allocates and releases.
    Workspace(Formula),
    /// The lines up to [`Line::End`] run as often as the formula says.
    Loop(Formula),
    /// The end of a loop.
    End,
    /// A copy between device and host.
    Copy {
        /// The direction.
        to_host: bool,
        /// Bytes.
        bytes: Formula,
    },
}

/// An allocation of an earlier line.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocationReference {
    /// The part that made it; `None` for the line's own.
    pub part: Option<String>,
    /// The layer of that part.
    pub layer: LayerReference,
    /// Its number there.
    pub number: u32,
}

/// A layer, seen from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerReference {
    /// The layer this many after the line's own.
    Relative(isize),
    /// The first layer.
    First,
    /// The layer this many before the last.
    FromLast(usize),
    /// Every layer that has the allocation.
    All,
}

/// An operator of a framework, with its tensors.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedOperator {
    /// Its name, such as `aten.mm` or `triton.rms_norm_forward`.
    pub name: String,
    /// The tensors that it reads.
    pub inputs: Vec<TracedTensor>,
    /// The tensors that it writes.
    pub outputs: Vec<TracedTensor>,
    /// Whether attention is causal.
    pub causal: bool,
}

/// A tensor of an operator.
#[derive(Clone, Debug, PartialEq)]
pub struct TracedTensor {
    /// Its number format.
    pub element: Element,
    /// Its shape, and for each dimension whether it repeats the same numbers in memory (stride 0).
    pub dimensions: Vec<(Formula, bool)>,
}

impl TracedOperator {
    /// The call of the operator at the symbols' `values`: its name and the tensors that it reads,
    /// such as `aten.mm f32[512,768] f32[768,3072]`. Measurements of operators are found by it.
    pub fn call(&self, values: &[f64]) -> String {
        let mut call = self.name.clone();
        for tensor in &self.inputs {
            let dimensions = tensor.dimensions.iter();
            let sizes =
                dimensions.map(|(formula, repeats)| format!("{}{:.0}", if *repeats { "^" } else { "" }, formula.value(values)));
            call.push_str(&format!(" {}[{}]", tensor.element.name(), sizes.collect::<Vec<_>>().join(",")));
        }
        call
    }
}

impl TracedTensor {
    fn parse(text: &str, symbols: &[String]) -> Option<Self> {
        let (element, rest) = text.split_once('[')?;
        let inside = rest.strip_suffix(']')?;
        let dimension = |text: &str| {
            let plain = text.strip_prefix('^');
            Some((Formula::parse(plain.unwrap_or(text), symbols).ok()?, plain.is_some()))
        };
        let dimensions: Option<_> = inside.split(',').filter(|text| !text.is_empty()).map(dimension).collect();
        Some(TracedTensor { element: Element::parse(element)?, dimensions: dimensions? })
    }

    /// The shape at the symbols' `values`.
    pub fn shape(&self, values: &[f64]) -> Vec<f64> {
        self.dimensions.iter().map(|(formula, _)| formula.value(values)).collect()
    }

    /// Bytes in memory at the symbols' `values`.
    pub fn bytes(&self, values: &[f64]) -> f64 {
        let stored = self.dimensions.iter().filter(|(_, repeats)| !repeats);
        stored.map(|(formula, _)| formula.value(values)).product::<f64>() * self.element.bytes() as f64
    }
}

impl OperatorTable {
    /// Reads a table of format 1.
    ///
    /// # Errors
    /// [`TableError`] names the line.
    pub fn parse(text: &str) -> Result<Self, TableError> {
        let mut lines = text.lines();
        if lines.next() != Some("foretell-operator-table 1") {
            return Err(wrong(text.lines().next().unwrap_or(""), "should say `foretell-operator-table 1`"));
        }
        let mut table = OperatorTable {
            key: BTreeMap::new(),
            versions: BTreeMap::new(),
            symbols: Vec::new(),
            parameters: Vec::new(),
            parts: Vec::new(),
        };
        for line in lines {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "key" => table.key = pairs(line, rest)?,
                "versions" => table.versions = pairs(line, rest)?,
                "symbols" => table.symbols = rest.split(' ').map(String::from).collect(),
                "param" => table.parameters.push(parameter(line, rest, &table.symbols)?),
                "part" => table.parts.push(part(rest)),
                _ => {
                    let read = table.line(word, rest).ok_or_else(|| wrong(line, "cannot be read"))?;
                    table.parts.last_mut().ok_or_else(|| wrong(line, "stands before the first part"))?.lines.push(read);
                }
            }
        }
        Ok(table)
    }

    fn line(&self, word: &str, rest: &str) -> Option<Line> {
        let formula = |text: &str| Formula::parse(text, &self.symbols).ok();
        Some(match word {
            "o" => Line::Operator(self.operator(rest)?),
            "+" => {
                let (number, bytes) = rest.split_once(' ')?;
                Line::Allocate { number: number.parse().ok()?, bytes: formula(bytes)? }
            }
            "-" => Line::Release(allocation(rest)?),
            "g" => {
                let (place, name) = rest.split_once(' ')?;
                let parameter = self.parameters.iter().position(|parameter| parameter.name == name)?;
                Line::Gradient { allocation: allocation(place)?, parameter }
            }
            "~" => Line::Workspace(formula(rest)?),
            "loop" => Line::Loop(formula(rest)?),
            "end" => Line::End,
            "h2d" | "d2h" => Line::Copy { to_host: word == "d2h", bytes: formula(rest)? },
            _ => return None,
        })
    }

    fn operator(&self, text: &str) -> Option<TracedOperator> {
        let (body, words) = text.split_once(" ; ").unwrap_or((text, ""));
        let mut tensors = body.split(' ');
        let name = tensors.next()?.to_owned();
        let (mut inputs, mut outputs, mut written) = (Vec::new(), Vec::new(), false);
        for text in tensors {
            match (text, written) {
                (">", _) => written = true,
                (_, true) => outputs.push(TracedTensor::parse(text, &self.symbols)?),
                (_, false) => inputs.push(TracedTensor::parse(text, &self.symbols)?),
            }
        }
        Some(TracedOperator { name, inputs, outputs, causal: words.split(' ').any(|word| word == "causal") })
    }
}

fn wrong(line: &str, problem: &'static str) -> TableError {
    TableError::Line { line: line.into(), problem }
}

fn pairs(line: &str, text: &str) -> Result<BTreeMap<String, String>, TableError> {
    let pair = |pair: &str| pair.split_once('=').map(|(name, value)| (name.to_owned(), value.to_owned()));
    text.split(' ').map(|text| pair(text).ok_or_else(|| wrong(line, "should have `name=value`"))).collect()
}

fn parameter(line: &str, text: &str, symbols: &[String]) -> Result<TableParameter, TableError> {
    let mut words = text.split(' ');
    let (Some(stack), Some(name), Some(element)) = (words.next(), words.next(), words.next().and_then(Element::parse)) else {
        return Err(wrong(line, "should have a stack, a name and a number format"));
    };
    let (mut dimensions, mut role) = (Vec::new(), ParameterRole::Trained);
    for word in words {
        match word {
            "adapter" => role = ParameterRole::Adapter,
            "frozen" => role = ParameterRole::Frozen,
            "buffer" => role = ParameterRole::Buffer,
            _ if word.starts_with("tied=") => role = ParameterRole::Tied,
            _ => dimensions.push(Formula::parse(word, symbols)?),
        }
    }
    let stack = (stack != "once").then(|| stack.to_owned());
    Ok(TableParameter { name: name.into(), stack, element, dimensions, role })
}

fn part(text: &str) -> Part {
    let (name, variant) = match text {
        _ if text.ends_with(".first") => (&text[..text.len() - 6], Variant::First),
        _ if text.ends_with(".last") => (&text[..text.len() - 5], Variant::Last),
        _ => (text, Variant::Usual),
    };
    Part { name: name.into(), stack: stack_of(name).map(String::from), variant, lines: Vec::new() }
}

/// The stack whose layers run a part, by the part's name; `None` if the step runs the part once.
pub(super) fn stack_of(part: &str) -> Option<&str> {
    let place = part.split_once('.').map_or(part, |(_, place)| place);
    let runs_once = matches!(place, "start" | "end") || place.ends_with("_start") || place.ends_with("_end");
    (!runs_once).then_some(place)
}

fn allocation(text: &str) -> Option<AllocationReference> {
    let (place, number) = text.rsplit_once(':').map_or((None, text), |(place, number)| (Some(place), number));
    let (part, layer) = match place.map(|place| place.split_once('@').unwrap_or((place, "0"))) {
        None => (None, LayerReference::Relative(0)),
        Some((part, layer)) => (Some(part.to_owned()), reference(layer)?),
    };
    Some(AllocationReference { part, layer, number: number.parse().ok()? })
}

fn reference(text: &str) -> Option<LayerReference> {
    Some(match text {
        "all" => LayerReference::All,
        "first" => LayerReference::First,
        _ => match text.strip_prefix("last") {
            Some("") => LayerReference::FromLast(0),
            Some(before) => LayerReference::FromLast(before.strip_prefix('-')?.parse().ok()?),
            None => LayerReference::Relative(text.parse().ok()?),
        },
    })
}
