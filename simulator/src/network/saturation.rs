//! Links that can never saturate. They slow no flow, so the simulator leaves them out of fair
//! sharing.
//!
//! - A group or channel runs one communication at a time, which takes at most a link's capacity. A
//!   link with a single user never saturates.
//! - All traffic of a link has passed its predecessors on the routes. A link as wide as all its
//!   predecessors together never saturates. An example is an uplink of a fat tree without
//!   oversubscription.
//! - The same holds for a link as wide as all its successors together.
//!
//! This module must not know when communication happens.

use super::rotation::MeshRotation;
use super::shape::{LinkPair, ROUTE_END};

/// The loaded links of a topology, in ascending order, and the index of each among them.
pub(crate) struct LoadedLinks {
    links: Vec<usize>,
    /// Index by link of the topology; `u32::MAX` for links without load.
    number: Vec<u32>,
}

impl LoadedLinks {
    /// Collects the loaded links of a topology with `count` links.
    pub(crate) fn new(count: usize, loaded: impl Iterator<Item = usize>) -> Self {
        let mut number = vec![u32::MAX; count];
        let mut links = Vec::new();
        for link in loaded {
            if std::mem::replace(&mut number[link], 0) == u32::MAX {
                links.push(link);
            }
        }
        links.sort_unstable();
        links.iter().zip(0..).for_each(|(&link, own)| number[link] = own);
        Self { links, number }
    }

    fn number(&self, link: usize) -> Option<usize> {
        self.number.get(link).filter(|&&number| number != u32::MAX).map(|&number| number as usize)
    }
}

/// Returns the loaded links that can saturate, in ascending order.
///
/// `parties` has the links of each group, channel and hop. `consecutive` has every pair of links
/// that follow each other on some route, with [`ROUTE_END`] before the first and after the last.
/// Links for which `always` is true are kept. With a rotation, parties load representative links,
/// and routes are those of the representative ranks.
pub(crate) fn links_that_can_saturate<'a, Links: Iterator<Item = usize>>(
    loaded: &LoadedLinks,
    parties: impl Iterator<Item = Links>,
    consecutive: impl Iterator<Item = &'a LinkPair> + Clone,
    capacity: impl Fn(usize) -> f64,
    always: impl Fn(usize) -> bool,
    rotation: Option<&MeshRotation>,
) -> Vec<usize> {
    let has_one_user = are_of_one(loaded, parties);
    let representative_of = |link: usize| rotation.and_then(|rotation| rotation.representative_link(link)).unwrap_or(link);
    // The reason why each link is left out. A link left out because of its predecessors relies on
    // their limits, and they may rely on those of their own predecessors. So it cannot be the
    // reason to leave out a predecessor, or two links would rely on each other.
    let mut why: Vec<Option<Reason>> = vec![None; loaded.links.len()];
    for (number, why) in why.iter_mut().enumerate() {
        if has_one_user[number] && !always(loaded.links[number]) {
            *why = Some(Reason::SingleUser);
        }
    }
    for reason in [Reason::Predecessors, Reason::Successors] {
        let all_neighbours = Neighbours::new(loaded, consecutive.clone(), reason, rotation);
        let opposite = if reason == Reason::Successors { Reason::Predecessors } else { Reason::Successors };
        for (number, &link) in loaded.links.iter().enumerate() {
            let neighbours = all_neighbours.of(number);
            if neighbours.is_empty() || why[number].is_some() || always(link) {
                continue;
            }
            let why_not = |neighbour: usize| loaded.number(representative_of(neighbour)).and_then(|number| why[number]);
            let counts = |neighbour: &usize| *neighbour != ROUTE_END && why_not(*neighbour) != Some(opposite);
            let total: f64 = neighbours.iter().copied().filter(|&neighbour| neighbour != ROUTE_END).map(&capacity).sum();
            if neighbours.iter().all(counts) && total <= capacity(link) * (1.0 + SAME) {
                why[number] = Some(reason);
            }
        }
    }
    loaded.links.iter().zip(why).filter(|(_, why)| why.is_none()).map(|(&link, _)| link).collect()
}

/// Returns for each link whether only one party loads it.
fn are_of_one<Links: Iterator<Item = usize>>(loaded: &LoadedLinks, parties: impl Iterator<Item = Links>) -> Vec<bool> {
    let mut one = vec![true; loaded.links.len()];
    // For each link, the party that loaded it last, so that each party counts once.
    let mut last = vec![usize::MAX; loaded.links.len()];
    for (party, links) in parties.enumerate() {
        for number in links.filter_map(|link| loaded.number(link)) {
            let before = std::mem::replace(&mut last[number], party);
            one[number] &= before == usize::MAX || before == party;
        }
    }
    one
}

/// The predecessors or the successors of each link, without duplicates and in ascending order.
struct Neighbours {
    all: Vec<usize>,
    /// Start of each link's neighbours in `all`, and the end of the last link's.
    first: Vec<u32>,
}

impl Neighbours {
    /// Collects the neighbours on one side of each link.
    fn new<'a>(
        loaded: &LoadedLinks,
        consecutive: impl Iterator<Item = &'a LinkPair> + Clone,
        side: Reason,
        rotation: Option<&MeshRotation>,
    ) -> Self {
        let pairs = consecutive.map(|pair| if side == Reason::Successors { (pair.from, pair.to) } else { (pair.to, pair.from) });
        // A representative link gets the neighbours of all links of its orbit, rotated in the same
        // way.
        let pairs = pairs.filter(|&(link, _)| link != ROUTE_END).map(|(link, neighbour)| match rotation {
            Some(rotation) => (rotation.representative_link(link).unwrap_or(link), rotation.relative_link(link, neighbour)),
            None => (link, neighbour),
        });
        let pairs = pairs.filter_map(|(link, neighbour)| Some((loaded.number(link)?, neighbour)));
        let count = loaded.links.len();
        // A counting sort by link, since there are many pairs and few links.
        let mut next = vec![0u32; count + 1];
        pairs.clone().for_each(|(link, _)| next[link + 1] += 1);
        for link in 0..count {
            next[link + 1] += next[link];
        }
        let ends = next.clone();
        let mut all = vec![ROUTE_END; ends.last().copied().unwrap_or(0) as usize];
        for (link, neighbour) in pairs {
            all[next[link] as usize] = neighbour;
            next[link] += 1;
        }
        let mut kept = Vec::new();
        let mut first = vec![0];
        for range in ends.windows(2) {
            let own = &mut all[range[0] as usize..range[1] as usize];
            own.sort_unstable();
            let begin = kept.len();
            for &neighbour in own.iter() {
                if kept.get(begin..).and_then(<[usize]>::last) != Some(&neighbour) {
                    kept.push(neighbour);
                }
            }
            first.push(kept.len() as u32);
        }
        Self { all: kept, first }
    }

    fn of(&self, link: usize) -> &[usize] {
        &self.all[self.first[link] as usize..self.first[link + 1] as usize]
    }
}

/// Relative difference below which capacities count as equal, since sums of capacities are rounded.
const SAME: f64 = 1e-9;

/// Reason why a link cannot saturate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    SingleUser,
    /// On every route, its predecessors (or its successors) together have at most its capacity.
    Predecessors,
    Successors,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can_saturate(parties: &[&[usize]], capacities: &[f64]) -> Vec<usize> {
        let consecutive: Vec<LinkPair> = parties.iter().flat_map(|route| LinkPair::of_route(route.iter().copied())).collect();
        let links = parties.iter().map(|route| route.iter().copied());
        let loaded = LoadedLinks::new(capacities.len(), links.clone().flatten());
        links_that_can_saturate(&loaded, links, consecutive.iter(), |link| capacities[link], |_| false, None)
    }

    #[test]
    fn a_link_with_one_user_cannot_saturate() {
        assert_eq!(can_saturate(&[&[0, 1]], &[1.0, 1.0]), [0usize; 0]);
        assert_eq!(can_saturate(&[&[0, 1], &[0, 2]], &[1.0, 1.0, 1.0]), [0]);
    }

    #[test]
    fn an_uplink_as_wide_as_all_its_predecessors_cannot_saturate() {
        // Ports 0 and 1 with two users each lead to uplink 2.
        let routes: [&[usize]; 4] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4]];
        assert_eq!(can_saturate(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0]), [0, 1, 3, 4]);
        assert_eq!(can_saturate(&routes, &[1.0, 1.0, 1.5, 1.0, 1.0]), [0, 1, 2, 3, 4]);
        // A route that begins at the uplink bypasses the ports.
        let routes: [&[usize]; 5] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4], &[2, 5]];
        assert!(can_saturate(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0, 1.0]).contains(&2));
    }

    #[test]
    fn two_links_are_not_left_out_because_of_each_other() {
        // Two users share the same links, so one of the links must stay.
        assert_eq!(can_saturate(&[&[0, 1], &[0, 1]], &[1.0, 1.0]), [0]);
        assert_eq!(can_saturate(&[&[0, 1, 2], &[0, 1, 2]], &[1.0, 1.0, 1.0]), [0]);
        assert_eq!(can_saturate(&[&[0, 1, 2], &[0, 1, 2]], &[3.0, 2.0, 1.0]), [2]);
    }
}
