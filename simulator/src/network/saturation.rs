//! Links that can never be full, whatever goes on at once: nobody is slowed there, so nobody has to
//! be asked who is on them.
//!
//! One group or channel runs one exchange at a time, and that takes at most all of a link: a link
//! that only one uses is never too small. And what passes a link has passed the one before it on
//! its route: a link that carries as much as all those together is never too small either, as the
//! uplinks of a fat tree that is not oversubscribed; nor is one that carries as much as all those
//! that follow it. It must not know when exchanges happen.

use super::rotation::MeshRotation;
use super::shape::{LinkPair, ROUTE_END};

/// The links of a topology that somebody loads, in order, and the number of each among them.
pub(crate) struct LoadedLinks {
    links: Vec<usize>,
    /// By link of the topology, of which a small simulation loads few; `u32::MAX` for those that
    /// nobody loads.
    number: Vec<u32>,
}

impl LoadedLinks {
    /// Those of a topology that has `count` in all.
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

/// Of the links that parties load, those that may be full, in order: `parties` has each party's
/// links, `turns` every pair of links that some route takes one after the other, [`ROUTE_END`]
/// standing before the first and after the last. Those of which `always` says so stay. Where ranks
/// have been turned onto each other, parties load links that stand for others, and routes are those
/// of a few.
pub(crate) fn links_that_can_saturate<'a, Links: Iterator<Item = usize>>(
    loaded: &LoadedLinks,
    parties: impl Iterator<Item = Links>,
    turns: impl Iterator<Item = &'a LinkPair> + Clone,
    capacity: impl Fn(usize) -> f64,
    always: impl Fn(usize) -> bool,
    rotation: Option<&MeshRotation>,
) -> Vec<usize> {
    let has_one_user = are_of_one(loaded, parties);
    let stands_for = |link: usize| rotation.and_then(|rotation| rotation.representative_link(link)).unwrap_or(link);
    // Reason a link is left out. One that is left out for those before it counts on these, and
    // those on the ones before them; so nobody may count on it for the other direction, or two
    // would count on each other.
    let mut why: Vec<Option<Reason>> = vec![None; loaded.links.len()];
    for (number, why) in why.iter_mut().enumerate() {
        if has_one_user[number] && !always(loaded.links[number]) {
            *why = Some(Reason::SingleUser);
        }
    }
    for reason in [Reason::Predecessors, Reason::Successors] {
        let around = Neighbours::new(loaded, turns.clone(), reason, rotation);
        let opposite = if reason == Reason::Successors { Reason::Predecessors } else { Reason::Successors };
        for (number, &link) in loaded.links.iter().enumerate() {
            let around = around.of(number);
            if around.is_empty() || why[number].is_some() || always(link) {
                continue;
            }
            let why_not = |neighbour: usize| loaded.number(stands_for(neighbour)).and_then(|number| why[number]);
            let counts = |neighbour: &usize| *neighbour != ROUTE_END && why_not(*neighbour) != Some(opposite);
            let total: f64 = around.iter().copied().filter(|&one| one != ROUTE_END).map(&capacity).sum();
            if around.iter().all(counts) && total <= capacity(link) * (1.0 + SAME) {
                why[number] = Some(reason);
            }
        }
    }
    loaded.links.iter().zip(why).filter(|(_, why)| why.is_none()).map(|(&link, _)| link).collect()
}

/// Of each link whether one party alone loads it.
fn are_of_one<Links: Iterator<Item = usize>>(loaded: &LoadedLinks, parties: impl Iterator<Item = Links>) -> Vec<bool> {
    let mut one = vec![true; loaded.links.len()];
    // Who loaded each link last: a party counts once.
    let mut last = vec![usize::MAX; loaded.links.len()];
    for (party, links) in parties.enumerate() {
        for number in links.filter_map(|link| loaded.number(link)) {
            let before = std::mem::replace(&mut last[number], party);
            one[number] &= before == usize::MAX || before == party;
        }
    }
    one
}

/// What comes before each link, or after it, each once and in order.
struct Neighbours {
    all: Vec<usize>,
    /// Where those of each link begin; one more than there are links.
    first: Vec<u32>,
}

impl Neighbours {
    /// Those on which `side` of a link.
    fn new<'a>(
        loaded: &LoadedLinks,
        turns: impl Iterator<Item = &'a LinkPair> + Clone,
        side: Reason,
        rotation: Option<&MeshRotation>,
    ) -> Self {
        let pairs = turns.map(|turn| if side == Reason::Successors { (turn.from, turn.to) } else { (turn.to, turn.from) });
        // Links that stand for others have the neighbours that those have, seen from them.
        let pairs = pairs.filter(|&(link, _)| link != ROUTE_END).map(|(link, neighbour)| match rotation {
            Some(rotation) => (rotation.representative_link(link).unwrap_or(link), rotation.relative_link(link, neighbour)),
            None => (link, neighbour),
        });
        let pairs = pairs.filter_map(|(link, neighbour)| Some((loaded.number(link)?, neighbour)));
        let count = loaded.links.len();
        // Sorted by link by counting: there are many turns, and links have numbers.
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

/// Capacities that differ by less than this share are the same, but for the rounding of their sums.
const SAME: f64 = 1e-9;

/// Reason a link cannot be full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reason {
    SingleUser,
    /// Those before it, or after it, on every route let no more through.
    Predecessors,
    Successors,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn can_saturate(parties: &[&[usize]], capacities: &[f64]) -> Vec<usize> {
        let turns: Vec<LinkPair> = parties.iter().flat_map(|route| LinkPair::of_route(route.iter().copied())).collect();
        let links = parties.iter().map(|route| route.iter().copied());
        let loaded = LoadedLinks::new(capacities.len(), links.clone().flatten());
        links_that_can_saturate(&loaded, links, turns.iter(), |link| capacities[link], |_| false, None)
    }

    #[test]
    fn a_link_of_one_user_is_never_full() {
        assert_eq!(can_saturate(&[&[0, 1]], &[1.0, 1.0]), [0usize; 0]);
        assert_eq!(can_saturate(&[&[0, 1], &[0, 2]], &[1.0, 1.0, 1.0]), [0]);
    }

    #[test]
    fn an_uplink_as_wide_as_all_before_it_is_never_full() {
        // Ports 0 and 1 with two users each lead to uplink 2.
        let routes: [&[usize]; 4] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4]];
        assert_eq!(can_saturate(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0]), [0, 1, 3, 4]);
        assert_eq!(can_saturate(&routes, &[1.0, 1.0, 1.5, 1.0, 1.0]), [0, 1, 2, 3, 4]);
        // Where one begins at the uplink itself, the ports say nothing of it.
        let routes: [&[usize]; 5] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4], &[2, 5]];
        assert!(can_saturate(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0, 1.0]).contains(&2));
    }

    #[test]
    fn two_links_do_not_count_on_each_other() {
        // Two users on the same two links: one of the links must stay.
        assert_eq!(can_saturate(&[&[0, 1], &[0, 1]], &[1.0, 1.0]), [0]);
        assert_eq!(can_saturate(&[&[0, 1, 2], &[0, 1, 2]], &[1.0, 1.0, 1.0]), [0]);
        assert_eq!(can_saturate(&[&[0, 1, 2], &[0, 1, 2]], &[3.0, 2.0, 1.0]), [2]);
    }
}
