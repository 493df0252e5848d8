//! A table expanded to the events of a step at given sizes.

use super::error::TableError;
use super::table::{
    AllocationReference, LayerReference, Line, OperatorTable, ParameterRole, Part, TracedOperator, Variant, stack_of,
};
use std::collections::{BTreeMap, HashMap};

/// The sizes of a model and its batch, by symbol.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TableSizes {
    /// Layers of every stack.
    pub layers: usize,
    /// The value of each symbol that tables use.
    pub symbols: BTreeMap<String, f64>,
}

/// An event of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum StepEvent<'a> {
    /// A part begins.
    Begin {
        /// The part.
        part: &'a Part,
        /// Its layer; `None` if the part is outside of layers.
        layer: Option<usize>,
    },
    /// That part ends.
    End {
        /// The part.
        part: &'a Part,
        /// Its layer; `None` if the part is outside of layers.
        layer: Option<usize>,
    },
    /// A kernel is launched.
    Operator(&'a TracedOperator),
    /// Memory is allocated.
    Allocate {
        /// A number that no other allocation of the step has.
        id: u32,
        /// Bytes, before the allocator rounds them.
        bytes: u64,
    },
    /// Memory is released.
    Release {
        /// The allocation.
        id: u32,
    },
    /// An allocation has become the gradient of a parameter; the step does not release it.
    Gradient {
        /// The allocation.
        id: u32,
        /// Index of the parameter in [`OperatorTable::parameters`].
        parameter: usize,
    },
    /// The last kernel allocates and releases memory.
    Workspace {
        /// Bytes.
        bytes: u64,
    },
    /// Bytes are copied between device and host.
    Copy {
        /// The direction.
        to_host: bool,
        /// Bytes.
        bytes: u64,
    },
}

/// Live allocations, by the part that made them, its layer and their number there. A loop makes
/// several with one number.
type Live<'a> = HashMap<(&'a str, usize, u32), Vec<u32>>;

impl OperatorTable {
    /// The values of the table's symbols, in its order. The chunks of a loss (`c` chunks of `q`
    /// positions each) are derived if they are not given: 1,024 positions, as TRL processes
    /// together, or Liger's rule for its own kernel.
    ///
    /// # Errors
    /// [`TableError::Size`] if one is not given.
    pub fn values(&self, sizes: &TableSizes) -> Result<Vec<f64>, TableError> {
        let chunks = self.loss_chunks(sizes);
        let value = |symbol: &String| {
            let derived = || match symbol.as_str() {
                "q" => chunks.map(|[positions, _]| positions),
                "c" => chunks.map(|[_, count]| count),
                _ => None,
            };
            let given = sizes.symbols.get(symbol).copied();
            given.or_else(derived).ok_or_else(|| TableError::Size { symbol: symbol.clone() })
        };
        self.symbols.iter().map(value).collect()
    }

    /// Positions of a chunk of the loss, and the number of chunks.
    fn loss_chunks(&self, sizes: &TableSizes) -> Option<[f64; 2]> {
        let size = |symbol: &str| sizes.symbols.get(symbol).copied();
        let (batch, sequence) = (size("b")?, size("s")?);
        let value = |word: &str| self.key.get(word).map_or("", String::as_str);
        let (kernels, loss) = (value("kernels"), value("loss"));
        let (positions, all) = if kernels.ends_with("liger") {
            // `fused_linear_cross_entropy_forward`: as many chunks as the vocabulary is wider than
            // the features. `fms-acceleration-foak` leaves the last position out beforehand.
            let all = if kernels == "foak-liger" { batch * (sequence - 1.0) } else { batch * sequence };
            let least = (all / (size("v")? / size("h")?).ceil()).ceil();
            ((least as u64).next_power_of_two() as f64, all)
        } else if loss == "trl" {
            (128.0, batch * sequence)
        } else if matches!(loss, "trl-fused" | "dpo" | "dpo-precomputed" | "grpo") {
            // `TOKEN_CHUNK_SIZE` in `trl/kernels/chunked_logprob.py`.
            (4096.0, batch * (sequence - 1.0))
        } else {
            (1024.0, batch * (sequence - 1.0))
        };
        let positions = size("q").unwrap_or(positions).min(all);
        Some([positions, (all / positions).ceil()])
    }

    /// The parts of a step in the order of execution, each with its layer.
    pub fn sequence(&self, layers: usize) -> Vec<(&Part, Option<usize>)> {
        let mut sequence = Vec::new();
        let mut done: Vec<&str> = Vec::new();
        for part in &self.parts {
            if done.contains(&part.name.as_str()) {
                continue;
            }
            done.push(&part.name);
            if part.stack.is_none() {
                sequence.push((part, None));
                continue;
            }
            let variant = |variant| self.parts.iter().find(|other| other.name == part.name && other.variant == variant);
            let of_layer = |layer: usize| {
                let special = match layer {
                    0 => variant(Variant::First),
                    _ if layer + 1 == layers => variant(Variant::Last),
                    _ => None,
                };
                (special.or_else(|| variant(Variant::Usual)).unwrap_or(part), Some(layer))
            };
            match part.name.starts_with("backward") {
                true => sequence.extend((0..layers).rev().map(of_layer)),
                false => sequence.extend((0..layers).map(of_layer)),
            }
        }
        sequence
    }

    /// Passes every event of a step to `visit`, in order.
    ///
    /// # Errors
    /// [`TableError`] if a size is not given, or if the table releases what is not allocated.
    pub fn expand<'a>(&'a self, sizes: &TableSizes, mut visit: impl FnMut(StepEvent<'a>)) -> Result<(), TableError> {
        let values = self.values(sizes)?;
        let (mut live, mut next): (Live<'a>, u32) = (HashMap::new(), 0);
        for (part, layer) in self.sequence(sizes.layers) {
            visit(StepEvent::Begin { part, layer });
            let mut run =
                Run { part, layer: layer.unwrap_or(0), layers: sizes.layers, values: &values, live: &mut live, next: &mut next };
            run.lines(&part.lines, &mut visit)?;
            visit(StepEvent::End { part, layer });
        }
        Ok(())
    }

    /// For each parameter: its elements, and how many of it the model has. For a parameter of each
    /// expert, the elements are those of all experts together.
    ///
    /// # Errors
    /// [`TableError::Size`] if a size is not given.
    pub fn elements(&self, sizes: &TableSizes) -> Result<Vec<(u64, usize)>, TableError> {
        let values = self.values(sizes)?;
        let elements = |index: usize| {
            let parameter = &self.parameters[index];
            let elements: f64 = parameter.dimensions.iter().map(|dimension| dimension.value(&values)).product();
            let count = if parameter.stack.is_some() { sizes.layers } else { 1 };
            (elements.round() as u64, if parameter.role == ParameterRole::Tied { 0 } else { count })
        };
        Ok((0..self.parameters.len()).map(elements).collect())
    }
}

/// A part of the step while it is expanded.
struct Run<'a, 'b> {
    part: &'a Part,
    layer: usize,
    layers: usize,
    values: &'b [f64],
    live: &'b mut Live<'a>,
    next: &'b mut u32,
}

impl<'a> Run<'a, '_> {
    fn lines(&mut self, lines: &'a [Line], visit: &mut impl FnMut(StepEvent<'a>)) -> Result<(), TableError> {
        let mut index = 0;
        while let Some(line) = lines.get(index) {
            if let Line::Loop(count) = line {
                let body = &lines[index + 1..index + 1 + body_length(&lines[index + 1..])];
                for _ in 0..count.value(self.values).round() as u64 {
                    self.lines(body, visit)?;
                }
                index += body.len() + 1;
            } else {
                self.line(line, visit)?;
            }
            index += 1;
        }
        Ok(())
    }

    fn line(&mut self, line: &'a Line, visit: &mut impl FnMut(StepEvent<'a>)) -> Result<(), TableError> {
        let bytes = |formula: &super::formula::Formula| formula.value(self.values).round() as u64;
        match line {
            Line::Operator(operator) => visit(StepEvent::Operator(operator)),
            Line::Allocate { number, bytes: size } => {
                let (id, bytes) = (*self.next, bytes(size));
                *self.next += 1;
                self.live.entry((&self.part.name, self.layer, *number)).or_default().push(id);
                visit(StepEvent::Allocate { id, bytes });
            }
            Line::Release(allocation) => {
                let home = self.home(allocation);
                for layer in self.layers_of(home, allocation)? {
                    let id = self.live.get_mut(&(home, layer, allocation.number)).and_then(Vec::pop);
                    visit(StepEvent::Release { id: id.ok_or_else(|| self.not_allocated(allocation.number))? });
                }
            }
            Line::Gradient { allocation, parameter } => {
                let home = self.home(allocation);
                let layers = self.layers_of(home, allocation)?;
                let layer = *layers.first().ok_or_else(|| self.not_allocated(allocation.number))?;
                let id = self.live.get(&(home, layer, allocation.number)).and_then(|ids| ids.last());
                let id = *id.ok_or_else(|| self.not_allocated(allocation.number))?;
                visit(StepEvent::Gradient { id, parameter: *parameter });
            }
            Line::Workspace(size) => visit(StepEvent::Workspace { bytes: bytes(size) }),
            Line::Copy { to_host, bytes: size } => visit(StepEvent::Copy { to_host: *to_host, bytes: bytes(size) }),
            Line::Loop(_) | Line::End => {}
        }
        Ok(())
    }

    /// The part that made an allocation.
    fn home(&self, allocation: &'a AllocationReference) -> &'a str {
        allocation.part.as_ref().map_or(&self.part.name, String::as_str)
    }

    /// The layers that a reference names. Parts outside of layers are layer 0.
    fn layers_of(&self, home: &'a str, allocation: &AllocationReference) -> Result<Vec<usize>, TableError> {
        let AllocationReference { layer: reference, number, .. } = *allocation;
        let last = self.layers.saturating_sub(1);
        let layer = match reference {
            LayerReference::All => {
                let has = |layer: &usize| self.live.get(&(home, *layer, number)).is_some_and(|ids| !ids.is_empty());
                return Ok((0..self.layers).filter(has).collect());
            }
            LayerReference::First => Some(0),
            LayerReference::FromLast(before) => last.checked_sub(before),
            LayerReference::Relative(_) if stack_of(home).is_none() => Some(0),
            // For a part outside of layers, a relative number is the layer's index itself.
            LayerReference::Relative(after) => self.layer.checked_add_signed(after),
        };
        Ok(vec![layer.ok_or_else(|| self.not_allocated(number))?])
    }

    fn not_allocated(&self, number: u32) -> TableError {
        TableError::Release { part: self.part.name.clone(), layer: self.layer, number }
    }
}

/// The number of lines before the end of the loop that they are in.
fn body_length(lines: &[Line]) -> usize {
    let mut depth = 0_usize;
    for (index, line) in lines.iter().enumerate() {
        match line {
            Line::Loop(_) => depth += 1,
            Line::End if depth == 0 => return index,
            Line::End => depth -= 1,
            _ => {}
        }
    }
    lines.len()
}
