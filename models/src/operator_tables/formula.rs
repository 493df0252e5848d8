//! Sizes as formulas of a model's sizes: `4*b*(s-1)*v`. Sums and products of symbols and integers,
//! exact division, and `ceil(a/b)`.

use super::error::TableError;

/// A formula, as operations on a stack: evaluated thousands of times, parsed once.
#[derive(Clone, Debug, PartialEq)]
pub struct Formula(Vec<Operation>);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Operation {
    Number(f64),
    /// The value of the symbol with this index.
    Symbol(u16),
    Add,
    Subtract,
    Multiply,
    Divide,
    /// Rounds up to a whole number.
    Ceiling,
}

/// The most operands on the stack of a formula.
const DEPTH: usize = 16;

impl Formula {
    /// Reads a formula over `symbols`.
    ///
    /// # Errors
    /// [`TableError::Formula`] if the text is not a formula, or names another symbol.
    pub fn parse(text: &str, symbols: &[String]) -> Result<Self, TableError> {
        let mut parser = Parser { text, rest: text, symbols, operations: Vec::new() };
        parser.sum()?;
        if !parser.rest.is_empty() {
            return Err(parser.wrong());
        }
        let formula = Formula(parser.operations);
        if formula.depth() > DEPTH {
            return Err(TableError::Formula { text: text.into() });
        }
        Ok(formula)
    }

    /// The value with the symbols' `values`, in the order in which they were given to
    /// [`Formula::parse`]. Whole numbers below 2^53 are exact.
    pub fn value(&self, values: &[f64]) -> f64 {
        let mut stack = [0.0; DEPTH];
        let mut top = 0;
        for operation in &self.0 {
            match *operation {
                Operation::Number(number) => {
                    stack[top] = number;
                    top += 1;
                }
                Operation::Symbol(index) => {
                    stack[top] = values[usize::from(index)];
                    top += 1;
                }
                Operation::Ceiling => stack[top - 1] = stack[top - 1].ceil(),
                binary => {
                    top -= 1;
                    let (left, right) = (stack[top - 1], stack[top]);
                    stack[top - 1] = match binary {
                        Operation::Add => left + right,
                        Operation::Subtract => left - right,
                        Operation::Multiply => left * right,
                        Operation::Divide => left / right,
                        Operation::Number(_) | Operation::Symbol(_) | Operation::Ceiling => {
                            unreachable!("invariant: it is binary")
                        }
                    };
                }
            }
        }
        stack[0]
    }

    fn depth(&self) -> usize {
        let (mut now, mut most) = (0_usize, 0);
        for operation in &self.0 {
            match operation {
                Operation::Number(_) | Operation::Symbol(_) => now += 1,
                Operation::Ceiling => {}
                Operation::Add | Operation::Subtract | Operation::Multiply | Operation::Divide => now -= 1,
            }
            most = most.max(now);
        }
        most
    }
}

struct Parser<'a> {
    text: &'a str,
    rest: &'a str,
    symbols: &'a [String],
    operations: Vec<Operation>,
}

impl Parser<'_> {
    fn wrong(&self) -> TableError {
        TableError::Formula { text: self.text.into() }
    }

    fn accept(&mut self, token: &str) -> bool {
        let after = self.rest.strip_prefix(token);
        self.rest = after.unwrap_or(self.rest);
        after.is_some()
    }

    fn sum(&mut self) -> Result<(), TableError> {
        self.product()?;
        loop {
            let operation = if self.accept("+") {
                Operation::Add
            } else if self.accept("-") {
                Operation::Subtract
            } else {
                return Ok(());
            };
            self.product()?;
            self.operations.push(operation);
        }
    }

    fn product(&mut self) -> Result<(), TableError> {
        self.factor()?;
        loop {
            let operation = if self.accept("*") {
                Operation::Multiply
            } else if self.accept("/") {
                Operation::Divide
            } else {
                return Ok(());
            };
            self.factor()?;
            self.operations.push(operation);
        }
    }

    fn factor(&mut self) -> Result<(), TableError> {
        let ceiling = self.accept("ceil(");
        if ceiling || self.accept("(") {
            self.sum()?;
            if ceiling {
                self.operations.push(Operation::Ceiling);
            }
            return if self.accept(")") { Ok(()) } else { Err(self.wrong()) };
        }
        let length = self.rest.find(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(length);
        self.rest = rest;
        let operation = match word.parse() {
            Ok(number) if word.starts_with(|letter: char| letter.is_ascii_digit()) => Operation::Number(number),
            _ => {
                let index = self.symbols.iter().position(|symbol| symbol == word).ok_or_else(|| self.wrong())?;
                Operation::Symbol(u16::try_from(index).map_err(|_| self.wrong())?)
            }
        };
        self.operations.push(operation);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(text: &str) -> Option<f64> {
        let symbols = ["b", "s", "v"].map(String::from);
        Some(Formula::parse(text, &symbols).ok()?.value(&[2.0, 129.0, 7.0]))
    }

    #[test]
    fn formulas_bind_as_in_arithmetic() {
        for (text, expected) in
            [("4*b*(s-1)*v", 7168.0), ("s-1-b", 126.0), ("2*ceil(s/128)+b/2", 5.0), ("12", 12.0), ("v-b*3", 1.0)]
        {
            assert_eq!(value(text), Some(expected), "{text}");
        }
        for text in ["", "b*", "b+(s", "b)", "x", "2b", "b s", "ceil(s/2"] {
            assert_eq!(value(text), None, "{text}");
        }
    }
}
