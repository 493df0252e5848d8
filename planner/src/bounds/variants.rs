//! The layouts that a search considers: the variants of a family, with cuts and recomputation from
//! truncated models if layouts are fitted.

use super::bound::Bounded;
use super::context::Bounds;
use super::layouts::have_same_devices;
use crate::space::Family;
use foretell_program::{Layout, Recompute};
use foretell_units::Seconds;

impl Bounds<'_> {
    /// Bounds all variants of a family together; see [`layouts`](Self::layouts).
    pub(crate) fn family(&self, family: &Family, enough: Option<Seconds>) -> Bounded {
        self.layouts(family, &self.variants(family), enough)
    }

    /// Returns the layouts of a family. If cuts are fitted, cuts by time replace those by the
    /// devices' peak rates.
    pub(crate) fn variants(&self, family: &Family) -> Vec<Layout> {
        let mut variants = self.space.variants(family);
        if !self.has_fitted_cuts(&family.layout) {
            return variants;
        }
        let mut cut: Vec<Layout> = Vec::new();
        for variant in variants.iter_mut().filter(|variant| variant.cuts.is_some()) {
            let place = cut.iter().position(|other| have_same_devices(other, variant)).unwrap_or_else(|| {
                let cuts = self.cuts_by_time(variant, family.micro_batches).or_else(|| variant.cuts.clone());
                cut.push(Layout { cuts, ..variant.clone() });
                cut.len() - 1
            });
            variant.cuts.clone_from(&cut[place].cuts);
        }
        if self.space.is_partly_recomputed(&family.layout) {
            for variant in &mut variants {
                let base = Layout { recompute: Recompute::None, ..variant.clone() };
                *variant = self.fitted_or_smallest(&base, family.micro_batches);
            }
        }
        variants
    }

    /// Returns the layouts to try if a layout does not fit: the fitted one, or those that recompute
    /// more and more blocks.
    pub(crate) fn partly_recomputed(&self, layout: &Layout, micro_batches: usize) -> Vec<Layout> {
        if !self.has_fitted_cuts(layout) {
            return self.space.partly_recomputed(layout);
        }
        if !self.has_fitted_layout(layout) {
            return Vec::new();
        }
        vec![self.fitted_or_smallest(layout, micro_batches)]
    }

    /// Returns the number of layouts of the space that a layout represents; see
    /// [`Space::forms`](crate::space::Space::forms).
    pub(crate) fn forms(&self, layout: &Layout) -> usize {
        let partly_recomputed = if self.has_fitted_cuts(layout) {
            usize::from(self.has_fitted_layout(layout))
        } else {
            self.space.partly_recomputed(layout).len()
        };
        self.space.forms(layout, partly_recomputed)
    }
}
