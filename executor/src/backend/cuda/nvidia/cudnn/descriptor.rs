//! A descriptor that is given back when nobody needs it.

use super::calls::{Attribute, Calls, DescriptorKind, Failure, Raw, Values};
use std::sync::Arc;

/// A descriptor, and those that it was told of: the library may look at them as long as it is there.
#[derive(Debug)]
pub(super) struct Descriptor {
    calls: Arc<dyn Calls>,
    raw: Raw,
    parts: Vec<Descriptor>,
}

impl Descriptor {
    pub(super) fn new(calls: &Arc<dyn Calls>, kind: DescriptorKind) -> Result<Self, Failure> {
        Ok(Self { calls: Arc::clone(calls), raw: calls.create(kind)?, parts: Vec::new() })
    }

    pub(super) fn raw(&self) -> Raw {
        self.raw
    }

    pub(super) fn with(self, attribute: Attribute, values: Values) -> Result<Self, Failure> {
        self.calls.set(self.raw, attribute, &values)?;
        Ok(self)
    }

    pub(super) fn with_integers(self, attribute: Attribute, values: &[usize]) -> Result<Self, Failure> {
        self.with(attribute, Values::Integers(values.iter().map(|&value| value as i64).collect()))
    }

    /// Told of another one, which it keeps.
    pub(super) fn with_part(mut self, attribute: Attribute, part: Descriptor) -> Result<Self, Failure> {
        self.calls.set(self.raw, attribute, &Values::Descriptors(vec![part.raw]))?;
        self.parts.push(part);
        Ok(self)
    }

    /// Told of another one, which somebody else keeps as long.
    pub(super) fn with_other(self, attribute: Attribute, other: &Descriptor) -> Result<Self, Failure> {
        self.with(attribute, Values::Descriptors(vec![other.raw]))
    }

    pub(super) fn finalized(self) -> Result<Self, Failure> {
        self.calls.finalize(self.raw)?;
        Ok(self)
    }

    pub(super) fn integer(&self, attribute: Attribute) -> Result<i64, Failure> {
        self.calls.integer(self.raw, attribute)
    }

    /// Those that the library has for an attribute, at most so many.
    pub(super) fn all(&self, attribute: Attribute, kind: DescriptorKind, most: usize) -> Result<Vec<Descriptor>, Failure> {
        let mut all: Vec<Descriptor> = (0..most).map(|_| Self::new(&self.calls, kind)).collect::<Result<_, _>>()?;
        let places: Vec<Raw> = all.iter().map(Descriptor::raw).collect();
        all.truncate(self.calls.descriptors(self.raw, attribute, &places)?);
        Ok(all)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // What was told of others goes before them.
        self.calls.destroy(self.raw);
    }
}
