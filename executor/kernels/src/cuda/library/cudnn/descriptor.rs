//! A cuDNN descriptor that is destroyed on drop.

use super::api::{Attribute, AttributeValues, CudnnApi, CudnnFailure, DescriptorKind, RawDescriptor};
use std::sync::Arc;

/// A descriptor, and the descriptors that it refers to: cuDNN may read them for as long as it
/// lives.
#[derive(Debug)]
pub(super) struct Descriptor {
    api: Arc<dyn CudnnApi>,
    raw: RawDescriptor,
    parts: Vec<Descriptor>,
}

impl Descriptor {
    /// Creates an empty descriptor.
    pub(super) fn new(api: &Arc<dyn CudnnApi>, kind: DescriptorKind) -> Result<Self, CudnnFailure> {
        Ok(Self { api: Arc::clone(api), raw: api.create(kind)?, parts: Vec::new() })
    }

    /// Returns the library's handle.
    pub(super) fn raw(&self) -> RawDescriptor {
        self.raw
    }

    /// Sets an attribute.
    pub(super) fn with(self, attribute: Attribute, values: AttributeValues) -> Result<Self, CudnnFailure> {
        self.api.set(self.raw, attribute, &values)?;
        Ok(self)
    }

    /// Sets an attribute of integers.
    pub(super) fn with_integers(self, attribute: Attribute, values: &[usize]) -> Result<Self, CudnnFailure> {
        self.with(attribute, AttributeValues::Integers(values.iter().map(|&value| value as i64).collect()))
    }

    /// Sets an attribute to another descriptor, and owns it from now on.
    pub(super) fn with_part(mut self, attribute: Attribute, part: Descriptor) -> Result<Self, CudnnFailure> {
        self.api.set(self.raw, attribute, &AttributeValues::Descriptors(vec![part.raw]))?;
        self.parts.push(part);
        Ok(self)
    }

    /// Sets an attribute to another descriptor, which the caller keeps alive for as long.
    pub(super) fn with_borrowed(self, attribute: Attribute, other: &Descriptor) -> Result<Self, CudnnFailure> {
        self.with(attribute, AttributeValues::Descriptors(vec![other.raw]))
    }

    /// Finalises the descriptor: the library validates it, and it no longer changes.
    pub(super) fn finalized(self) -> Result<Self, CudnnFailure> {
        self.api.finalize(self.raw)?;
        Ok(self)
    }

    /// Returns an attribute that is one integer.
    pub(super) fn integer(&self, attribute: Attribute) -> Result<i64, CudnnFailure> {
        self.api.integer(self.raw, attribute)
    }

    /// Returns the descriptors that the library has for an attribute, at most `limit`.
    pub(super) fn descriptors(
        &self,
        attribute: Attribute,
        kind: DescriptorKind,
        limit: usize,
    ) -> Result<Vec<Descriptor>, CudnnFailure> {
        let mut all: Vec<Descriptor> = (0..limit).map(|_| Self::new(&self.api, kind)).collect::<Result<_, _>>()?;
        let raw: Vec<RawDescriptor> = all.iter().map(Descriptor::raw).collect();
        all.truncate(self.api.descriptors(self.raw, attribute, &raw)?);
        Ok(all)
    }
}

impl Drop for Descriptor {
    fn drop(&mut self) {
        // This descriptor goes before the parts that it refers to.
        self.api.destroy(self.raw);
    }
}
